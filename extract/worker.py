"""A worker: one process, one device, one loaded target; tasks in, reports out, over a pipe."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from functools import partial
from typing import TYPE_CHECKING, Literal

from dflash_offline.extract.config import ExtractConfig
from dflash_offline.shards.errors import UsageError

# A parent that imports this waits for nothing heavy.
if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from dflash_offline.extract.runner import Runner
    from dflash_offline.extract.task import Done

CALIBRATE = -1
"""Task number of the codec calibration, which comes before all others."""
_SAY_EVERY = 0.5
"""Seconds between two signs of progress."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says: a task is done, or failed. In between it says None for rows done."""

    number: int
    done: "Done | None" = None
    error: str = ""
    fatal: Literal["", "usage", "run"] = ""
    """Every worker would fail alike, by the user's input or while running."""
    kernels: str = ""
    probe: dict[str, list[float]] = field(default_factory=dict)
    """What checks.probe found."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker is for."""

    config: ExtractConfig
    layers: tuple[int, ...]
    device: str
    ahead: bool
    """Be ready for rows before there is a task. Else only load: another compiles kernels and chooses tiles for all."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A worker begins something slow."""

    words: str
    time: float
    """Unix seconds; the parent may hear of it later."""


def serve(connection: "Connection") -> None:
    """A worker's whole life. Before all tasks it is told `Order`; until then it imports what any order needs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    import torch

    from dflash_offline.extract import kernels
    from dflash_offline.extract.runner import Loading, Runner, begin_loading, start_runner
    from dflash_offline.extract.task import calibrate, run_task

    if not connection.poll():  # an order that is there may need none of it
        kernels.import_ahead()
    try:
        order: Order = connection.recv()
    except (EOFError, ConnectionError):
        return
    config, layers, device = order.config, order.layers, order.device
    # One thread a worker: how a matmul is split over threads changes its low bits, and the bytes of a shard must not
    # depend on how many workers share the cores.
    torch.set_num_threads(1)
    where = torch.device(device)
    sending = threading.Lock()
    said = -_SAY_EVERY

    def send(report: Report | Stage | None) -> None:
        with sending, suppress(BrokenPipeError, ConnectionError):  # the parent may be gone
            connection.send(report)

    def beat(begun: str = "") -> None:
        nonlocal said
        if begun:
            send(Stage(words=begun, time=time.time()))
        elif (now := time.monotonic()) - said > _SAY_EVERY:
            said = now
            send(None)

    runner: Runner | None = None
    loading: list[Loading] = []  # at most one, to be taken out by whoever uses it
    failed: Report | None = None
    broken = threading.Event()
    """After an error of its own a device may fail at everything until a new process opens it."""
    try:
        loading.append(begin_loading(config, layers, where))
        if order.ahead:
            runner = start_runner(config, layers, where, beat, loading.pop())
    except Exception as error:  # told as that of the first task
        failed = failure(CALIBRATE, error, device)
        if _of_device(error, device):
            broken.set()
    while failed or not broken.is_set():
        try:
            if not connection.poll(0.5):
                continue
            number, task = connection.recv()
        except (EOFError, ConnectionError):
            return
        if failed:
            send(replace(failed, number=number))
            failed = None
            continue
        try:
            if runner is None:
                gc.collect()  # an error of an earlier start holds itself, and so the weights it had loaded
                runner = start_runner(config, layers, where, beat, loading.pop() if loading else None)
            if number == CALIBRATE:
                calibrate(runner, config.cache, task)
                send(Report(number=number, kernels=runner.kernels, probe=runner.probe))
            else:
                done = run_task(runner, config.cache, number, task)
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
    done: "Future[Done]",
) -> None:
    if error := done.exception():
        if _of_device(error, device):
            broken.set()
        send(failure(number, error, device))
    else:
        send(Report(number=number, done=done.result(), kernels=runner.kernels, probe=runner.probe))


def failure(number: int, error: BaseException, device: str) -> Report:
    """What the parent is told of an error."""
    from dflash_offline.extract.checks import StatesError

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


def end_with_parent() -> None:
    """Wait for the parent's end, however early it came, and leave with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
