"""Searching with flags alone, as docs/sweep.md has it: what W&B's agents and a Slurm array would start."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
import yaml
from test_sweep import BASE, check_table, trials
from train_runs import metrics

from dflash_offline.shards.command import load_toml, structure
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.sweep_config import SweepConfig
from dflash_offline.train.sweep_setup import DEFAULTS
from dflash_offline.train.sweep_space import read_space

DOC = (Path(__file__).parents[1] / "docs" / "sweep.md").read_text()
BLOCKS = dict(re.findall(r"```(\w+)\n(.*?)```", DOC, re.S))


@pytest.fixture
def folder(cache: Path, tmp_path: Path) -> Path:
    """A working directory with base.toml and `dflash-train` on the path."""
    base = {**BASE, "cache": str(cache), "validate": {"every": 4, "samples": 2}}
    (tmp_path / "base.toml").write_text(tomli_w.dumps(base))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dflash-train"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dflash_offline.train "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(folder: Path, argv: list[str], **environment: str) -> None:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_slurm_array(folder: Path) -> None:
    (folder / "points.txt").write_text("--optim.lr 3e-4\n--optim.lr 1e-3 --model.layers 2\n")
    (folder / "array.sh").write_text(BLOCKS["bash"])
    run(folder, ["bash", "array.sh"], SLURM_ARRAY_TASK_ID="1")
    config = load_toml(TrainConfig, folder / "runs" / "1" / "config.toml")
    assert (config.optim.lr, config.model.layers, config.data.row_tokens) == (1e-3, 2, 100)
    assert len(metrics(folder / "runs" / "1")) == 8


def test_an_agent_of_wandb(folder: Path) -> None:
    """The agent puts --name=value for ${args}, and the run's id into the environment."""
    pytest.importorskip("wandb")
    words = yaml.safe_load(BLOCKS["yaml"])
    args = ["--optim.lr=0.0003", "--model.layers=2", "--save.keep_best=True"]
    assert {a[2:].split("=")[0] for a in args} == {*words["parameters"]}
    argv = [word for part in words["command"] for word in (args if part == "${args}" else [part])]
    run(folder, argv, WANDB_RUN_ID="abc123", WANDB_MODE="offline")
    config = load_toml(TrainConfig, folder / "runs" / "abc123" / "config.toml")
    assert (config.optim.lr, config.model.layers, config.save.keep_best) == (3e-4, 2, True)
    assert list((folder / "runs" / "abc123" / "wandb").glob("offline-run-*-abc123"))


def test_the_settings_in_the_docs_are_settings() -> None:
    config = structure(SweepConfig, tomllib.loads(BLOCKS["toml"]), "docs")
    assert config.base is not None
    base = load_toml(TrainConfig, Path(__file__).parents[1] / config.base)
    assert {*read_space(config.space, base)} >= {"optim.lr", "model.layer_ids"}
    for method, plain in ((config.sampler, SweepConfig().sampler), (config.pruner, SweepConfig().pruner)):
        assert method.name == plain.name and method.arguments == DEFAULTS[plain.name]


def test_trials_of_two_ranks(folder: Path, cache: Path) -> None:
    """Under torchrun; the command line is that of a user."""
    (folder / "sweep.toml").write_text(
        "ranks = 2\nfraction = 1.0\nevaluations = 2\n[space]\noptim.lr = { choices = [1e-3] }\n"
        '[pruner]\nname = "NopPruner"\n'
    )
    run(folder, ["dflash-train", "sweep", "sweep.toml", "--base", "base.toml", "--trials", "1"])
    check_table(folder / "sweep", rows := trials(folder / "sweep"))
    assert rows[0]["state"] == "complete" and (folder / "sweep" / "best-000" / "config.json").is_file()
