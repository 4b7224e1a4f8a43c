"""Rows in flight: how many there are, and what becomes of them when something fails."""

import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import copy_without_shards

from dflash_offline.extract import plan, task
from dflash_offline.extract.config import ExtractConfig, TargetConfig
from dflash_offline.extract.runner import Runner, start_runner
from dflash_offline.shards.errors import CorruptError, RunError
from dflash_offline.shards.index import shard_name


class Watched:
    """A capture that counts its tensors, and may fail at one of its rows."""

    def __init__(self, runner: Runner, fails: int = 0, limit: int = 99) -> None:
        self._runner, self._fails, self._limit, self._rows = runner, fails, limit, 0
        self._states: list[weakref.ref[torch.Tensor]] = []
        self.hidden_size, self.most = runner.capture.hidden_size, 0

    def __call__(self, samples: Any) -> torch.Tensor:
        self._rows += 1
        if self._rows == self._fails:
            raise RuntimeError("once")
        there = sum(states() is not None for states in self._states)
        if there >= self._limit:
            raise torch.OutOfMemoryError("beside so many rows")
        self.most = max(self.most, there + 1)
        states = self._runner.capture(samples)
        self._states.append(weakref.ref(states))
        return states


@pytest.fixture
def runner(site: Path, tmp_path: Path) -> Runner:
    copy_without_shards(site, tmp_path / "c")
    config = ExtractConfig(target=TargetConfig(path=str(site / "t")), cache=tmp_path / "c", token_budget=300)
    return start_runner(config, (1, 2, 3, 4, 5), torch.device("cpu"))


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float, broken: bool = False) -> None:
    encode = task._encode

    def slowed(*args: Any) -> Any:
        time.sleep(seconds)
        if broken:
            raise CorruptError("broken")
        return encode(*args)

    monkeypatch.setattr(task, "_encode", slowed)


def test_a_task_may_be_tried_again_at_once(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer of the attempt before takes its file away, not that of the next."""
    found = plan.read(tmp_path / "c")
    assert found is not None
    runner = replace(runner, capture=Watched(runner, fails=3))  # type: ignore[arg-type]
    slow(monkeypatch, 0.2)
    with pytest.raises(RuntimeError, match="once"):
        task.run_task(runner, tmp_path / "c", 0, found.tasks[0])
    task.run_task(runner, tmp_path / "c", 0, found.tasks[0]).result()
    assert (tmp_path / "c" / shard_name(0)).is_file()


def test_rows_in_flight_are_bounded_over_tasks(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks at once, a slow disk: three rows and the one that is computed."""
    found = plan.read(tmp_path / "c")
    assert found is not None
    runner = replace(runner, capture=(watched := Watched(runner)))  # type: ignore[arg-type]
    slow(monkeypatch, 0.1)
    pending = [task.run_task(runner, tmp_path / "c", n, t) for n, t in enumerate(found.tasks[:2])]
    assert [done.result().skipped for done in pending] == [0] * len(pending)
    assert 2 <= watched.most <= task.ROWS_AHEAD + 1 and runner.alive.below(1, 0)


def test_a_row_that_fits_alone_is_not_cut(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan.read(tmp_path / "c")
    assert found is not None
    runner = replace(runner, capture=Watched(runner, limit=1))  # type: ignore[arg-type]
    slow(monkeypatch, 0.05)
    assert task.run_task(runner, tmp_path / "c", 0, found.tasks[0]).result().skipped == 0


def test_a_failed_task_keeps_no_rows(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is still at hand."""
    found = plan.read(tmp_path / "c")
    assert found is not None
    with monkeypatch.context() as patch:
        slow(patch, 0.3, broken=True)
        done = task.run_task(runner, tmp_path / "c", 0, found.tasks[0])
        assert isinstance(error := done.exception(), CorruptError)
    assert runner.alive.below(1, 1) and error
    task.run_task(runner, tmp_path / "c", 0, found.tasks[0]).result()


def test_a_slow_disk_is_no_lack_of_memory(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is skipped because the rows before it have not been written yet."""
    found = plan.read(tmp_path / "c")
    assert found is not None
    monkeypatch.setattr("dflash_offline.extract.runner._PATIENCE", 0.05)
    runner = replace(runner, capture=Watched(runner, limit=1))  # type: ignore[arg-type]
    slow(monkeypatch, 0.6)
    with pytest.raises(RunError, match=r"those before it were not written in 0\.05 s; rerun"):
        task.run_task(runner, tmp_path / "c", 0, found.tasks[0])
    assert not list((tmp_path / "c" / "shards").glob("*.jsonl"))
