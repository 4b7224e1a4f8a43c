"""`dflash-shards stats`: every number against a plain one, every warning by name, and the page.

Legend: T tokens, L layers, D hidden.
"""

import dataclasses
import html.parser
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from caches import write_cache
from codec_reference import bits as raw_bits
from codec_reference import plain_ecsq_encode, wide
from test_tools import shards
from torch import Tensor

from dflash_offline import tools
from dflash_offline.shards import calibration, codecs, manifest
from dflash_offline.shards.build import Entry, Part, build, claim
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import prompt_key, sample_key
from dflash_offline.shards.writer import Identity
from dflash_offline.tools import stats, stats_states
from dflash_offline.tools.config import Stats
from dflash_offline.tools.stats_states import choose, measure_states

LAYERS, HIDDEN = 3, 24


def save(
    folder: Path,
    samples: list[Tensor],
    codec: str = "lossless",
    measured: Tensor | None = None,
    parameters: dict[str, float] | None = None,
    mask: tuple[int, int] = (1, 3),
) -> Cache:
    """Samples bf16 [T, L, D] as a cache; all but mask[0] of every mask[1] tokens are supervised."""
    rng = np.random.default_rng(0)
    layers, hidden = samples[0].shape[1:]

    def entries() -> Iterator[Entry]:
        for i, states in enumerate(samples):
            ids = rng.integers(0, 60, len(states)).astype(np.int32)
            on = (np.arange(len(states)) >= len(states) * mask[0] / mask[1]).astype(np.uint8)
            who = Identity(
                key=sample_key(ids, on),
                prompt_key=prompt_key(ids, on),
                id="",
                source=f"data<{i % 2}>.jsonl",
                source_row=i,
                finish_reason="length" if i == 0 else "stop",
                response="greedy",
            )
            yield Entry(identity=who, input_ids=ids, loss_mask=on, frames=encode_frames(made, states))

    with claim(folder):
        info = calibration.write(folder, codec, parameters or {}, torch.cat(samples) if measured is None else measured)
        made = calibration.read(folder, info, layers, hidden, last_hidden=False).states
        draft = manifest.Manifest(
            complete=False,
            layer_ids=list(range(1, 1 + layers)),
            hidden_size=hidden,
            codec=info,
            settings={},
            target={},
            tokenizer={},
            generation="greedy",
            dataset={},
            versions={},
            kernels="none",
        )
        build(folder, draft, [Part(task="0" * 32, samples=entries)], 1)
    return Cache(folder)


def random_samples(count: int = 4, tokens: int = 150, layers: int = LAYERS, hidden: int = HIDDEN) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = torch.linspace(0.1, 3, hidden) * torch.arange(1, layers + 1)[:, None]
    return [(torch.randn(tokens, layers, hidden, generator=generator) * size).bfloat16() for _ in range(count)]


@pytest.mark.parametrize("codec", ["bf16", "lossless"])
def test_numbers_of_exact_states_equal_plain_ones(tmp_path: Path, codec: str) -> None:
    samples = random_samples()
    for x in samples:
        x[:, 0, 3], x[:, 1, 4], x[:, 1, 5] = 0.0, 0.0, 7.0
    spread_D = 3 * torch.linspace(0.1, 3, HIDDEN)
    for channel, spreads in ((6, 300), (7, -25), (8, 18)):  # two of them are outliers
        samples[3][channel, 2, channel] = spreads * spread_D[channel]
    cache = save(tmp_path / "c", samples, codec)
    found = measure_states(cache, [0, 1, 2, 3], try_codecs=False)
    x_TLD = wide(raw_bits(torch.cat(samples))).astype(np.float64)
    energy_LD = (x_TLD**2).mean(0)
    assert found.samples == 4 and found.tokens == 600
    np.testing.assert_allclose(found.energy_LD, energy_LD, rtol=1e-6)
    np.testing.assert_allclose(found.rms_L, np.sqrt((x_TLD**2).mean((0, 2))), rtol=1e-6)
    np.testing.assert_allclose(found.share_LD, energy_LD / energy_LD.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(found.largest_L, np.abs(x_TLD).max((0, 2)))
    np.testing.assert_array_equal(found.low_LD, x_TLD.min(0))
    np.testing.assert_array_equal(found.high_LD, x_TLD.max(0))
    assert found.dead_L.tolist() == [1, 1, 0] and found.constant_L.tolist() == [0, 1, 0]
    assert found.outliers_L.tolist() == [0, 0, 2]
    assert found.escapes_L is None and found.promised_L is None
    frames = [f.as_py() for i in range(4) for f in cache.read_batch(cache.row(i)).column("frames").values]
    assert found.bits == pytest.approx(8 * sum(map(len, frames)) / x_TLD.size)
    assert found.bits_L.mean() == pytest.approx(found.bits)
    if codec == "bf16":
        np.testing.assert_allclose(found.bits_L, found.bits)


@pytest.mark.parametrize("delta", [2.0**-3.5, 1.0])
def test_numbers_of_ecsq_equal_plain_ones(tmp_path: Path, delta: float) -> None:
    samples = random_samples(count=3, tokens=100)  # one frame each
    measured = torch.cat(samples)
    samples[0][::2, 1, :3], samples[2][50, 0, 9] = 300.0, -400.0
    samples[1][:, 2] = 0.25  # nothing to code
    cache = save(tmp_path / "c", samples, "ecsq", measured, {"delta": delta})
    found = measure_states(cache, [0, 1, 2], try_codecs=False)
    mean_LD, spread_LD = (cache.codec.states.calibration()[name].numpy() for name in ("mean", "spread"))
    escapes_L, square_L, sizes_L = np.zeros(LAYERS, int), np.zeros(LAYERS), np.zeros(LAYERS)
    for x in samples:
        symbols, scales, index, _ = plain_ecsq_encode(raw_bits(x), mean_LD, spread_LD, delta)
        layer = index.view(np.uint32) // (100 * HIDDEN)
        escapes_L += np.bincount(layer, minlength=LAYERS)
        square_L += (wide(scales.view(np.uint16)).reshape(LAYERS, 100).astype(float) ** 2).sum(1)
        packed = [len(zstandard.compress(row.tobytes(), 1)) for row in symbols.reshape(LAYERS, -1)]
        sizes_L += np.array(packed) + 288 + 6 * np.bincount(layer, minlength=LAYERS)
    assert found.escapes_L is not None and found.promised_L is not None
    assert escapes_L.sum() > 0
    np.testing.assert_array_equal(found.escapes_L, escapes_L)
    np.testing.assert_allclose(found.promised_L, 10 * np.log10(12 * 300 / (delta**2 * square_L)), rtol=1e-6)
    np.testing.assert_allclose(found.bits_L / found.bits_L.sum(), sizes_L / sizes_L.sum(), rtol=0.05)
    assert found.bits_L.argmin() == 2 and found.bits_L.mean() == pytest.approx(found.bits)


def test_distances_equal_plain_ones(tmp_path: Path) -> None:
    cache = save(tmp_path / "c", samples := random_samples(count=2, tokens=300))
    found = measure_states(cache, [0, 1], try_codecs=False).distance_SLL
    x_TLD = torch.cat(samples).double()
    spread_LD = x_TLD.std(dim=0, correction=0)
    for i in range(LAYERS):
        for j in range(LAYERS):
            for s in (-1, 0, 1):
                plain = 0.0
                for x in samples:
                    middle = x[128:256].double()
                    pairs = [(t, t + s) for t in range(128) if 0 <= t + s < 128]
                    gap = torch.stack([middle[t, i] - middle[u, j] for t, u in pairs]) / spread_LD[i]
                    plain += float(gap.square().mean()) / 2
                # Nothing planted here is an outlier, and all tokens are ordinary.
                assert found[1 + s, i, j] == (pytest.approx(plain, rel=1e-5) if i < j else np.inf)


def test_few_tokens_are_kept_whatever_the_number_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_states, "MEASURING_TOKENS", 50)
    samples = random_samples(count=6, tokens=200)
    cache = save(tmp_path / "c", samples)
    kept = stats_states._measuring_set(cache, [0, 2, 3, 5])
    assert torch.equal(kept, torch.cat([samples[i] for i in (0, 2, 3, 5)])[::16]) and len(kept) == 50
    longest = max(len(states) for _, states, _ in stats_states._frames(cache, 0))
    assert longest == 128
    assert [middle for *_, middle in stats_states._frames(cache, 0)] == [True, False]


def test_samples_are_spread_and_seeded() -> None:
    assert choose(1000, 10, 0) == choose(1000, 10, 0) != choose(1000, 10, 1)
    assert [n // 100 for n in choose(1000, 10, 0)] == list(range(10))
    assert choose(3, 10, 0) == [0, 1, 2] and choose(5, 5, 7) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [3, 9, 9, 100], list(range(50))])
def test_histogram_counts_every_length_once(lengths: list[int]) -> None:
    bins = stats.histogram(np.array(lengths), 7)
    assert len(bins) <= 7 and bins[0][0] == min(lengths) and bins[-1][0] <= max(lengths) <= bins[-1][1]
    for first, last, count in bins:
        assert count == sum(first <= n <= last for n in lengths)
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(bins))


def warnings(cache: Cache, samples: int = 8) -> list[str]:
    found = stats.examine(cache, Stats(cache=cache.path, samples=samples)).warnings
    return [w.split(":")[0] for w in found]


@pytest.mark.parametrize("codec", ["bf16", "lossless", "ecsq", "fp8"])
def test_sound_states_give_no_warning(tmp_path: Path, codec: str) -> None:
    assert warnings(save(tmp_path / "c", random_samples(), codec)) == []


@pytest.mark.parametrize("codec", ["lossless", "ecsq", "fp8"])
def test_layers_that_are_wrong_are_named(tmp_path: Path, codec: str) -> None:
    def examined(name: str, change: object) -> list[str]:
        samples = random_samples()
        for x in samples:
            change(x)  # type: ignore[operator]
        return stats.examine(cache := save(tmp_path / name, samples, codec), Stats(cache=cache.path)).warnings

    assert examined("zero", lambda x: x[:, 1].zero_()) == ["zero-layer: layer 2 is zero in every token"]
    both = examined("zeros", lambda x: x[:, :2].zero_())
    assert [w.split(":")[0] for w in both] == ["zero-layer"] * 2
    tiny = examined("zero and tiny", lambda x: (x[:, 0].zero_(), x[:, 1].mul_(1e-3)))
    assert tiny == ["zero-layer: layer 1 is zero in every token"]
    assert examined("equal", lambda x: x[:, 2].copy_(x[:, 0].clone())) == ["equal-layers: layers 1 and 3 are equal"]
    later = examined("later", lambda x: x[1:, 1].copy_(x[:-1, 0].clone()))
    assert later == ["shifted-layer: layer 2 is layer 1 one token later"]
    earlier = examined("earlier", lambda x: x[:-1, 2].copy_(x[1:, 1].clone()))
    assert earlier == ["shifted-layer: layer 2 is layer 3 one token later"]


def test_lost_fidelity_is_named(tmp_path: Path) -> None:
    cache = save(tmp_path / "c", random_samples(), "ecsq")
    quality = {**cache.codec.quality, "chan_snr": [31.0, 25.0, 31.5]}
    cache.__dict__["codec"] = dataclasses.replace(cache.codec, quality=quality)
    (found,) = stats.examine(cache, Stats(cache=cache.path)).warnings
    assert found.startswith("noise: layer 2 had 25.0 dB chanSNR at calibration, its step promises 31.")
    exact = save(tmp_path / "e", random_samples())
    exact.__dict__["codec"] = dataclasses.replace(exact.codec, quality={**quality, "snr": [None] * 3})
    assert warnings(exact) == ["noise"] * 3


def test_massive_tokens_alone_are_no_lost_fidelity(tmp_path: Path) -> None:
    """A sink token has a coarse step and costs chanSNR as measured, so the plain promise would be a false alarm."""
    samples = random_samples(hidden=200)
    for x in samples:
        x[0] *= 20
    cache = save(tmp_path / "c", samples, "ecsq")
    assert min(cache.codec.quality["chan_snr"]) < 10 * np.log10(12 * 128) - 1
    assert "noise" not in warnings(cache)


def test_states_that_left_their_calibration_are_named(tmp_path: Path) -> None:
    samples = random_samples()
    calm = torch.cat(samples)
    for x in samples:
        x[::3, 1, 0] = 500.0
    assert warnings(save(tmp_path / "c", samples, "ecsq", calm)) == ["escapes"]


@pytest.mark.parametrize("mask", [(299, 300), (0, 1)])
def test_a_strange_share_of_supervised_tokens_is_named(tmp_path: Path, mask: tuple[int, int]) -> None:
    assert warnings(save(tmp_path / "c", random_samples(tokens=300), mask=mask)) == ["supervision"]


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = save(tmp_path / "c", random_samples())
    code, out, _ = shards(capsys, "stats", cache.path)
    share, anchors = cache.supervised.sum() / 600, cache.anchors.sum()
    assert code == 0 and out.endswith("0 warnings\n")
    assert f"tokens     600, {cache.supervised.sum()} supervised ({share:.1%}), {anchors} anchors" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["tokens", *["150"] * 6, "150.0"] in lines
    assert ["150", "to", "150", "4", "100.0%", "#" * 30] in lines
    for words in ("source: data<0>.jsonl 2 50.0%", "finish reason: stop 3 75.0%", "response: greedy 4 100.0%"):
        assert words.split() in lines
    x_TD = torch.cat(random_samples())[:, 1].double()
    (row,) = [line for line in lines if line[:1] == ["2"]]
    assert row[1] == f"{x_TD.square().mean().sqrt():.4g}" and row[2] == f"{x_TD.abs().max():.4g}"
    top = int(x_TD.square().sum(0).argmax())
    assert row[-8] == str(top) and row[-7] == f"({x_TD[:, top].square().sum() / x_TD.square().sum():.1%}),"
    assert row[-10:-8] == ["exact", "exact"]
    code, out, _ = shards(capsys, "stats", cache.path, "--samples", 0)
    assert code == 0 and "States by layer" not in out and "600, " in out


def test_fidelity_is_that_of_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=4, codec="ecsq", last_hidden=True)
    _, out, _ = shards(capsys, "stats", tmp_path / "c")
    quality = Cache(tmp_path / "c").codec.quality
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("  ")}
    for i, layer in enumerate("123"):
        assert f"{quality['snr'][i]:.1f} {quality['chan_snr'][i]:.1f}" in " ".join(rows[layer])
    last = quality["last"]
    assert rows["last"][-2:] == [f"{last['snr'][0]:.1f}", f"{last['chan_snr'][0]:.1f}"]


def test_other_codecs_are_measured_on_every_second_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = torch.cat(random_samples())
    cache = save(tmp_path / "c", random_samples())
    found = dict(measure_states(cache, [0, 1, 2, 3], try_codecs=True).others)
    assert list(found) == ["fp8", "ecsq 0.08839", "ecsq 0.125", "ecsq 0.25", "ecsq 0.5", "ecsq 1"]
    for name, parameters in (("fp8", {}), ("ecsq", {"delta": 0.25})):
        plain = calibration.measure(codecs.calibrate(name, states[::2], parameters), states[1::2])
        assert found[f"{name} 0.25" if parameters else name] == plain
    code, out, _ = shards(capsys, "stats", cache.path, "--codecs", "True")
    assert code == 0 and f"ecsq 0.25     {found['ecsq 0.25']['bits']:.3f}" in out
    save(tmp_path / "lossy", random_samples(), "ecsq")
    code, _, err = shards(capsys, "stats", tmp_path / "lossy", "--codecs", "True")
    assert code == 2 and "codec ecsq is lossy" in err


def test_a_cache_being_written_shows_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=6, tokens=40, per_shard=2, complete=False)
    (tmp_path / "c" / "shards" / "00000002.arrow").rename(tmp_path / "c" / "shards" / "00000002.arrow.1.tmp")
    code, out, _ = shards(capsys, "stats", tmp_path / "c", "--html", tmp_path / "a.html")
    assert code == 0 and "being written" in out and "4 in 2 shards" in out and "4 samples (seed 0), 160 tokens" in out
    for path in (tmp_path / "c" / "shards").glob("*.arrow"):
        path.unlink()
    code, out, _ = shards(capsys, "stats", tmp_path / "c", "--html", tmp_path / "b.html")
    assert code == 0 and "0 in 0 shards" in out and (tmp_path / "b.html").is_file()


class Page(html.parser.HTMLParser):
    """What a page refers to, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object")
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def test_the_page_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = random_samples()
    for x in samples:
        x[:, 1].zero_()
    save(tmp_path / "c", samples)
    code, out, _ = shards(capsys, "stats", tmp_path / "c", "--codecs", "True", "--html", tmp_path / "a.html")
    assert code == 0 and "wrote" in out
    text = (tmp_path / "a.html").read_text()
    page = Page(text)
    assert len(page.links) == 3 and all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "@import" not in text and "url(" not in text
    for words in ("data<0>.jsonl", "zero-layer: layer 2", "States by layer", "ecsq 0.25", "supervised share"):
        assert words in page.text
    shards(capsys, "stats", tmp_path / "c", "--codecs", "True", "--html", tmp_path / "b.html")
    assert (tmp_path / "b.html").read_text() == text


def test_without_matplotlib_the_page_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", random_samples(count=1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dflash_offline.tools.stats_page", raising=False)
    monkeypatch.delattr(tools, "stats_page", raising=False)
    code, out, err = shards(capsys, "stats", tmp_path / "c", "--html", tmp_path / "a.html")
    assert code == 2 and out == "" and "pip install matplotlib" in err
    assert not (tmp_path / "a.html").exists()
    assert shards(capsys, "stats", tmp_path / "c")[0] == 0


def test_bad_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=1)
    assert shards(capsys, "stats", tmp_path / "c", "--samples", "-1")[0] == 2
    assert shards(capsys, "stats", tmp_path / "c", "--samples", "0", "--codecs", "True")[0] == 2
    assert shards(capsys, "stats", tmp_path)[0] == 2
    for place in (tmp_path, tmp_path / "no" / "a.html"):
        code, out, err = shards(capsys, "stats", tmp_path / "c", "--html", place)
        assert code == 2 and out == "" and "expected the name of a file" in err
