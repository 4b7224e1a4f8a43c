"""All of extraction's parallelism on a machine: one process per device, started by spawn, fed tasks by the parent.

Workers never talk to each other and nothing is collective, so nothing can hang on a peer. A worker that dies, or does
no row for too long, is replaced and its task given again; children end when their parent does. All load at once.
"""

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.events import Events
from dflash_offline.extract.worker import CALIBRATE, Order, Report, Stage, serve
from dflash_offline.shards import manifest
from dflash_offline.shards.command import say
from dflash_offline.shards.errors import RunError, UsageError

if TYPE_CHECKING:
    from dflash_offline.extract.plan import Task
    from dflash_offline.extract.ray_engine import Workers as Actors

ATTEMPTS = 3


@dataclass(kw_only=True)
class _Worker:
    process: BaseProcess
    slot: int
    """Place in the list of devices."""
    tasks: list[int]
    """Given and not yet reported."""
    heard: float
    """When it last made progress or was given work after it had none."""
    started: float
    """Unix seconds of its start."""
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


class Workers:
    """The processes of a run, one a device; none outlives the block.

    With `ahead` the first starts with the block, and imports while the caller does: on some machines that takes longer
    than to load a target.
    """

    def __init__(self, ahead: bool) -> None:
        self._ahead = ahead
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[Connection, _Worker] = {}

    def __enter__(self) -> "Workers":
        if self._ahead:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop them all."""
        _stop([(connection, worker.process) for connection, worker in self._workers.items()])
        self._workers.clear()

    def begin(self, config: ExtractConfig, layers: tuple[int, ...], devices: Sequence[str]) -> None:
        """Say what they are for. The first loads its target from now on."""
        self._config, self._layers, self._devices = config, layers, devices
        self._order(next(iter(self._workers)) if self._workers else self._start(), 0, True)

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs,), daemon=True)
        # Ctrl-C reaches the whole group and the parent decides; a child inherits the block from its first instruction.
        resource_tracker.ensure_running()  # else the first start begins it, and that lifts the block
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._workers[ours] = _Worker(process=process, slot=0, tasks=[], heard=time.monotonic(), started=time.time())
        return ours

    def _order(self, connection: Connection, slot: int, ahead: bool) -> None:
        self._workers[connection].slot = slot
        order = Order(config=self._config, layers=self._layers, device=self._devices[slot], ahead=ahead)
        with suppress(BrokenPipeError, ConnectionError):  # it just died; the next wait sees that
            connection.send(order)

    def run(
        self,
        tasks: "Sequence[Task]",
        numbers: Sequence[int],
        calibrate: bool,
        report: Callable[[Report], None],
        events: Events,
    ) -> dict[int, str]:
        """Run those of `tasks`, reporting each. Returns the ones that failed for good, with their last error.

        Raises UsageError when workers say the input is at fault, Interrupted on a signal, RunError when going on is
        useless or no worker is left.
        """
        workers, devices = self._workers, self._devices
        queue = Queue(numbers, calibrate, events)
        strikes = [0] * len(devices)
        # The others get no task before the first has done a row: then kernels are compiled, and their tiles chosen.
        held = calibrate or devices[0].startswith("cuda")

        def told(worker: _Worker) -> None:
            since, device = round(worker.started, 3), devices[worker.slot]
            events("worker", worker=worker.process.pid, device=device, since=since)

        def start(slot: int, ahead: bool) -> None:
            connection = self._start()
            self._order(connection, slot, ahead)
            told(self._workers[connection])

        def lost(connection: Connection, worker: _Worker) -> None:
            nonlocal held
            worker.process.join()
            del workers[connection]
            held = False
            error = worker.hung or f"worker on {devices[worker.slot]} ended with code {worker.process.exitcode}"
            events("lost", worker=worker.process.pid, device=devices[worker.slot], tasks=worker.tasks, error=error)
            for number in reversed(worker.tasks):
                if worker.process.exitcode or worker.hung:
                    queue.give_up(number, error)
                else:  # it told of its error and left; these it had not begun
                    queue.todo.appendleft(number)
            strikes[worker.slot] += 1
            if strikes[worker.slot] < ATTEMPTS:
                start(worker.slot, True)  # on a device that always fails it would use up every task's attempts
            elif not workers:
                raise RunError(f"no worker is left: {error}; rerun to retry")

        def hear(worker: _Worker, message: Report | Stage | None) -> None:
            nonlocal held
            worker.heard = time.monotonic()
            if isinstance(message, Stage):
                events("stage", worker=worker.process.pid, words=message.words, since=round(message.time, 3))
                if worker.slot == 0:  # the others do the same
                    say(f"{devices[0]}: {message.words}")
                return
            worker.began = True
            if message is None:
                held = False
                return
            worker.tasks.remove(message.number)
            if queue.settle(message, report):
                strikes[worker.slot] = 0
                held = False

        with Signals() as signals:
            for worker in workers.values():
                told(worker)
            for slot in range(len(workers), min(len(devices), len(numbers))):
                start(slot, False)
            while queue.todo or any(worker.tasks for worker in workers.values()):
                if signals.number:
                    raise Interrupted(signals.number)
                for connection, worker in workers.items():
                    if not (held and worker.slot):
                        _feed(connection, worker, queue, tasks, events, devices[worker.slot])
                    _end_if_hung(worker, self._config)
                for ready in wait(list(workers), timeout=0.5):
                    assert isinstance(ready, Connection)
                    try:
                        message = ready.recv()
                    except (EOFError, ConnectionError):
                        lost(ready, workers[ready])
                        continue
                    hear(workers[ready], message)  # apart: a closed stdout is a ConnectionError too
        return queue.failed


def workers(config: ExtractConfig) -> "Workers | Actors":
    """Those of the configured engine; ahead, where a cache is not there that may need no work."""
    if config.engine == "ray":
        from dflash_offline.extract.ray_engine import Workers as Actors

        return Actors()
    return Workers(ahead=config.cache != Path() and not config.dry_run and not (config.cache / manifest.NAME).exists())


def _feed(
    connection: Connection, worker: _Worker, queue: Queue, tasks: "Sequence[Task]", events: Events, device: str
) -> None:
    # A GPU begins a task while the shard before it is written; on the CPU both need the same cores.
    while queue.todo and len(worker.tasks) < (2 if device.startswith("cuda") and queue.todo[0] != CALIBRATE else 1):
        number = queue.todo.popleft()
        try:
            connection.send((number, tasks[max(number, 0)]))  # to calibrate, the first
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
