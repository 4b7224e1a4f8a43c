"""What must be right before the first trial of a sweep starts: settings, space, cache, GPUs, Optuna, the folder."""

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from dflash_offline.shards.command import load_toml, unstructure
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, read_json, take_lock, write_json
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.folder import refuse_changes
from dflash_offline.train.job import prepare
from dflash_offline.train.sweep_config import FREE, Method, SweepConfig
from dflash_offline.train.sweep_space import SET_HERE, Dimension, combinations, flat, read_space

if TYPE_CHECKING:
    import optuna

LOCK, CONFIG, BASE, IDENTITY, STUDY = ".lock", "sweep.toml", "base.toml", "identity.json", "study.jsonl"
DEFAULTS: dict[str, dict[str, Any]] = {
    # Without it, trials that are asked for side by side would be much alike.
    "TPESampler": {"constant_liar": True},
    "MedianPruner": {"n_warmup_steps": 2},
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What trials are made from."""

    base: TrainConfig
    space: dict[str, Dimension]
    slots: list[str]
    """CUDA_VISIBLE_DEVICES of each trial at work, or cpu 0, cpu 1, ..."""
    study: "optuna.Study"
    settings: int | None
    """How many an exhaustive sampler has; None for others."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep the sweep folder for this process; the kernel drops the lock of a process that died."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file; expected a new, an empty or a sweep folder")
    ours = any((folder / name).is_file() for name in (LOCK, CONFIG))
    if folder.is_dir() and not ours and any(folder.iterdir()):
        raise UsageError(f"{folder}: holds other files and no {CONFIG}; expected a new, an empty or a sweep folder")
    try:
        (folder / "trials").mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error}; choose another --sweep-dir") from None
    with lock:
        take_lock(lock, folder)
        for leftover in (*folder.glob("*.tmp"), *(folder / "trials").glob("*.tmp")):
            leftover.unlink()
        yield


def prepare_sweep(config: SweepConfig) -> Setup:
    """Check everything that can be checked, then open the study in the held folder. Raises UsageError."""
    base = load_toml(TrainConfig, config.base) if config.base else TrainConfig()
    base = replace(base, cache=config.cache or base.cache, data=replace(base.data, fraction=config.fraction))
    space = read_space(config.space, base)
    slots = _slots(config, base)
    job = prepare(replace(base, validate=replace(base.validate, every=1)), config.ranks)
    optuna = _optuna()
    sampler = _method("sampler", config.sampler, optuna.samplers, optuna.samplers.BaseSampler)
    pruner = _method("pruner", config.pruner, optuna.pruners, optuna.pruners.BasePruner)
    count = combinations(space, config.sampler)
    _claim(config, base, job.cache.fingerprint)
    study = _study(config.sweep_dir / STUDY, sampler, pruner)
    return Setup(base=base, space=space, slots=slots, study=study, settings=count)


def _claim(config: SweepConfig, base: TrainConfig, cache: str) -> None:
    """Make the folder that of these settings, or check that it is."""
    folder = config.sweep_dir
    free = ("cache", "log_every", "trackers", *SET_HERE)
    fixed = {
        **{n: v for n, v in unstructure(config).items() if n not in FREE},
        **{f"base.{n}": v for n, v in flat(unstructure(base)) if n not in free},
        "cache_fingerprint": cache,
    }
    now = dict(flat(fixed))
    try:
        before = dict(flat(read_json(folder / IDENTITY)))
    except FileNotFoundError:
        before = now
    refuse_changes(folder, before, now, "--sweep-dir")
    for name, settings in ((BASE, base), (CONFIG, config)):
        with atomic_file(folder / name) as file:
            file.write(tomli_w.dumps(unstructure(settings)).encode())
    write_json(folder / IDENTITY, fixed)


def _study(
    journal: Path, sampler: "optuna.samplers.BaseSampler", pruner: "optuna.pruners.BasePruner"
) -> "optuna.Study":
    import optuna

    _cut_torn_line(journal)
    backend = optuna.storages.journal.JournalFileBackend(str(journal), lock_obj=_Held())
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        sampler=sampler,
        pruner=pruner,
        study_name="sweep",
        direction="maximize",
        load_if_exists=True,
    )
    if study.trials:
        study.sampler.reseed_rng()  # a seed that starts again would draw the same trials again
    return study


class _Held:
    """The journal's lock: nobody else writes it, the folder is ours. Optuna's own would outlive a kill by 30 s."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _cut_torn_line(journal: Path) -> None:
    """What a death in the middle of writing left; Optuna would append to it."""
    raw = journal.read_bytes() if journal.exists() else b""
    if not raw.endswith(b"\n") and raw:
        with journal.open("r+b") as file:
            file.truncate(raw.rfind(b"\n") + 1)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError(f"sweep needs optuna ({error}); pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def _method(what: str, method: Method, module: Any, kind: type) -> Any:
    kinds = {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, kind)}
    names = sorted(n for n, c in kinds.items() if not n.startswith("Base") and not inspect.isabstract(c))
    if method.name not in names:
        raise UsageError(f"{what}.name is {method.name}; expected one of Optuna's: {', '.join(names)}")
    made = getattr(module, method.name)
    try:
        return made(**{**DEFAULTS.get(method.name, {}), **method.arguments})
    except (TypeError, ValueError, ImportError) as error:
        known = ", ".join(n for n in inspect.signature(made).parameters)
        raise UsageError(f"{what}.arguments of {method.name}: {error}; it has: {known}") from None


def _slots(config: SweepConfig, base: TrainConfig) -> list[str]:
    count = 0 if base.device == "cpu" else torch.cuda.device_count()
    if not count:
        if base.device == "cuda":
            raise UsageError("base: device is cuda, but no GPU is visible; expected one, or device = cpu")
        return [f"cpu {i}" for i in range(config.slots or 1)]
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]
    most = count // config.ranks
    if not 1 <= (config.slots or most) <= most:
        raise UsageError(f"slots = {config.slots or 1} of ranks = {config.ranks} GPUs, but {count} are visible")
    return [",".join(gpus[i * config.ranks : (i + 1) * config.ranks]) for i in range(config.slots or most)]
