"""The command line of `dflash-extract`. Imports nothing heavy before a command runs."""

from dflash_offline.extract.config import ExtractConfig, PreviewConfig
from dflash_offline.shards import command

PROG = "dflash-extract"


def _run(argv: list[str]) -> int:
    config = command.parse(ExtractConfig, argv, f"{PROG} run", "Run the target once over a dataset and write a cache.")
    from dflash_offline.extract.run import run

    return run(config)


def _preview(argv: list[str]) -> int:
    config = command.parse(PreviewConfig, argv, f"{PROG} preview", "Show samples with their masks, lengths and skips.")
    from dflash_offline.extract.preview import preview

    return preview(config)


def main() -> None:
    """Entry point."""
    commands = {
        "run": ("dataset -> cache; rerun the same command to continue", _run),
        "preview": ("samples as rendered, supervised tokens marked; lengths; what is skipped and why", _preview),
    }
    command.run(PROG, commands)
