"""`dflash-extract run` for tests: in this process, or as a command of its own."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_offline.extract.cli import main
from dflash_offline.shards.cache import Cache


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "dflash_offline.extract", "run", *map(str, args)]


def extract(*args: object) -> subprocess.CompletedProcess[str]:
    """The command in this process, whose imports are warm; its workers are real processes all the same."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dflash-extract", "run", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
    return subprocess.CompletedProcess(args, int(left.value.code or 0), out.getvalue(), err.getvalue())


def arguments(site: Path, cache: Path, **changes: Any) -> list[object]:
    values = {
        "target.path": site / "t",
        "data.files": site / "chats.jsonl",
        "cache": cache,
        "shard-mib": 1,
        "workers": 2,
        "data.generation": "greedy",
        **changes,
    }
    return [x for k, v in values.items() for x in (f"--{k}", v)]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def states(folder: Path) -> dict[str, torch.Tensor]:
    cache = Cache(folder)
    return {cache.keys[i]: cache.read(i).states for i in range(len(cache))}
