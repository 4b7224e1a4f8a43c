"""The optimizer's work dealt to the ranks is the work of one."""

import shutil
from pathlib import Path

import pytest
import torch
from train_reference import chats, make_cache
from train_runs import SIX, finish, hashes, metrics

from dflash_offline.train import checkpoint
from dflash_offline.train.log import read_metrics

FLAGS = [
    *SIX, "--device", "cpu", "--precision", "bfloat16", "--data.rows-per-step", "6", "--optim.ema", "0.8",
    "--optim.weight-decay", "0.1", "--optim.freeze", "layers.1.mlp.*", "layers.0.self_attn.k_norm.weight",
    "--optim.no-decay", "fc.*", "--optim.clip", "0.1", "--optim.epochs", "9",
]  # fmt: skip


def test_shares_of_three_ranks_are_the_whole_of_one(tmp_path: Path) -> None:
    """bf16 on the CPU, with what else touches weights; parts that three do not divide are filled up.

    Sums in another order leave their mark on the last bits of fp32, which rounding to bf16 now and then makes larger.
    """
    cache = make_cache(tmp_path / "cache", chats(40)).path
    flags = ["--cache", cache, *FLAGS]
    finish(3, [*flags, "--run-dir", tmp_path / "three"])
    for name in ("again", "alone"):
        shutil.copytree(tmp_path / "three", tmp_path / name)
        for step in (4, 6):
            shutil.rmtree(tmp_path / name / "checkpoints" / f"step-{step:08d}")
    finish(3, [*flags, "--run-dir", tmp_path / "again"])
    assert hashes(tmp_path / "again", 6) == hashes(tmp_path / "three", 6)
    assert metrics(tmp_path / "again") == metrics(tmp_path / "three")

    finish(1, [*flags, "--run-dir", tmp_path / "one"], [*flags, "--run-dir", tmp_path / "alone"])
    found = {name: checkpoint.at_step(tmp_path / name / "checkpoints", 6) for name in ("one", "three", "alone")}
    start = checkpoint.at_step(tmp_path / "one" / "checkpoints", 2)
    for file in (checkpoint.MODEL, checkpoint.EMA, checkpoint.OPTIMIZER):
        one, three, alone, before = (
            {name: tensor.double() for name, tensor in x.load(file, torch.device("cpu")).items()}
            for x in (found["one"], found["three"], found["alone"], start)
        )
        assert one.keys() == three.keys() == alone.keys()
        for name in one:
            assert one[name].shape == three[name].shape
            moved = (one[name] - before[name]).norm()
            assert (three[name] - one[name]).norm() <= 0.02 * moved and (alone[name] - one[name]).norm() <= 0.02 * moved
    phases = {name: [set(line["seconds"]) for line in read_metrics(tmp_path / name)] for name in ("one", "three")}
    assert all("gather" in step for step in phases["three"]) and not any("gather" in step for step in phases["one"])
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "three"), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=2e-3)
