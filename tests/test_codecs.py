"""Codecs against plain numpy, on hostile channels.

Legend: T tokens, L layers, D hidden.
"""

import numpy as np
import pytest
import torch
from codec_reference import bits, hostile, plain_ecsq_decode, plain_ecsq_encode, plain_fp8
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_offline.shards import codecs, frames
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.quality import chan_snr, snr

shapes = st.tuples(st.integers(1, 300), st.integers(1, 3), st.integers(1, 70), st.integers(0, 2**32 - 1))
deltas = st.sampled_from([0.03, 2**-3.5, 0.25, 0.5, 0.7, 1.0])


@settings(max_examples=40, deadline=None)
@given(shapes, deltas, st.booleans())
def test_ecsq_is_the_plain_definition_and_within_its_bound(
    shape: tuple[int, int, int, int], delta: float, later: bool
) -> None:
    x_TLD = hostile(*shape)
    tokens, layers, hidden, seed = shape
    # The codec is measured on other tokens than it stores, or on a part that may be a single one.
    measured_TLD = hostile(64, layers, hidden, seed + 1) if later else x_TLD[: tokens // 2 + 1]
    codec = codecs.calibrate("ecsq", measured_TLD, {"delta": delta})
    mean_LD, spread_LD = (codec.calibration()[n].numpy() for n in ("mean", "spread"))
    planes = codec.encode(x_TLD)
    for ours, plain in zip(planes, plain_ecsq_encode(bits(x_TLD), mean_LD, spread_LD, delta), strict=True):
        assert np.array_equal(ours.numpy(), plain)
    y_TLD = codec.decode(planes, tokens).view(x_TLD.shape)
    plain_planes = [p.numpy() for p in planes]
    assert np.array_equal(bits(y_TLD), plain_ecsq_decode(plain_planes, mean_LD, spread_LD, delta, tokens))

    x_LTD, y_LTD = x_TLD.transpose(0, 1).double(), y_TLD.transpose(0, 1).double()
    step_LT1 = planes[1].view(torch.bfloat16).view(layers, tokens, 1).double() * delta
    bound_LTD = 0.5001 * step_LT1 * torch.from_numpy(spread_LD)[:, None].double() + y_LTD.abs() * 2.0**-8
    escaped = planes[2].view(torch.int32).long()
    assert torch.equal(y_LTD.reshape(-1)[escaped], x_LTD.reshape(-1)[escaped])
    error_LTD = (y_LTD - x_LTD).abs().contiguous()
    error_LTD.view(-1)[escaped] = 0
    # fp32 rounds x - mean, which counts where a channel is far from zero.
    fp32_LD = (x_LTD.abs().amax(1) + torch.from_numpy(mean_LD).abs().double()) * 2.0**-22
    assert bool((error_LTD <= bound_LTD + fp32_LD[:, None]).all())


@settings(max_examples=25, deadline=None)
@given(shapes)
def test_fp8_is_the_plain_definition(shape: tuple[int, int, int, int]) -> None:
    x_TLD = hostile(*shape)
    codec = codecs.calibrate("fp8", x_TLD)
    planes, plain_TLD = plain_fp8(bits(x_TLD))
    ours = codec.encode(x_TLD)
    assert all(np.array_equal(o.numpy(), p) for o, p in zip(ours, planes, strict=True))
    y_TLD = codec.decode(ours, shape[0]).view(x_TLD.shape)
    assert np.array_equal(bits(y_TLD), plain_TLD)
    massive = x_TLD.abs() >= x_TLD.abs().amax(2, keepdim=True) / 100
    assert bool(torch.isfinite(y_TLD).all())
    assert bool(((y_TLD.double() - x_TLD.double()).abs() <= 0.07 * x_TLD.double().abs())[massive].all())


# What calibration must survive.


def gaussian(tokens: int, layers: int, hidden: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, layers, hidden, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def token_scales(codec: codecs.Codec, x_TLD: Tensor) -> Tensor:
    return codec.encode(x_TLD)[1].view(torch.bfloat16).float()


def test_sinks_and_lone_outliers_do_not_reach_the_statistics() -> None:
    x_TLD = gaussian(1000, 1, 256)
    clean = codecs.calibrate("ecsq", x_TLD).calibration()
    x_TLD[0] = 1000.0  # a sink token
    x_TLD[1, 0, 5] = 40.0  # one spike in one channel, of a token that is ordinary by its norm
    assert x_TLD[1].double().norm() < 4 * x_TLD[2].double().norm()
    dirty = codecs.calibrate("ecsq", x_TLD).calibration()
    assert torch.allclose(clean["spread"], dirty["spread"], rtol=0.02)
    assert torch.allclose(clean["mean"], dirty["mean"], atol=0.02)


def test_one_spike_or_a_waking_channel_hardly_moves_the_step() -> None:
    x_TLD = gaussian(64, 1, 5120)
    x_TLD[..., 7] = 0
    codec = codecs.calibrate("ecsq", x_TLD)
    before = token_scales(codec, x_TLD)
    x_TLD[:, 0, 9] = 350.0
    x_TLD[:, 0, 7] = 3.0  # dead when measured: now 2^24 of its spreads away
    after = token_scales(codec, x_TLD)
    assert bool((after / before < 1.04).all())
    y_TLD = codec.decode(codec.encode(x_TLD), 64).view(x_TLD.shape)
    assert bool((y_TLD[..., [7, 9]] == x_TLD[..., [7, 9]]).all())


@pytest.mark.parametrize("what", ["zeros", "one token", "half zeros", "largest", "smallest"])
def test_degenerate_states_stay_finite_and_close(what: str) -> None:
    x_TLD = gaussian(64, 2, 48)
    measured_TLD = x_TLD
    match what:
        case "zeros":
            measured_TLD = torch.zeros_like(x_TLD)
        case "one token":
            measured_TLD = x_TLD[:1]
        case "half zeros":
            measured_TLD = torch.cat([torch.zeros_like(x_TLD)] * 2 + [x_TLD])
        case "largest":
            measured_TLD = x_TLD = torch.full_like(x_TLD, torch.finfo(torch.bfloat16).max)
            x_TLD[::2] *= -1
        case "smallest":
            measured_TLD = x_TLD = x_TLD * 1e-38
    codec = codecs.calibrate("ecsq", measured_TLD)
    planes = codec.encode(x_TLD)
    y_TLD = codec.decode(planes, 64).view(x_TLD.shape)
    assert bool(torch.isfinite(y_TLD).all())
    assert what == "smallest" or bool((snr(x_TLD, y_TLD) > 20).all())
    if what in ("one token", "zeros", "half zeros"):
        assert planes[2].numel() < 0.02 * 4 * x_TLD.numel()


def test_what_is_not_finite_is_refused() -> None:
    x_TLD = gaussian(130, 2, 16)
    for name in codecs.CODECS:
        codec = codecs.calibrate(name, x_TLD)
        for value in (float("nan"), float("inf"), -float("inf")):
            bad_TLD = x_TLD.clone()
            bad_TLD[129, 1, 3] = value
            with pytest.raises(ValueError, match="token 129, layer 1, channel 3 is not finite"):
                frames.encode_frames(codec, bad_TLD)
    with pytest.raises(ValueError, match="finite"):
        codecs.calibrate("ecsq", bad_TLD)
    with pytest.raises(ValueError, match=r"ecsq\.delta is 3"):
        codecs.calibrate("ecsq", x_TLD, {"delta": 3})


def test_a_calibration_that_does_not_fit_is_named() -> None:
    x_TLD = gaussian(8, 2, 16)
    for name, parameters in (("lossless", {}), ("ecsq", {"delta": 0.1})):
        good = codecs.calibrate(name, x_TLD, parameters).calibration()
        for bad in ({}, {n: t[:1] for n, t in good.items()}, {n: t.double() for n, t in good.items()}):
            with pytest.raises(CorruptError, match=r"codec\.safetensors: (mode|mean) is"):
                codecs.restore(name, 1, parameters, bad, 2, 16)
        assert codecs.restore(name, 1, parameters, good, 2, 16).parameters() == parameters


# What is measured.


def test_snr_and_chan_snr_see_different_channels() -> None:
    x_TLD = gaussian(500, 2, 64)
    x_TLD[..., 0] *= 1000
    noise_TLD = 0.01 * torch.randn(x_TLD.shape, generator=torch.Generator().manual_seed(1))
    lossy_TLD = x_TLD.float() + noise_TLD * x_TLD.float().std(0)
    assert torch.allclose(snr(x_TLD, lossy_TLD), torch.tensor(40.0).double(), atol=1)
    assert torch.allclose(chan_snr(x_TLD, lossy_TLD), torch.tensor(40.0).double(), atol=0.5)
    lossy_TLD[:, 1, 1:] = 0  # all but the massive channel are lost in layer 1
    assert float(snr(x_TLD, lossy_TLD)[1]) > 35
    assert -0.1 < float(chan_snr(x_TLD, lossy_TLD)[1]) < 0.1
    x_TLD[..., 3], lossy_TLD[..., 3] = 5, 5
    assert bool(torch.isfinite(chan_snr(x_TLD, lossy_TLD)).all())
    lossy_TLD[0, 0, 3] = 6
    assert chan_snr(x_TLD, lossy_TLD)[0] == -torch.inf
    assert bool(torch.isposinf(snr(x_TLD, x_TLD)).all() and torch.isposinf(chan_snr(x_TLD, x_TLD)).all())


@pytest.mark.parametrize(
    ("delta", "most", "least"), [(2**-3.5, 5.7, 31.5), (0.125, 5.2, 28.5), (0.5, 3.2, 16.5), (1.0, 2.25, 10)]
)
def test_rate_and_distortion_on_gaussian_channels(delta: float, most: float, least: float) -> None:
    x_TLD = (gaussian(256, 2, 1024).float() * torch.logspace(-3, 3, 1024) + 5).to(torch.bfloat16)
    codec = codecs.calibrate("ecsq", x_TLD, {"delta": delta})
    made = frames.encode_frames(codec, x_TLD)
    assert sum(map(len, made)) * 8 / x_TLD.numel() < most
    y_TLD = torch.cat([frames.decode_frame(codec, memoryview(f), 128) for f in made]).view(x_TLD.shape)
    assert float(chan_snr(x_TLD, y_TLD).min()) > least


def test_escapes_of_a_row_of_more_than_2_31_values_are_kept() -> None:
    """A row of samples is encoded whole and then cut; nothing here has its size, but the places of two escapes."""
    tokens, hidden = 120_000, 5120
    codec = codecs.calibrate("ecsq", torch.randn(16, 5, hidden).bfloat16(), {})
    symbols = torch.zeros(1, dtype=torch.uint8).expand(5 * tokens * hidden)
    scales = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).expand(5 * tokens, 2).reshape(-1)
    places = [(4 * tokens + 70_001) * hidden + 7, (4 * tokens + 90_000) * hidden]
    index = torch.tensor(places, dtype=torch.int64).view(torch.int32)[::2].clone().view(torch.uint8)
    values = torch.tensor([100.0, 200.0], dtype=torch.bfloat16).view(torch.uint8)
    found = codec.cut([symbols, scales, index, values], 5, tokens, 70_000, 70_004)
    assert found[2].view(torch.int32).tolist() == [(4 * 4 + 1) * hidden + 7]
    assert found[3].view(torch.bfloat16).tolist() == [100.0]
