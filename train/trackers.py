"""TensorBoard, trackio and W&B: shown what metrics.jsonl records, which stays the record.

Imported when a run asks for them. One that fails is left out with one warning and never ends a run. RUN/trackers.json
holds the run's name there and the last step that they may have been told: it is never told again, so a run that was
killed has no step twice, at most one missing.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_offline.shards.command import unstructure
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.files import read_json, write_json
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.log import read_metrics, say

FILE = "trackers.json"
PROJECT = "dflash"


@dataclass(frozen=True, kw_only=True)
class Sink:
    """What a tracker does."""

    log: Callable[[int, dict[str, float]], Any]
    close: Callable[[], Any]


def _tensorboard(run: Path, name: str, settings: dict[str, Any]) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def log(step: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    return Sink(log=log, close=writer.close)


def _trackio(run: Path, name: str, settings: dict[str, Any]) -> Sink:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    tracked = trackio.init(
        project=project, name=name, config=settings, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
    )
    return Sink(log=lambda step, values: tracked.log(values, step=step), close=tracked.finish)


def _wandb(run: Path, name: str, settings: dict[str, Any]) -> Sink:
    import wandb

    # Offline unless told otherwise: an unattended run must not wait for a login. An agent gives the run its own id.
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    tracked = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=os.environ.get("WANDB_RUN_ID", name),
        name=os.environ.get("WANDB_NAME", name),
        dir=str(run),
        config=settings,
        resume="allow",
        mode=mode,
        settings=wandb.Settings(console="off", quiet=True),
    )
    return Sink(log=lambda step, values: tracked.log(values, step=step), close=tracked.finish)


_OPEN = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}


def check_trackers(config: TrainConfig) -> None:
    """Raise UsageError for a tracker that is not installed, before any work."""
    for name in config.trackers:
        if find_spec(name) is None:
            raise UsageError(f"trackers: {name} is not installed; pip install {name}, or leave it out of --trackers")


class Trackers:
    """The trackers of a run, on its first rank."""

    def __init__(self, config: TrainConfig) -> None:
        """Open them, before metrics.jsonl is cut back to the checkpoint: they were told what it holds."""
        self._every = config.log_every
        self._sinks: dict[str, Sink] = {}
        if not config.trackers:
            return
        path = config.run_dir / FILE
        about: dict[str, Any] = {}
        with suppress(FileNotFoundError, CorruptError):
            about = read_json(path)
        name = about.get("name") or f"{config.run_dir.resolve().name}-{secrets.token_hex(4)}"
        lines = read_metrics(config.run_dir)
        self._told = max(lines[-1]["step"] if lines else 0, about.get("told", 0))
        write_json(path, {"name": name, "told": self._told})
        for kind in config.trackers:
            self._try(kind, lambda kind=kind: self._open(kind, config, name))  # type: ignore[misc]

    def tell(self, values: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, every log_every steps and where it has held-out numbers."""
        step = values["step"]
        if not self._sinks or step <= self._told or (step % self._every and "validation" not in values):
            return
        numbers = dict(_numbers(values))
        for kind, sink in list(self._sinks.items()):
            self._try(kind, lambda sink=sink: sink.log(step, numbers))  # type: ignore[misc]

    def close(self) -> None:
        """Let them write what they still hold."""
        for kind, sink in list(self._sinks.items()):
            self._try(kind, sink.close)
        self._sinks.clear()

    def _open(self, kind: str, config: TrainConfig, name: str) -> None:
        self._sinks[kind] = _OPEN[kind](config.run_dir, name, unstructure(config))

    def _try(self, kind: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # whatever it was: a tracker is not worth a run
            self._sinks.pop(kind, None)
            words = " ".join(str(error).split()) or type(error).__name__
            say(f"tracker {kind} failed and is left out from here: {words}; metrics.jsonl goes on")


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers by name: validation/tau, slot_accuracy/1."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield from _numbers({str(i): v for i, v in enumerate(value, 1)}, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and prefix + name != "step":
            yield prefix + name, float(value)
