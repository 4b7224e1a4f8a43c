"""`dflash-extract run` for tests: in this process, or as a command of its own."""

import io
import multiprocessing
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_offline.extract import pool
from dflash_offline.extract.cli import main
from dflash_offline.shards import manifest
from dflash_offline.shards.cache import Cache


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "dflash_offline.extract", "run", *map(str, args)]


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["transformers.models.qwen3_5.modeling_qwen3_5", "dflash_offline.extract.runner"])


def warm(patch: pytest.MonkeyPatch) -> None:
    """Workers of this process find their imports done; they are real processes all the same."""
    patch.setattr(pool, "multiprocessing", SimpleNamespace(get_context=lambda _: SERVER))


def extract(*args: object) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        warm(patch)
        return call("run", *args)


def call(*args: object) -> subprocess.CompletedProcess[str]:
    """Any command of dflash-extract in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dflash-extract", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
    return subprocess.CompletedProcess(args, int(left.value.code or 0), out.getvalue(), err.getvalue())


def arguments(site: Path, cache: Path, **changes: Any) -> list[object]:
    values = {
        "target.path": site / "t",
        "data.files": site / "chats.jsonl",
        "cache": cache,
        "shard-mib": 1,
        "workers": 1,
        "data.generation": "greedy",
        **changes,
    }
    return [x for k, v in values.items() for x in (f"--{k}", v)]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file but the events, which tell of times and processes."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith("events")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def states(folder: Path) -> dict[str, torch.Tensor]:
    cache = Cache(folder)
    return {cache.keys[i]: cache.read(i).states for i in range(len(cache))}


def copy_without_shards(site: Path, cache: Path) -> None:
    """The site's cache as it was before its first shard: planned and calibrated."""
    shutil.copytree(site / "cache", cache, ignore=shutil.ignore_patterns("*.arrow.*", "0*.arrow", "events*", ".lock"))
    (cache / "index.parquet").unlink()
    manifest.write(cache, replace(manifest.read(cache), complete=False, shards=[], index={}, audit={}))
