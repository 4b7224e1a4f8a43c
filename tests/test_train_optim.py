"""What an optimizer step does to weights and averages, and at which rate."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import Linear, RMSNorm, Sequential
from train_reference import drafter

from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import OptimConfig
from dflash_offline.train.optim import Gradients, build_optimizers, clipped, learning_rate
from dflash_offline.train.state import State


def net() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(4, 6, bias=False), RMSNorm(6), Linear(6, 3, bias=False))


def step(module: torch.nn.Module, config: OptimConfig, rate: float, seed: int) -> dict[str, torch.Tensor]:
    """One step of fresh optimizers with random gradients, which are returned."""
    gradients, generator = Gradients(module), torch.Generator().manual_seed(seed)
    gradients.flat.copy_(torch.randn(len(gradients.flat), generator=generator))
    for optimizer in build_optimizers(module, config):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_clip_limits_the_norm_and_reports_what_it_was() -> None:
    layer = Linear(4, 4, bias=False)
    gradients = Gradients(layer)
    gradients.flat.fill_(6)
    norm, scale = clipped(gradients.norm(), 2.0, clip=1.0)
    assert norm == pytest.approx(12) and scale * float(layer.weight.grad.norm()) == pytest.approx(1)


def test_cosine() -> None:
    config = OptimConfig(lr=1.0, warmup_ratio=0.04, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[-1] == pytest.approx(0.1) and all(a > b for a, b in pairwise(rates[3:]))
    assert rates[51] == pytest.approx(0.55)  # half of the 96 steps after the warm-up
    assert learning_rate(0, 1, config) == pytest.approx(0.1)


def test_warm_up_stable_and_decay() -> None:
    config = OptimConfig(lr=1.0, schedule="wsd", warmup_ratio=0.04, decay_ratio=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and set(rates[3:80]) == {1.0} and rates[80] < 1
    assert rates[80:] == pytest.approx([0.1 + 0.9 * k / 20 for k in range(19, -1, -1)])
    assert learning_rate(0, 1, config) == pytest.approx(0.1)


def test_only_the_named_matrices_decay() -> None:
    """With gradients of zero the decay is all that moves."""
    for optimizer in ("adamw", "muon"):
        module, before = net(), net().state_dict()
        config = OptimConfig(weight_decay=0.1, no_decay=("2.*",), optimizer=optimizer)  # type: ignore[arg-type]
        gradients = Gradients(module)
        gradients.flat.zero_()
        for made in build_optimizers(module, config):
            for group in made.param_groups:
                group["lr"] = 0.5
            made.step()
        for name, factor in (("0.weight", 0.95), ("1.weight", 1.0), ("2.weight", 1.0)):
            torch.testing.assert_close(module.state_dict()[name], before[name] * factor)


def test_muon_steps_are_orthogonal_and_of_adamw_s_size() -> None:
    module, before = net(), net().state_dict()
    gradient = step(module, OptimConfig(optimizer="muon"), rate=0.01, seed=1)
    for name in ("0.weight", "2.weight"):
        moved = (before[name] - module.state_dict()[name]) / 0.01
        left, _, right = torch.linalg.svd(gradient[name], full_matrices=False)
        size = 0.2 * max(moved.shape) ** 0.5
        # Five iterations in bf16 bring the singular values near 1, not to it.
        overlap = torch.linalg.diagonal(left.T @ moved @ right.T) / size
        assert overlap.min() > 0.6 and overlap.max() < 1.3
        assert (moved - left @ torch.diag(overlap * size) @ right).abs().max() < 0.05 * size
    gain, wanted = net(), OptimConfig()
    step(gain, wanted, rate=0.01, seed=1)
    assert torch.equal(module.state_dict()["1.weight"], gain.state_dict()["1.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_are_as_set(optimizer: Any) -> None:
    config = OptimConfig(optimizer=optimizer, betas=(0.5, 0.6), muon_momentum=0.7)
    groups = [group for made in build_optimizers(net(), config) for group in made.param_groups]
    found = {group.get("betas", group.get("momentum")) for group in groups}
    assert found == ({(0.5, 0.6)} if optimizer == "adamw" else {(0.5, 0.6), 0.7})


def test_muon_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UsageError, match=r"optim.optimizer = muon: torch .* has none; install torch 2.11"):
        build_optimizers(net(), OptimConfig(optimizer="muon"))


def test_the_average_follows_the_weights() -> None:
    state = State.of(drafter(), OptimConfig(ema=0.5))
    expected = {name: p.clone() for name, p in state.drafter.named_parameters()}
    for number in range(1, 15):
        state.gradients.flat.normal_(generator=torch.Generator().manual_seed(number))
        state.step(number, rate=0.1)
        decay = min(0.5, (1 + number) / (10 + number))
        for name, p in state.drafter.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach()
    assert state.served is state.average and state.average is not None
    for name, p in state.average.named_parameters():
        torch.testing.assert_close(p, expected[name])
        assert not p.requires_grad and not torch.equal(p, state.drafter.get_parameter(name))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"freeze": ("fc.*", "layer.*")}, r"optim.freeze: no tensor matches 'layer\.\*'; expected names such as fc"),
        ({"no_decay": ("fc",)}, r"optim.no_decay: no tensor matches 'fc'"),
        ({"freeze": ("*",)}, r"optim.freeze = \['\*'\]: every tensor is frozen; expected some left to train"),
    ],
)
def test_patterns_that_fit_nothing_or_everything(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        State.of(drafter(), OptimConfig(**config))


def test_small_steps_are_not_lost_to_rounding() -> None:
    """B78: 200 steps at 6e-5 move a weight of 1 by about 0.012; in bf16 they would not move it at all."""
    layer = Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    gradients = Gradients(layer)
    (optimizer,) = build_optimizers(layer, OptimConfig(lr=6e-5))
    for _ in range(200):
        gradients.flat.fill_(1)
        optimizer.step()
    assert float(layer.weight.detach()) == pytest.approx(0.988, abs=1e-4)
    assert all(t.dtype == torch.float32 for t in optimizer.state[layer.weight].values())
