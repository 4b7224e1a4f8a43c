"""What a hybrid decoder does between its matrix products, in torch. hybrid_kernels.py is the same in Triton.

Results are rounded to the states' type where transformers rounds them, so the two differ by the order of sums only.

Legend: P tokens of a packed row, D hidden, F width of the MLP, d width of a head; attention has H query heads and G key
and value heads, the delta rule G query and key heads and V value heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x_PD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm of x times 1 + weight."""
    return (_rms(x_PD.float(), eps) * (1 + weight_D.float())).to(x_PD.dtype)


def swiglu(gate_up_PF2: Tensor) -> Tensor:
    """silu(gate) * up of [gate | up]. [P, F]"""
    gate_PF, up_PF = gate_up_PF2.chunk(2, dim=1)
    return F.silu(gate_PF) * up_PF


def conv_heads(
    proj_P: Tensor, weight_CK: Tensor, place_P: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal depthwise convolution and silu of proj's first C columns, then unit length for queries and keys.

    `place_P` is each token's place in its own sample: taps before its start are zero. C = (2 G + V heads) wide.
    Returns q, k [P, G, d] and v [P, V, d].
    """
    channels, taps = weight_CK.shape
    x_PC, out_PC = proj_P[:, :channels].float(), torch.zeros(len(proj_P), channels, device=proj_P.device)
    for back in range(taps):
        shifted_PC = F.pad(x_PC, (0, 0, back, 0))[: len(x_PC)]
        out_PC += torch.where((place_P >= back)[:, None], shifted_PC, 0) * weight_CK[:, taps - 1 - back].float()
    dtype = proj_P.dtype
    q, k, v = torch.split(F.silu(out_PC).to(dtype), [key_heads * key_dim] * 2 + [value_heads * value_dim], dim=1)
    q, k = (x.reshape(len(x), key_heads, key_dim).float() for x in (q, k))
    q, k = ((x * torch.rsqrt(x.square().sum(dim=2, keepdim=True) + 1e-6)).to(dtype) for x in (q, k))
    return q, k, v.reshape(len(v), value_heads, value_dim)


def gates(b_PV: Tensor, a_PV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay (fp32) and write strength of every value head. [P, V] each."""
    decay_PV = -a_log_V.float().exp() * F.softplus(a_PV.float() + dt_bias_V.float())
    return decay_PV, b_PV.float().sigmoid().to(b_PV.dtype)


def gated_norm(out_PVd: Tensor, z_PC: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """RMS norm of every head times weight times silu(z). [P, V * d]"""
    normed_PVd = weight_d * _rms(out_PVd.float(), eps).to(out_PVd.dtype)
    return (normed_PVd * F.silu(z_PC.float().reshape(out_PVd.shape))).flatten(1).to(out_PVd.dtype)


def rope_heads(
    proj_P: Tensor, q_weight_d: Tensor, k_weight_d: Tensor, cos_PR: Tensor, sin_PR: Tensor, heads: int, kv_heads: int,
    eps: float, spare: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RMS norm of every query and key head, and rotation of its first R channels.

    proj holds a query and a gate for each of the H heads in turn, then the keys. Returns q [P + spare, H, d] and k
    [P + spare, G, d]; what is spare is zero.
    """
    tokens, d = len(proj_P), len(q_weight_d)
    q = proj_P[:, : 2 * heads * d].view(tokens, heads, 2 * d)[..., :d]
    k = proj_P[:, 2 * heads * d :][:, : kv_heads * d].view(tokens, kv_heads, d)
    q, k = (
        _rotate((_rms(x.float(), eps) * (1 + w.float())).to(proj_P.dtype), cos_PR, sin_PR)
        for x, w in ((q, q_weight_d), (k, k_weight_d))
    )
    return F.pad(q, (0, 0, 0, 0, 0, spare)), F.pad(k, (0, 0, 0, 0, 0, spare))


def gate_heads(out_PHd: Tensor, proj_P: Tensor, into_PC: Tensor) -> None:
    """Attention's output times the sigmoid of its gates in proj, written to [P, H * d]."""
    tokens, heads, d = out_PHd.shape
    gate_PHd = proj_P[:, : 2 * heads * d].view(tokens, heads, 2 * d)[..., d:]
    into_PC.copy_((out_PHd * gate_PHd.sigmoid()).flatten(1))


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _rotate(x_PHd: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> Tensor:
    part, rest = x_PHd[..., : cos_PR.shape[1]], x_PHd[..., cos_PR.shape[1] :]
    low, high = part.chunk(2, dim=-1)
    return torch.cat([part * cos_PR[:, None] + torch.cat([-high, low], dim=-1) * sin_PR[:, None], rest], dim=-1)
