"""The command line of `dflash-extract`. Imports nothing heavy before a command runs."""

from dflash_offline.extract.config import ExtractConfig
from dflash_offline.shards import command

PROG = "dflash-extract"


def _run(argv: list[str]) -> int:
    config = command.parse(ExtractConfig, argv, f"{PROG} run", "Run the target once over a dataset and write a cache.")
    from dflash_offline.extract.run import run

    return run(config)


def main() -> None:
    """Entry point."""
    command.run(PROG, {"run": ("dataset -> cache; rerun the same command to continue", _run)})
