"""The folder of a run: its settings first, then metrics, checkpoints and evaluations.

RUN/.lock            held by the process that trains
RUN/config.toml      the resolved settings; `--config RUN/config.toml` repeats the run
RUN/identity.json    fingerprint of the cache, and the drafter as a config.json
RUN/metrics.jsonl    one object a step
RUN/status.json      running, finished, stopped or failed; torchrun hides the exit code
RUN/checkpoints/     step-00000012, ...
RUN/eval/            step-00000012.json, ...
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from dflash_offline.shards.command import load_toml, unstructure
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.files import atomic_file, read_json, take_lock, write_json
from dflash_offline.train import checkpoint
from dflash_offline.train.config import TrainConfig

LOCK, CONFIG, IDENTITY, STATUS, CHECKPOINTS = ".lock", "config.toml", "identity.json", "status.json", "checkpoints"
# These change where and how fast a run goes, not what comes out. Caches and `model.init` may have moved: their contents
# are compared.
FREE = (
    "cache", "data.caches", "model.init", "run_dir", "recompute", "log_every", "trackers", "save", "validate",
    "data.threads", "data.rows_ahead",
)  # fmt: skip


def read_config(run: Path) -> TrainConfig:
    """Settings of an existing run."""
    if not (run / CONFIG).is_file():
        raise UsageError(f"{run}: not a run folder (no config.toml); expected a folder made by `dflash-train run`")
    return load_toml(TrainConfig, run / CONFIG)


def read_identity(run: Path) -> dict[str, Any]:
    """What the checkpoints of an existing run belong to."""
    path = run / IDENTITY
    try:
        identity = read_json(path)
    except FileNotFoundError:
        raise UsageError(f"{run}: no identity.json; expected a folder made by `dflash-train run`") from None
    if not isinstance(identity.get("drafter"), dict) or "cache_fingerprint" not in identity:
        raise CorruptError(f"{path}: has no drafter or cache_fingerprint; expected what `dflash-train run` wrote")
    return identity


def facts(config: TrainConfig, identity: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says it belongs to: every setting that decides what comes out, the cache and the drafter."""
    return {**identity, "settings": settings(config)}


def settings(config: TrainConfig, without: Sequence[str] = FREE) -> dict[str, Any]:
    """Settings by dotted name, but for those of `without`."""
    return _others(unstructure(config), without)


def check_checkpoints(run: Path, config: TrainConfig, identity: dict[str, Any]) -> None:
    """Raise UsageError where a checkpoint in `run` was made with other settings, another cache or drafter.

    config.toml cannot tell: it may have been edited, and checkpoints may have been copied from elsewhere.
    """

    def compared(values: dict[str, Any]) -> dict[str, Any]:
        names = ("cache_fingerprint", "drafter", "init")
        found = {**values.get("settings", {}), **{name: values.get(name) for name in names}}
        return _others(found, FREE)

    now = compared(facts(config, identity))
    for folder, state in checkpoint.states(run / CHECKPOINTS):
        refuse_changes(folder, compared(state), now, "--run-dir")


@contextmanager
def hold(run: Path) -> Iterator[None]:
    """Keep the run folder for this process; the kernel drops the lock of a process that died."""
    if run.exists() and not run.is_dir():
        raise UsageError(f"{run}: is a file; expected a new, an empty or a run folder")
    if (run / "manifest.json").is_file():
        raise UsageError(f"{run}: is a cache; expected a new, an empty or a run folder")
    ours = (run / LOCK).is_file() or (run / CONFIG).is_file()
    if run.is_dir() and not ours and any(not p.match(f"{CONFIG}.*.tmp") for p in run.iterdir()):
        raise UsageError(f"{run}: holds other files and no config.toml; expected a new, an empty or a run folder")
    try:
        (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        lock = (run / LOCK).open("a+")
    except OSError as error:
        raise UsageError(f"{run}: cannot be written: {error}; choose another --run-dir") from None
    with lock:
        take_lock(lock, run)
        for name in (CONFIG, IDENTITY, STATUS):
            for leftover in run.glob(f"{name}.*.tmp"):
                leftover.unlink()
        yield


def claim(run: Path, config: TrainConfig, identity: dict[str, Any]) -> None:
    """Make the held `run` that of these settings, cache and drafter, or check that it is. Writes the settings."""
    for name in (CONFIG, IDENTITY):
        if not (run / name).is_file() and any((run / CHECKPOINTS).glob("step-*")):
            raise UsageError(f"{run}: has checkpoints and no {name}; restore it, or choose another --run-dir")
    if (run / CONFIG).is_file():
        refuse_changes(run, settings(read_config(run)), settings(config), "--run-dir")
    if (run / IDENTITY).is_file():
        refuse_changes(run, _others(read_identity(run), FREE), _others(identity, FREE), "--run-dir")
    check_checkpoints(run, config, identity)
    with atomic_file(run / CONFIG) as file:
        file.write(tomli_w.dumps(unstructure(config)).encode())
    write_json(run / IDENTITY, identity)


def refuse_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], flag: str) -> None:
    """Raise UsageError for the first value that differs. `flag`: what names another folder."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{folder}: was made with {name} = {before.get(name)}, now {now.get(name)}; "
                f"set it back, or choose another {flag}"
            )


def _others(values: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    def named(name: str) -> bool:
        return any(name == other or name.startswith(f"{other}.") for other in without)

    return {name: value for name, value in _flat(values) if not named(name)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
