"""torch.optim.AdamW on a GPU, in one pass over its memory: scaled gradients in, weights and their rounded copies out.

torch's own fused step wants the gradients scaled before it and the weights rounded after it: three passes, where all
that a step does is wait for memory.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math
from collections.abc import Iterable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 2048


@triton.jit
def _adamw(
    weight, gradient, first, second, copy, size, scale, keep, rate, new1, beta2, new2, correction, eps,
    COPY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = at < size
    g = tl.load(gradient + at, there, other=0.0) * scale
    m = tl.load(first + at, there, other=0.0)
    m += (g - m) * new1
    v = tl.load(second + at, there, other=0.0)
    v = v * beta2 + g * g * new2
    w = tl.load(weight + at, there, other=0.0)
    w = w * keep - rate * m / (tl.sqrt(v) * correction + eps)
    tl.store(first + at, m, there)
    tl.store(second + at, v, there)
    tl.store(weight + at, w, there)
    if COPY:
        tl.store(copy + at, w.to(copy.dtype.element_ty), there)


class AdamW(torch.optim.AdamW):
    """The same groups and state, so the same checkpoints."""

    @torch.no_grad()
    def apply(self, scale: float, weights: Iterable[Tensor], copies: Mapping[Tensor, Tensor]) -> None:
        """A step of `weights` with their gradients times `scale`. `copies`: what a weight is rounded to."""
        wanted = {*weights}
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for weight in filter(wanted.__contains__, group["params"]):
                state = self.state[weight]
                if not state:
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **moments)
                state["step"] += 1
                if not weight.numel():
                    continue
                steps, size, copy = float(state["step"]), weight.numel(), copies.get(weight, weight)
                _adamw[triton.cdiv(size, WIDTH),](
                    weight, weight.grad, state["exp_avg"], state["exp_avg_sq"], copy, size, scale,
                    1 - rate * group["weight_decay"], rate / (1 - beta1**steps), 1 - beta1, beta2, 1 - beta2,
                    1 / math.sqrt(1 - beta2**steps), group["eps"], copy is not weight, WIDTH,
                )  # fmt: skip
