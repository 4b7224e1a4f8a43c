"""The command line of `dflash-shards`: a table of commands. A command's module is imported when it runs."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from dflash_offline.shards import command
from dflash_offline.tools import config

PROG = "dflash-shards"

# name: (summary, settings, module of tools, function of the settings that returns the exit code)
COMMANDS: dict[str, tuple[str, type[Any], str, str]] = {
    "info": ("target, layers, codec, samples, bytes a token", config.OneCache, "browse", "info"),
    "ls": ("one line a sample", config.Ls, "browse", "ls"),
    "show": ("a sample's text, its supervised tokens marked", config.Show, "browse", "show"),
    "verify": (
        "check every byte of a cache, or of a random part; exit 3 when anything is wrong",
        config.Verify,
        "browse",
        "check",
    ),
    "repair": ("mend a damaged cache without the target; exit 3 when samples were lost", config.Repair, "mend", "mend"),
    "diff": (
        "compare settings, samples and states of two caches; exit 3 when they differ",
        config.Diff,
        "compare",
        "diff",
    ),
    "merge": ("one cache from several; equal samples once", config.Merge, "rewrite", "merge"),
    "split": ("a part of a cache: by prompts, keys, source or number", config.Split, "rewrite", "split"),
    "convert": ("a cache in another codec", config.Convert, "rewrite", "convert"),
    "stats": (
        "lengths, sources, states by layer, fidelity, warnings; --html with plots",
        config.Stats,
        "stats",
        "stats",
    ),
    "report": (
        "training runs beside each other: tau, loss, settings, time; --html and --png with plots",
        config.Report,
        "report",
        "report",
    ),
    "estimate": ("tokens -> bytes and hours by codec", config.Estimate, "estimate", "estimate"),
    "import": ("a cache from the states that another project stored", config.Import, "peers.importing", "run"),
    "export": ("every sample as a safetensors file of its own", config.Export, "peers.export", "run"),
    "regenerate": (
        "answers from the target through any OpenAI-compatible server",
        config.Regenerate,
        "regenerate",
        "regenerate",
    ),
    "live": (
        "decode with the target and a drafter, and compare with the offline walk; exit 3 when they differ",
        config.Live,
        "live",
        "live",
    ),
    "bench": ("read, decode, copy and de-quantise against the machine's copy rate", config.Bench, "bench", "bench"),
}


def _runner(name: str) -> Callable[[list[str]], int]:
    summary, settings, module, function = COMMANDS[name]

    def call(argv: list[str]) -> int:
        args = command.parse(settings, argv, f"{PROG} {name}", f"{summary[0].upper()}{summary[1:]}.")
        code: int = getattr(import_module(f"dflash_offline.tools.{module}"), function)(args)
        return code

    return call


def main() -> None:
    """Entry point."""
    command.run(PROG, {name: (COMMANDS[name][0], _runner(name)) for name in COMMANDS})
