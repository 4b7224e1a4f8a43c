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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple

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


class _Worker(NamedTuple):
    process: BaseProcess
    device: str
    tasks: list[int]
    """Given and not yet reported."""


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
    workers: dict[Connection, _Worker] = {}

    def start(device: str) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, job, device), daemon=True)
        # Ctrl-C reaches the whole group and the parent decides; a child inherits the block from its first instruction.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        workers[ours] = _Worker(process, device, [])

    def give_up(number: int, error: str) -> None:
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
            while queue or any(worker.tasks for worker in workers.values()):
                if signals.number:
                    raise Interrupted(signals.number)
                _feed(workers, queue)
                for connection in wait(list(workers), timeout=0.5):
                    assert isinstance(connection, Connection)
                    worker = workers[connection]
                    try:
                        message: Report = connection.recv()
                    except (EOFError, ConnectionError):
                        worker.process.join()
                        del workers[connection]
                        error = f"worker on {worker.device} ended with code {worker.process.exitcode}"
                        if not worker.tasks:
                            raise RunError(f"a worker ended before its first task: {error}") from None
                        for number in worker.tasks:
                            give_up(number, error)
                        start(worker.device)
                        continue
                    if message.usage:
                        raise UsageError(message.error)
                    worker.tasks.remove(message.number)
                    if message.error:
                        give_up(message.number, message.error)
                    else:
                        report(message)
                        if message.number == CALIBRATE:
                            queue.extend(numbers)
                            for other in devices[1 : max(1, len(numbers))]:
                                start(other)
        finally:
            _stop([(connection, worker.process) for connection, worker in workers.items()])
    return failed


def _feed(workers: dict[Connection, _Worker], queue: deque[int]) -> None:
    for connection, worker in workers.items():
        # A GPU begins a task while the shard before it is written; on the CPU both need the same cores.
        while queue and len(worker.tasks) < (2 if worker.device.startswith("cuda") and queue[0] != CALIBRATE else 1):
            number = queue.popleft()
            try:
                connection.send(number)
            except (BrokenPipeError, ConnectionError):
                queue.appendleft(number)  # it just died; the next wait sees that
                break
            worker.tasks.append(number)


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

    from dflash_offline.extract.runner import make_runner
    from dflash_offline.extract.target import open_target
    from dflash_offline.extract.task import calibrate, run_task

    # One thread a worker: how a matmul is split over threads changes its low bits, and the bytes of a shard must not
    # depend on how many workers share the cores.
    torch.set_num_threads(1)
    runner = None
    sending = threading.Lock()

    def send(report: Report) -> None:
        with sending, suppress(BrokenPipeError, ConnectionError):  # the parent may be gone
            connection.send(report)

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
                send(Report(number=number, kernels=runner.kernels))
            else:
                done = run_task(runner, job.cache, number, job.plan.tasks[number])
                done.add_done_callback(partial(_tell, send, number, runner.kernels, device))
        except Exception as error:  # whatever it was, the parent must hear of it and may try again
            send(_failure(number, error, device))


def _tell(send: Callable[[Report], None], number: int, kernels: str, device: str, done: Future[Done]) -> None:
    error = done.exception()
    send(_failure(number, error, device) if error else Report(number=number, done=done.result(), kernels=kernels))


def _failure(number: int, error: BaseException, device: str) -> Report:
    if isinstance(error, UsageError):
        return Report(number=number, error=str(error), usage=True)
    if isinstance(error, OSError):
        return Report(number=number, error=f"{error.filename or device}: {error.strerror or error}")
    return Report(number=number, error=f"{type(error).__name__}: {error}")


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
