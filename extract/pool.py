"""All of extraction's parallelism on a machine: one process per device, started by spawn, fed tasks by the parent.

Workers never talk to each other and nothing is collective, so nothing can hang on a peer. A worker that dies, or does
no row for too long, is replaced and its task given again; children end when their parent does.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from dflash_offline.extract.checks import StatesError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.events import Events
from dflash_offline.extract.plan import Plan
from dflash_offline.extract.task import Done
from dflash_offline.shards.command import say
from dflash_offline.shards.errors import RunError, UsageError

if TYPE_CHECKING:
    from dflash_offline.extract.runner import Runner

CALIBRATE = -1
"""Task number of the codec calibration, which comes before all others."""
ATTEMPTS = 3
_SAY_EVERY = 0.5
"""Seconds between two signs of progress."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker needs to know; the rest is in the cache folder."""

    config: ExtractConfig
    cache: Path
    layers: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says: a task is done, or failed. In between it says None for rows done."""

    number: int
    done: Done | None = None
    error: str = ""
    fatal: Literal["", "usage", "run"] = ""
    """Every worker would fail alike, by the user's input or while running."""
    kernels: str = ""
    probe: dict[str, list[float]] = field(default_factory=dict)
    """What checks.probe found."""


@dataclass(kw_only=True)
class _Worker:
    process: BaseProcess
    slot: int
    """Place in the list of devices."""
    tasks: list[int]
    """Given and not yet reported."""
    heard: float
    """When it last made progress or was given work after it had none."""
    began: bool = False
    """It has done a row."""
    hung: str = ""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; carries the signal number."""


class Signals:
    """Remembers the first SIGINT or SIGTERM; the second SIGINT ends the process as usual."""

    def __enter__(self) -> "Signals":
        self.number = 0
        self._old = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


class Queue:
    """Tasks to do, those that failed, and why."""

    def __init__(self, numbers: Sequence[int], calibrate: bool, events: Events) -> None:
        self._later = list(numbers) if calibrate else []
        self.todo = deque([CALIBRATE] if calibrate else numbers)
        self.failed: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self._events = events

    def settle(self, message: "Report", report: Callable[["Report"], None]) -> bool:
        """What follows from a worker's report; True when the task is done. Raises what ends the whole run."""
        if message.fatal:
            raise (UsageError if message.fatal == "usage" else RunError)(message.error)
        if message.error:
            self.give_up(message.number, message.error)
            return False
        report(message)
        if message.number == CALIBRATE:
            self.todo.extend(self._later)
        return True

    def give_up(self, number: int, error: str) -> None:
        """Try `number` again, at most ATTEMPTS times in all. Raises RunError for the calibration."""
        attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
        self._events("failed", task=number, attempt=attempt, error=error)
        if attempt < ATTEMPTS:
            self.todo.append(number)
        elif number == CALIBRATE:
            raise RunError(f"calibration failed {ATTEMPTS} times: {error}")
        else:
            self.failed[number] = error


def run(
    job: Job,
    devices: Sequence[str],
    numbers: Sequence[int],
    calibrate: bool,
    report: Callable[[Report], None],
    events: Events,
) -> dict[int, str]:
    """Run tasks on `devices`, reporting each. Returns the tasks that failed for good, with their last error.

    Raises UsageError when workers say the input is at fault, Interrupted on a signal, RunError when going on is useless
    or no worker is left.
    """
    context = multiprocessing.get_context("spawn")
    queue = Queue(numbers, calibrate, events)
    workers: dict[Connection, _Worker] = {}
    strikes = [0] * len(devices)
    # When the first has done a row, its kernels are compiled and their tiles chosen, for all.
    waiting = deque(range(1, min(len(devices), len(numbers))))

    def start(slot: int) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, job, devices[slot]), daemon=True)
        # Ctrl-C reaches the whole group and the parent decides; a child inherits the block from its first instruction.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        workers[ours] = _Worker(process=process, slot=slot, tasks=[], heard=time.monotonic())
        events("worker", worker=process.pid, device=devices[slot])

    def start_others() -> None:
        while waiting:
            start(waiting.popleft())

    def lost(connection: Connection, worker: _Worker) -> None:
        worker.process.join()
        del workers[connection]
        start_others()
        error = worker.hung or f"worker on {devices[worker.slot]} ended with code {worker.process.exitcode}"
        events("lost", worker=worker.process.pid, device=devices[worker.slot], tasks=worker.tasks, error=error)
        for number in reversed(worker.tasks):
            if worker.process.exitcode or worker.hung:
                queue.give_up(number, error)
            else:  # it told of its error and left; these it had not begun
                queue.todo.appendleft(number)
        strikes[worker.slot] += 1
        if strikes[worker.slot] < ATTEMPTS:
            start(worker.slot)  # on a device that fails again and again it would use up every task's attempts
        elif not workers:
            raise RunError(f"no worker is left: {error}; rerun to retry")

    def hear(worker: _Worker, message: Report | str | None) -> None:
        worker.heard = time.monotonic()
        if isinstance(message, str):
            if worker.slot == 0:  # the others do the same
                say(f"{devices[0]}: {message}")
            return
        worker.began = True
        if message is None:
            start_others()
            return
        worker.tasks.remove(message.number)
        if queue.settle(message, report):
            strikes[worker.slot] = 0
            start_others()

    with Signals() as signals:
        try:
            start(0)
            if not calibrate and not devices[0].startswith("cuda"):
                start_others()
            while queue.todo or any(worker.tasks for worker in workers.values()):
                if signals.number:
                    raise Interrupted(signals.number)
                for connection, worker in workers.items():
                    _feed(connection, worker, queue, events, devices[worker.slot])
                    _end_if_hung(worker, job.config)
                for ready in wait(list(workers), timeout=0.5):
                    assert isinstance(ready, Connection)
                    try:
                        message = ready.recv()
                    except (EOFError, ConnectionError):
                        lost(ready, workers[ready])
                        continue
                    hear(workers[ready], message)  # apart: a closed stdout is a ConnectionError too
        finally:
            _stop([(connection, worker.process) for connection, worker in workers.items()])
    return queue.failed


def _feed(connection: Connection, worker: _Worker, queue: Queue, events: Events, device: str) -> None:
    # A GPU begins a task while the shard before it is written; on the CPU both need the same cores.
    while queue.todo and len(worker.tasks) < (2 if device.startswith("cuda") and queue.todo[0] != CALIBRATE else 1):
        number = queue.todo.popleft()
        try:
            connection.send(number)
        except (BrokenPipeError, ConnectionError):
            queue.todo.appendleft(number)  # it just died; the next wait sees that
            break
        if not worker.tasks:
            worker.heard = time.monotonic()
        worker.tasks.append(number)
        events("given", task=number, worker=worker.process.pid)


def _end_if_hung(worker: _Worker, config: ExtractConfig) -> None:
    """Our own child, by its id; the closed pipe then says that it is lost."""
    limit = config.guard.hang if worker.began else config.guard.hang_start
    if limit and worker.tasks and not worker.hung and time.monotonic() - worker.heard > limit:
        worker.hung = f"no row done in {limit:g} s (guard.hang{'' if worker.began else '_start'}), ended"
        worker.process.kill()


def _stop(workers: list[tuple[Connection, BaseProcess]]) -> None:
    """End our own children: by a closed pipe, then SIGTERM, then SIGKILL."""
    for connection, process in workers:
        connection.close()
        process.terminate()
    deadline = time.monotonic() + 5
    for _, process in workers:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _serve(connection: Connection, job: Job, device: str) -> None:
    """A worker's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    import torch

    from dflash_offline.extract.runner import Runner, start_runner
    from dflash_offline.extract.task import calibrate, run_task

    # One thread a worker: how a matmul is split over threads changes its low bits, and the bytes of a shard must not
    # depend on how many workers share the cores.
    torch.set_num_threads(1)
    runner: Runner | None = None
    sending = threading.Lock()
    said = -_SAY_EVERY

    def send(report: Report | str | None) -> None:
        with sending, suppress(BrokenPipeError, ConnectionError):  # the parent may be gone
            connection.send(report)

    def beat(begun: str = "") -> None:
        nonlocal said
        if begun:
            send(begun)
        elif (now := time.monotonic()) - said > _SAY_EVERY:
            said = now
            send(None)

    # After an error of its own a device may fail at everything until a new process opens it.
    broken = threading.Event()
    while not broken.is_set():
        try:
            if not connection.poll(0.5):
                continue
            number: int = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if runner is None:
                runner = start_runner(job.config, job.layers, torch.device(device), beat)
            if number == CALIBRATE:
                calibrate(runner, job.cache, job.plan.tasks[0])
                send(Report(number=number, kernels=runner.kernels, probe=runner.probe))
            else:
                done = run_task(runner, job.cache, number, job.plan.tasks[number])
                done.add_done_callback(partial(_tell, send, number, runner, device, broken))
        except Exception as error:  # whatever it was, the parent must hear of it and may try again
            send(failure(number, error, device))
            if _of_device(error, device):
                broken.set()
    if runner is not None:
        runner.writer.shutdown()


def _of_device(error: BaseException, device: str) -> bool:
    return device.startswith("cuda") and not isinstance(error, OSError)


def _tell(
    send: Callable[[Report], None],
    number: int,
    runner: "Runner",
    device: str,
    broken: threading.Event,
    done: Future[Done],
) -> None:
    if error := done.exception():
        if _of_device(error, device):
            broken.set()
        send(failure(number, error, device))
    else:
        send(Report(number=number, done=done.result(), kernels=runner.kernels, probe=runner.probe))


def failure(number: int, error: BaseException, device: str) -> Report:
    """What the parent is told of an error."""
    if isinstance(error, UsageError):
        return Report(number=number, error=str(error), fatal="usage")
    if isinstance(error, StatesError):
        return Report(number=number, error=str(error), fatal="run")
    if isinstance(error, OSError):
        full = error.errno in (ENOSPC, EDQUOT, EFBIG, EROFS)
        hint = "; make room and rerun the same command: finished shards are kept" if full else ""
        text = f"{error.filename or device}: {error.strerror or error}{hint}"
        return Report(number=number, error=text, fatal="run" if full else "")
    return Report(number=number, error=f"{type(error).__name__}: {error}")


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
