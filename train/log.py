"""What a run tells: where the time of a step went, metrics.jsonl, and a line now and then.

Times on a GPU are taken by events on its own stream, so that asking for them does not stall it.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_offline.shards.errors import CorruptError, RunError
from dflash_offline.shards.files import atomic_file

if TYPE_CHECKING:
    from dflash_offline.train.trackers import Trackers

METRICS = "metrics.jsonl"


class Clock:
    """Seconds of each phase of a step: `lap(name)` ends the phase that began at the last lap."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[str, Any]] = []
        self.read()

    def lap(self, name: str) -> None:
        """The time since the last lap went to `name`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._laps.append((name, event))
        else:
            self._laps.append((name, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last reading, which the next phase starts from."""
        if self._cuda and self._laps:
            self._laps[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (_, begin), (name, end) in zip(self._laps, self._laps[1:], strict=False):
            seconds[name] = seconds.get(name, 0.0) + (begin.elapsed_time(end) / 1e3 if self._cuda else end - begin)
        self._laps.clear()
        self.lap("")
        return seconds


class Metrics:
    """metrics.jsonl of a run: one object a step, in order, each step once."""

    def __init__(self, run: Path, step: int, trackers: "Trackers | None" = None) -> None:
        """Append after `step`; what a killed run wrote after its last checkpoint is dropped, as it happens again."""
        path = run / METRICS
        kept = b"".join(line for line, values in _whole(path) if values["step"] <= step)
        if path.exists() and path.stat().st_size != len(kept):
            with atomic_file(path) as file:
                file.write(kept)
        self._path, self._file, self._trackers = path, path.open("a"), trackers

    def write(self, values: Mapping[str, Any]) -> None:
        """One line, and the trackers after it."""
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self._path}: not written: {error}; rerun to go on from the last checkpoint") from None
        if self._trackers:
            self._trackers.tell(values)

    def close(self) -> None:
        """Let the trackers end."""
        self._file.close()
        if self._trackers:
            self._trackers.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl; none where there is no file. A last line that was torn is left out."""
    return [values for _, values in _whole(run / METRICS)]


def _whole(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines and what they say. One without its end was torn."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for n, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            yield line, _parsed(line, f"{path}:{n}")


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(line)
        step = values["step"]
    except (ValueError, KeyError, TypeError):
        step = None
    if not isinstance(step, int):
        raise CorruptError(f"{where}: found {line[:40]!r}, expected an object with a step; remove the line and rerun")
    return values


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def line(entry: dict[str, Any], steps: int) -> str:
    """A step for people."""
    loss = "none" if entry["loss"] is None else f"{entry['loss']:.4f}"
    wait = entry["seconds"].get("data", 0.0) / max(sum(entry["seconds"].values()), 1e-9)
    text = (
        f"step {entry['step']}/{steps}  loss {loss}  accuracy {entry['accuracy']:.3f}  "
        f"tau(uniform) {entry['tau_uniform']:.2f}  lr {entry['lr']:.2e}  norm {entry['grad_norm']:.2f}  "
        f"tok/s {entry['tokens_per_s']:.0f}  block tok/s {entry['block_tokens_per_s']:.0f}  data wait {wait:.0%}"
    )
    if entry["mask_token_samples"]:
        text += f"  ({entry['mask_token_samples']} samples contain the mask token)"
    if "validation" in entry:
        text += f"  held-out tau {entry['validation']['tau']:.3f}"
    return text
