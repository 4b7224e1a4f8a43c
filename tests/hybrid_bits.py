"""The hybrid decoder's kernels against torch, in fp32: on a GPU, or under TRITON_INTERPRET=1 on the CPU."""

import os

import torch

from dflash_offline.extract import hybrid_kernels, hybrid_plain

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def same(ours: object, torchs: object) -> None:
    pairs = (
        zip(ours, torchs, strict=True) if isinstance(ours, tuple) and isinstance(torchs, tuple) else [(ours, torchs)]
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def both(name: str, *args: object) -> None:
    same(getattr(hybrid_kernels, name)(*args), getattr(hybrid_plain, name)(*args))


P, D = 37, 1100
both("norm", draw(P, D), draw(D, seed=2), 1e-6)
both("swiglu", draw(P, 2 * 2500))
G, V, DK, DV = 2, 6, 16, 32
wide = draw(P, 2 * G * DK + V * DV + V * DV + 2 * V)
place = torch.cat([torch.arange(n, dtype=torch.int32) for n in (1, 2, 20, 14)]).to(DEVICE)
both("conv_heads", wide, draw(2 * G * DK + V * DV, 4, seed=3), place, G, V, DK, DV)
_, z, b, a = wide.split([2 * G * DK + V * DV, V * DV, V, V], dim=1)
a *= 20
both("gates", b, a, draw(V, seed=4), draw(V, seed=5))
both("gated_norm", draw(P, V, DV, seed=6), z, draw(DV, seed=7), 1e-6)
H, d, R = 6, 32, 8
proj = draw(P, 2 * H * d + 2 * G * d)
cos, sin = draw(P, R, seed=8), draw(P, R, seed=9)
both("rope_heads", proj, draw(d, seed=10), draw(d, seed=11), cos, sin, H, G, 1e-6, 5)
out, wanted = draw(P, H * d), draw(P, H * d)
hybrid_kernels.gate_heads(draw(P, H, d, seed=12), proj, out)
hybrid_plain.gate_heads(draw(P, H, d, seed=12), proj, wanted)
same(out, wanted)
