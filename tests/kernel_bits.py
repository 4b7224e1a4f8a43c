"""The kernels against the torch path, bit for bit: on a GPU, or under TRITON_INTERPRET=1 on the CPU."""

import os

import torch
from codec_reference import hostile

from dflash_offline.shards import codecs
from dflash_offline.shards.codecs import kernels, plain
from dflash_offline.shards.codecs.ecsq import L1_TO_SPREAD, Ecsq
from dflash_offline.shards.codecs.lossless import Lossless
from dflash_offline.shards.codecs.operations import operations

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

for tokens, layers, hidden in ((1, 1, 1), (5, 2, 7), (33, 3, 130), (19, 2, 1100)):
    x_TLD = hostile(tokens, layers, hidden, tokens).to(DEVICE)
    assert operations(x_TLD) is kernels
    for delta in (2**-3.5, 0.5, 1.0):
        codec = codecs.calibrate("ecsq", hostile(64, layers, hidden, 1), {"delta": delta}).to(DEVICE)
        assert isinstance(codec, Ecsq)
        given = (codec.mean_LD, codec.inverse_LD, delta, L1_TO_SPREAD / hidden, codec.limit)
        ours, torchs = (module.quantise(x_TLD, *given) for module in (kernels, plain))
        for name, a, b in zip(("symbols", "scales", "escape indices", "escaped values"), ours, torchs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (name, tokens, layers, hidden, delta)
        symbols_LTD, scale_LT = ours[:2]
        given = (symbols_LTD, scale_LT, codec.mean_LD, codec.spread_LD, delta, codec.limit)
        restored, plainly = (module.restore(*given).view(torch.int16) for module in (kernels, plain))
        assert torch.equal(restored, plainly), (tokens, layers, hidden, delta)
    mode_LD = Lossless.calibrate(x_TLD, {}).mode_LD
    for a, b in zip(kernels.split(x_TLD, mode_LD), plain.split(x_TLD, mode_LD), strict=True):
        assert torch.equal(a, b), (tokens, layers, hidden)
    merged = kernels.merge(*kernels.split(x_TLD, mode_LD), mode_LD)
    assert torch.equal(merged.view(torch.int16), x_TLD.view(torch.int16)), (tokens, layers, hidden)
