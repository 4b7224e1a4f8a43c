"""Starting runs in tests, and reading what they left."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_offline.shards.command import load_toml, parse
from dflash_offline.train import checkpoint
from dflash_offline.train.cli import main
from dflash_offline.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from dflash_offline.train.log import read_metrics
from dflash_offline.train.loop import train

FLAGS = [
    "--model.layers", "2", "--model.block-size", "6", "--model.sliding-window", "8", "--data.row-tokens", "100",
    "--data.row-anchors", "40", "--data.rows-per-step", "2", "--data.val-fraction", "0.1", "--optim.lr", "3e-3",
    "--optim.max-steps", "12", "--save.every", "7", "--save.keep-last", "9", "--log-every", "4",
]  # fmt: skip

VARIANTS = {
    "decay": [],
    "dpace": ["--loss.decay", "0", "--loss.dpace", "1", "--loss.dpace-divisor", "samples"],
    "kd": ["--loss.kd", "1", "--optim.optimizer", "muon"],
    "everything": [
        "--loss.decay", "0.5", "--loss.dpace", "0.5", "--loss.kd", "0.3", "--loss.dpace-divisor", "blocks",
        "--optim.optimizer", "muon", "--optim.schedule", "wsd", "--optim.ema", "0.8", "--optim.weight-decay", "0.1",
        "--optim.no-decay", "fc.*", "--optim.freeze", "layers.0.mlp.*", "norm.weight", "--data.feature-noise", "0.05",
        "--data.weights", "0.7", "--optim.warmup-ratio", "0.6",
    ],
}  # fmt: skip
"""FLAGS and what a run may have besides."""

SIX = [
    "--model.layers", "2", "--model.block-size", "6", "--data.row-tokens", "100", "--data.row-anchors", "40",
    "--data.rows-per-step", "2", "--data.val-fraction", "0.2", "--optim.lr", "3e-3", "--optim.max-steps", "6",
    "--save.every", "2", "--save.keep-last", "9", "--validate.every", "2", "--validate.samples", "2",
]  # fmt: skip


def call(*argv: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dflash-train", *map(str, argv)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def launcher(ranks: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def start(ranks: int, *argv: object) -> subprocess.Popen[str]:
    """A run in a process of its own, or under torchrun."""
    command = [*launcher(ranks), "-m", "dflash_offline.train", "run", *map(str, argv)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(ranks: int, *runs: list[object]) -> None:
    """Each of `runs`, to its end."""
    words = [[str(word) for word in argv] for argv in runs]
    if ranks == 1:
        for argv in words:
            assert train(parse(TrainConfig, argv, "dflash-train run", "")) == 0
        return
    done = subprocess.run(
        [*launcher(ranks), str(Path(__file__).with_name("train_many.py")), json.dumps(words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def metrics(run: Path) -> list[dict[str, Any]]:
    timed = {"seconds", "loader_seconds", "tokens_per_s", "block_tokens_per_s", "tflops"}
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(run)]


def hashes(run: Path, step: int) -> dict[str, str]:
    return checkpoint.at_step(run / "checkpoints", step).state["files"]


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def config_of(run: Path, cache: Path) -> TrainConfig:
    return replace(load_toml(TrainConfig, run / "config.toml"), run_dir=run, cache=cache)


def settings(cache: Path, run: Path, *flags: str) -> TrainConfig:
    return parse(TrainConfig, ["--cache", str(cache), "--run-dir", str(run), *SIX, *flags], "", "")


def small(cache: Path, run: Path, **data: Any) -> TrainConfig:
    return TrainConfig(
        cache=cache,
        run_dir=run,
        model=ModelConfig(layers=2, block_size=6),
        data=DataConfig(**{"row_tokens": 2000, "row_anchors": 64, "rows_per_step": 1, "val_fraction": 0.0} | data),
        optim=OptimConfig(lr=3e-3, epochs=2),
    )
