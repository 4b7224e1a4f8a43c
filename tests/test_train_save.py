"""Checkpoints: which are kept, and writing them beside the training."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from train_reference import drafter
from train_runs import call, config_of, hashes, metrics, settings

from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.train import checkpoint, step_end
from dflash_offline.train.config import EvalConfig, ExportConfig, OptimConfig, SaveConfig
from dflash_offline.train.export import run_drafter
from dflash_offline.train.loop import train
from dflash_offline.train.saver import saver
from dflash_offline.train.state import State


def steps_in(run: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (run / "checkpoints").iterdir())


@pytest.fixture
def taus(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Held-out tau of the measurements to come."""
    plain, script = step_end.summary, [1.5, 2.5, 2.0, 2.5, 1.0, 1.0]
    monkeypatch.setattr(step_end, "summary", lambda *a, **k: {**plain(*a, **k), "tau": script.pop(0)})
    return script


def test_the_best_checkpoint_is_kept_beside_the_newest(
    cache: Path, tmp_path: Path, taus: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = ("--validate.every", "1", "--save.keep-last", "1", "--save.every", "100")
    assert train(settings(cache, run, *flags)) == 0
    assert steps_in(run) == [2, 6] and not taus
    assert run_drafter(run, None, best=True)[1] == 2 and run_drafter(run, None)[1] == 6
    best = load_file(run / "checkpoints" / "step-00000002" / checkpoint.MODEL)
    assert call("export", "--run-dir", run, "--best", "True", "--out", tmp_path / "d", monkeypatch=monkeypatch) == 0
    assert (load_file(tmp_path / "d" / "model.safetensors")["fc.weight"] == best["fc.weight"].bfloat16()).all()
    assert call("eval", "--run-dir", run, "--best", "True", monkeypatch=monkeypatch) == 0
    assert (run / "eval" / "step-00000002-val.json").is_file()
    for config in (EvalConfig, ExportConfig):
        with pytest.raises(ValueError, match="expected either --best or --step 2"):
            config(run_dir=run, best=True, step=2)
    assert train(settings(cache, tmp_path / "other", "--validate.every", "0")) == 0
    with pytest.raises(UsageError, match="no step was measured while training"):
        run_drafter(tmp_path / "other", None, best=True)


def test_a_resumed_run_knows_its_best(cache: Path, tmp_path: Path, taus: list[float]) -> None:
    run = tmp_path / "run"
    config = settings(cache, run, "--validate.every", "1", "--save.every", "1")
    assert train(config) == 0
    for step in (4, 5, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    taus += [2.4, 2.45, 2.5]
    assert train(config) == 0
    found, _ = checkpoint.newest(run / "checkpoints")
    assert found is not None and found.state["best"] == {"step": 2, "tau": 2.5}


def test_saving_beside_the_training_writes_the_same(cache: Path, six: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(settings(cache, run, "--save.asynchronous", "False")) == 0
    for step in (2, 4, 6):
        assert hashes(run, step) == hashes(six, step)


def test_a_checkpoint_is_of_its_own_step_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State.of(drafter(), OptimConfig())
    before = {name: p.clone() for name, p in state.drafter.state_dict().items()}
    go, plain = threading.Event(), checkpoint.write_tensors
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *a: (go.wait(10), plain(*a))[1])
    with saver(tmp_path, SaveConfig()) as writer:
        writer.start(1, state.items(), {})
        state.gradients.flat.fill_(1)
        state.step(2, rate=0.1)
        writer.check()
        go.set()
    found = checkpoint.at_step(tmp_path, 1).load(checkpoint.MODEL)
    assert all((found[name] == before[name]).all() for name in before)
    assert not (state.drafter.fc.weight == before["fc.weight"]).any()


@pytest.mark.parametrize("flag", ["True", "False"])
def test_a_failed_write_ends_the_run_with_its_cause(
    flag: str, cache: Path, run: Path, six: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    plain, failed = checkpoint.write_tensors, threading.Event()

    def full(path: Path, tensors: Any) -> None:
        failed.set()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    config = config_of(run, cache)
    with pytest.raises(RunError, match=r"step-00000004: not written: .*No space left"):
        train(settings(cache, run, "--save.asynchronous", flag))
    assert failed.is_set() and steps_in(run) == [2]
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "No space left" in status["error"]
    monkeypatch.setattr(checkpoint, "write_tensors", plain)
    assert train(config) == 0 and hashes(run, 6) == hashes(six, 6) and metrics(run) == metrics(six)
