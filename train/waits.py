"""Whether steps wait for their data, and what to do about it."""

from collections import Counter
from typing import Any

import numpy as np

from dflash_offline.train.config import DataConfig
from dflash_offline.train.parallel import Ranks

MOST = 0.02
"""Part of the time."""
ADVICE = {
    "disk": "reading: put the cache on a faster disk, or where it fits into the page cache; if it is there already, "
    "threads wait for each other: lower data.threads",
    "cores": "waiting for a core: give the run more of them, or end what else uses them; more threads do not help",
    "decode": "decoding: raise data.threads, and data.rows_ahead to no less, as far as there are cores",
    "copy": "copying to the GPU and de-quantising: check that nothing else uses the GPU or its link",
}


class Waits:
    """Of the steps since the last report, on one of the ranks."""

    last = 0.0
    """Seconds that the last step waited here, which the ranks tell each other in the sums of the next one."""

    def __init__(self, ranks: Ranks, data: DataConfig) -> None:
        self._ranks, self._readers = ranks, min(data.threads, data.rows_ahead)
        self._clear()

    def _clear(self) -> None:
        self._steps, self._seconds, self._loader = 0, Counter[str](), Counter[str]()
        self._waited = np.zeros(self._ranks.world)

    def add(self, entry: dict[str, Any], waited: list[float], warm: bool) -> None:
        """Count a step's metrics and what every rank said of the step before; not of the first step of a process.

        Nothing could be read ahead for that one.
        """
        self.last = entry["seconds"]["data"] if warm else 0.0
        if warm:
            self._steps += 1
            self._seconds.update(entry["seconds"])
            self._loader.update(entry["loader_seconds"])
            self._waited += waited

    def report(self) -> str | None:
        """A line on the rank that waited longest, if more than MOST, naming what held the rows up."""
        steps, waited, total = self._steps, self._seconds["data"], self._seconds.total()
        # One thread copies what several read: seconds of the wall, while all of them are busy.
        each = {name: spent / (1 if name == "copy" else self._readers) for name, spent in self._loader.items()}
        longest = int(self._waited.argmax())  # the others' waits for it look like a slow sum
        self._clear()
        if not total or waited <= MOST * total or not each or longest != self._ranks.rank:
            return None
        reading = {name: spent for name, spent in each.items() if name != "copy"}
        copying = each.get("copy", 0.0)
        slower = reading if sum(reading.values()) >= copying else {"copy": copying}
        name, most = max(slower.items(), key=lambda item: item[1])
        return (
            (f"rank {longest}: " if self._ranks.world > 1 else "")
            + f"waited for data {waited / total:.0%} of the last {steps} steps; "
            f"{most / max(sum(each.values()), 1e-9):.0%} of the loader's time went to {ADVICE[name]}"
        )
