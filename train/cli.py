"""`dflash-train`: a cache of target states -> a drafter. Imports torch only inside a command."""

from dflash_offline.shards import command
from dflash_offline.train.config import EvalConfig, ExportConfig, TrainConfig

PROG = "dflash-train"


def _run(argv: list[str]) -> int:
    config = command.parse(
        TrainConfig, argv, f"{PROG} run", "Train a drafter from a cache; continues a run that exists."
    )
    from dflash_offline.train.loop import train

    return train(config)


def _eval(argv: list[str]) -> int:
    config = command.parse(EvalConfig, argv, f"{PROG} eval", "Measure acceptance by the serving walk over a cache.")
    from dflash_offline.train.eval_command import evaluate

    return evaluate(config)


def _export(argv: list[str]) -> int:
    config = command.parse(ExportConfig, argv, f"{PROG} export", "Write a checkpoint as a Hugging Face folder.")
    from dflash_offline.train.export_command import export

    return export(config)


def _sweep(argv: list[str]) -> int:
    from dflash_offline.train.sweep_config import SweepConfig

    argv = ["--config", *argv] if argv and not argv[0].startswith("-") else argv
    about = "Search settings by trials side by side on one cache: sweep FILE.toml [--trials N ...]."
    config = command.parse(SweepConfig, argv, f"{PROG} sweep", about)
    from dflash_offline.train.sweep import sweep

    return sweep(config)


def main() -> None:
    """Entry point of the console script and of `torchrun -m dflash_offline.train`."""
    command.run(
        PROG,
        {
            "run": ("train a drafter from a cache", _run),
            "eval": ("measure acceptance of a run or a drafter folder", _eval),
            "sweep": ("search settings by trials side by side on one cache", _sweep),
            "export": ("write a run's checkpoint as a Hugging Face folder", _export),
        },
    )
