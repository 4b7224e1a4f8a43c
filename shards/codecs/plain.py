"""The codecs' arithmetic in torch, on any device. kernels.py is the same in Triton.

No multiplication meets its addition in one call here: a fused multiply-add rounds once instead of twice, and whether a
device has one would decide the bytes.
"""

import torch
from torch import Tensor

CUT = 64.0
"""The most that one |u| adds to a token's scale."""
GRID = 128.0
"""Added and subtracted again, it leaves |u| as a multiple of 2^-16, so that a sum is exact in any order."""
SMALLEST_SCALE = 2.0**-16


def quantise(
    states_TLD: Tensor, mean_LD: Tensor, inverse_LD: Tensor, delta: float, factor: float, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bf16 [T, L, D] -> symbols uint8 [L, T, D], scales bf16 [L, T], escape indices int32 [E], escaped values bf16 [E].

    `factor` turns the sum of |u| over the channels into the token's scale.
    """
    hidden = states_TLD.shape[2]
    states_LTD = states_TLD.transpose(0, 1).contiguous()
    u_LTD = states_LTD.float().sub_(mean_LD[:, None]).mul_(inverse_LD[:, None])
    total_LT = u_LTD.abs().clamp_(max=CUT).add_(GRID).sub_(GRID).sum(dim=2, dtype=torch.float64)
    scale_LT = (total_LT.float() * factor).clamp(min=SMALLEST_SCALE).to(torch.bfloat16)
    v_LTD = u_LTD.mul_((1 / (scale_LT.float() * delta))[..., None])
    # limit + 1 is even, so a tie below it is rounded to it and escapes. Few rows have an escape at all.
    rows = (v_LTD.abs().amax(dim=2) >= limit + 0.5).view(-1).nonzero().view(-1)
    row, channel = (v_LTD.view(-1, hidden)[rows].abs() >= limit + 0.5).nonzero().unbind(1)
    index = rows[row] * hidden + channel
    symbols_LTD = v_LTD.clamp_(-limit, limit).round_().add_(limit + 1).to(torch.uint8)
    return symbols_LTD, scale_LT, index.int(), states_LTD.view(-1)[index]


def restore(
    symbols_LTD: Tensor, scale_LT: Tensor, mean_LD: Tensor, spread_LD: Tensor, delta: float, limit: int
) -> Tensor:
    """Symbols uint8 [L, T, D], scales bf16 [L, T] -> bf16 [T, L, D]; the escapes are the caller's."""
    layers, tokens, hidden = symbols_LTD.shape
    step_LT = scale_LT.float() * delta
    out_TLD = torch.empty(tokens, layers, hidden, dtype=torch.bfloat16, device=symbols_LTD.device)
    for layer in range(layers):  # one layer's fp32 values stay in the CPU's cache
        y_TD = symbols_LTD[layer].float().sub_(limit + 1).mul_(step_LT[layer, :, None])
        out_TLD[:, layer] = y_TD.mul_(spread_LD[layer]).add_(mean_LD[layer])
    return out_TLD


def split(states_TLD: Tensor, mode_LD: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 [T, L, D] -> exponent minus mode, sign << 7 | mantissa; uint8 [L, T, D] each."""
    low_LTD, high_LTD = states_TLD.transpose(0, 1).contiguous().unsqueeze(-1).view(torch.uint8).unbind(-1)
    # uint8 arithmetic wraps, which is the mod 256 of the format.
    exponent_LTD = ((high_LTD << 1) | (low_LTD >> 7)) - mode_LD[:, None]
    return exponent_LTD, (high_LTD & 128) | (low_LTD & 127)


def merge(exponent_LTD: Tensor, rest_LTD: Tensor, mode_LD: Tensor) -> Tensor:
    """What `split` made -> bf16 [T, L, D]."""
    exponent_LTD = exponent_LTD + mode_LD[:, None]
    layers, tokens, hidden = exponent_LTD.shape
    out_TLD2 = torch.empty(tokens, layers, hidden, 2, dtype=torch.uint8, device=exponent_LTD.device)
    out_TLD2[..., 0] = ((exponent_LTD << 7) | (rest_LTD & 127)).transpose(0, 1)
    out_TLD2[..., 1] = ((rest_LTD & 128) | (exponent_LTD >> 1)).transpose(0, 1)
    return out_TLD2.view(torch.bfloat16).view(tokens, layers, hidden)
