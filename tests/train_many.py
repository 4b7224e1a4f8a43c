"""`python -m torch.distributed.run tests/train_many.py RUNS`: several runs under one torchrun, which is slow to start.

RUNS is a JSON list of argument lists of `dflash-train run`.
"""

import json
import sys
from contextlib import nullcontext

import torch

from dflash_offline.shards.command import parse
from dflash_offline.train import parallel
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.loop import train

torch.set_num_threads(1)
with parallel.connect("cpu") as ranks:
    parallel.connect = lambda _: nullcontext(ranks)  # type: ignore[assignment]
    for argv in json.loads(sys.argv[1]):
        assert train(parse(TrainConfig, argv, "", "")) == 0
