"""Asking a run to end between two steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Which signal asked to stop; None while none has."""

    signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn SIGTERM and SIGINT into a flag: work done in a handler could break a save in two."""
    stop = Stop()

    def ask(number: int, _: FrameType | None) -> None:
        stop.signal = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
