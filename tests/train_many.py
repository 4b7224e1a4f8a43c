"""`python -m torch.distributed.run tests/train_many.py RUNS`: several runs under one torchrun, which is slow to start.

RUNS is a JSON list of argument lists of `dflash-train run`. A list that begins with "drift" is of a run in which the
last rank's weights leave the others' after two steps, which must be found.
"""

import json
import sys
from contextlib import nullcontext

import torch

from dflash_offline.shards.command import parse
from dflash_offline.shards.errors import RunError
from dflash_offline.train import parallel
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.loop import train
from dflash_offline.train.state import State

torch.set_num_threads(1)
plain = State.step


def drift(state: State, number: int, rate: float) -> None:
    plain(state, number, rate)
    if number == 2 and ranks.rank == ranks.world - 1:
        state.drafter.norm.weight.data[0] += 1e-6


with parallel.connect("cpu") as ranks:
    parallel.connect = lambda _: nullcontext(ranks)  # type: ignore[assignment]
    for argv in json.loads(sys.argv[1]):
        if argv[0] != "drift":
            assert train(parse(TrainConfig, argv, "", "")) == 0
            continue
        State.step = drift  # type: ignore[method-assign]
        try:
            train(parse(TrainConfig, argv[1:], "", ""))
        except RunError as error:
            assert "step 2: the weights of the ranks differ" in str(error)
        else:
            raise AssertionError("the ranks differ and nobody said so")
        State.step = plain  # type: ignore[method-assign]
