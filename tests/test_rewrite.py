"""`dflash-shards merge`, `split` and `convert`: the states stay what they were."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import HIDDEN, LAYERS, write_cache
from runs import arguments, extract
from test_tools import shards

from dflash_offline.shards import codecs, index, manifest
from dflash_offline.shards.build import Entry
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.sample import Sample
from dflash_offline.shards.verify import verify
from dflash_offline.tools import rewrite, rewrite_cache
from dflash_offline.tools.config import Convert, Merge, Split


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def bits(sample: Sample) -> list[Any]:
    """Everything of a sample that a trainer sees."""
    last = [] if sample.last_hidden is None else sample.last_hidden.view(torch.int16).tolist()
    return [sample.key, sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.states.view(torch.int16), last]


def assert_equal(cache: Cache, expected: dict[str, Sample]) -> None:
    """The cache is sound and holds exactly these samples, to the bit."""
    assert verify(cache.path, threads=1).faults == []
    assert sorted(cache.keys) == sorted(expected) and cache.manifest.dataset["samples"] == len(expected)
    for i, key in enumerate(cache.keys):
        *ours, states, last = bits(cache.read(i))
        *theirs, wanted, wanted_last = bits(expected[key])
        assert ours == theirs and torch.equal(states, wanted) and last == wanted_last


def stored(cache: Cache) -> dict[str, Sample]:
    return {key: cache.read(i) for i, key in enumerate(cache.keys)}


def edit(folder: Path, **values: Any) -> None:
    """Another manifest for a cache, as if it had been written so."""
    m = manifest.read(folder)
    index.publish(folder, replace(m, **values), index.load(folder, m, ranges=True))


def same_target(folder: Path, other: Path) -> Path:
    """Give a random cache the target of another."""
    shutil.rmtree(folder / "target")
    shutil.copytree(other / "target", folder / "target")
    edit(folder, target=manifest.read(other).target)
    return folder


@pytest.mark.parametrize(
    ("codec", "last_hidden"), [("lossless", True), ("bf16", False), ("ecsq", True), ("fp8", False)]
)
def test_the_parts_of_a_cache_merge_to_the_same_states(tmp_path: Path, codec: str, last_hidden: bool) -> None:
    write_cache(tmp_path / "a", samples=30, per_shard=7, codec=codec, last_hidden=last_hidden)
    before, a = tree(tmp_path / "a"), Cache(tmp_path / "a")
    for name, rest in (("b", False), ("c", True)):
        assert rewrite.split(Split(cache=tmp_path / "a", out=tmp_path / name, fraction=0.4, rest=rest)) == 0
    assert rewrite.merge(Merge(caches=(tmp_path / "b", tmp_path / "c"), out=tmp_path / "d")) == 0
    parts = [Cache(tmp_path / name) for name in "bcd"]
    assert all(part.keys for part in parts)
    whole = stored(a)
    for part in parts:
        assert_equal(part, {key: whole[key] for key in part.keys})
        assert part.manifest.codec == a.manifest.codec and part.manifest.target == a.manifest.target
        assert part.manifest.settings["codec"] == codec
    assert set(parts[0].keys).isdisjoint(parts[1].keys) and set(parts[2].keys) == set(a.keys)
    assert len({cache.fingerprint for cache in [a, *parts]}) == 4
    assert tree(tmp_path / "a") == before


def test_equal_samples_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "a", samples=9)
    rewrite.split(Split(cache=tmp_path / "a", out=tmp_path / "b", limit=4))
    (tmp_path / "a" / "skipped.jsonl").write_text('{"reason": "empty"}\n{"reason": "damaged"}\n')
    edit(tmp_path / "a", dataset={"rows": 11, "skipped": {"empty": 1, "damaged": 1}})  # as a repair leaves it
    code, out, _ = shards(capsys, "merge", tmp_path / "b", tmp_path / "a", "--out", tmp_path / "c")
    cache = Cache(tmp_path / "c")
    assert code == 0 and "9 samples" in out and "4 duplicates" in out
    assert_equal(cache, stored(Cache(tmp_path / "a")))
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "c" / "skipped.jsonl").read_text().splitlines()]
    assert Counter(reasons) == cache.manifest.dataset["skipped"]
    facts = cache.manifest.dataset
    assert facts["rows"] == 9 + 11
    assert facts["skipped"] == {"split": 5, "empty": 1, "damaged_before": 1, "duplicate": 4}


@pytest.mark.parametrize("codec", ["lossless", "bf16", "fp8"])
def test_caches_measured_apart_merge_where_that_is_exact(tmp_path: Path, codec: str) -> None:
    write_cache(tmp_path / "a", samples=6, codec=codec, last_hidden=True)
    write_cache(tmp_path / "b", samples=5, codec=codec, last_hidden=True, seed=1)
    same_target(tmp_path / "b", tmp_path / "a")
    a, b = Cache(tmp_path / "a"), Cache(tmp_path / "b")
    assert a.manifest.codec.calibration != b.manifest.codec.calibration
    rewrite.merge(Merge(caches=(tmp_path / "a", tmp_path / "b"), out=tmp_path / "c"))
    assert_equal(Cache(tmp_path / "c"), stored(a) | stored(b))


def test_lossy_caches_measured_apart_are_refused(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", samples=6, codec="ecsq")
    write_cache(tmp_path / "b", samples=5, codec="ecsq", seed=1)
    same_target(tmp_path / "b", tmp_path / "a")
    with pytest.raises(
        UsageError, match=r"both ecsq, measured on different states.*merge the bf16 or lossless"
    ) as error:
        rewrite.merge(Merge(caches=(tmp_path / "a", tmp_path / "b"), out=tmp_path / "c"))
    assert "\n" not in str(error.value) and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_ids": [1, 2, 4]}, r"layer_ids is \[1, 2, 3\] and \[1, 2, 4\]"),
        ({"convention": "after the norm"}, "convention is"),
        ({"tokenizer": {"length": 5}}, "tokenizer is"),
        ({"target": {"copied": {"target.safetensors": "00"}}}, r"target\.safetensors is"),
        ({"settings": {"codec": "lossless", "chat_template": "x"}}, "chat_template is None and 'x'"),
    ],
)
def test_caches_that_differ_are_refused_by_name(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    write_cache(tmp_path / "a", samples=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    edit(tmp_path / "b", **values)
    with pytest.raises(UsageError, match=message) as error:
        rewrite.merge(Merge(caches=(tmp_path / "a", tmp_path / "b"), out=tmp_path / "c"))
    assert f"{tmp_path / 'a'} and {tmp_path / 'b'}: " in str(error.value) and not (tmp_path / "c").exists()


def test_another_codec_or_no_last_hidden_state_is_refused(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", samples=4)
    write_cache(tmp_path / "b", samples=4, codec="bf16", last_hidden=True)
    same_target(tmp_path / "b", tmp_path / "a")
    with pytest.raises(UsageError, match=r"codec is 'lossless' and 'bf16'; last_hidden is False and True"):
        rewrite.merge(Merge(caches=(tmp_path / "a", tmp_path / "b"), out=tmp_path / "c"))


def test_what_samples_there_are_may_differ(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", samples=4)
    write_cache(tmp_path / "b", samples=4, seed=1)
    same_target(tmp_path / "b", tmp_path / "a")
    edit(tmp_path / "b", settings={"codec": "lossless", "data.max_length": 9})
    rewrite.merge(Merge(caches=(tmp_path / "a", tmp_path / "b"), out=tmp_path / "c"))
    assert Cache(tmp_path / "c").manifest.settings["data.max_length"] == [None, 9]


def test_no_prompt_is_on_both_sides() -> None:
    prompts = [f"{i % 200:032x}" for i in range(1000)]
    cache: Any = type("Cache", (), {"__len__": lambda self: 1000, "prompt_keys": prompts})()

    def side(**args: Any) -> set[int]:
        taken = rewrite._chosen(cache, Split(cache=Path(), out=Path(), **args))
        return {i for i in range(1000) if taken[i]}

    some, rest, more = side(fraction=0.3), side(fraction=0.3, rest=True), side(fraction=0.6)
    assert 200 < len(some) < 400 and some < more and some | rest == set(range(1000)) and not some & rest
    assert {prompts[i] for i in some}.isdisjoint({prompts[i] for i in rest})
    assert side(fraction=0.3, seed=1) not in (some, rest)


def test_split_by_keys_source_and_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "a", samples=8)
    keys = Cache(tmp_path / "a").keys
    file = tmp_path / "keys.txt"
    file.write_text(f"{keys[5]}\n\n{keys[2]}\n")
    for name, args, wanted in (
        ("k", ["--keys", file], [2, 5]),
        ("kr", ["--keys", file, "--rest", "True"], [0, 1, 3, 4, 6, 7]),
        ("s", ["--source", "data", "--limit", "3"], [0, 1, 2]),
    ):
        code, out, _ = shards(capsys, "split", tmp_path / "a", *args, "--out", tmp_path / name)
        cache = Cache(tmp_path / name)
        assert code == 0 and f"{len(wanted)} samples" in out and cache.keys == [keys[i] for i in wanted]
        assert cache.manifest.dataset["skipped"] == {"split": 8 - len(wanted)}
    file.write_text(f"{keys[0]}\n{'0' * 32}\n")
    for args, message in (
        (["--source", "other"], "none of its 8 samples is chosen"),
        (["--keys", file], "line 2: no sample '0000"),
        (["--keys", tmp_path / "no.txt"], "no.txt"),
        ([], "no condition"),
        (["--fraction", "1.5"], "expected between 0 and 1"),
    ):
        code, _, err = shards(capsys, "split", tmp_path / "a", *args, "--out", tmp_path / "x")
        assert code == 2 and message in err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("codecs_", [("lossless", "bf16"), ("bf16", "lossless")])
def test_exact_codecs_convert_to_the_bit(tmp_path: Path, codecs_: tuple[str, str]) -> None:
    write_cache(tmp_path / "a", samples=9, per_shard=4, codec=codecs_[0], last_hidden=True)
    rewrite.convert(Convert(cache=tmp_path / "a", out=tmp_path / "b", codec=codecs_[1]))  # type: ignore[arg-type]
    a, b = Cache(tmp_path / "a"), Cache(tmp_path / "b")
    assert b.manifest.codec.name == b.manifest.settings["codec"] == codecs_[1] and b.keys == a.keys
    assert_equal(b, stored(a))
    assert a.fingerprint != b.fingerprint


@pytest.mark.parametrize(("delta", "samples", "tokens"), [(None, 45, 100), (0.5, 45, 100), (1.0, 2, 7000)])
def test_ecsq_is_measured_and_encoded_as_an_extraction_would(
    tmp_path: Path, delta: float | None, samples: int, tokens: int
) -> None:
    written = write_cache(tmp_path / "a", samples=samples, tokens=tokens, per_shard=10, last_hidden=True)
    rewrite.convert(Convert(cache=tmp_path / "a", out=tmp_path / "b", codec="ecsq", delta=delta))
    cache = Cache(tmp_path / "b")
    parameters = {"delta": delta or 2**-3.5}
    states_TLD = torch.cat([s.states for s in written])[:4096].view(-1, len(LAYERS), HIDDEN)
    first = written[: -(-4096 // tokens)]
    last = torch.cat([s.last_hidden for s in first if s.last_hidden is not None])[:4096, None]
    states, last_hidden = (codecs.calibrate("ecsq", x, parameters) for x in (states_TLD, last))
    assert cache.manifest.settings["ecsq.delta"] == parameters["delta"]
    assert verify(cache.path, threads=1).faults == []
    for i, sample in enumerate(written):
        batch = cache.read_batch(cache.row(i))
        assert sample.last_hidden is not None
        direct = encode_frames(states, sample.states.view(-1, len(LAYERS), HIDDEN))
        assert batch.column("frames").values.to_pylist() == direct
        assert batch.column("last_frames").values.to_pylist() == encode_frames(last_hidden, sample.last_hidden[:, None])


def test_states_are_never_quantised_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "a", samples=3, codec="ecsq")
    for args, message in (
        (["--codec", "fp8"], "would quantise them a second time"),
        (["--codec", "ecsq", "--delta", "0.5"], "would quantise them a second time"),
        (["--codec", "bf16"], "is lossy; bf16 stores what is left"),
    ):
        code, _, err = shards(capsys, "convert", tmp_path / "a", *args, "--out", tmp_path / "x")
        assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "x").exists()
    args = ["--codec", "bf16", "--force", "True", "--out", tmp_path / "b"]
    assert shards(capsys, "convert", tmp_path / "a", *args)[0] == 0
    assert_equal(Cache(tmp_path / "b"), stored(Cache(tmp_path / "a")))
    assert shards(capsys, "convert", tmp_path / "b", "--codec", "lossless", "--out", tmp_path / "c")[0] == 0
    code, _, err = shards(capsys, "convert", tmp_path / "c", "--codec", "fp8", "--out", tmp_path / "x")
    assert code == 2 and "went through ecsq" in err  # what was lost is not forgotten on the way
    code, _, err = shards(capsys, "convert", tmp_path / "b", "--codec", "bf16", "--out", tmp_path / "x")
    assert code == 2 and "is bf16 already" in err
    code, _, err = shards(capsys, "convert", tmp_path / "b", "--codec", "fp8", "--delta", "1", "--out", tmp_path / "x")
    assert code == 2 and "fp8 has no step" in err


def test_an_extraction_into_a_made_cache_is_refused_by_name(site: Path, tmp_path: Path) -> None:
    for name, rest in (("b", "False"), ("c", "True")):
        args = Split(cache=site / "cache", out=tmp_path / name, fraction=0.5, rest=rest == "True")
        assert rewrite.split(args) == 0
    assert rewrite.merge(Merge(caches=(tmp_path / "b", tmp_path / "c"), out=tmp_path / "d")) == 0
    for name in "bcd":
        cache = Cache(tmp_path / name)
        facts = cache.manifest.dataset
        lines = (tmp_path / name / "skipped.jsonl").read_text().splitlines()
        assert facts["rows"] == facts["samples"] + sum(facts["skipped"].values())
        assert len(lines) == sum(facts["skipped"].values())
        assert [file["name"] for file in facts["files"]] == ["chats.jsonl"]
        assert cache.generation == "greedy" and verify(cache.path, threads=1).faults == []
        assert set(cache.target_tensors()) == {"embed_tokens", "lm_head", "norm"}
    assert_equal(cache, stored(Cache(site / "cache")))
    for lost in ((), ("manifest.json",), ("plan/plan.json",)):  # finished, begun, and tidied up
        shutil.copytree(tmp_path / "b", tmp_path / "e", dirs_exist_ok=True)
        for name in lost:
            (tmp_path / "e" / name).unlink()
        done = extract(*arguments(site, tmp_path / "e"))
        assert done.returncode == 2 and "made_by was {'command': 'split'" in done.stderr, done.stderr
    with pytest.raises(UsageError, match="made_by was None"):
        rewrite.merge(Merge(caches=(tmp_path / "b", tmp_path / "c"), out=site / "cache"))


def test_diff_sees_the_last_hidden_state_and_a_cache_being_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cache(tmp_path / "a", samples=6, last_hidden=True)
    rewrite.convert(Convert(cache=tmp_path / "a", out=tmp_path / "b", codec="bf16"))
    code, out, _ = shards(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 3 and "setting made_by" in out and "6 samples in both, 0 with other states" in out
    rewrite.convert(Convert(cache=tmp_path / "a", out=tmp_path / "c", codec="ecsq"))
    code, out, _ = shards(capsys, "diff", tmp_path / "a", tmp_path / "c", "--limit", 2)
    assert (
        code == 3 and out.count("states differ by up to") == 2 and "6 with other states" in out and "last: 0.0" in out
    )
    write_cache(tmp_path / "d", samples=6, per_shard=4, complete=False)
    code, out, _ = shards(capsys, "diff", tmp_path / "a", tmp_path / "d")
    assert code == 3 and f"last hidden state: only in {tmp_path / 'a'}" in out
    assert f"{tmp_path / 'd'} is being written; it has 6 samples so far" in out
    # A difference in nothing but the last hidden state.
    (tmp_path / "e").mkdir()
    key = Cache(tmp_path / "a").keys[3]
    entry = rewrite_cache._encoded

    def other_last(pick: rewrite_cache.Pick, codec: Calibrated) -> Entry:
        made, states = entry(pick, codec), pick.source.read(pick.number).last_hidden
        assert codec.last is not None and states is not None
        return replace(made, last_frames=encode_frames(codec.last, -states[:, None])) if pick.key == key else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite_cache, "_encoded", other_last)
        rewrite.convert(Convert(cache=tmp_path / "a", out=tmp_path / "e", codec="bf16"))
    code, out, _ = shards(capsys, "diff", tmp_path / "b", tmp_path / "e")
    assert code == 3 and f"sample {key}: states differ" in out and "1 with other states; 1 differences" in out
    assert "1: 0, 2: 0, 3: 0, last: " in out
    # And a source that was exchanged for it is noticed, although settings and keys are the same.
    rewrite.split(Split(cache=tmp_path / "b", out=tmp_path / "s", limit=5))
    assert Cache(tmp_path / "b").fingerprint == Cache(tmp_path / "e").fingerprint
    with pytest.raises(UsageError, match="begun with other samples"):
        rewrite.split(Split(cache=tmp_path / "e", out=tmp_path / "s", limit=5))
