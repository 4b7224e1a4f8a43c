"""The command line of `dflash-shards`. Imports nothing heavy before a command runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dflash_offline.shards import command

PROG = "dflash-shards"
CachePath = Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class OneCache:
    """A cache folder."""

    cache: CachePath
    """The cache folder."""


@dataclass(frozen=True, kw_only=True)
class Ls:
    """Which samples to list."""

    cache: CachePath
    """The cache folder."""
    limit: int = 20
    """Lines to print; 0 prints all."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Show:
    """Which sample to show."""

    cache: CachePath
    """The cache folder."""
    key: Annotated[str, tyro.conf.Positional]
    """The sample's key, or the beginning of it."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Which caches to compare."""

    first: CachePath
    """A cache folder."""
    second: CachePath
    """Another one."""
    limit: int = 10
    """Samples to name of each kind."""


def _diff(argv: list[str]) -> int:
    args = command.parse(Diff, argv, f"{PROG} diff", "Compare two caches; exit 3 when they differ.")
    from dflash_offline.tools.compare import diff

    return diff(args.first, args.second, args.limit)


def _info(argv: list[str]) -> int:
    args = command.parse(OneCache, argv, f"{PROG} info", "What a cache is.")
    from dflash_offline.tools import browse

    return browse.info(args.cache)


def _ls(argv: list[str]) -> int:
    args = command.parse(Ls, argv, f"{PROG} ls", "One line a sample.")
    from dflash_offline.tools import browse

    return browse.ls(args.cache, args.limit)


def _show(argv: list[str]) -> int:
    args = command.parse(Show, argv, f"{PROG} show", "A sample's text, its supervised tokens marked.")
    from dflash_offline.tools import browse

    return browse.show(args.cache, args.key)


def _verify(argv: list[str]) -> int:
    args = command.parse(OneCache, argv, f"{PROG} verify", "Check every byte; exit 3 when anything is wrong.")
    from dflash_offline.tools import browse

    return browse.check(args.cache)


def main() -> None:
    """Entry point."""
    command.run(
        PROG,
        {
            "info": ("target, layers, codec, samples, bytes a token", _info),
            "ls": ("one line a sample", _ls),
            "show": ("a sample's text with its mask", _show),
            "verify": ("check every byte of a cache", _verify),
            "diff": ("compare two caches: settings, samples, states", _diff),
        },
    )
