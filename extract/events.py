"""CACHE/events.jsonl: what happened to a run, a line each, with time and process. Nothing depends on it.

Lines are appended unbuffered, so that another shell may follow; a line that a kill tore is passed over. Each of
several machines has a file of its own, `events-0-of-8.jsonl`: appending to one file is not safe on a network disk.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PATTERN = "events*.jsonl"


class Events:
    """An open event file; thread-safe."""

    def __init__(self, cache: Path, share: tuple[int, int] | None = None) -> None:
        name = f"events-{share[0]}-of-{share[1]}.jsonl" if share else "events.jsonl"
        self._file = (cache / name).open("ab+", buffering=0)
        self._lock = threading.Lock()
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # torn
                self._file.write(b"\n")

    def __call__(self, event: str, **values: Any) -> None:
        """Append `event`; `pid` is this process unless given."""
        line = {"time": round(time.time(), 3), "event": event, "pid": os.getpid(), **values}
        with self._lock, suppress(OSError):  # on a full disk the shard that failed says so
            self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(cache: Path) -> list[dict[str, Any]]:
    """Every whole event of a cache, by time."""
    return sorted((e for path in cache.glob(PATTERN) for e in lines(path)), key=lambda e: e["time"])


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole events of one file."""
    for line in path.read_bytes().splitlines():
        try:
            event = json.loads(line)
            if isinstance(event["time"], (int, float)) and isinstance(event["event"], str):
                yield event
        except (ValueError, KeyError, TypeError):
            continue
