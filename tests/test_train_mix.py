"""Several caches trained on as one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_reference import chats, make_cache
from train_runs import call, hashes, metrics, settings

from dflash_offline.shards import manifest
from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import DataConfig
from dflash_offline.train.job import prepare
from dflash_offline.train.loop import train
from dflash_offline.train.mix import Mix
from dflash_offline.train.plan import held_out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Caches of 20 samples each, written by two codecs; five samples are in both."""
    folder, samples = tmp_path_factory.mktemp("two"), chats(35)
    return [
        make_cache(folder / "a", samples[:20], generation="greedy").path,
        make_cache(folder / "b", samples[15:], generation="sampled", codec="lossless").path,
    ]


def test_a_mix_reads_as_its_caches_do(two: list[Path]) -> None:
    mix = Mix(two)
    assert len(mix) == 40 and mix.new.sum() == 35 and mix.generation == "mixed"
    assert mix.new[:20].all() and (~mix.new[20:25]).all()
    for number in (0, 19, 20, 39):
        cache = mix.caches[number // 20]
        sample, plain = mix.read(number), cache.read(number % 20)
        assert sample.key == plain.key == mix.keys[number] and torch.equal(sample.states, plain.states)
        assert mix.tokens[number] == len(sample.input_ids) and mix.part[number] == number // 20
    assert Mix(two[:1]).fingerprint == mix.caches[0].fingerprint != mix.fingerprint != Mix(two[::-1]).fingerprint


def test_weights_and_the_split_go_over_all_caches(two: list[Path], tmp_path: Path) -> None:
    flags = ["--data.caches", str(two[1]), "--data.weights", "2", "0.5", "--optim.max-steps", "1000"]
    job = prepare(settings(two[0], tmp_path, *flags, "--optim.epochs", "4"), world=1)
    held = held_out(job.cache.prompt_keys, job.config.data.val_fraction)
    seen = np.zeros(40, int)
    for members, _ in job.plan.dealt(0, job.plan.steps, 0, 1):
        np.add.at(seen, members, 1)
    assert 0 < held.sum() < 40 and not seen[held].any() and not seen[20:25].any()
    assert (seen[:20][~held[:20]] == 8).all() and (seen[25:][~held[25:]] == 2).all()
    assert {job.cache.part[i] for i in np.flatnonzero(held & job.cache.new)} == {0, 1}
    assert all(held[i] for i in job.validation) and "5 in two caches" in job.describe()


def test_a_mixed_run_is_exact_and_is_measured_on_its_mix(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.weights", "1", "0.5", "--data.caches"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train(settings(two[0], whole, *flags, str(two[1]))) == 0
    moved = Path(shutil.copytree(two[1], tmp_path / "moved"))
    shutil.copytree(whole, run)
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    assert train(settings(two[0], run, *flags, str(moved))) == 0
    assert hashes(run, 6) == hashes(whole, 6) and metrics(run) == metrics(whole)
    assert call("eval", "--run-dir", run, "--split", "all", monkeypatch=monkeypatch) == 0
    result = json.loads((run / "eval" / "step-00000006-all.json").read_text())
    assert result["samples"] == 35 and result["cache"] == f"{two[0]}, {moved}" and "mixed" in capsys.readouterr().out
    for other in ([], ["--data.caches", str(two[0])]):
        with pytest.raises((UsageError, ValueError), match=r"data.weights: expected|made with cache_fingerprint"):
            train(settings(two[0], run, "--data.weights", "1", "0.5", *other))


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("layer_ids", [1, 3, 6], r"other: layer_ids is \[1, 3, 6\], of .*a \[1, 3, 5\]; caches that are mixed"),
        ("tokenizer", {"length": 93, "eos_ids": [90], "pad_id": 91, "mask_id": None}, r"tokenizer.length is 93, of"),
        ("target", {"files": {"model.safetensors": "ab"}}, r"target.model.safetensors is ab, of .*a None"),
        ("target", {"copied": {"target.safetensors": "cd"}}, r"target.copied.target.safetensors is cd, of"),
    ],
)
def test_caches_of_other_targets_are_refused(
    field: str, change: Any, message: str, two: list[Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(two[1], tmp_path / "other"))
    found = manifest.read(other)
    new = {**found.target, **change} if field == "target" else change
    manifest.write(other, replace(found, **{field: new}))
    with pytest.raises(UsageError, match=message) as raised:
        train(settings(two[0], tmp_path / "run", "--data.caches", str(other)))
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


def test_a_weight_for_every_cache() -> None:
    for weights in ((1.0,), (1.0, 0.0), (1.0, 1.0, 1.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match=r"data.weights: expected a number > 0 for each of 2 caches"):
            DataConfig(caches=(Path("b"),), weights=weights)
