"""The folder of a run: its settings first, then metrics, checkpoints and evaluations.

RUN/config.toml      the resolved settings; `--config RUN/config.toml` repeats the run
RUN/identity.json    fingerprint of the cache, and the drafter as a config.json
RUN/metrics.jsonl    one object a step
RUN/status.json      running, finished, stopped or failed; torchrun hides the exit code
RUN/checkpoints/     step-00000012, ...
RUN/eval/            step-00000012.json, ...
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from dflash_offline.shards.command import load_toml, unstructure
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, read_json, write_json
from dflash_offline.train.config import TrainConfig

# These change where and how fast a run goes, not what comes out. `cache` may have moved: its fingerprint is compared.
FREE = ("cache", "run_dir", "log_every", "save", "validate", "data.threads", "data.rows_ahead")


def read_config(run: Path) -> TrainConfig:
    """Settings of an existing run."""
    if not (run / "config.toml").is_file():
        raise UsageError(f"{run}: not a run folder (no config.toml); expected a folder made by `dflash-train run`")
    return load_toml(TrainConfig, run / "config.toml")


def read_identity(run: Path) -> dict[str, Any]:
    """What the checkpoints of an existing run belong to."""
    try:
        return read_json(run / "identity.json")
    except FileNotFoundError:
        raise UsageError(f"{run}: no identity.json; expected a folder made by `dflash-train run`") from None


def claim(run: Path, config: TrainConfig, identity: dict[str, Any]) -> None:
    """Make `run` the folder of these settings and this cache and drafter, or check that it is. Writes the settings."""
    if (run / "config.toml").is_file():
        _refuse_changes(run, unstructure(read_config(run)), unstructure(config))
        if (run / "identity.json").is_file():
            _refuse_changes(run, read_json(run / "identity.json"), identity)
    elif run.exists() and any(run.iterdir()):
        raise UsageError(f"{run}: holds other files and no config.toml; expected a new, an empty or a run folder")
    run.mkdir(parents=True, exist_ok=True)
    with atomic_file(run / "config.toml") as file:
        file.write(tomli_w.dumps(unstructure(config)).encode())
    write_json(run / "identity.json", identity)


def _refuse_changes(run: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    before, after = dict(_flat(old)), dict(_flat(new))
    for name in sorted({*before, *after}):
        free = any(name == f or name.startswith(f"{f}.") for f in FREE)
        if not free and before.get(name) != after.get(name):
            raise UsageError(
                f"{run}: was made with {name} = {before.get(name)}, now {after.get(name)}; "
                "set it back, or choose another --run-dir"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
