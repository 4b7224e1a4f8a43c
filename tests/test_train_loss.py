"""The loss, its weights, and how gradients of rows add up."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from targets import model
from train_reference import D, V, chats, make_cache, plain_loss

from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import LossConfig, TrainConfig
from dflash_offline.train.evaluate import load_target
from dflash_offline.train.job import prepare
from dflash_offline.train.loss import Objective, block_loss, decay_weights, default_gamma, dpace_weights
from dflash_offline.train.optim import Gradients, clipped
from dflash_offline.train.rows import supervised_slots

GOLDEN = [1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679, 0.3189, 0.2765, 0.2397, 0.2077, 0.1801, 0.1561]
OBJECTIVES = {
    "decay": LossConfig(),
    "dpace": LossConfig(decay=0.0, dpace=1.0),
    "dpace over blocks": LossConfig(decay=0.0, dpace=1.0, dpace_alpha=0.3, dpace_divisor="blocks"),
    "dpace over samples": LossConfig(decay=0.0, dpace=1.0, dpace_divisor="samples"),
    "decay and dpace": LossConfig(decay=0.25, dpace=0.75),
    "kd": LossConfig(kd=1.0),
    "kd and cross entropy, dpace": LossConfig(decay=0.5, dpace=0.5, kd=0.7, dpace_divisor="blocks"),
}


def row(anchors: int = 9, seed: int = 0) -> dict[str, Any]:
    """Outputs, labels, supervision and teacher of a row; the last block has no supervised slot."""
    generator = torch.Generator().manual_seed(seed)
    supervised = (torch.rand(anchors, 6, generator=generator) < 0.8).cummin(1).values
    supervised[:, 0], supervised[-1] = False, False
    return {
        "output_AKD": torch.randn(anchors, 6, D, generator=generator).requires_grad_(),
        "head_VD": torch.randn(V, D, generator=generator) * 0.3,
        "label_AK": torch.randint(0, V, (anchors, 6), generator=generator),
        "supervised_AK": supervised,
        "samples": 2,
        "teacher_AKD": torch.randn(anchors, 6, D, generator=generator),
    }


def objective(config: LossConfig) -> Objective:
    return Objective.of(config, 6, torch.device("cpu"))


def test_decay_golden_vectors() -> None:
    weights = decay_weights(16, 7)
    assert weights[0] == 0
    np.testing.assert_allclose(weights[1:].numpy(), [*GOLDEN, 0.1353], atol=5e-5)
    for size, total in ((16, 6.6306), (10, 4.6048), (8, 3.7352)):
        assert float(decay_weights(size, default_gamma(size)).sum()) == pytest.approx(total, abs=5e-5)
    assert [default_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]


def test_supervision_stops_at_the_first_unsupervised_slot() -> None:
    mask = np.array([0, 1, 1, 1, 0, 1, 1], np.uint8)
    found = supervised_slots(mask, np.array([1, 2, 5]), 6).astype(int).tolist()
    assert found == [[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]


def test_dpace_golden_vectors() -> None:
    nll = -torch.tensor([[0.3, 0.9, 0.5, 0.2], [0.3, 0.9, 0.5, 0.2]]).log()
    supervised = torch.tensor([[False, True, True, True], [False, True, True, False]])
    found = dpace_weights(nll, supervised, alpha=0.5)
    torch.testing.assert_close(found[0], torch.tensor([0, 2.09, 1.14, 0.4275]))
    torch.testing.assert_close(found[1], torch.tensor([0, 0.95 + 0.7125, 0.7125, 0]))
    assert dpace_weights(nll * 1e4, supervised, alpha=0.0).isfinite().all()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_equals_the_plain_one(name: str, chunk: int) -> None:
    config = replace(OBJECTIVES[name], gamma=2.5, chunk=chunk)
    given = row()
    expected, divisor = plain_loss(config, **given)
    (wanted,) = torch.autograd.grad(expected, given["output_AKD"])
    found = block_loss(objective(config), **given)
    (gradient,) = torch.autograd.grad(found.loss, given["output_AKD"])
    assert float(found.divisor) == pytest.approx(divisor, rel=1e-6)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert (gradient[:, 0] == 0).all() and (gradient[~given["supervised_AK"]] == 0).all()
    best = (given["output_AKD"] @ given["head_VD"].T).argmax(-1)
    assert torch.equal(found.hit_AK, (best == given["label_AK"]) & given["supervised_AK"])


def test_distillation_ends_at_the_target_s_distribution() -> None:
    given = row()
    config = LossConfig(kd=1.0)
    same = block_loss(objective(config), **{**given, "teacher_AKD": given["output_AKD"].detach()})
    (gradient,) = torch.autograd.grad(same.loss, given["output_AKD"])
    assert float(same.loss.detach()) == pytest.approx(0, abs=1e-5) and gradient.abs().max() < 1e-5
    assert block_loss(objective(config), **given).loss > 1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_supervised_is_zero_and_harmless(name: str) -> None:
    """B70: never nan, and no divisor to make a fake zero of."""
    given = row() | {"supervised_AK": torch.zeros(9, 6, dtype=torch.bool), "samples": 0}
    found = block_loss(objective(OBJECTIVES[name]), **given)
    (gradient,) = torch.autograd.grad(found.loss, given["output_AKD"])
    assert found.loss == 0 and found.divisor == 0 and not found.hit_AK.any() and (gradient == 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_of_rows_add_up_to_the_whole(name: str) -> None:
    """B76: one supervised slot in the first half, twenty in the second, and no mean of means."""
    layer = torch.nn.Linear(D, D, bias=False)
    torch.nn.init.eye_(layer.weight)
    given = row(8)
    supervised = torch.zeros(8, 6, dtype=torch.bool)
    supervised[0, 1] = True
    supervised[4:, 1:] = True

    def gradient(parts: list[slice]) -> torch.Tensor:
        gradients, divisor, loss = Gradients(layer), 0.0, 0.0
        for part in parts:
            found = block_loss(
                objective(OBJECTIVES[name]), layer(given["output_AKD"].detach()[part]), given["head_VD"],
                given["label_AK"][part], supervised[part], 2 // len(parts), given["teacher_AKD"][part],
            )  # fmt: skip
            found.loss.backward()
            divisor, loss = divisor + float(found.divisor), loss + float(found.loss.detach())
        _, scale = clipped(gradients.norm(), divisor, clip=1e9)
        return torch.cat([gradients.flat * scale, torch.tensor([loss / divisor])])

    whole = gradient([slice(0, 8)])
    torch.testing.assert_close(gradient([slice(0, 4), slice(4, 8)]), whole, rtol=1e-5, atol=1e-6)
    assert whole.abs().sum() > 0


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_the_teacher_passes_the_target_s_own_norm(family: str) -> None:
    """A norm of Qwen3.5 multiplies by 1 + weight, the others by the weight."""
    stock = model(family).model
    torch.nn.init.normal_(stock.norm.weight, 0.5)
    table = torch.randn(320, 64)
    tensors = {"embed_tokens": table, "lm_head": table, "norm": stock.norm.weight.detach()}
    cache: Any = SimpleNamespace(
        target_tensors=lambda: tensors, target_config=stock.config.to_dict(), hidden_size=64, path=Path("cache")
    )
    hidden = torch.randn(5, 64)
    found = load_target(cache, torch.device("cpu"), torch.float32).norm(hidden)
    torch.testing.assert_close(found, stock.norm(hidden).detach())


def test_distillation_needs_the_last_hidden_state(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", chats(3)).path
    with pytest.raises(UsageError, match=r"cache: does not store the target's last hidden state, which loss.kd = 0.5"):
        prepare(TrainConfig(cache=cache, run_dir=tmp_path / "run", loss=LossConfig(kd=0.5)), world=1)
