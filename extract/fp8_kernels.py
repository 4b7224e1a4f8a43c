"""fp8.quantise in Triton: activations read once."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_offline.extract.fp8 import LARGEST, TINY

COLUMNS = 128
ROWS = 16
"""Tokens of a program."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _to_fp8(
    x, values, scales, tokens, padded, width, TINY: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    at = token.to(tl.int64)[:, None] * width + group * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    value = tl.load(x + at, (token < tokens)[:, None], other=0.0).to(tl.float32)
    largest = tl.reduce(tl.abs(value), 1, _larger)  # tl.max would pass over what is not a number
    scale = tl.div_rn(_larger(largest, TINY), LARGEST)
    tl.store(scales + group * padded + token, scale, token < padded)
    tl.store(values + at, tl.div_rn(value, scale[:, None]).to(values.dtype.element_ty), (token < padded)[:, None])


def quantise(x_PI: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """As fp8.quantise, by groups of 128: with zeros up to a multiple of four tokens, and the scales column by column.

    Another `dtype` is for tests: Triton's interpreter does not round to FP8 as a GPU does.
    """
    tokens, width = x_PI.shape
    padded = triton.cdiv(tokens, 4) * 4
    values_PI = torch.empty(padded, width, dtype=dtype, device=x_PI.device)
    scale_GP = torch.empty(width // COLUMNS, padded, dtype=torch.float32, device=x_PI.device)
    _to_fp8[triton.cdiv(padded, ROWS), width // COLUMNS](
        x_PI.contiguous(), values_PI, scale_GP, tokens, padded, width,
        TINY=TINY, LARGEST=LARGEST, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return values_PI, scale_GP.t()
