"""Runs end with the same numbers however often they were interrupted and on however many ranks they ran."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_killed import POINTS
from train_reference import make_cache
from train_runs import FLAGS, VARIANTS, config_of, finish, hashes, metrics, settings, small

from dflash_offline.train import checkpoint, evaluate, loop
from dflash_offline.train.export import run_drafter
from dflash_offline.train.job import prepare
from dflash_offline.train.loop import train


@pytest.mark.parametrize("ranks", [1, 2])
def test_twelve_steps_are_seven_and_five(
    ranks: int, cache: Path, finished: dict[str, Path], together: dict[str, Path], tmp_path: Path
) -> None:
    """B74, B84, B63: weights, moments, average, rates and losses, to the last bit."""
    whole = finished if ranks == 1 else together
    names = ["decay", "everything"]
    for name in names:
        shutil.copytree(whole[name], tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000012")
    finish(ranks, *(["--cache", cache, "--run-dir", tmp_path / n, *FLAGS, *VARIANTS[n]] for n in names))
    for name in names:
        assert hashes(tmp_path / name, 12) == hashes(whole[name], 12)
        assert metrics(tmp_path / name) == metrics(whole[name]) and len(metrics(whole[name])) == 12


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_equal_one_that_accumulates(name: str, finished: dict[str, Path], together: dict[str, Path]) -> None:
    """B80, B76: in every objective, with either optimizer; two rows add up to the same bits in either order."""
    assert metrics(finished[name]) == metrics(together[name])
    assert hashes(finished[name], 12) == hashes(together[name], 12)


def test_two_ranks_go_on_as_one_in_the_same_order(cache: Path, together: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(together["decay"], run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    finish(1, ["--cache", cache, "--run-dir", run, *FLAGS])
    for one, two in zip(metrics(run), metrics(together["decay"]), strict=True):
        assert [one[n] for n in ("anchors", "tokens", "lr")] == [two[n] for n in ("anchors", "tokens", "lr")]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)


def test_a_checkpoint_is_fp32_tensors_and_text(finished: dict[str, Path]) -> None:
    """B78, B84: no pickle, nothing in bf16, nothing of the target, no moments of what is frozen."""
    for name, moments in (
        ("decay", {"step", "exp_avg", "exp_avg_sq"}),
        ("everything", {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}),
    ):
        found = checkpoint.at_step(finished[name] / "checkpoints", 12)
        files = {"model.safetensors", "optimizer.safetensors", *(["ema.safetensors"] if name == "everything" else [])}
        assert {p.name for p in found.folder.iterdir()} == {"state.json", *files}
        loaded = {file: found.load(file) for file in files}
        assert all(t.dtype == torch.float32 for tensors in loaded.values() for t in tensors.values())
        assert {key.rsplit(":")[1] for key in loaded["optimizer.safetensors"]} == moments
        assert not any("embed" in key or "head" in key for key in loaded["optimizer.safetensors"])


def killed(kills: int, name: str, cache: Path, finished: Path, folder: Path) -> list[str]:
    """Train under kills; every run that got to its end is as the one that was not disturbed. Where it was killed."""
    out, flags = folder / "out", [*FLAGS, *VARIANTS[name], "--save.every", "1", "--save.keep-last", "2"]
    command = [sys.executable, str(Path(__file__).with_name("train_killed.py")), str(kills), "0", str(out)]
    done = subprocess.run(
        [*command, "--cache", str(cache), "--run-dir", str(folder / "run"), *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    points = out.read_text().splitlines()
    runs = sorted(folder.glob("out.*"))
    assert len(runs) == points.count("finished") + 1
    for run in runs:
        assert hashes(run, 12) == hashes(finished, 12) and metrics(run) == metrics(finished)
        assert not list((run / "checkpoints").glob(".*")) and not list(run.glob("*.tmp"))
    return [point for point in points if point != "finished"]


def test_kills_change_nothing(cache: Path, finished: dict[str, Path], tmp_path: Path) -> None:
    """B85, B69: at random moments and in the middle of writing."""
    assert len(killed(6, "everything", cache, finished["everything"], tmp_path)) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decay", "everything"])
def test_a_hundred_kills_change_nothing(name: str, cache: Path, finished: dict[str, Path], tmp_path: Path) -> None:
    points = killed(100, name, cache, finished[name], tmp_path)
    print(Counter(points))
    assert len(points) == 100 and {*points} == {"at a random moment", *POINTS}


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_stopped_run_has_the_metrics_of_one_that_was_not(
    moment: str, cache: Path, six: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal before or within the measuring of step 4, which may take longer than a signal leaves time."""
    config, rates, walks = settings(cache, tmp_path / "run"), loop.learning_rate, evaluate.draft_sample

    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if moment == "before":  # seen when the counts of the next step, the fourth, are collected
        monkeypatch.setattr(loop, "learning_rate", lambda step, *rest: (step == 2 and stop(), rates(step, *rest))[1])
    else:
        calls: list[int] = []
        monkeypatch.setattr(
            evaluate, "draft_sample", lambda *a, **k: (calls.append(1), len(calls) == 3 and stop(), walks(*a, **k))[2]
        )
    assert train(config) == 143
    monkeypatch.undo()
    assert checkpoint.newest(config.run_dir / "checkpoints")[0].step == 4  # type: ignore[union-attr]
    assert [m["step"] for m in metrics(config.run_dir)] == [1, 2, 3]
    stopped = shutil.copytree(config.run_dir / "checkpoints" / "step-00000004", tmp_path / "stopped")
    assert train(config) == 0
    assert metrics(config.run_dir) == metrics(six) and hashes(config.run_dir, 6) == hashes(six, 6)
    assert [("validation" in m) for m in metrics(six)] == [False, True] * 3
    # Again from the checkpoint of step 4, as after a kill before the next one: its line is there already.
    shutil.rmtree(config.run_dir / "checkpoints")
    shutil.copytree(stopped, config.run_dir / "checkpoints" / "step-00000004")
    assert train(config) == 0 and metrics(config.run_dir) == metrics(six)


def test_a_run_repeats_from_its_own_settings(cache: Path, finished: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(finished["decay"], cache)
    assert config.model.sliding_window == 8 and config.model.layer_ids is None
    finish(1, ["--config", finished["decay"] / "config.toml", "--run-dir", tmp_path / "again"])
    assert hashes(tmp_path / "again", 12) == hashes(finished["decay"], 12)


def test_empty_rows_change_nothing(cache: Path, tmp_path: Path) -> None:
    """B70: rows without a label beside one that has some."""
    train(small(cache, tmp_path / "a"))
    train(small(cache, tmp_path / "b", rows_per_step=4))
    assert hashes(tmp_path / "a", 2)["model.safetensors"] == hashes(tmp_path / "b", 2)["model.safetensors"]
    assert [m["empty_rows"] for m in metrics(tmp_path / "b")] == [3, 3]


def test_a_step_without_supervision_changes_nothing(tmp_path: Path) -> None:
    """B70: no loss is told, rather than one of 0."""
    ids, mask = np.arange(80, dtype=np.int32), np.array([0] * 60 + [1] * 20, np.uint8)
    made = make_cache(tmp_path / "cache", [(ids, mask)])
    config = small(made.path, tmp_path / "run", row_tokens=50)  # the cut leaves the prompt alone
    assert train(config) == 0
    steps = metrics(config.run_dir)
    assert [(m["loss"], m["empty_rows"], m["grad_norm"]) for m in steps] == [(None, 1, 0.0)] * 2
    untrained, trained = (run_drafter(config.run_dir, step)[0].state_dict() for step in (0, 2))
    assert all(torch.equal(untrained[name], trained[name]) for name in untrained)


def test_the_tensors_of_a_variant_move_as_its_settings_say(finished: dict[str, Path]) -> None:
    found = checkpoint.at_step(finished["everything"] / "checkpoints", 12)
    begin = run_drafter(finished["everything"], 0)[0].state_dict()
    twelve, average = found.load(checkpoint.MODEL), found.load(checkpoint.EMA)
    frozen = {name for name in begin if name.startswith("layers.0.mlp.") or name == "norm.weight"}
    assert len(frozen) == 4
    for name in begin:
        assert torch.equal(begin[name], twelve[name]) == (name in frozen), name
        assert torch.equal(begin[name], average[name]) == (name in frozen), name
    moments = found.load(checkpoint.OPTIMIZER)
    assert {name.rsplit(":", 1)[0] for name in moments} == {*begin} - frozen
    matrices = {name for name in {*begin} - frozen if begin[name].ndim == 2}
    assert {name.split(":")[0] for name in moments if name.endswith("momentum_buffer")} == matrices
    served = run_drafter(finished["everything"], 12)[0].state_dict()
    assert all(torch.equal(served[name], average[name]) for name in average)


def test_the_schedule_counts_optimizer_steps(cache: Path, tmp_path: Path) -> None:
    """B75: rows of an epoch do not fill its last step; the rate ends at its planned minimum."""
    config = settings(cache, tmp_path, "--data.rows-per-step", "5", "--optim.epochs", "2", "--optim.max-steps", "1000",
                      "--optim.min-lr-ratio", "0.1", "--optim.schedule", "cosine", "--save.every", "1000")  # fmt: skip
    rows = prepare(config, 1).plan.epochs[0].rows
    assert rows % 5 and train(config) == 0
    steps = metrics(tmp_path)
    assert [m["step"] for m in steps] == list(range(1, 2 * -(-rows // 5) + 1))
    assert steps[-1]["lr"] == pytest.approx(0.1 * config.optim.lr) and steps[-1]["epoch"] < 2
    assert sum(m["samples"] for m in steps) == 2 * len(prepare(config, 1).plan.epochs[0].members)


def test_a_mean_is_over_slots_not_over_rows(tmp_path: Path) -> None:
    """B76: two samples with 2 and 60 supervised tokens, in one row or in two of one step."""
    samples = []
    for length in (2, 60):
        ids = np.arange(10 + length, dtype=np.int32)
        samples.append((ids, (ids >= 10).astype(np.uint8)))
    made = make_cache(tmp_path / "cache", samples).path
    found = []
    for name, tokens, rows in (("one", 100, 1), ("two", 75, 2)):
        config = small(made, tmp_path / name, row_tokens=tokens, row_anchors=200, rows_per_step=rows)
        assert train(config) == 0 and prepare(config, 1).plan.epochs[0].rows == rows
        found.append(metrics(tmp_path / name))
    for one, two in zip(*found, strict=True):
        assert one["anchors"] == two["anchors"] == 60
        for field in ("loss", "grad_norm", "divisor"):
            assert two[field] == pytest.approx(one[field], rel=1e-5), field
