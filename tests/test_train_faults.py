"""What goes wrong around a run ends in one line, before any harm: bad numbers, full disks, damaged files."""

import json
import math
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_reference import drafter, files_of
from train_runs import SIX, call, config_of, hashes, metrics, settings, snapshot

from dflash_offline.shards.errors import CorruptError, RunError
from dflash_offline.shards.files import read_json, write_json
from dflash_offline.train import checkpoint, evaluate, loop
from dflash_offline.train.config import (
    DataConfig,
    EvalConfig,
    LossConfig,
    OptimConfig,
)
from dflash_offline.train.export import export_drafter
from dflash_offline.train.loop import train
from dflash_offline.train.state import State


@pytest.mark.parametrize("cls", [DataConfig, LossConfig, OptimConfig, EvalConfig])
def test_no_setting_is_nan_or_inf(cls: Callable[..., Any]) -> None:
    tried = 0
    others: dict[str, Any] = {"run_dir": Path("run")} if cls is EvalConfig else {}
    for name, kind in ((f.name, str(f.type)) for f in fields(cls)):  # type: ignore[arg-type]
        if "float" in kind:
            for bad in (math.nan, math.inf, -math.inf):
                tried += 1
                with pytest.raises(ValueError, match=rf"{name}: expected finite numbers, found .*(nan|inf)"):
                    cls(**others, **{name: (0.9, bad) if "tuple" in kind else bad})
    assert tried


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--seed", "99999999999999999999999"],
        ["run", "--seed", "-1"],
        ["run", "--data.row-anchors", "9" * 25],
        ["eval", "--run-dir", "run", "--seed", "-1"],
        ["eval", "--run-dir", "run", "--seed", "99999999999999999999999"],
        ["run", "--optim.lr", "nan"],
        ["run", "--optim.lr", "1e300"],
        ["run", "--optim.lr", "1e20", "--optim.weight-decay", "1e20"],
    ],
)
def test_numbers_out_of_range(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*argv, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert "expected" in error and error.count("\n") == 1


@pytest.mark.parametrize("dpace", ["0", "1"])
def test_a_run_that_diverges_fails_and_keeps_its_last_checkpoint(
    dpace: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    argv = ["run", "--cache", cache, "--run-dir", run, *SIX, "--optim.lr", "1e20", "--save.every", "1",
            "--loss.dpace", dpace]  # fmt: skip
    assert call(*argv, monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "dflash-train run: error: step " in error and "finite" in error
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    for _, state in checkpoint.states(run / "checkpoints"):
        weights = load_file(run / "checkpoints" / f"step-{state['step']:08d}" / checkpoint.MODEL)
        assert checkpoint.not_finite(weights) is None


def test_a_loss_that_is_not_finite_changes_no_weight(
    cache: Path, run: Path, six: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    plain, steps = loop.block_loss, []

    def bad(*args: Any) -> Any:
        steps.append(1)
        loss = plain(*args)
        return loss if len(steps) < 3 else loss._replace(loss=loss.loss * math.inf)

    monkeypatch.setattr(loop, "block_loss", bad)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: steps.append(100))
    with pytest.raises(RunError, match=r"step 6: loss is inf, gradient norm (nan|inf); expected finite"):
        train(config_of(run, cache))
    assert sum(steps) == 100 + 4 and hashes(run, 4) == hashes(six, 4)
    assert [m["step"] for m in metrics(run)] == [1, 2, 3, 4, 5]


FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
    " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True."
)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_full_gpu_is_one_error_that_says_what_to_try(
    recompute: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, rows = loop.block_loss, []

    def full(*args: Any) -> Any:
        rows.append(1)
        if len(rows) > 2 * 2:  # of step 3
            raise torch.OutOfMemoryError(FULL)
        return plain(*args)

    monkeypatch.setattr(loop, "block_loss", full)
    run, tried = tmp_path / "run", "--recompute True, which this run may go on with, or "
    argv = ["run", "--cache", cache, "--run-dir", run, *SIX, "--recompute", recompute]
    assert call(*argv, monkeypatch=monkeypatch) == 1
    expected = (
        "step 3: too little GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        f"79.10 GiB of which 1.20 GiB is free; try {'' if recompute else tried}in another --run-dir --loss.chunk below "
        "1024, --data.row-tokens below 100 and --data.row-anchors below 40"
    )
    assert capsys.readouterr().err.splitlines()[-1] == f"dflash-train run: error: {expected}"
    assert read_json(run / "status.json") == {"state": "failed", "error": expected}
    monkeypatch.setattr(loop, "block_loss", plain)
    assert call(*argv[:-1], True, monkeypatch=monkeypatch) == 0 and metrics(run)[-1]["step"] == 6


def test_a_gpu_that_is_full_before_the_first_step_or_past_the_allocator_of_torch(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other errors stay what they are."""
    for said, found, message in (
        (
            "CUDA error: out of memory\nCompile with ...",
            RunError,
            r"before the first step: too little GPU memory: CUDA e",
        ),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
            RunError,
            r"before the first step: too little GPU memory",
        ),
        ("shapes do not match", RuntimeError, r"^shapes do not match$"),
    ):

        def full(*_: Any, said: str = said) -> None:
            raise RuntimeError(said)

        monkeypatch.setattr(loop, "load_target", full)
        with pytest.raises(found, match=message):
            train(settings(cache, tmp_path / "run"))


def test_a_gpu_too_small_for_an_evaluation_is_one_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(evaluate, "draft_sample", full)
    assert call("eval", "--run-dir", run, "--device", "cpu", monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("dflash-train eval: error: measuring: too little GPU memory: CUDA out of memory. Tried to")
    assert "1.20 GiB is free; try a GPU that nothing else uses" in error and error.count("\n") == 1


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    made = drafter()
    files = files_of(State.of(drafter(), OptimConfig()))
    kept = tmp_path / "checkpoints"
    checkpoint.save(kept, 1, files, {}, keep=1)
    before = snapshot(kept)
    with largest_file(10_000), pytest.raises(RunError, match=r"model.safetensors: not written: ") as raised:
        checkpoint.save(kept, 2, files, {}, keep=1)
    assert "\n" not in str(raised.value) and snapshot(kept) == before and len(list(kept.iterdir())) == 1
    with largest_file(10_000), pytest.raises(RunError, match=r"model.safetensors: not written: "):
        export_drafter(made, tmp_path / "drafter")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(State.of(drafter(), OptimConfig()))
    checkpoint.save(tmp_path, 1, files, {}, keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(RunError, match=r"step-00000002: not written: .*No space left"):
        checkpoint.save(tmp_path, 2, files, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    found, passed = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 1 and not passed


def test_a_full_disk_while_training_says_so(cache: Path, run: Path, six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B85."""
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    with largest_file(20_000), pytest.raises(RunError, match=r"model.safetensors: not written: "):
        train(config_of(run, cache))
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert not list((run / "checkpoints").glob(".*"))
    assert train(config_of(run, cache)) == 0
    assert hashes(run, 6) == hashes(six, 6) and metrics(run) == metrics(six)


@pytest.mark.parametrize("damage", ["cut", "flip", "no state", "no optimizer"])
def test_a_torn_checkpoint_is_passed_over(
    damage: str, cache: Path, finished: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B85, B74: also one that lost its moments, which would restart them at 0."""
    run = tmp_path / "run"
    shutil.copytree(finished["decay"], run)
    newest = run / "checkpoints" / "step-00000012"
    model = newest / checkpoint.MODEL
    if damage == "cut":
        os.truncate(model, 1000)
    elif damage == "flip":
        data = bytearray(model.read_bytes())
        data[-5] ^= 1
        model.write_bytes(data)
    else:
        (newest / (checkpoint.STATE if damage == "no state" else checkpoint.OPTIMIZER)).unlink()
    assert train(config_of(run, cache)) == 0
    assert "passed over an incomplete checkpoint" in capsys.readouterr().err
    assert metrics(run)[-1]["step"] == 12 and checkpoint.at_step(run / "checkpoints", 12).step == 12
    for folder in (run / "checkpoints").iterdir():
        (folder / checkpoint.STATE).write_text("{}")
    with pytest.raises(RunError, match="no complete checkpoint among 2"):
        train(config_of(run, cache))


def test_a_new_checkpoint_outlives_newer_ones_that_were_passed_over(cache: Path, run: Path) -> None:
    """Torn ones at steps 4 and 6 are not among the newest that are kept."""
    for step in (4, 6):
        os.truncate(run / "checkpoints" / f"step-{step:08d}" / checkpoint.MODEL, 1000)
    files = files_of(State.of(drafter(), OptimConfig()))
    checkpoint.save(run / "checkpoints", 3, files, {}, keep=1)
    found, passed = checkpoint.newest(run / "checkpoints")
    assert found is not None and found.step == 3 and len(passed) == 2
    assert not (run / "checkpoints" / "step-00000002").exists()


def test_a_kill_while_a_checkpoint_is_replaced_leaves_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(State.of(drafter(), OptimConfig()))
    checkpoint.save(tmp_path, 1, files, {}, keep=1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 1, files, {}, keep=1)
    checkpoint.clean(tmp_path)
    assert checkpoint.at_step(tmp_path, 1).step == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("line", [b"[]", b"{}", b"\x00\xff", b'{"step": "4"}', b""])
def test_metrics_that_are_not_steps(line: bytes, cache: Path, run: Path, six: Path) -> None:
    path = run / "metrics.jsonl"
    plain = path.read_bytes()
    path.write_bytes(plain + line)  # torn: it has no end
    assert train(config_of(run, cache)) == 0 and path.read_bytes() == plain
    path.write_bytes(line + b"\n" + plain)
    with pytest.raises(CorruptError, match=r"metrics.jsonl:1: found .*, expected an object with a step"):
        train(config_of(run, cache))


@pytest.mark.parametrize("state", ["[]", "step", "files"])
def test_a_state_that_is_none_is_passed_over(
    state: str, cache: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step-00000006" / checkpoint.STATE
    if state == "[]":
        path.write_text("[]")
    else:
        write_json(path, read_json(path) | {state: 4})
    assert train(config_of(run, cache)) == 0
    assert "passed over an incomplete checkpoint" in capsys.readouterr().err
    assert checkpoint.at_step(run / "checkpoints", 6).step == 6
