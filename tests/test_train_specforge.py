"""Twenty steps of `dflash-train run` and of SpecForge's own DFlash module, side by side.

Runs where `specforge` (0.2.0) can be imported, or with DFLASH_SPECFORGE=/path/to/a/python that can.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from train_reference import chats, make_cache, states_of, target_tensors
from train_runs import FLAGS, metrics

from dflash_offline.shards.command import parse
from dflash_offline.shards.keys import eligible_anchors
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.hf import to_config
from dflash_offline.train.job import Job, prepare
from dflash_offline.train.loop import train
from dflash_offline.train.model import new_drafter
from dflash_offline.train.rows import draw_anchors

PYTHON = os.environ.get("DFLASH_SPECFORGE") or (sys.executable if importlib.util.find_spec("specforge") else None)


def batches(job: Job) -> dict[str, torch.Tensor]:
    """The rows of every step as padded batches of whole samples."""
    out = {}
    for step, (members, visits) in enumerate(job.plan.dealt(0, job.steps, 0, 1)):
        samples = [job.cache.read(number) for number in members.tolist()]
        drawn = [
            draw_anchors(eligible_anchors(sample.loss_mask), int(job.slots[number]), job.config.seed, visit, sample.key)
            for sample, number, visit in zip(samples, members, visits.tolist(), strict=True)
        ]
        anchors = [torch.from_numpy(one) for one in drawn]
        parts = {
            "ids": [torch.from_numpy(s.input_ids.astype(np.int64)) for s in samples],
            "mask": [torch.from_numpy(s.loss_mask) for s in samples],
            "states": [states_of(s.input_ids) for s in samples],
            "anchors": anchors,
            "real": [torch.ones(len(a), dtype=torch.uint8) for a in anchors],
        }
        out |= {f"{step}.{name}": pad_sequence(part, batch_first=True) for name, part in parts.items()}
    return out


@pytest.mark.skipif(PYTHON is None, reason="needs specforge, or DFLASH_SPECFORGE=/path/to/python")
@pytest.mark.parametrize("loss_type", ["dflash", "dpace"])
def test_the_loss_curve_is_that_of_specforge(loss_type: str, tmp_path: Path) -> None:
    single_turn = [sample for sample in chats(60, seed=4) if (np.diff(sample[1].astype(int)) == 1).sum() == 1]
    cache = make_cache(tmp_path / "cache", single_turn).path
    loss = ["--loss.decay", "0", "--loss.dpace", "1", "--loss.dpace-divisor", "samples"] if loss_type == "dpace" else []
    flags = ["--data.rows-per-step", "1", "--optim.max-steps", "20", "--optim.epochs", "6", *loss]
    argv = ["--cache", str(cache), "--run-dir", str(tmp_path / "run"), *FLAGS, *flags]
    config = parse(TrainConfig, argv, "", "")
    job = prepare(config, world=1)
    assert train(config) == 0
    ours = metrics(tmp_path / "run")

    (tmp_path / "config.json").write_text(json.dumps(to_config(job.spec)))
    save_file(new_drafter(job.spec, config.seed).state_dict(), tmp_path / "weights.safetensors")
    save_file(target_tensors(), tmp_path / "target.safetensors")
    save_file(batches(job), tmp_path / "steps.safetensors")
    run = {"loss_type": loss_type, "gamma": 3.0, "rates": [m["lr"] for m in ours], "clip": config.optim.clip}
    (tmp_path / "run.json").write_text(json.dumps(run))
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("specforge_curve.py")), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert len(ours) == len(theirs) == 20 and max(m["samples"] for m in ours) > 1
    # D-PACE divides by the batch alone: its losses and norms are a hundred times as large.
    size = 1.0 if loss_type == "dflash" else ours[0]["loss"]
    worst = {name: max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True)) for name in theirs[0]}
    print(worst, size, [round(m["loss"], 4) for m in ours])
    assert worst["loss"] < 1e-5 * size and worst["grad_norm"] < 1e-5 * size and worst["accuracy"] < 1e-6
