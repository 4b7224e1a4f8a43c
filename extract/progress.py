"""What a run says while it runs: a line and an event per finished shard; and the manifest of a cache being written."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from dflash_offline.extract import plan as plans
from dflash_offline.extract.events import Events
from dflash_offline.extract.worker import Report
from dflash_offline.shards import calibration, manifest
from dflash_offline.shards.command import say
from dflash_offline.shards.errors import RunError

_MOST_LOST = 20
"""Losing so many samples, and more than are written, is no accident."""


class Progress:
    """Counts reports. `draft` is the manifest as far as it is known."""

    def __init__(
        self, cache: Path, plan: plans.Plan, todo: list[int], draft: manifest.Manifest, events: Events, alone: bool
    ) -> None:
        """`alone`: nobody else writes into this cache, so the manifest may be written."""
        self._cache, self._plan, self._events, self._alone, self.draft = cache, plan, events, alone, draft
        self._left = sum(plan.tasks[n].tokens for n in todo)
        self._start = time.monotonic()
        self._first = True
        self._samples = self._tokens = self._bytes = self._skipped = 0
        if (done := len(plan.tasks) - len(todo)) and todo and alone:
            say(f"resuming: {done} of {len(plan.tasks)} shards are done")

    def note(self, report: Report) -> None:
        """Count a finished task and say so. Raises RunError when most samples are lost."""
        if self._first:
            say(f"kernels: {report.kernels}")
            self._events("kernels", kernels=report.kernels, probe=report.probe)
            before = [name for name in self.draft.kernels.split("; ") if name]
            if before and report.kernels not in before:
                say(f"note: this cache was begun with other kernels: {self.draft.kernels}")
            if self._alone:
                codec = calibration.info(self._cache, self.draft.codec.name, self.draft.codec.parameters)
                names = dict.fromkeys([*before, report.kernels])
                self.draft = replace(self.draft, kernels="; ".join(names), codec=codec)
                manifest.write(self._cache, self.draft)
        self._first = False
        if report.done is None:
            self._events("calibrated", calibration=self.draft.codec.calibration)
            self._start = time.monotonic()  # loading and calibration are no part of the rate
            return
        done = report.done
        self._events("done", task=report.number, **asdict(done))
        self._samples += done.samples
        self._tokens += done.tokens
        self._bytes += done.bytes
        self._skipped += done.skipped
        self._left -= self._plan.tasks[report.number].tokens
        rate = self._tokens / max(1e-3, self._seconds())
        weak = f"; {done.weak} of {done.audited} audited samples are stored worse than promised" if done.weak else ""
        say(f"shard {report.number}: {rate:,.0f} tok/s, {self._left / max(rate, 1e-3):,.0f} s left{weak}")
        if self._skipped >= _MOST_LOST and self._skipped > self._samples:
            raise RunError(
                f"{self._skipped} samples were lost and {self._samples} written; the last of shard {report.number} are "
                f"in {self._cache / 'shards'}/*.skipped.jsonl; check the target, or make more memory free"
            )

    @property
    def lost(self) -> int:
        """Samples that could not be written."""
        return self._skipped

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def summary(self) -> str:
        """What this run did."""
        lost = f", {self._skipped} samples lost (skipped.jsonl)" if self._skipped else ""
        return f"{self._samples} samples, {self._tokens} tokens, {self._bytes} bytes in {self._seconds():.1f} s{lost}"
