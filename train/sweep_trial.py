"""A trial of a sweep: `dflash-train run` as a process of its own, and what it left.

SWEEP/trials/007.toml   its settings
SWEEP/trials/007.log    what it said
SWEEP/trials/007/       its run folder
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import is_locked, read_json
from dflash_offline.train.folder import LOCK, STATUS
from dflash_offline.train.log import METRICS, read_metrics

TRAIN = ["-m", "dflash_offline.train"]
_LAST_LINES, _LAST_BYTES = 5, 4000
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a trial of a sweep lies."""

    trials: Path
    number: int

    @property
    def run(self) -> Path:
        """Its run folder."""
        return self.trials / f"{self.number:03d}"

    @property
    def config(self) -> Path:
        """Its settings."""
        return self.trials / f"{self.number:03d}.toml"

    @property
    def log(self) -> Path:
        """What it said."""
        return self.trials / f"{self.number:03d}.log"

    def busy(self) -> bool:
        """A process of a sweep that was killed may still be saving."""
        return is_locked(self.run / LOCK)


def start(place: Place, cache: Path | None, ranks: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Begin or continue the trial. The process is told to stop when this one dies."""
    (place.run / STATUS).unlink(missing_ok=True)  # so that it tells of this process
    # All on this host, whose own name need not be one that it can look up.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), *TRAIN, "run", "--config", str(place.config)]
    # The folders may have moved since the file was written.
    command += ["--run-dir", str(place.run), *(["--cache", str(cache)] if cache else [])]
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def stop_with_parent() -> None:
        if sys.platform == "linux":
            libc.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    with place.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"} | environment,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its trials to save
            preexec_fn=stop_with_parent,
        )


def status(place: Place) -> str:
    """How the trial's process left: finished, failed or stopped; running if it died without a word."""
    try:
        return str(read_json(place.run / STATUS)["state"])
    except (FileNotFoundError, CorruptError, KeyError):
        return ""


def last_words(log: Path) -> list[str]:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if line.strip()][-_LAST_LINES:]


def measured(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl with held-out numbers, in order. The others are not parsed: this is asked all the time."""
    path = run / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n") and b'"validation": {' in line]


def best(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first line with the highest held-out tau: of the step that `--best` exports."""
    return max(lines, key=lambda line: line["validation"]["tau"], default=None)


def row(place: Place, metric: str) -> dict[str, Any]:
    """What the trial's metrics say, for the table."""
    lines = read_metrics(place.run)
    found = best([line for line in lines if "validation" in line])
    out: dict[str, Any] = {
        "steps": lines[-1]["step"] if lines else 0,
        "tokens": sum(line["tokens"] for line in lines),
        "seconds": round(sum(sum(line["seconds"].values()) for line in lines), 1),
    }
    if found:
        numbers = found["validation"]
        out |= {"value": numbers[metric], "step": found["step"], "tau": numbers["tau"],
                "tau_interval": numbers["tau_interval"]}  # fmt: skip
    return out
