"""`python -m torch.distributed.run tests/train_many.py RUNS`: several runs under one torchrun, which is slow to start.

RUNS is a JSON list of argument lists of `dflash-train run`. A list that begins with "drift" is of a run in which the
last rank's weights leave the others' after two steps, with "cache" of one where it has another cache (its next word),
with "stale" of one in which it does not see the newest checkpoint. All must be found.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from dflash_offline.shards.command import parse
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.train import checkpoint, parallel
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.loop import train
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.state import State

torch.set_num_threads(1)
plain = State.step
SAID = {
    "drift": "step 2: the weights of the ranks differ",
    "cache": "differs from the other ranks: its newest checkpoint is of step 0 of 2, its cache [0-9a-f]+; expected",
    "stale": "differs from the other ranks: its newest checkpoint is of step [12] of 2, its cache",
}


def drift(state: State, number: int, rate: float, scale: float) -> None:
    plain(state, number, rate, scale)
    if number == 2 and ranks.rank == ranks.world - 1:
        state.drafter.norm.weight.data[0] += 1e-6


def late(ranks: Ranks, whole: Tensor, share: Tensor) -> Callable[[], None]:
    """What is gathered is NaN until somebody waits for it."""
    came = torch.empty_like(whole)
    wait = gather(ranks, came, share.clone())
    whole.fill_(torch.nan)

    def waited() -> None:
        wait()
        whole.copy_(came)

    return waited


gather = Ranks.gather
Ranks.gather = late  # type: ignore[method-assign]
with parallel.connect("cpu") as ranks:
    parallel.connect = lambda _: nullcontext(ranks)  # type: ignore[assignment]
    for argv in json.loads(sys.argv[1]):
        if argv[0] not in SAID:
            assert train(parse(TrainConfig, argv, "", "")) == 0
            continue
        last, case = ranks.rank == ranks.world - 1, argv.pop(0)
        if case == "cache":
            other = argv.pop(0)
            argv += ["--cache", other] * last
        with pytest.MonkeyPatch.context() as patch, pytest.raises((RunError, UsageError), match=SAID[case]):
            if case == "drift":
                patch.setattr(State, "step", drift)
            if case == "stale" and last:
                patch.setattr(checkpoint, "_folders", lambda root, seen=checkpoint._folders: seen(root)[1:])
            train(parse(TrainConfig, argv, "", ""))
