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
    from dflash_offline.train.evaluate import evaluate

    return evaluate(config)


def _export(argv: list[str]) -> int:
    config = command.parse(ExportConfig, argv, f"{PROG} export", "Write a checkpoint as a Hugging Face folder.")
    from dflash_offline.train.export import export

    return export(config)


def main() -> None:
    """Entry point of the console script and of `torchrun -m dflash_offline.train`."""
    command.run(
        PROG,
        {
            "run": ("train a drafter from a cache", _run),
            "eval": ("measure acceptance of a run or a drafter folder", _eval),
            "export": ("write a run's checkpoint as a Hugging Face folder", _export),
        },
    )
