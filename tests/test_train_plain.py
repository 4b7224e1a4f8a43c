"""A run with every option at once, and what it tells, against a plain trainer that drafts block by block.

Shapes: K block, D hidden.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from train_reference import chats, drafter, make_cache, one_block, plain_loss, target
from train_runs import FLAGS, VARIANTS, metrics

from dflash_offline.shards.command import parse
from dflash_offline.shards.keys import eligible_anchors, last_positions
from dflash_offline.train import checkpoint
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.export import export_drafter, load_drafter
from dflash_offline.train.job import prepare
from dflash_offline.train.loop import train
from dflash_offline.train.rows import draw_anchors, unit_noise

STEPS, K, NOISE = 3, 6, 0.5


def test_a_run_equals_a_plain_trainer(tmp_path: Path) -> None:
    """Two caches, weights, warm start, noise, mixed loss, Muon, decay, frozen parts, average, clipping."""
    samples = chats(30)
    first, second = (
        make_cache(tmp_path / name, part, last_hidden=True).path
        for name, part in (("a", samples[:18]), ("b", samples[14:]))
    )
    export_drafter(drafter(sliding_window=8), tmp_path / "init")
    flags = [
        "--cache", first, "--run-dir", tmp_path / "run", *FLAGS, *VARIANTS["everything"], "--data.caches", second,
        "--data.weights", 1, 0.5, "--data.feature-noise", NOISE, "--model.init", tmp_path / "init", "--loss.gamma", 2,
        "--loss.dpace-alpha", 0.4, "--optim.muon-momentum", 0.6, "--optim.betas", 0.7, 0.9, "--optim.clip", 0.7,
        "--optim.max-steps", STEPS,
    ]  # fmt: skip
    config = parse(TrainConfig, [str(flag) for flag in flags], "", "")
    assert train(config) == 0

    job, frozen, made = prepare(config, 1), target(), load_drafter(tmp_path / "init")
    parameters = dict(made.named_parameters())
    for name in [n for n in parameters if n.startswith("layers.0.mlp.") or n == "norm.weight"]:
        parameters.pop(name).requires_grad_(False)
    gains = [p for p in parameters.values() if p.ndim == 1]
    matrices = [p for n, p in parameters.items() if p.ndim == 2 and n != "fc.weight"]
    muon = torch.optim.Muon(
        [{"params": matrices, "weight_decay": 0.1}, {"params": [parameters["fc.weight"]], "weight_decay": 0.0}],
        momentum=0.6, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adamw = torch.optim.AdamW(gains, betas=(0.7, 0.9), weight_decay=0.0)
    average = {name: p.detach().clone() for name, p in parameters.items()}
    hits = leading = 0
    dealt = list(job.plan.dealt(0, STEPS, 0, 1))
    for step, rate, told in zip(range(1, 1 + STEPS), (0.5, 1.0, 0.0), metrics(tmp_path / "run"), strict=True):
        total, divisor, accepted, blocks, tokens = torch.tensor(0.0), 0.0, 0, 0, 0
        hits_K, asked_K = np.zeros(K), np.zeros(K)
        members, visits = (np.concatenate(part) for part in zip(*dealt[2 * step - 2 : 2 * step], strict=True))
        for number, visit in zip(members.tolist(), visits.tolist(), strict=True):
            sample = job.cache.read(number)
            assert sample.last_hidden is not None
            ids, mask, tokens = sample.input_ids, sample.loss_mask, tokens + len(sample.input_ids)
            noise = NOISE * unit_noise(sample.states.shape, config.seed, visit, sample.key)
            states = (sample.states.float() + noise).bfloat16()
            before = {int(at): i for i, at in enumerate(last_positions(mask))}
            count = min(len(eligible_anchors(mask)), -(-40 * len(ids) // 100))
            for anchor in draw_anchors(eligible_anchors(mask), count, config.seed, visit, sample.key).tolist():
                slots = [anchor + k for k in range(K)]
                ends = next((k for k in range(K) if slots[k] >= len(ids) or not mask[slots[k]]), K)
                supervised = torch.tensor([[0 < k < ends for k in range(K)]])
                label = torch.tensor([[int(ids[at]) if at < len(ids) else 0 for at in slots]])
                teacher = frozen.norm(torch.stack([sample.last_hidden[before.get(at - 1, 0)] for at in slots]).float())
                output_KD = one_block(made, frozen, ids, states, anchor)
                loss, part = plain_loss(
                    config.loss, output_KD[None], frozen.head_VD, label, supervised, 1, teacher[None]
                )
                total, divisor, blocks = total + loss, divisor + part, blocks + 1
                right = (((output_KD @ frozen.head_VD.T).argmax(-1) == label) & supervised)[0].numpy()
                hits_K, asked_K = hits_K + right, asked_K + supervised[0].numpy()
                accepted += int(np.logical_and.accumulate(right[1:]).sum())
        for p in made.parameters():
            p.grad = None
        (total / divisor).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.7))
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate * config.optim.lr
            optimizer.step()
        for name, p in parameters.items():
            average[name] += (1 - min(0.8, (1 + step) / (10 + step))) * (p.detach() - average[name])
        expected = {
            "loss": float(total.detach()) / divisor, "divisor": divisor, "grad_norm": norm,
            "lr": rate * config.optim.lr, "accuracy": hits_K.sum() / asked_K.sum(),
            "tau_uniform": 1 + accepted / blocks,
        }  # fmt: skip
        assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert told["slot_accuracy"] == pytest.approx((hits_K / np.maximum(asked_K, 1))[1:], abs=1e-4)
        assert (told["samples"], told["anchors"], told["tokens"]) == (len(members), blocks, tokens)
        hits, leading = hits + int(hits_K.sum()), leading + accepted
        assert norm > 0.7
    assert 0 < leading < hits  # or the numbers above would say little
    found = checkpoint.at_step(tmp_path / "run" / "checkpoints", STEPS)
    start = load_drafter(tmp_path / "init").state_dict()
    for file, wanted in (("model.safetensors", parameters), ("ema.safetensors", average)):
        for name, tensor in found.load(file).items():
            if name in wanted:
                moved, off = wanted[name].detach() - start[name], tensor - wanted[name].detach()
                # Muon's iterations in bf16 make much of the last bits of a gradient.
                assert off.norm() < 0.05 * moved.norm(), f"{file} {name}"
