"""The optimizer's work dealt to the ranks is the work of one."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from train_reference import chats, drafter, make_cache
from train_runs import SIX, finish, hashes, metrics

from dflash_offline.train import checkpoint
from dflash_offline.train.config import OptimConfig
from dflash_offline.train.masks import Blocks
from dflash_offline.train.model import Edges
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.state import State

FLAGS = [
    *SIX, "--device", "cpu", "--precision", "bfloat16", "--data.rows-per-step", "6", "--optim.ema", "0.8",
    "--optim.weight-decay", "0.1", "--optim.freeze", "layers.1.mlp.*", "layers.0.self_attn.k_norm.weight",
    "--optim.no-decay", "fc.*", "--optim.clip", "0.1", "--optim.epochs", "9",
]  # fmt: skip


@dataclass(frozen=True)
class Told(Ranks):
    """A rank whose peers are in the same process: what it gives is kept, as it is at that moment."""

    given: list[Tensor] = field(default_factory=list)

    def gather(self, whole: Tensor, share: Tensor) -> Callable[[], None]:
        assert len(whole) == 3 * len(share)
        self.given.append(share.clone())
        whole.fill_(torch.nan)  # until somebody waits

        def wait() -> None:
            whole.fill_(0.01)

        return wait


def output(state: State, edges: Edges | None) -> Tensor:
    spec = state.drafter.spec
    states_TLD = torch.randn(50, state.drafter.fc.in_features, generator=torch.Generator().manual_seed(1))
    inputs = torch.ones(3, spec.block_size, spec.hidden_size)
    blocks = Blocks(torch.tensor([5, 20, 44]), torch.tensor([0, 10, 10]), spec.block_size)
    return state.working(states_TLD, torch.arange(50), inputs, blocks, None, edges)


def test_a_part_is_sent_when_all_of_it_is_stepped() -> None:
    """As on a GPU, where a part is stepped while the one before it travels; and it is used when it has come."""
    master, ranks = drafter(), [Told(rank, 3, torch.device("cpu")) for rank in range(3)]
    config = OptimConfig(freeze=("layers.1.mlp.*", "fc.*"))
    states = [State.of(copy.deepcopy(master), config, torch.bfloat16, rank) for rank in ranks]
    for state in states:
        state.gradients.flat.normal_(generator=torch.Generator().manual_seed(0))

        @torch.no_grad()
        def apply(scale: float, weights: list[Tensor], copies: dict[Tensor, Tensor]) -> None:
            for weight in weights:
                weight -= scale * weight.grad
                copies.get(weight, weight).copy_(weight)

        state.optimizers[0].apply = apply  # type: ignore[attr-defined]
        state.step(1, 1.0, 0.5)
    ranges, flat = states[0].gradients.ranges, states[0].gradients.flat
    before = dict(master.named_parameters())
    gains, *parts = (names for _, names in states[0].sharded.turns())  # type: ignore[union-attr]
    assert sorted([*gains, *(name for part in parts for name in part)]) == sorted(ranges)
    assert all(len(rank.given) == len(parts) for rank in ranks)
    for number, part in enumerate(parts):
        wanted = [(before[name].view(-1) - 0.5 * flat[ranges[name]]).bfloat16() for name in part]
        found = torch.cat([rank.given[number] for rank in ranks])
        assert torch.equal(found[: sum(map(len, wanted))], torch.cat(wanted))
    assert torch.isnan(output(states[1], None)).all()
    assert not torch.isnan(output(states[1], Edges(states[1].arrive, None))).any()
    assert torch.equal(output(states[1], None), output(states[1], Edges(states[1].arrive, None)))  # all had come
    for name in gains:
        assert torch.equal(states[2].drafter.get_parameter(name), before[name] - 0.5 * flat[ranges[name]])


def test_weights_on_their_way_outlast_steps_that_learn_nothing(tmp_path: Path) -> None:
    """Ranks without a row and steps without supervision use none of the parts; the next that does waits for them."""
    nothing = [((np.arange(64) * n % 90).astype(np.int32), np.repeat(np.uint8([0, 1]), [54, 10])) for n in range(1, 20)]
    cache = make_cache(tmp_path / "cache", [*chats(2, seed=3, longest=20), *nothing]).path
    flags = ["--cache", cache, *FLAGS, "--data.row-tokens", "40", "--data.val-fraction", "0", "--validate.every", "0"]
    flags += ["--recompute", "True", "--optim.max-steps", "9"]
    finish(3, [*flags, "--run-dir", tmp_path / "three"])
    finish(1, [*flags, "--run-dir", tmp_path / "one"])
    one, three = (metrics(tmp_path / name) for name in ("one", "three"))
    assert any(a["divisor"] for a in one) and not all(a["divisor"] for a in one)
    for a, b in zip(one, three, strict=True):
        assert (b["loss"] or 0, b["grad_norm"]) == pytest.approx((a["loss"] or 0, a["grad_norm"]), rel=2e-3)


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
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "three"), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=2e-3)
