"""The loss, its weights, and how gradients of rows add up."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from train_reference import D, V, plain_loss

from dflash_offline.train.config import OptimConfig
from dflash_offline.train.loss import block_loss, decay_weights, default_gamma
from dflash_offline.train.optim import Gradients, build_optimizer, learning_rate
from dflash_offline.train.rows import supervised_slots

GOLDEN = [1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679, 0.3189, 0.2765, 0.2397, 0.2077, 0.1801, 0.1561]


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


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_loss_equals_the_plain_one(chunk: int) -> None:
    torch.manual_seed(0)
    output = torch.randn(9, 6, D, requires_grad=True)
    head, label = torch.randn(V, D), torch.randint(0, V, (9, 6))
    supervised = (torch.rand(9, 6) < 0.7).cummin(1).values
    supervised[:, 0] = False
    expected, weight = plain_loss(output, head, label, supervised, 2.5)
    (wanted,) = torch.autograd.grad(expected, output)
    found = block_loss(output, head, label, supervised, decay_weights(6, 2.5), chunk)
    (gradient,) = torch.autograd.grad(found.loss, output)
    assert float(found.weight) == pytest.approx(weight, rel=1e-6)
    torch.testing.assert_close(found.loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert (gradient[:, 0] == 0).all() and (gradient[~supervised] == 0).all()
    best = (output @ head.T).argmax(-1)
    assert torch.equal(found.hit_AK, (best == label) & supervised)


def test_nothing_supervised_is_zero_and_harmless() -> None:
    output = torch.randn(3, 6, D, requires_grad=True)
    nothing = torch.zeros(3, 6, dtype=torch.bool)
    found = block_loss(output, torch.randn(V, D), torch.zeros(3, 6, dtype=torch.int64), nothing, decay_weights(6, 3), 4)
    found.loss.backward()
    assert found.loss == 0 and found.weight == 0 and not found.hit_AK.any()
    assert output.grad is not None and (output.grad == 0).all()


def test_gradients_of_rows_add_up_to_the_whole() -> None:
    torch.manual_seed(1)
    layer = torch.nn.Linear(D, D, bias=False)
    x, head, label = torch.randn(8, 6, D), torch.randn(V, D), torch.randint(0, V, (8, 6))
    supervised = torch.zeros(8, 6, dtype=torch.bool)
    supervised[0, 1] = True  # one supervised slot in the first half, thirty in the second
    supervised[4:, 1:] = True

    def gradient(parts: list[slice]) -> torch.Tensor:
        gradients, weight = Gradients(layer), 0.0
        for part in parts:
            found = block_loss(layer(x[part]), head, label[part], supervised[part], decay_weights(6, 3), 16)
            found.loss.backward()
            weight += float(found.weight)
        gradients.normalise(weight, clip=1e9)
        return gradients.flat.clone()

    whole = gradient([slice(0, 8)])
    torch.testing.assert_close(gradient([slice(0, 4), slice(4, 8)]), whole, rtol=1e-6, atol=1e-7)
    assert whole.abs().sum() > 0


def test_clip_limits_the_norm_and_reports_what_it_was() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    gradients = Gradients(layer)
    gradients.flat.fill_(6)
    assert gradients.normalise(2.0, clip=1.0) == pytest.approx(12)
    assert float(layer.weight.grad.norm()) == pytest.approx(1)


def test_schedule() -> None:
    config = OptimConfig(lr=1.0, warmup_ratio=0.04, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[-1] == pytest.approx(0.1) and all(a > b for a, b in pairwise(rates[3:]))
    assert rates[51] == pytest.approx(0.55)  # half of the 96 steps after the warm-up
    assert learning_rate(0, 1, config) == pytest.approx(0.1)


def test_weight_decay_leaves_gains_alone() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.RMSNorm(4))
    groups = build_optimizer(module, OptimConfig(weight_decay=0.1)).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.1), (1, 0.0)]
