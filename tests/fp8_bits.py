"""Activations quantised by the kernel and by torch, bit for bit: on a GPU, or under TRITON_INTERPRET=1 on the CPU.

There values are compared before they are FP8: the interpreter does not round to it as a GPU does.
"""

import os

import torch

from dflash_offline.extract import checks, fp8, fp8_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

LARGE = (20, 5) if INTERPRETED else (64, 40)  # the interpreter takes half a minute for the second

for tokens, groups, dtype in ((1, 1, torch.float32), (37, 3, torch.bfloat16), (*LARGE, torch.bfloat16)):
    x_PI = torch.randn(tokens, groups * 128, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x_PI[:, :128] *= 1000
    x_PI[0, :128] = 0
    if tokens > 1:
        x_PI[2, 5], x_PI[3, 140] = torch.nan, torch.inf
    ours_PI, scale_PG = fp8_kernels.quantise(x_PI, torch.float32 if INTERPRETED else torch.float8_e4m3fn)
    wanted_PI, wanted_PG = fp8.quantise(x_PI, 128)
    if INTERPRETED:
        wanted_PI = (x_PI.float().view(tokens, groups, 128) / wanted_PG[..., None]).flatten(1)
    assert len(ours_PI) % 4 == 0 and not ours_PI[tokens:].float().any() and scale_PG.stride() == (1, len(ours_PI))
    torch.testing.assert_close(ours_PI[:tokens].float(), wanted_PI.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scale_PG[:tokens], wanted_PG, rtol=0, atol=0, equal_nan=True)

if not INTERPRETED and torch.cuda.get_device_capability() == (9, 0):
    assert checks.check_product((128, 128), DEVICE, torch.bfloat16) < 0.005
