"""Workers that die, hang or fail; signals; full disks. Whatever happens, nobody waits for ever and nothing is lost."""

import json
import os
import signal
import subprocess
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import arguments, command, copy_without_shards, extract, tree, warm
from safetensors.torch import load_file
from targets import write_chats, write_rows

from dflash_offline.extract import events, forecast, plan, pool, run, runner, worker
from dflash_offline.extract.config import ExtractConfig, TargetConfig
from dflash_offline.extract.progress import Progress
from dflash_offline.extract.runner import Runner, start_runner
from dflash_offline.extract.task import Done, run_task
from dflash_offline.shards import manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.verify import verify

CPU = torch.device("cpu")
TASKS = [plan.Task(hash="", file="", batch=n, samples=1, tokens=1) for n in range(40)]


@pytest.fixture
def start(site: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A run as a process of its own over 160 chats into tmp_path/c; none is left behind."""
    write_chats(tmp_path / "chats.jsonl", 160)
    started: list[subprocess.Popen[str]] = []

    def run(*prefix: str, **changes: Any) -> subprocess.Popen[str]:
        argv = command(
            *arguments(site, tmp_path / "c", **{"workers": 2, "data.files": tmp_path / "chats.jsonl", **changes})
        )
        process = subprocess.Popen(
            [*prefix, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen[str], found: Callable[[], Any], seconds: float = 90) -> Any:
    """What `found` finds while the process lives."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.02)
    raise AssertionError(f"left with {process.poll()}: {process.stderr.read() if process.stderr else ''}")


def busy(cache: Path, tasks: int = 1) -> list[int]:
    """Workers that were given at least so many tasks."""
    given = Counter(e["worker"] for e in events.read(cache) if e["event"] == "given" and e["task"] >= 0)
    return [worker for worker, n in given.items() if n >= tasks]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_dead_and_a_hung_worker_are_replaced(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """B43: one is killed, one stops doing rows; the run ends by itself with every sample once."""
    cache = tmp_path / "c"
    process = start(**{"guard.hang": 3})
    hung, *_ = until(process, lambda: busy(cache, 2))
    os.kill(hung, signal.SIGSTOP)
    dead, *_ = until(process, lambda: [w for w in busy(cache) if w != hung])
    os.kill(dead, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lost = {e["worker"]: e["error"] for e in events.read(cache) if e["event"] == "lost"}
    assert "no row done in 3 s (guard.hang), ended" in lost[hung] and "ended with code -9" in lost[dead]
    assert not alive(hung)
    assert len(Cache(cache)) == 160 and verify(cache, threads=1).faults == []


def test_a_task_that_always_fails_is_named_and_the_others_are_done(site: Path, tmp_path: Path) -> None:
    """B43: its plan is damaged; after three attempts the run fails with the task's number."""
    copy_without_shards(site, tmp_path / "c")
    (name,) = plan.read(tmp_path / "c").tokens_files  # type: ignore[union-attr]
    tokens = tmp_path / "c" / "plan" / name
    with Cache(site / "cache").path.joinpath("plan", name).open("rb") as file:
        raw = bytearray(file.read())
    ids = Cache(site / "cache").read(len(Cache(site / "cache")) - 1).input_ids.tobytes()
    raw[raw.rindex(ids)] ^= 1
    tokens.write_bytes(raw)
    done = extract(*arguments(site, tmp_path / "c"))
    assert done.returncode == 1 and "1 of 3 tasks failed: 2; task 2: CorruptError" in done.stderr
    failures = [e["attempt"] for e in events.read(tmp_path / "c") if e["event"] == "failed"]
    assert failures == [1, 2, 3] and len(list((tmp_path / "c" / "shards").glob("*.arrow"))) == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_that_fails_again_and_again_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: bool
) -> None:
    warm(monkeypatch)
    monkeypatch.setattr(pool, "serve", _leave)
    with (
        pool.Workers(ahead) as workers,
        pytest.raises(RunError, match="no worker is left: worker on cpu ended with code 7"),
    ):
        workers.begin(ExtractConfig(), (), ["cpu"])
        workers.run(TASKS, range(40), False, lambda report: None, events.Events(tmp_path))
    assert sum(e["event"] == "worker" for e in events.read(tmp_path)) == pool.ATTEMPTS


def _leave(*_: object) -> None:
    os._exit(7)


def test_the_first_worker_loads_while_the_plan_is_made(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is gone when the plan fails. A complete cache, which may need no work, starts none."""
    started: list[Any] = []
    start = pool.Workers._start

    def note(*given: Any) -> Any:
        connection = start(*given)
        started.append(given[0]._workers[connection].process)
        return connection

    def refuse(*_: object) -> None:
        assert all(process.is_alive() for process in started)
        raise UsageError("such data")

    monkeypatch.setattr(pool.Workers, "_start", note)
    monkeypatch.setattr(run, "make_plan", refuse)
    for cache, workers in ((tmp_path / "c", 1), (site / "cache", 0)):
        started.clear()
        done = extract(*arguments(site, cache, workers=2))
        assert done.returncode == 2 and "such data" in done.stderr
        assert len(started) == workers and not any(process.is_alive() for process in started)


def test_a_worker_that_tells_of_its_error_and_leaves_costs_one_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a GPU's does, whose device may be broken; it was given more meanwhile."""
    warm(monkeypatch)
    monkeypatch.setattr(pool, "serve", _tell_and_leave)
    done: list[int] = []
    with pool.Workers(False) as workers:
        workers.begin(ExtractConfig(), (), ["cuda:0"])
        failed = workers.run(TASKS, [1, 2], False, lambda r: done.append(r.number), events.Events(tmp_path))
    assert failed == {1: "broken"} and done == [2]
    assert [e["attempt"] for e in events.read(tmp_path) if e["event"] == "failed"] == [1, 2, 3]


def _tell_and_leave(connection: Any, *_: object) -> None:
    with suppress(EOFError):
        connection.recv()  # the order
        while (number := connection.recv()[0]) != 1:
            connection.send(worker.Report(number=number))
        time.sleep(0.3)
        connection.send(worker.Report(number=1, error="broken"))


@pytest.mark.parametrize(("samples", "workers"), [(7, 3), (1, 8)])
def test_few_tasks_for_many_workers(site: Path, tmp_path: Path, samples: int, workers: int) -> None:
    """B44, B46: a task a sample; the parent has tokenised in processes and threads before the workers start."""
    rows = [{"input_ids": [(7 * i + k) % 300 + 6 for i in range(1400)], "loss_mask": [0] + [1] * 1399}
            for k in range(samples)]  # fmt: skip
    data = {"data.files": write_rows(tmp_path / "d.jsonl", *rows), "data.workers": 2, "workers": workers}
    done = extract(*arguments(site, tmp_path / "c", **data))
    assert done.returncode == 0 and "fork" not in done.stderr, done.stderr
    cache = Cache(tmp_path / "c")
    assert len(cache) == samples and len(cache.manifest.shards) == samples
    assert sum(e["event"] == "worker" for e in events.read(tmp_path / "c")) <= min(samples, workers)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGKILL], [signal.SIGTERM]])
def test_no_child_outlives_a_signal(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, signals: list[int]
) -> None:
    """B96, B97: one or two Ctrl-C, SIGKILL or SIGTERM to the parent while workers load."""
    process = start()
    workers = until(process, lambda: [e["worker"] for e in events.read(tmp_path / "c") if e["event"] == "worker"])
    begun = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1)
    process.communicate(timeout=25)
    workers += [e["worker"] for e in events.read(tmp_path / "c") if e["event"] == "worker"]
    while any(map(alive, workers)) and time.monotonic() < begun + 10:
        time.sleep(0.1)
    assert not any(map(alive, workers))
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9, signal.SIGTERM: 143}[signals[0]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_parent_s_imports(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    """B97: while both import. Ctrl-C reaches the whole group, and nobody prints where it was."""
    process = start(**{"target.path": tmp_path})  # which is refused, seconds later
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = until(process, lambda: listed.read_text().split())
    time.sleep(0.3)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    _, err = process.communicate(timeout=25)
    deadline = time.monotonic() + 5
    while any(alive(int(pid)) for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(int(pid)) for pid in found)
    assert "Traceback" not in err


@pytest.mark.parametrize("failures", [1, 2])
def test_an_error_before_there_was_a_task_costs_one_attempt(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """The first worker's weights cannot be read, and then they can."""
    (tmp_path / "left").write_text(str(failures))
    monkeypatch.setattr(pool, "serve", partial(_serve_badly, tmp_path / "left"))
    done = extract(*arguments(site, tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    told = [e for e in events.read(tmp_path / "c") if e["event"] == "failed"]
    assert [e["attempt"] for e in told] == [1, 2][:failures] and all("gone for now" in e["error"] for e in told)


def _serve_badly(left: Path, connection: Any) -> None:
    plain, before = runner.read_weights, list[Any]()

    def load(*given: Any) -> Any:
        assert not any(tensor() is not None for tensor in before), "the weights of an earlier start are still there"
        weights = torch.zeros(1000)
        before.append(weakref.ref(weights))
        if failures := int(left.read_text()):
            left.write_text(str(failures - 1))
            raise OSError(5, "gone for now")
        return plain(*given)

    runner.read_weights = load  # type: ignore[assignment]
    worker.serve(connection)


def test_sigterm_at_the_very_start(start: Callable[..., subprocess.Popen[str]], tmp_path: Path, site: Path) -> None:
    """B96: before there is anything to save."""
    process = start()
    time.sleep(1)
    process.terminate()
    process.communicate(timeout=25)
    assert process.returncode in (-signal.SIGTERM, 143)
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_full_disk_ends_the_run_at_once(
    start: Callable[..., subprocess.Popen[str]], site: Path, tmp_path: Path
) -> None:
    """B41: no shard fits; one line with the path, nothing half-written that counts, and the rerun completes."""
    process = start("bash", "-c", 'ulimit -f 500; exec "$@"', "limited", **{"data.files": site / "chats.jsonl"})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and err.count("\n") == 1, err
    assert "shards/0000000" in err and "make room and rerun" in err
    assert events.read(tmp_path / "c")[-1]["event"] == "stop"
    assert not list((tmp_path / "c").rglob("*.arrow.*tmp")) and not list((tmp_path / "c" / "shards").glob("*.arrow"))
    assert extract(*arguments(site, tmp_path / "c")).returncode == 0
    ours, theirs = tree(tmp_path / "c"), tree(site / "cache")
    del ours[".lock"], theirs[".lock"]
    assert ours == theirs


def test_a_disk_that_is_too_small_is_said_before(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B41."""
    room = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda path: room)  # type: ignore[attr-defined]
    done = extract(*arguments(site, tmp_path / "c"))
    assert (
        done.returncode == 2 and "bytes more: 1,000,000 free on" in done.stderr and not list(tmp_path.rglob("0*.arrow"))
    )
    with_head = int(done.stderr.partition("needs ")[2].partition(" ")[0].replace(",", ""))
    done = extract(*arguments(site, tmp_path / "c", **{"guard.preflight": "warn"}))
    assert done.returncode == 0 and "warning: needs" in done.stdout
    shards = int(done.stdout.partition("shards: about ")[2].partition(" ")[0].replace(",", ""))
    copied = load_file(tmp_path / "c" / "target" / "target.safetensors")
    assert with_head - shards == sum(tensor.nbytes for tensor in copied.values())


def test_long_samples_that_do_not_fit_into_memory_are_skipped(site: Path, tmp_path: Path) -> None:
    """B37: the row is halved until its short samples pass; the long ones are named with their length."""
    copy_without_shards(site, tmp_path / "c")
    found = plan.read(tmp_path / "c")
    assert found is not None
    config = ExtractConfig(target=TargetConfig(path=str(site / "t")), cache=tmp_path / "c")
    loaded = start_runner(config, (1, 2, 3, 4, 5), CPU)
    lengths = sorted(len(s.input_ids) for s in plan.load_task(tmp_path / "c", found.tasks[0]))
    limit = lengths[-3]
    done = run_task(replace(loaded, capture=Tight(loaded, limit)), tmp_path / "c", 0, found.tasks[0]).result()
    assert (done.samples, done.skipped) == (len(lengths) - 2, 2)
    skips = [json.loads(line) for line in (tmp_path / "c/shards/00000000.skipped.jsonl").read_text().splitlines()]
    assert [s["reason"] for s in skips] == ["oom", "oom"]
    assert sorted(int(s["detail"].split()[0]) for s in skips) == lengths[-2:]
    done_again = extract(*arguments(site, tmp_path / "c"))
    assert done_again.returncode == 3 and len(Cache(tmp_path / "c")) == 38


class Tight:
    """A capture on a device with little memory."""

    def __init__(self, runner: Runner, limit: int) -> None:
        self._runner, self._limit, self.hidden_size = runner, limit, runner.capture.hidden_size

    def __call__(self, samples: Any) -> torch.Tensor:
        if sum(map(len, samples)) > self._limit:
            raise torch.OutOfMemoryError("fake")
        return self._runner.capture(samples)


def test_a_run_that_loses_most_samples_stops(site: Path, tmp_path: Path) -> None:
    """B26: not one NaN here and there, but nearly everywhere."""
    found, draft = plan.read(site / "cache"), manifest.read(site / "cache")
    assert found is not None
    counting = Progress(site / "cache", found, [0, 1, 2], draft, events.Events(tmp_path), alone=False)
    done = Done(samples=15, tokens=10, bytes=1, skipped=19)
    counting.note(worker.Report(number=0, done=done))
    with pytest.raises(RunError, match="34 samples were lost and 20 written"):
        counting.note(worker.Report(number=1, done=replace(done, samples=5, skipped=15)))
