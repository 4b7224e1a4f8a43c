"""Settings of the `dflash-shards` commands. Imports nothing heavy, so that `--help` answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

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
