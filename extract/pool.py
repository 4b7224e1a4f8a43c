"""All of extraction's parallelism: one process per device, started by spawn, fed task numbers by the parent.

Workers never talk to each other and nothing is collective, so nothing can hang on a peer. A worker that dies gives its
task back; children end when their parent does.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.plan import Plan
from dflash_offline.extract.task import Done
from dflash_offline.shards.errors import RunError, UsageError

CALIBRATE = -1
"""Task number of the codec calibration: one worker does it before the others start, on warm kernels for all."""
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker needs to know; the rest is in the cache folder."""

    config: ExtractConfig
    cache: Path
    layers: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says: it is ready, a task is done, or a task failed."""

    number: int
    done: Done | None = None
    error: str = ""
    usage: bool = False
    """The error is the user's to mend; every worker would fail alike."""
    kernels: str = ""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; carries the signal number."""


class _Signals:
    """Remembers the first SIGINT or SIGTERM; the second SIGINT ends the process as usual."""

    def __enter__(self) -> "_Signals":
        self.number = 0
        self._old = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def run(
    job: Job, devices: Sequence[str], numbers: Sequence[int], calibrate: bool, report: Callable[[Report], None]
) -> dict[int, str]:
    """Run tasks on `devices`, reporting each. Returns the tasks that failed for good, with their last error.

    Raises UsageError when workers say the input is at fault, Interrupted on a signal, RunError when no worker lives.
    """
    context = multiprocessing.get_context("spawn")
    queue = deque([CALIBRATE] if calibrate else numbers)
    attempts: dict[int, int] = {}
    failed: dict[int, str] = {}
    workers: dict[Connection, tuple[BaseProcess, str, int | None]] = {}

    def start(device: str) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, job, device), daemon=True)
        # Ctrl-C reaches the whole group and the parent decides; a child inherits the block from its first instruction.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        workers[ours] = (process, device, None)

    def give_up(number: int | None, error: str) -> None:
        if number is None:
            raise RunError(f"a worker ended before its first task: {error}")
        attempts[number] = attempts.get(number, 0) + 1
        if attempts[number] < ATTEMPTS:
            queue.append(number)
        elif number == CALIBRATE:
            raise RunError(f"calibration failed {ATTEMPTS} times: {error}")
        else:
            failed[number] = error

    with _Signals() as signals:
        try:
            for device in devices[:1] if calibrate else devices[: max(1, len(numbers))]:
                start(device)
            while queue or any(number is not None for _, _, number in workers.values()):
                if signals.number:
                    raise Interrupted(signals.number)
                _feed(workers, queue)
                for connection in wait(list(workers), timeout=0.5):
                    assert isinstance(connection, Connection)
                    process, device, number = workers[connection]
                    try:
                        message: Report = connection.recv()
                    except (EOFError, ConnectionError):
                        process.join()
                        del workers[connection]
                        give_up(number, f"worker on {device} ended with code {process.exitcode}")
                        start(device)
                        continue
                    if message.usage:
                        raise UsageError(message.error)
                    workers[connection] = (process, device, None)
                    if message.error:
                        give_up(message.number, message.error)
                    else:
                        report(message)
                        if message.number == CALIBRATE:
                            queue.extend(numbers)
                            for other in devices[1 : max(1, len(numbers))]:
                                start(other)
        finally:
            _stop([(c, p) for c, (p, _, _) in workers.items()])
    return failed


def _feed(workers: dict[Connection, tuple[BaseProcess, str, int | None]], queue: deque[int]) -> None:
    for connection, (process, device, number) in workers.items():
        if number is None and queue:
            number = queue.popleft()
            try:
                connection.send(number)
            except (BrokenPipeError, ConnectionError):
                queue.appendleft(number)  # it just died; the next wait sees that
                continue
            workers[connection] = (process, device, number)


def _stop(workers: list[tuple[Connection, BaseProcess]]) -> None:
    """End our own children: by a closed pipe, then SIGTERM, then SIGKILL."""
    for connection, process in workers:
        connection.close()
        process.terminate()
    for _, process in workers:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(connection: Connection, job: Job, device: str) -> None:
    """A worker's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    import torch

    from dflash_offline.extract.target import open_target
    from dflash_offline.extract.task import calibrate, make_runner, run_task

    # One thread a worker: how a matmul is split over threads changes its low bits, and the bytes of a shard must not
    # depend on how many workers share the cores.
    torch.set_num_threads(1)
    runner = None
    while True:
        try:
            number: int = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if runner is None:
                target = open_target(job.config.target.path, job.config.target.revision)
                runner = make_runner(job.config, target, job.layers, torch.device(device))
            if number == CALIBRATE:
                calibrate(runner, job.cache, job.plan.tasks[0])
                report = Report(number=number, kernels=runner.kernels)
            else:
                done = run_task(runner, job.cache, number, job.plan.tasks[number])
                report = Report(number=number, done=done, kernels=runner.kernels)
        except UsageError as error:
            report = Report(number=number, error=str(error), usage=True)
        except OSError as error:
            report = Report(number=number, error=f"{error.filename or device}: {error.strerror or error}")
        except Exception as error:  # whatever it was, the parent must hear of it and may try again
            report = Report(number=number, error=f"{type(error).__name__}: {error}")
        try:
            connection.send(report)
        except (BrokenPipeError, ConnectionError):
            return  # the parent is gone


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
