"""The codecs' arithmetic in Triton: plain.py's four functions, each reading and writing device memory once.

Legend: T tokens, L layers, D hidden. A program works on a tile of `ROWS` tokens by `WIDTH` channels of one layer.

bf16 goes through integers, so that the interpreter rounds as a GPU does, and `enable_fp_fusion=False` keeps
multiplication and addition apart as plain.py has them: the results are equal bit for bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_offline.shards.codecs.plain import CUT, GRID, SMALLEST_SCALE

ROWS = 8
WIDTH = 1024
WARPS = 4
_CUT, _GRID, _SMALLEST = (tl.constexpr(value) for value in (CUT, GRID, SMALLEST_SCALE))
_GRID_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", GRID))[0])
_ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added to an fp32 below 2^22 it rounds to the nearest integer, half to even, and leaves it in the lowest bits."""


@triton.jit
def _float(bits):
    """bf16 as int16 -> fp32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bfloat(x):
    """Finite fp32 -> bf16 as int16, half to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _tile(chunk, layer, tokens, layers, hidden, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Channels, tokens, places in a plane [L, T, D] and in the states [T, L, D], and which of them exist."""
    channel_D = chunk * WIDTH + tl.arange(0, WIDTH)
    token_T = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_TD = (token_T < tokens)[:, None] & (channel_D < hidden)[None, :]
    plane_T = (layer.to(tl.int64) * tokens + token_T) * hidden
    states_T = (token_T.to(tl.int64) * layers + layer) * hidden
    return channel_D, token_T, plane_T[:, None] + channel_D[None, :], states_T[:, None] + channel_D[None, :], inside_TD


@triton.jit
def _standard(states, mean, inverse, token, layer, layers, channel_D, HIDDEN: tl.constexpr):
    """u of one token, zero beyond the last channel."""
    inside_D = channel_D < HIDDEN
    mean_D = tl.load(mean + layer * HIDDEN + channel_D, inside_D, other=0.0)
    inverse_D = tl.load(inverse + layer * HIDDEN + channel_D, inside_D, other=0.0)
    row = states + (token.to(tl.int64) * layers + layer) * HIDDEN
    return (_float(tl.load(row + channel_D, inside_D, other=0)) - mean_D) * inverse_D


@triton.jit
def _quantise(
    states, mean, inverse, symbols, scales, counts, tokens, layers, delta, factor, limit,
    HIDDEN: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program is one row of [L][T], which stays in registers from the sum to the symbols."""
    token, layer = tl.program_id(0), tl.program_id(1)
    row = layer.to(tl.int64) * tokens + token
    u = ()
    sum_D = tl.zeros([WIDTH], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        channel_D = chunk * WIDTH + tl.arange(0, WIDTH)
        u_D = _standard(states, mean, inverse, token, layer, layers, channel_D, HIDDEN)
        # On the grid, an fp32's bits count its multiples of 2^-16.
        sum_D += (tl.minimum(tl.abs(u_D), _CUT) + _GRID).to(tl.int32, bitcast=True) - _GRID_BITS
        u = u + (u_D,)  # noqa: RUF005
    total = tl.sum(sum_D.to(tl.int64), 0).to(tl.float32) * (1.0 / 65536)
    scale = _bfloat(tl.maximum(total * factor, _SMALLEST))
    inverse_step = tl.div_rn(1.0, _float(scale) * delta)
    count_D = tl.zeros([WIDTH], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        channel_D = chunk * WIDTH + tl.arange(0, WIDTH)
        v_D = u[chunk] * inverse_step
        count_D += (tl.abs(v_D) >= limit + 0.5).to(tl.int32)
        symbol_D = tl.minimum(tl.maximum(v_D, -limit), limit) + (_ROUND + (limit + 1.0))
        symbol_D = symbol_D.to(tl.int32, bitcast=True).to(tl.uint8)
        tl.store(symbols + row * HIDDEN + channel_D, symbol_D, channel_D < HIDDEN)
    tl.store(scales + row, scale)
    tl.store(counts + row, tl.sum(count_D, 0))


@triton.jit
def _collect(
    states, mean, inverse, scales, rows, starts, index, escaped, tokens, layers, delta, limit,
    HIDDEN: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The escapes of one row that has any, in order."""
    row = tl.load(rows + tl.program_id(0))
    layer, token = row // tokens, row % tokens
    start = tl.load(starts + row)
    inverse_step = tl.div_rn(1.0, _float(tl.load(scales + row)) * delta)
    for chunk in tl.static_range(CHUNKS):
        channel_D = chunk * WIDTH + tl.arange(0, WIDTH)
        u_D = _standard(states, mean, inverse, token, layer, layers, channel_D, HIDDEN)
        out_D = (tl.abs(u_D * inverse_step) >= limit + 0.5).to(tl.int32)
        at_D = start + tl.cumsum(out_D, 0) - 1
        tl.store(index + at_D, (row * HIDDEN + channel_D).to(tl.int32), out_D > 0)
        x_D = tl.load(states + (token * layers + layer) * HIDDEN + channel_D, out_D > 0, other=0)
        tl.store(escaped + at_D, x_D, out_D > 0)
        start += tl.sum(out_D, 0)


@triton.jit
def _restore(
    symbols, scales, mean, spread, out, tokens, layers, hidden, delta, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    layer = tl.program_id(1)
    channel_D, token_T, plane_TD, states_TD, inside_TD = _tile(
        tl.program_id(2), layer, tokens, layers, hidden, ROWS, WIDTH
    )
    mean_D = tl.load(mean + layer * hidden + channel_D, channel_D < hidden, other=0.0)
    spread_D = tl.load(spread + layer * hidden + channel_D, channel_D < hidden, other=0.0)
    step_T = _float(tl.load(scales + layer * tokens + token_T, token_T < tokens, other=0)) * delta
    q_TD = tl.load(symbols + plane_TD, inside_TD, other=0).to(tl.float32) - (limit + 1.0)
    y_TD = q_TD * step_T[:, None] * spread_D[None, :] + mean_D[None, :]
    tl.store(out + states_TD, _bfloat(y_TD), inside_TD)


@triton.jit
def _split(states, mode, exponent, rest, tokens, layers, hidden, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    layer = tl.program_id(1)
    channel_D, _, plane_TD, states_TD, inside_TD = _tile(tl.program_id(2), layer, tokens, layers, hidden, ROWS, WIDTH)
    mode_D = tl.load(mode + layer * hidden + channel_D, channel_D < hidden, other=0).to(tl.int32)
    bits_TD = tl.load(states + states_TD, inside_TD, other=0).to(tl.int32)
    tl.store(exponent + plane_TD, (((bits_TD >> 7) - mode_D[None, :]) & 255).to(tl.uint8), inside_TD)
    tl.store(rest + plane_TD, (((bits_TD >> 8) & 128) | (bits_TD & 127)).to(tl.uint8), inside_TD)


@triton.jit
def _merge(exponent, rest, mode, out, tokens, layers, hidden, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    layer = tl.program_id(1)
    channel_D, _, plane_TD, states_TD, inside_TD = _tile(tl.program_id(2), layer, tokens, layers, hidden, ROWS, WIDTH)
    mode_D = tl.load(mode + layer * hidden + channel_D, channel_D < hidden, other=0).to(tl.int32)
    exponent_TD = (tl.load(exponent + plane_TD, inside_TD, other=0).to(tl.int32) + mode_D[None, :]) & 255
    rest_TD = tl.load(rest + plane_TD, inside_TD, other=0).to(tl.int32)
    bits_TD = ((rest_TD & 128) << 8) | (exponent_TD << 7) | (rest_TD & 127)
    tl.store(out + states_TD, bits_TD.to(tl.int16), inside_TD)


def _grid(tokens: int, layers: int, hidden: int) -> tuple[int, int, int]:
    return triton.cdiv(tokens, ROWS), layers, triton.cdiv(hidden, WIDTH)


def quantise_rows(
    states_TLD: Tensor, mean_LD: Tensor, inverse_LD: Tensor, delta: float, factor: float, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 [T, L, D] -> symbols uint8 [L, T, D], scales bf16 [L, T], number of escapes int32 [L, T]."""
    tokens, layers, hidden = states_TLD.shape
    symbols_LTD = torch.empty(layers, tokens, hidden, dtype=torch.uint8, device=states_TLD.device)
    scale_LT = torch.empty(layers, tokens, dtype=torch.int16, device=states_TLD.device)
    count_LT = torch.empty(layers, tokens, dtype=torch.int32, device=states_TLD.device)
    chunks = triton.cdiv(hidden, WIDTH)
    _quantise[tokens, layers](
        states_TLD.view(torch.int16), mean_LD, inverse_LD, symbols_LTD, scale_LT, count_LT, tokens, layers,
        delta, factor, float(limit), HIDDEN=hidden, CHUNKS=chunks, WIDTH=WIDTH,
        num_warps=4 if chunks <= 8 else 8, enable_fp_fusion=False,
    )  # fmt: skip
    return symbols_LTD, scale_LT.view(torch.bfloat16), count_LT


def quantise(
    states_TLD: Tensor, mean_LD: Tensor, inverse_LD: Tensor, delta: float, factor: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As plain.quantise."""
    tokens, layers, hidden = states_TLD.shape
    states_TLD = states_TLD.contiguous()
    symbols_LTD, scale_LT, count_LT = quantise_rows(states_TLD, mean_LD, inverse_LD, delta, factor, limit)
    counts = count_LT.view(-1)
    ends, rows = counts.cumsum(0), counts.nonzero().view(-1)
    total = int(ends[-1]) if len(rows) else 0
    index = torch.empty(total, dtype=torch.int32, device=counts.device)
    escaped = torch.empty(total, dtype=torch.bfloat16, device=counts.device)
    if total:
        _collect[(len(rows),)](
            states_TLD.view(torch.int16), mean_LD, inverse_LD, scale_LT.view(torch.int16), rows, ends - counts,
            index, escaped.view(torch.int16), tokens, layers, delta, float(limit),
            HIDDEN=hidden, CHUNKS=triton.cdiv(hidden, WIDTH), WIDTH=WIDTH, enable_fp_fusion=False,
        )  # fmt: skip
    return symbols_LTD, scale_LT, index, escaped


def restore(
    symbols_LTD: Tensor, scale_LT: Tensor, mean_LD: Tensor, spread_LD: Tensor, delta: float, limit: int
) -> Tensor:
    """As plain.restore."""
    layers, tokens, hidden = symbols_LTD.shape
    out_TLD = torch.empty(tokens, layers, hidden, dtype=torch.int16, device=symbols_LTD.device)
    _restore[_grid(tokens, layers, hidden)](
        symbols_LTD, scale_LT.view(torch.int16), mean_LD, spread_LD, out_TLD, tokens, layers, hidden,
        delta, float(limit), ROWS=ROWS, WIDTH=WIDTH, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out_TLD.view(torch.bfloat16)


def split(states_TLD: Tensor, mode_LD: Tensor) -> tuple[Tensor, Tensor]:
    """As plain.split."""
    tokens, layers, hidden = states_TLD.shape
    planes = torch.empty(2, layers, tokens, hidden, dtype=torch.uint8, device=states_TLD.device)
    states = states_TLD.contiguous().view(torch.int16)
    _split[_grid(tokens, layers, hidden)](
        states, mode_LD, *planes, tokens, layers, hidden, ROWS=ROWS, WIDTH=WIDTH, num_warps=WARPS
    )
    return planes[0], planes[1]


def merge(exponent_LTD: Tensor, rest_LTD: Tensor, mode_LD: Tensor) -> Tensor:
    """As plain.merge."""
    layers, tokens, hidden = exponent_LTD.shape
    out_TLD = torch.empty(tokens, layers, hidden, dtype=torch.int16, device=exponent_LTD.device)
    _merge[_grid(tokens, layers, hidden)](
        exponent_LTD, rest_LTD, mode_LD, out_TLD, tokens, layers, hidden, ROWS=ROWS, WIDTH=WIDTH, num_warps=WARPS
    )
    return out_TLD.view(torch.bfloat16)
