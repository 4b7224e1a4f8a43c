"""A process a GPU, and what each of them tells as it goes."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class Ended:
    """The last that is heard of a process."""

    code: int


def heard(
    target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], deadline: float = float("inf")
) -> Iterator[tuple[int, Any]]:
    """Run `target(*given, told)` in a process for each of `arguments`; yields its place and what it sends by `told`.

    When one fails, the others are ended, which may wait for it; what they had sent is still yielded. Raises
    TimeoutError at `deadline`, of time.monotonic. However this is left, no process stays.

    A pipe for each process, not a queue for all: what was sent is there even if the sender is killed next, and no lock
    dies with it.
    """
    context = multiprocessing.get_context("spawn")
    places, processes = dict[Connection, int](), []
    try:
        for place, given in enumerate(arguments):
            receiver, sender = context.Pipe(duplex=False)
            processes.append(context.Process(target=target, args=(*given, sender), daemon=True))
            processes[-1].start()
            sender.close()  # the process has its own: the pipe ends with it
            places[receiver] = place
        while places:
            left = None if deadline == float("inf") else max(deadline - time.monotonic(), 0)
            if not (ready := wait(list(places), left)):
                raise TimeoutError("not done in its time")
            for receiver in ready:
                place = places[receiver]
                told: Any
                try:
                    told = receiver.recv()
                except EOFError:
                    del places[receiver]
                    processes[place].join()
                    told = Ended(processes[place].exitcode or 0)
                    for process in processes if told.code else ():
                        process.terminate()
                yield place, told
    finally:
        for process in processes:
            process.terminate()
            process.join()
