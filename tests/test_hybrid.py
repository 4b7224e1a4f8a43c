"""The fused hybrid decoder against the stock model, and its kernels against torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from targets import decoder, write_target
from test_extract_states import CPU, LAYERS, LENGTHS, samples, stock

from dflash_offline.extract import kernels
from dflash_offline.extract.hybrid import HybridCapture
from dflash_offline.extract.target import open_target
from dflash_offline.extract.weights import build_decoder, read_weights


def test_states_equal_those_of_the_stock_model(tmp_path: Path) -> None:
    """fp32: the same mathematics, sample by sample and packed."""
    net = write_target(tmp_path / "t", "qwen3_5")
    target = open_target(str(tmp_path / "t"), None)
    kernels.install(target.config, CPU, allow_slow=False)
    weights = read_weights(target, max(LAYERS), CPU, torch.float32)
    model = build_decoder(target, max(LAYERS), weights, CPU, kernels.PACKED_ATTENTION)
    assert not weights  # else all are there twice while they are merged
    capture = HybridCapture(model, LAYERS, CPU)
    assert not hasattr(model.layers[0].mlp, "gate_proj")  # taken, not copied
    found = capture(samples()).split(list(LENGTHS))
    for ids, got in zip(samples(), found, strict=True):
        want = stock(net, ids)
        torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=1e-5)
        assert (got != want.to(torch.bfloat16)).sum() <= 1 + 0.002 * got.numel()
        torch.testing.assert_close(capture([ids]).float(), got.float(), rtol=2**-7, atol=1e-5)


def test_kernels_equal_torch() -> None:
    """In the interpreter, in a process of its own: it must be chosen before triton is imported."""
    script = Path(__file__).with_name("hybrid_bits.py")
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("drop", ["place", "boundaries"])
def test_packing_without_boundaries_is_not_the_same(tmp_path: Path, drop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "t", "qwen3_5")
    target = open_target(str(tmp_path / "t"), None)
    kernels.install(target.config, CPU, allow_slow=False)
    model = decoder(tmp_path / "t", max(LAYERS), attention=kernels.PACKED_ATTENTION)
    capture = HybridCapture(model, LAYERS, CPU)
    want = capture(samples()).split(list(LENGTHS))
    if drop == "place":
        from dflash_offline.extract import hybrid_plain

        stock_conv = hybrid_plain.conv_heads
        monkeypatch.setattr(hybrid_plain, "conv_heads", lambda p, w, place, *rest: stock_conv(p, w, place + 9, *rest))
    else:
        real = kernels.boundaries
        monkeypatch.setattr(kernels, "boundaries", lambda lengths, device: real([sum(lengths)], device))
    got = capture(samples()).split(list(LENGTHS))
    assert torch.allclose(got[0].float(), want[0].float(), atol=1e-4)
    assert (got[2].float() - want[2].float()).abs().max() > 0.01
