"""Settings of `dflash-train sweep`. Imports nothing heavy, so that `--help` answers at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

InFile = Annotated[dict[str, Any], tyro.conf.Suppress]
"""A table of the TOML file, without flags."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A class of Optuna."""

    name: str
    """Its name, as in Optuna."""
    arguments: InFile = field(default_factory=dict)
    """Its keyword arguments."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Search settings: trials side by side on one cache, chosen by Optuna."""

    space: InFile = field(default_factory=dict)
    """What to vary: a field of `dflash-train run` -> {low, high, log, step} or {choices}."""
    base: Path | None = None
    """Settings of every trial, a file for `dflash-train run --config`; None: its defaults."""
    cache: Path | None = None
    """Cache folder; None: that of base."""
    sweep_dir: Path = Path("sweep")
    """Folder of this sweep: its study, and a run folder a trial. Continued when it exists."""
    trials: int = 20
    """Trials in all, failed ones counted too. A sweep that is done goes on when this grows."""
    fraction: float = 0.25
    """data.fraction of a trial, unless the space has it: part of the training samples."""
    evaluations: int = 8
    """Held-out measurements of a trial, evenly spread, the last at its end. They are the steps of a pruner."""
    metric: Literal["tau", "tau_uniform"] = "tau"
    """What is made large: of the measured step with the highest tau, which is the one to be exported."""
    sampler: Method = field(default_factory=lambda: Method(name="TPESampler"))
    """Who chooses; TPESampler has constant_liar = true unless told otherwise, for trials side by side."""
    pruner: Method = field(default_factory=lambda: Method(name="MedianPruner"))
    """Who ends trials early; MedianPruner has n_warmup_steps = 2 unless told otherwise, NopPruner ends none."""
    slots: int | None = None
    """Trials at a time; None: as many as the GPUs allow, one without GPUs."""
    ranks: int = 1
    """GPUs of a trial, used by torchrun when more than one. CUDA_VISIBLE_DEVICES says which there are."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of every trial; otherwise only those of the best one so far."""

    def __post_init__(self) -> None:
        for name in ("trials", "evaluations", "slots", "ranks"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}, expected 0 < fraction <= 1")


FREE = ("base", "cache", "sweep_dir", "trials", "sampler", "pruner", "slots", "ranks", "keep_checkpoints")
"""These may change between two starts of a sweep. What base and cache hold is compared itself."""
