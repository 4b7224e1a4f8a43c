"""What a GPU does besides matrix products, one kernel each way: compiled in bf16 training, elsewhere as it is written.

Compiled for the shapes of the run, which never change; evaluation, where they do, runs as written.

Shapes: N rows, D width, H heads, E head width.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")


def fused(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, compiled where its first argument is a bf16 tensor on a GPU that is trained on."""

    @wraps(function)
    def call(x: Tensor, *rest: Any) -> T:
        compile_it = x.is_cuda and x.dtype == torch.bfloat16 and torch.is_grad_enabled()
        return (compiled(function) if compile_it else function)(x, *rest)

    return call


@cache
def compiled(function: Any, whole: bool = True) -> Any:
    """`function`, compiled for every shape that it meets. `whole`: in one piece, or not at all."""
    # A process may train several drafters, and after eight shapes of a function the compiler would give up.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
    return torch.compile(function, dynamic=False, fullgraph=whole)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean of squares in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype)).to(x.dtype)


rms_norm = fused(plain_norm)


@fused
def add_norm(x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and that normalised."""
    total = x_ND + y_ND
    return total, plain_norm(total, weight_D, eps)


@fused
def norm_rotate(x_HNE: Tensor, weight_E: Tensor, eps: float, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    """Every head normalised, then its halves rotated, in fp32."""
    normed = plain_norm(x_HNE, weight_E, eps)
    low, high = normed.float().chunk(2, dim=-1)
    return (normed * cos_NE + torch.cat([-high, low], dim=-1) * sin_NE).to(x_HNE.dtype)


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up
