"""Trackers show what metrics.jsonl records: each with its real package, resumed, failing."""

import json
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_runs import metrics, settings

from dflash_offline.shards.errors import UsageError
from dflash_offline.train import trackers
from dflash_offline.train.loop import train
from dflash_offline.train.trackers import Sink

KINDS = ["tensorboard", "trackio", "wandb"]


def shown_tensorboard(run: Path) -> list[tuple[int, dict[str, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}, purge_orphaned_data=False).Reload()
    out: list[tuple[int, dict[str, float]]] = []
    for event in events.Scalars("loss"):
        out.append((event.step, {"loss": event.value}))
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            next(values for step, values in out if step == event.step)[tag] = event.value
    return out


def shown_trackio(run: Path) -> list[tuple[int, dict[str, float]]]:
    (path,) = (run.parent / "trackio").rglob("dflash.db")
    with sqlite3.connect(path) as db:
        rows = db.execute("select step, metrics from metrics order by id").fetchall()
    return [(step, json.loads(values)) for step, values in rows]


def shown_wandb(run: Path) -> list[tuple[int, dict[str, float]]]:
    from wandb.proto.wandb_internal_pb2 import Record

    out = []
    for path in sorted((run / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime):
        for raw in leveldb_records(path.read_bytes()):
            record = Record.FromString(raw)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                out.append((record.history.step.num, values))
    return out


def leveldb_records(raw: bytes) -> Iterator[bytes]:
    """Payloads of a LevelDB log behind W&B's header of 7 bytes: blocks of 32 KiB, records in parts of type 1 to 4."""
    at, whole = 7, b""
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack("<IHB", raw[at : at + 7])
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            yield whole
            whole = b""


SHOWN = {"tensorboard": shown_tensorboard, "trackio": shown_trackio, "wandb": shown_wandb}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_in_its_tracker(kind: str, cache: Path, tmp_path: Path) -> None:
    """As if killed after step 6 with a checkpoint of step 4: 5 and 6 are computed again and shown once."""
    pytest.importorskip(kind)
    run = tmp_path / "run"
    config = settings(cache, run, "--trackers", kind, "--log-every", "1")
    assert train(config) == 0
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    assert train(settings(cache, run, "--trackers", kind, "--log-every", "1")) == 0
    shown = SHOWN[kind](run)
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]
    for (_, values), line in zip(shown, metrics(run), strict=True):
        assert values["loss"] == pytest.approx(line["loss"], rel=1e-6)
        assert values["slot_accuracy/1"] == pytest.approx(line["slot_accuracy"][0], rel=1e-6)
        assert ("validation/tau" in values) == ("validation" in line)


def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[int] = []

    def log(step: int, values: dict[str, float]) -> None:
        told.append(step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trackers, "find_spec", lambda _: True)  # neither package is in the test extra
    monkeypatch.setitem(trackers._OPEN, "wandb", lambda *_: Sink(log=log, close=lambda: told.append(-1)))
    run = tmp_path / "run"
    monkeypatch.setitem(trackers._OPEN, "trackio", lambda *_: 1 / 0)
    assert train(settings(cache, run, "--trackers", "wandb", "trackio", "--log-every", "1")) == 0
    error = capfd.readouterr().err
    assert told == [1] and len(metrics(run)) == 6
    assert error.count("tracker wandb failed and is left out from here: [Errno 28] No space left on device") == 1
    assert error.count("tracker trackio failed") == 1


def test_a_tracker_that_cannot_write(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    assert train(settings(cache, run, "--optim.max-steps", "2")) == 0
    (run / "tensorboard").write_text("in the way")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    assert train(settings(cache, run, "--optim.max-steps", "2", "--trackers", "tensorboard")) == 0
    assert capfd.readouterr().err.count("tracker tensorboard failed") == 1 and len(metrics(run)) == 2


def test_every_log_every_steps_and_where_it_was_measured(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    assert train(settings(cache, run, "--trackers", "tensorboard", "--log-every", "3")) == 0
    assert [step for step, _ in shown_tensorboard(run)] == [2, 3, 4, 6]


def test_a_tracker_that_is_not_installed_is_refused_before_work(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="trackers: wandb is not installed; pip install wandb"):
        train(settings(cache, tmp_path / "run", "--trackers", "wandb"))
    assert not (tmp_path / "run").exists()
