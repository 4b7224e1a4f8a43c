"""Whether steps wait for their data, and what to do about it."""

from collections import Counter
from typing import Any

MOST = 0.02
"""Part of the time."""
ADVICE = {
    "disk": "reading: put the cache on a faster disk, or where it fits into the page cache",
    "decode": "decoding: raise data.threads, as far as there are cores",
    "copy": "copying to the GPU and de-quantising: check that nothing else uses the GPU or its link",
}


class Waits:
    """Of the steps since the last report."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._steps, self._seconds, self._loader = 0, Counter[str](), Counter[str]()

    def add(self, entry: dict[str, Any], warm: bool) -> None:
        """Count a step's metrics; not of the first step of a process, for which nothing could be read ahead."""
        if warm:
            self._steps += 1
            self._seconds.update(entry["seconds"])
            self._loader.update(entry["loader_seconds"])

    def report(self) -> str | None:
        """A line where the wait was more than MOST, naming what the loader's threads spent most of their time on."""
        steps, waited, total, loader = self._steps, self._seconds["data"], self._seconds.total(), self._loader
        self._clear()
        if not total or waited <= MOST * total or not loader:
            return None
        name, most = max(loader.items(), key=lambda item: item[1])
        return (
            f"waited for data {waited / total:.0%} of the last {steps} steps; {most / max(loader.total(), 1e-9):.0%} "
            f"of the loader's time went to {ADVICE[name]}"
        )
