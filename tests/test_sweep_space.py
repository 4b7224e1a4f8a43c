"""What a sweep may vary: every kind of dimension, and those that are refused."""

from typing import Any

import optuna
import pytest

from dflash_offline.shards.errors import UsageError
from dflash_offline.train import sweep_space
from dflash_offline.train.config import DataConfig, OptimConfig, TrainConfig


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "space is empty; expected fields"),
        (
            {"optim.lrr": {"low": 1, "high": 2}},
            "space.optim.lrr: no such field .* in place of lrr there is: optim",
        ),
        ({"optim": {"lr": {"low": 1e-3, "high": 1e-4}}}, "space.optim.lr: low is 0.001, high 0.0001; expected finite"),
        ({"optim.lr": {"low": 0.0, "high": 1.0, "log": True}}, "log = true needs low > 0"),
        (
            {"optim.lr": {"low": 0.0, "high": 1.0}},
            "space.optim.lr: 0.0 is refused: .*optim.lr and optim.clip: exp",
        ),
        ({"optim.lr": {"lo": 1.0}}, "space.optim.lr.lo: no such field"),
        ({"optim.lr": 3}, r"space.optim.lr: found 3, expected \{ low, high"),
        ({"optim.lr": {"choices": ["a"]}}, "space.optim.lr: 'a' is refused: expected float, found 'a'"),
        ({"model.layers": {"low": 1.5, "high": 3}}, "space.model.layers: found .* expected whole numbers"),
        (
            {"model.layers": {"low": 0, "high": 3}},
            "space.model.layers: 0 is refused: model.layers: expected at",
        ),
        ({"optim.schedule": {"low": 0, "high": 3}}, "the field is not a number"),
        ({"optim.schedule": {"choices": ["linear"]}}, "space.optim.schedule: 'linear' is refused: .*'cosine', 'wsd'"),
        ({"model.layer_ids": {"low": 0, "high": 3}}, "the field is not a number"),
        ({"optim": {"choices": [1]}}, "space.optim: is a table; expected one of its fields: optimizer,"),
        ({"validate.every": {"low": 1, "high": 3}}, "space.validate.every: is set by the sweep"),
        ({"seed": {"choices": [1, 1]}}, "expected distinct choices"),
        ({"seed": {"choices": [1], "low": 2}}, "expected distinct choices and nothing else"),
    ],
)
def test_a_space_that_cannot_be_is_refused(space: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        sweep_space.read_space(space, TrainConfig())
    assert "\n" not in str(error.value)


def test_what_a_space_can_say() -> None:
    """Every kind of dimension reaches the trial's settings; values that need each other are not refused."""
    space = {
        "model": {"layers": {"low": 1, "high": 5, "step": 2}, "layer_ids": {"choices": [[1, 3], [1, 3, 5]]}},
        "loss": {"decay": {"choices": [0.0, 1.0]}, "dpace": {"choices": [0, 1.0]}, "gamma": {"low": 2, "high": 9}},
        "optim.ema": {"choices": ["None", 0.999]},
        "optim.lr": {"low": 1e-4, "high": 1e-3, "log": True},
        "data.row_tokens": {"low": 64, "high": 1024, "log": True},
    }
    base = TrainConfig(optim=OptimConfig(ema=0.5))
    dimensions = sweep_space.read_space(space, base)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    found = []
    for _ in range(40):
        trial = study.ask()
        values = sweep_space.suggest(trial, dimensions)
        assert sweep_space.suggest(optuna.Trial(study, trial._trial_id), dimensions) == values
        if values["loss.decay"] or values["loss.dpace"]:
            found.append(sweep_space.settings(base, values))
    assert {c.model.layers for c in found} == {1, 3, 5} and {c.model.layer_ids for c in found} == {(1, 3), (1, 3, 5)}
    assert {c.optim.ema for c in found} == {None, 0.999} and all(isinstance(c.data.row_tokens, int) for c in found)
    assert all(2 <= (c.loss.gamma or 0) <= 9 and 1e-4 <= c.optim.lr <= 1e-3 for c in found)
    assert all(c.data == DataConfig(row_tokens=c.data.row_tokens) for c in found)
