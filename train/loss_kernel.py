"""loss.plain_losses as one Triton kernel: logits are read twice and written once, whatever the number of rows.

Legend: N slots, V vocabulary. A program works on one slot.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 4096
WARPS = 8
_LOW = tl.constexpr(-1e38)
"""Finite: the difference of two infinities is not a number."""


@triton.jit
def _statistics(row, size, WIDTH: tl.constexpr):
    """Log of the sum of exponentials, and the first place of the largest value. Every lane keeps its own sum."""
    lane = tl.arange(0, WIDTH)
    top, total, place = tl.full([WIDTH], _LOW, tl.float32), tl.zeros([WIDTH], tl.float32), lane
    for begin in range(0, size, WIDTH):
        x = tl.load(row + begin + lane, begin + lane < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        place = tl.where(x > top, begin + lane, place)
        top = higher
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    return lse, tl.min(tl.where(top == highest, place, size), 0)


@triton.jit
def _losses(logits, teacher, label, loss, nll, best, size, kd, KD: tl.constexpr, WIDTH: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    row, lane = logits + slot * size, tl.arange(0, WIDTH)
    label_here = tl.load(label + slot)
    # Before the first reduction: no thread may read it when another has its gradient in place already.
    label_logit = tl.load(row + label_here).to(tl.float32)
    lse, place = _statistics(row, size, WIDTH)
    nll_here = lse - label_logit
    tl.store(nll + slot, nll_here)
    tl.store(best + slot, place.to(tl.int64))
    hard, teacher_lse, divergence = 1.0, 0.0, tl.zeros([WIDTH], tl.float32)
    other = teacher + slot * size
    if KD:
        hard = 1.0 - kd
        teacher_lse, _ = _statistics(other, size, WIDTH)
    for begin in range(0, size, WIDTH):
        at = begin + lane
        x = tl.load(row + at, at < size, other=_LOW).to(tl.float32) - lse
        gradient = tl.exp(x) - tl.where(at == label_here, hard, 0.0)
        if KD:
            y = tl.load(other + at, at < size, other=_LOW).to(tl.float32) - teacher_lse
            p = tl.exp(y)
            gradient -= kd * p
            divergence += tl.where(at < size, p * (y - x), 0.0)
        tl.store(row + at, gradient.to(logits.dtype.element_ty), at < size)
    tl.store(loss + slot, hard * nll_here + kd * tl.sum(divergence, 0))


def losses(logits_NV: Tensor, label_N: Tensor, teacher_NV: Tensor | None, kd: float) -> tuple[Tensor, Tensor, Tensor]:
    """As loss.plain_losses."""
    (slots, size), device = logits_NV.shape, logits_NV.device
    loss_N, nll_N = (torch.empty(slots, dtype=torch.float32, device=device) for _ in range(2))
    best_N = torch.empty(slots, dtype=torch.int64, device=device)
    if slots:
        teacher = logits_NV if teacher_NV is None else teacher_NV
        kd = 0.0 if teacher_NV is None else kd
        _losses[slots,](
            logits_NV, teacher, label_N, loss_N, nll_N, best_N, size, kd, teacher_NV is not None, WIDTH, num_warps=WARPS
        )  # fmt: skip
    return loss_N, nll_N, best_N
