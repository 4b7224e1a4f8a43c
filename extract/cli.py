"""The command line of `dflash-extract`. Imports nothing heavy before a command runs."""

import signal

from dflash_offline.extract.config import AuditConfig, ExtractConfig, PreviewConfig, StatusConfig
from dflash_offline.shards import command

PROG = "dflash-extract"


def _run(argv: list[str]) -> int:
    config = command.parse(ExtractConfig, argv, f"{PROG} run", "Run the target once over a dataset and write a cache.")
    from dflash_offline.extract.pool import workers

    with workers(config) as ahead:
        # Ctrl-C waits: a library whose import is broken off may swallow it, and then fail at being imported again.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            from dflash_offline.extract.run import extract  # takes seconds, in which a worker imports too
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return extract(config, ahead)


def _preview(argv: list[str]) -> int:
    config = command.parse(PreviewConfig, argv, f"{PROG} preview", "Show samples with their masks, lengths and skips.")
    from dflash_offline.extract.preview import preview

    return preview(config)


def _status(argv: list[str]) -> int:
    config = command.parse(StatusConfig, argv, f"{PROG} status", "Say how far an extraction is; from any shell.")
    from dflash_offline.extract.status import status

    return status(config)


def _audit(argv: list[str]) -> int:
    config = command.parse(AuditConfig, argv, f"{PROG} audit", "Recompute stored samples from the target and compare.")
    from dflash_offline.extract.audit import audit

    return audit(config)


def main() -> None:
    """Entry point."""
    commands = {
        "run": ("dataset -> cache; rerun the same command to continue", _run),
        "status": ("how far a run is, its rate and time left, who holds the cache", _status),
        "audit": ("a random draw of samples again through the target; exit 3 when states differ", _audit),
        "preview": ("samples as rendered, supervised tokens marked; lengths; what is skipped and why", _preview),
    }
    command.run(PROG, commands)
