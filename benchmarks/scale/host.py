"""What the host does while GPUs work: cores, disks, memory, read from /proc about once a second."""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
WHOLE = re.compile(r"(?:nvme\d+n\d+|[svh]d[a-z]+|xvd[a-z]+)$")
"""Disks that are no partitions and not made of others, as in /proc/diskstats."""


def counters() -> dict[str, float]:
    """Seconds and bytes since boot, bytes now. A disk that is not a block device of this host counts nothing."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    stats = Path("/proc/diskstats")  # some sandboxes have none
    disks = [line.split() for line in stats.read_text().splitlines()] if stats.exists() else []
    mine = [words for words in disks if WHOLE.match(words[2])]
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    cpu, resident = family(os.getpid())
    return {
        "time": time.monotonic(),
        "busy": (user + nice + system + irq + soft) / TICK,
        "ours": cpu,
        "resident": resident,
        "read": sum(512 * int(words[5]) for words in mine),
        "written": sum(512 * int(words[9]) for words in mine),
        "available": 1024 * int(memory["MemAvailable"]),
    }


def family(root: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process and all that it started and that still run."""
    found: dict[int, tuple[int, float, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one that has ended meanwhile
            words = path.read_text().rpartition(") ")[2].split()
            used = (int(words[11]) + int(words[12])) / TICK
            found[int(path.parent.name)] = int(words[1]), used, int(words[21]) * os.sysconf("SC_PAGE_SIZE")

    def ours(pid: int) -> bool:
        while pid in found and pid != root:
            pid = found[pid][0]
        return pid == root

    kept = [facts for pid, facts in found.items() if ours(pid)]
    return sum(used for _, used, _ in kept), sum(size for _, _, size in kept)


def between(samples: list[dict[str, float]], begin: float, end: float) -> dict[str, float] | None:
    """Rates over the samples of [begin, end] by time.monotonic; None: fewer than two."""
    seen = [s for s in samples if begin <= s["time"] <= end]
    if len(seen) < 2:
        return None
    first, last = seen[0], seen[-1]
    seconds = last["time"] - first["time"]
    rates = {name: (last[name] - first[name]) / seconds for name in ("busy", "ours", "read", "written")}
    return {
        "seconds": round(seconds, 1),
        "busy cores of the host": round(rates["busy"], 1),
        "cores of ours": round(rates["ours"], 1),
        "disk read MB/s": round(rates["read"] / 1e6),
        "disk written MB/s": round(rates["written"] / 1e6),
        "least available GB": round(min(s["available"] for s in seen) / 1e9, 1),
        "resident GB": round(max(s["resident"] for s in seen) / 1e9, 1),
    }


class Watch:
    """Samples of a thread, while the `with` block runs; `more()` is added to each."""

    def __init__(self, more: Callable[[], dict[str, float]] = dict, every: float = 0.5) -> None:
        self.samples: list[dict[str, float]] = []
        self._more, self._every, self._end = more, every, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(self._every):
            self.samples.append(counters() | self._more())

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()


def facts(work: Path) -> dict[str, Any]:
    """The host, so that numbers of two can be told apart."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory GB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "free GB of the disk": round(shutil.disk_usage(work).free / 1e9),
    }
