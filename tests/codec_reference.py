"""The lossy codecs' definitions in plain numpy, and states with everything that broke a codec before.

Legend: T tokens, L layers, D hidden.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

F32, F64 = np.float32, np.float64
Plain = list[NDArray[np.uint8]]


def bf16(x: NDArray[F32]) -> NDArray[np.uint16]:
    """Round to nearest even."""
    bits = x.astype(F32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def wide(bits: NDArray[np.uint16]) -> NDArray[F32]:
    return (bits.astype(np.uint32) << 16).view(F32)


def plain_ecsq_encode(x_TLD: NDArray[np.uint16], mean_LD, spread_LD, delta: float) -> Plain:  # type: ignore[no-untyped-def]
    x_LTD, limit = x_TLD.transpose(1, 0, 2), 7 if delta >= 0.7 else 127
    with np.errstate(over="ignore"):
        u_LTD = (wide(x_LTD) - mean_LD[:, None]) * (F32(1) / spread_LD)[:, None]
        grid_LTD = (np.minimum(np.abs(u_LTD), F32(64)) + F32(128)) - F32(128)
        total_LT = grid_LTD.astype(F64).sum(2).astype(F32)
        scale_LT = bf16(np.maximum(total_LT * F32(1.2533 / x_TLD.shape[2]), F32(2.0**-16)))
        r_LTD = np.rint(u_LTD * (F32(1) / (wide(scale_LT) * F32(delta)))[..., None])
    index = np.flatnonzero(np.abs(r_LTD) > limit).astype(np.uint32)
    q_LTD = (np.clip(r_LTD, -limit, limit) + limit + 1).astype(np.uint8)
    if limit == 7:
        half = -(-q_LTD.shape[2] // 2)
        high = np.full((*q_LTD.shape[:2], half), 8, np.uint8)
        high[..., : q_LTD.shape[2] - half] = q_LTD[..., half:]
        q_LTD = q_LTD[..., :half] | high << 4
    return [q_LTD.ravel(), *(a.ravel().view(np.uint8) for a in (scale_LT, index, x_LTD.ravel()[index]))]


def plain_ecsq_decode(planes: Plain, mean_LD, spread_LD, delta: float, tokens: int) -> NDArray[np.uint16]:  # type: ignore[no-untyped-def]
    layers, hidden = mean_LD.shape
    limit = 7 if delta >= 0.7 else 127
    q_LTD, scale_LT = planes[0].reshape(layers, tokens, -1), wide(planes[1].view(np.uint16)).reshape(layers, tokens)
    if limit == 7:
        q_LTD = np.concatenate([q_LTD & 15, q_LTD >> 4], 2)[..., :hidden]
    step_LT1 = (scale_LT * F32(delta))[..., None]
    y_LTD = bf16((q_LTD.astype(F32) - F32(limit + 1)) * step_LT1 * spread_LD[:, None] + mean_LD[:, None])
    y_LTD.reshape(-1)[planes[2].view(np.uint32)] = planes[3].view(np.uint16)
    return y_LTD.transpose(1, 0, 2)


E4M3 = np.array(
    [(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:127], F32
)
"""The 127 finite magnitudes; the position is the code."""


def plain_fp8(x_TLD: NDArray[np.uint16]) -> tuple[Plain, NDArray[np.uint16]]:
    """Planes, and what they decode to."""
    x_LTD = wide(x_TLD.transpose(1, 0, 2))
    scale_LT1 = np.maximum(np.abs(x_LTD).max(2, keepdims=True) / F32(448), F32(2.0**-126))
    v_LTD = np.minimum(np.abs(x_LTD) / scale_LT1, F32(448))
    above = np.searchsorted(E4M3, v_LTD).astype(int)
    below = np.maximum(above - 1, 0)
    low, high = v_LTD - E4M3[below], E4M3[above] - v_LTD
    code = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, below)
    code = np.where(E4M3[above] == v_LTD, above, code)
    y_LTD = bf16(np.copysign(E4M3[code], x_LTD) * scale_LT1)
    planes = [(code | np.signbit(x_LTD) << 7).astype(np.uint8).ravel(), scale_LT1.ravel().view(np.uint8)]
    return planes, y_LTD.transpose(1, 0, 2)


def hostile(tokens: int, layers: int, hidden: int, seed: int) -> Tensor:
    """bf16 [T, L, D]: channels of every size, some constant, zero or tiny; spikes and a massive channel."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(5, (tokens, layers, hidden)) * 10.0 ** rng.uniform(-2, 2, hidden)
    kinds = rng.permutation(hidden)[:6].tolist()
    for channel, value in zip(kinds, (0.0, 3.0, None, None, None, None), strict=False):
        if value is not None:
            x[..., channel] = value
    if hidden > 6:
        x[..., kinds[2]] = rng.standard_normal((tokens, layers)) * 1e-6
        x[..., kinds[3]] = 24832 + rng.standard_normal((tokens, layers))
        x[0, :, kinds[4]] = 1e5  # a sink token
        x[-1, 0, kinds[5]] *= 350
    return torch.from_numpy(x).to(torch.bfloat16)


def bits(x: Tensor) -> NDArray[np.uint16]:
    return x.view(torch.int16).numpy().view(np.uint16)
