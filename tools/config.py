"""Settings of the `dflash-shards` commands. Imports nothing heavy, so that `--help` answers at once."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dflash_offline.extract.config import EcsqConfig

Place = Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class OneCache:
    """A cache folder."""

    cache: Place
    """The cache folder."""


@dataclass(frozen=True, kw_only=True)
class Ls:
    """Which samples to list."""

    cache: Place
    """The cache folder."""
    limit: int = 20
    """Lines to print; 0 prints all."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Show:
    """Which sample to show."""

    cache: Place
    """The cache folder."""
    key: Annotated[str, tyro.conf.Positional]
    """The sample's key, or the beginning of it."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Which caches to compare."""

    first: Place
    """A cache folder."""
    second: Place
    """Another one."""
    limit: int = 10
    """Samples to name of each kind."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """What to import, and how to store it."""

    source: Place
    """The other project's cache; only read."""
    out: Path
    """Folder of the new cache. The same command finishes what was interrupted."""
    format: Literal["specforge", "speculators", "modelopt-hf", "modelopt-vllm", "deepspec"]
    """Whose it is; Model-Optimizer's two dump scripts count layers differently."""
    target: str
    """The target's checkpoint folder or hub id: the cache gets its embedding, head and tokenizer."""
    layers: tuple[int, ...] = ()
    """The layer ids as they were given to that project; DeepSpec's are in its manifest."""
    codec: Literal["lossless", "bf16", "ecsq", "fp8"] = "lossless"
    """How the new cache stores states."""
    delta: float | None = None
    """The step of ecsq; unset: that of `dflash-extract run`."""
    last_hidden: bool = False
    """Store the last hidden state too; speculators and modelopt-vllm hold it before the final norm, as it must be."""
    generation: Literal["greedy", "sampled", "unknown"] = "unknown"
    """How the responses were made by this target."""
    trim: bool = False
    """Leave out what follows a sample's last supervised token, such as the padding that SpecForge stores."""
    shard_mib: int = 2048
    """Approximate size of a shard."""
    threads: int = 0
    """Shards written at a time; 0: one a core."""

    def __post_init__(self) -> None:
        if self.shard_mib < 1 or self.threads < 0:
            raise ValueError(f"shard_mib is {self.shard_mib}, threads {self.threads}; expected at least 1 and 0")
        codec_parameters(self.codec, self.delta)


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to export."""

    cache: Place
    """The cache folder."""
    out: Path
    """Folder of the files. The same command finishes what was interrupted."""
    limit: int = 0
    """The first so many samples; 0: all."""
    threads: int = 0
    """Samples written at a time; 0: one a core."""

    def __post_init__(self) -> None:
        if self.limit < 0 or self.threads < 0:
            raise ValueError(f"limit is {self.limit}, threads {self.threads}; expected 0 or more")


def codec_parameters(codec: str, delta: float | None) -> dict[str, float]:
    """The settings of a codec. Raises ValueError for a step that it does not have."""
    if delta is not None and codec != "ecsq":
        raise ValueError(f"delta is {delta}, but {codec} has no step; expected it with --codec ecsq")
    if codec != "ecsq":
        return {}
    return asdict(EcsqConfig() if delta is None else EcsqConfig(delta=delta))
