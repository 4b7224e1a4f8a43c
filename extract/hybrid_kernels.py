"""What a hybrid decoder does between its matrix products, in Triton: hybrid_plain.py's functions, each one pass.

Legend as there. A program works on one token, or on one head of `ROWS` tokens. Sums are fp32.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024
ROWS = 8
WARPS = 2
"""Per program of a head; measured on an H200 with 4 to 64 tokens and 1 to 8 warps."""


@triton.jit
def _rounded(x, like):
    """x as a tensor of `like`'s type would hold it: intermediate results are rounded where transformers rounds them."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _norm(x, weight, out, eps, WIDTH: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    kept = ()
    squares = tl.zeros([WIDTH], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = chunk * WIDTH + tl.arange(0, WIDTH)
        value = tl.load(x + row + at, at < D, other=0.0).to(tl.float32)
        squares += value * value
        kept = kept + (value,)  # noqa: RUF005
    scale = tl.rsqrt(tl.sum(squares, 0) / D + eps)
    for chunk in tl.static_range(CHUNKS):
        at = chunk * WIDTH + tl.arange(0, WIDTH)
        gain = 1.0 + tl.load(weight + at, at < D, other=0.0).to(tl.float32)
        tl.store(out + row + at, (kept[chunk] * scale * gain).to(out.dtype.element_ty), at < D)


@triton.jit
def _swiglu(x, out, WIDTH: tl.constexpr, F: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    gate = tl.load(x + row * 2 * F + at, at < F, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + at, at < F, other=0.0).to(tl.float32)
    tl.store(out + row * F + at, (_rounded(gate * tl.sigmoid(gate), out) * up).to(out.dtype.element_ty), at < F)


@triton.jit
def _conv_heads(
    proj, weight, place, q, k, v, tokens, stride, G: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of ROWS tokens: heads 0..G are queries, then keys, then values."""
    head = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    at_place = tl.load(place + token, inside, other=0)
    if head < 2 * G:
        to_key = head * DK + tl.arange(0, DK)
        y = _taps(proj, weight, token, at_place, inside, to_key, stride, ROWS, DK, TAPS)
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
        row = token.to(tl.int64)[:, None] * (G * DK)
        if head < G:
            tl.store(q + row + to_key[None, :], y.to(q.dtype.element_ty), inside[:, None])
        else:
            tl.store(k + row + (to_key - G * DK)[None, :], y.to(k.dtype.element_ty), inside[:, None])
    else:
        to_value = (head - 2 * G) * DV + tl.arange(0, DV)
        u = _taps(proj, weight, token, at_place, inside, 2 * G * DK + to_value, stride, ROWS, DV, TAPS)
        start = token.to(tl.int64)[:, None] * (V * DV)
        tl.store(v + start + to_value[None, :], u.to(v.dtype.element_ty), inside[:, None])


@triton.jit
def _taps(proj, weight, token, place, inside, channel, stride, ROWS: tl.constexpr, d: tl.constexpr, TAPS: tl.constexpr):
    total = tl.zeros([ROWS, d], tl.float32)
    for back in tl.static_range(TAPS):
        there = (inside & (place >= back))[:, None]
        x = tl.load(proj + (token.to(tl.int64) - back)[:, None] * stride + channel[None, :], there, other=0.0)
        tap = tl.load(weight + channel * TAPS + (TAPS - 1 - back)).to(tl.float32)
        total += x.to(tl.float32) * tap[None, :]
    return _rounded(total * tl.sigmoid(total), proj)


@triton.jit
def _gates(b, a, a_log, dt_bias, decay, beta, tokens, stride, V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    token, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = (token < tokens)[:, None] & (head < V)[None, :]
    at = token.to(tl.int64)[:, None] * stride + head[None, :]
    rate = tl.exp(tl.load(a_log + head, head < V, other=0.0).to(tl.float32))
    s = tl.load(a + at, there, other=0.0).to(tl.float32)
    s += tl.load(dt_bias + head, head < V, other=0.0).to(tl.float32)[None, :]
    softplus = tl.where(s > 20.0, s, tl.log(1.0 + tl.exp(tl.minimum(s, 20.0))))
    to = token.to(tl.int64)[:, None] * V + head[None, :]
    tl.store(decay + to, -rate[None, :] * softplus, there)
    write = tl.sigmoid(tl.load(b + at, there, other=0.0).to(tl.float32))
    tl.store(beta + to, write.to(beta.dtype.element_ty), there)


@triton.jit
def _gated_norm(x, z, weight, out, tokens, stride, eps, V: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at, there = head * d + tl.arange(0, d)[None, :], (token < tokens)[:, None]
    value = tl.load(x + token[:, None] * (V * d) + at, there, other=0.0).to(tl.float32)
    value = _rounded(value * tl.rsqrt(tl.sum(value * value, 1) / d + eps)[:, None], out)
    value = _rounded(value * tl.load(weight + tl.arange(0, d)).to(tl.float32)[None, :], out)
    gate = tl.load(z + token[:, None] * stride + at, there, other=0.0).to(tl.float32)
    value *= gate * tl.sigmoid(gate)
    tl.store(out + token[:, None] * (V * d) + at, value.to(out.dtype.element_ty), there)


@triton.jit
def _rope_heads(
    proj, q_weight, k_weight, cos, sin, q, k, tokens, stride, eps,
    H: tl.constexpr, G: tl.constexpr, d: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of ROWS tokens: heads 0..H are queries, each followed by its gate, then keys."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = (token < tokens)[:, None]
    at = tl.arange(0, d)
    half: tl.constexpr = R // 2
    partner = tl.where(at < half, at + half, tl.where(at < R, at - half, at))
    first = tl.where(head < H, head * 2 * d, 2 * H * d + (head - H) * d)
    x = tl.load(proj + token[:, None] * stride + (first + at)[None, :], there, other=0.0).to(tl.float32)
    other = tl.load(proj + token[:, None] * stride + (first + partner)[None, :], there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / d + eps)[:, None]
    if head < H:
        gain, other_gain = tl.load(q_weight + at), tl.load(q_weight + partner)
    else:
        gain, other_gain = tl.load(k_weight + at), tl.load(k_weight + partner)
    x = _rounded(x * scale * (1.0 + gain.to(tl.float32))[None, :], q)
    other = _rounded(other * scale * (1.0 + other_gain.to(tl.float32))[None, :], q)
    turns = there & (at < R)[None, :]
    c = tl.load(cos + token[:, None] * R + at[None, :], turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token[:, None] * R + at[None, :], turns, other=0.0).to(tl.float32)
    y = _rounded(x * c, q) + tl.where(at < half, -1.0, 1.0)[None, :] * _rounded(other * s, q)
    if head < H:
        tl.store(q + token[:, None] * (H * d) + head * d + at[None, :], y.to(q.dtype.element_ty), there)
    else:
        tl.store(k + token[:, None] * (G * d) + (head - H) * d + at[None, :], y.to(k.dtype.element_ty), there)


@triton.jit
def _gate_heads(x, proj, out, tokens, stride, H: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at, there = tl.arange(0, d)[None, :], (token < tokens)[:, None]
    value = tl.load(x + token[:, None] * (H * d) + head * d + at, there, other=0.0).to(tl.float32)
    gate = tl.load(proj + token[:, None] * stride + head * 2 * d + d + at, there, other=0.0).to(tl.float32)
    value *= _rounded(tl.sigmoid(gate), out)
    tl.store(out + token[:, None] * (H * d) + head * d + at, value.to(out.dtype.element_ty), there)


def norm(x_PD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As hybrid_plain.norm."""
    tokens, hidden = x_PD.shape
    out_PD = torch.empty_like(x_PD)
    _norm[(tokens,)](x_PD, weight_D, out_PD, eps, WIDTH=WIDTH, D=hidden, CHUNKS=triton.cdiv(hidden, WIDTH))
    return out_PD


def swiglu(gate_up_PF2: Tensor) -> Tensor:
    """As hybrid_plain.swiglu."""
    tokens, width = gate_up_PF2.shape[0], gate_up_PF2.shape[1] // 2
    out_PF = gate_up_PF2.new_empty(tokens, width)
    _swiglu[(tokens, triton.cdiv(width, 2 * WIDTH))](gate_up_PF2, out_PF, WIDTH=2 * WIDTH, F=width)
    return out_PF


def conv_heads(
    proj_P: Tensor, weight_CK: Tensor, place_P: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As hybrid_plain.conv_heads."""
    tokens = len(proj_P)
    q, k = (proj_P.new_empty(tokens, key_heads, key_dim) for _ in range(2))
    v = proj_P.new_empty(tokens, value_heads, value_dim)
    _conv_heads[triton.cdiv(tokens, ROWS), 2 * key_heads + value_heads](
        proj_P, weight_CK, place_P, q, k, v, tokens, proj_P.stride(0),
        G=key_heads, V=value_heads, DK=key_dim, DV=value_dim, TAPS=weight_CK.shape[1], ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return q, k, v


def gates(b_PV: Tensor, a_PV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """As hybrid_plain.gates; a and b are columns of one tensor."""
    tokens, heads = b_PV.shape
    decay_PV = torch.empty(tokens, heads, dtype=torch.float32, device=b_PV.device)
    beta_PV = b_PV.new_empty(tokens, heads)
    _gates[(triton.cdiv(tokens, ROWS),)](
        b_PV, a_PV, a_log_V, dt_bias_V, decay_PV, beta_PV, tokens, b_PV.stride(0),
        V=heads, WIDTH=triton.next_power_of_2(heads), ROWS=ROWS,
    )  # fmt: skip
    return decay_PV, beta_PV


def gated_norm(out_PVd: Tensor, z_PC: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """As hybrid_plain.gated_norm."""
    tokens, heads, d = out_PVd.shape
    y_PC = out_PVd.new_empty(tokens, heads * d)
    _gated_norm[triton.cdiv(tokens, ROWS), heads](
        out_PVd, z_PC, weight_d, y_PC, tokens, z_PC.stride(0), eps, V=heads, d=d, ROWS=ROWS, num_warps=WARPS
    )
    return y_PC


def rope_heads(
    proj_P: Tensor, q_weight_d: Tensor, k_weight_d: Tensor, cos_PR: Tensor, sin_PR: Tensor, heads: int, kv_heads: int,
    eps: float, spare: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As hybrid_plain.rope_heads."""
    tokens, d = len(proj_P), len(q_weight_d)
    q, k = (proj_P.new_empty(tokens + spare, n, d) for n in (heads, kv_heads))
    q[tokens:], k[tokens:] = 0, 0
    _rope_heads[triton.cdiv(tokens, ROWS), heads + kv_heads](
        proj_P, q_weight_d, k_weight_d, cos_PR, sin_PR, q, k, tokens, proj_P.stride(0), eps,
        H=heads, G=kv_heads, d=d, R=cos_PR.shape[1], ROWS=ROWS,
    )  # fmt: skip
    return q, k


def gate_heads(out_PHd: Tensor, proj_P: Tensor, into_PC: Tensor) -> None:
    """As hybrid_plain.gate_heads."""
    tokens, heads, d = out_PHd.shape
    _gate_heads[triton.cdiv(tokens, ROWS), heads](
        out_PHd.contiguous(), proj_P, into_PC, tokens, proj_P.stride(0), H=heads, d=d, ROWS=ROWS
    )
