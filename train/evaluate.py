"""`dflash-train eval`: acceptance on held-out samples, with an interval and per slot.

Shapes: S samples, K block; counts per slot have K - 1 columns, slots 1 .. K - 1.
"""

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.train import parallel
from dflash_offline.train.config import EvalConfig
from dflash_offline.train.export import load_drafter, run_drafter
from dflash_offline.train.folder import read_config, read_identity
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter, RMSNorm, Target
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.plan import Ints, held_out, in_key_order
from dflash_offline.train.rows import column_index
from dflash_offline.train.stop import Stop
from dflash_offline.train.walk import Drafts, draft_sample, walk

NOT_GREEDY = (
    "responses were not generated greedily by the target ({}): tau estimates serving only if the target samples "
    "the same way; on text the target did not write it says nothing about serving"
)

ZERO_CENTRED = ("qwen3_5", "qwen3_5_text")
"""Targets whose norms multiply by 1 + weight."""
_RESULT_HEAD = b'{\n "drafter": '  # how every result begins


@dataclass(frozen=True)
class Counts:
    """What the walk counted in each of S samples; sums of it are all that is reported."""

    walked_S2: Ints
    """Tokens gained and steps taken."""
    uniform_S2: Ints
    """Tokens accepted from all anchors, and anchors."""
    slots_S4K: Ints
    """Per slot: within the span, hit; reached with only hits before, and hit then."""


def count(drafts: Drafts) -> tuple[Ints, Ints, Ints]:
    """Counts of one sample."""
    steps = walk(drafts)
    before = np.logical_and.accumulate(np.pad(drafts.hit_AK, ((0, 0), (1, 0)), constant_values=True)[:, :-1], axis=1)
    reached = before & drafts.inside_AK
    slots = np.stack([x.sum(axis=0) for x in (drafts.inside_AK, drafts.hit_AK, reached, reached & drafts.hit_AK)])
    walked = np.array([sum(step.recorded for step in steps), len(steps)])
    return walked, np.array([drafts.accepted_A.sum(), len(drafts.anchor_A)]), slots


def measure(
    drafter: Drafter, target: Target, cache: Cache | Mix, numbers: Sequence[int], ranks: Ranks, stop: Stop
) -> Counts | None:
    """Walk samples `numbers`, shared among the ranks. Each gets all counts, or None where one was told to stop."""
    layers = column_index(cache.layer_ids, drafter.spec.layer_ids)
    size = drafter.spec.block_size
    table = torch.zeros(len(numbers), 4 + 4 * (size - 1), dtype=torch.int64)
    for i in ranks.share(range(len(numbers))):
        if stop.signal is not None:
            break
        walked, uniform, slots = count(draft_sample(drafter, target, cache.read(numbers[i]), layers))
        table[i] = torch.from_numpy(np.concatenate([walked, uniform, slots.ravel()]))
    if ranks.sum(torch.tensor(stop.signal is not None, dtype=torch.int64, device=ranks.device)):
        return None
    found = ranks.sum(table.to(ranks.device)).cpu().numpy()
    return Counts(found[:, :2], found[:, 2:4], found[:, 4:].reshape(len(numbers), 4, size - 1))


def summary(counts: Counts, resamples: int, seed: int) -> dict[str, Any]:
    """Pooled numbers and a 95 % bootstrap interval over samples."""
    tokens, steps = counts.walked_S2.sum(axis=0).tolist()
    inside, hits, reached, kept = counts.slots_S4K.sum(axis=0)
    accepted, anchors = counts.uniform_S2.sum(axis=0).tolist()
    low, high = _interval(counts.walked_S2, resamples, seed)
    return {
        "tau": tokens / max(steps, 1),
        "tau_interval": [low, high],
        "tau_uniform": 1 + accepted / max(anchors, 1),
        "samples": len(counts.walked_S2),
        "tokens": tokens,
        "steps": steps,
        "acceptance_marginal": _ratios(hits, inside),
        "acceptance_conditional": _ratios(kept, reached),
    }


def bf16_weights(drafter: Drafter, device: torch.device) -> Drafter:
    """A copy with the weights that an export holds: computed with in fp32 on the CPU, in bf16 elsewhere."""
    rounded = copy.deepcopy(drafter).to(device, torch.bfloat16)
    return (rounded.float() if device.type == "cpu" else rounded).requires_grad_(False)


def load_target(cache: Cache | Mix, device: torch.device, dtype: torch.dtype) -> Target:
    """Embedding (as stored), head and final norm of the cache's target."""
    tensors, config = cache.target_tensors(), cache.target_config
    expected = (config["vocab_size"], cache.hidden_size)
    for name in ("embed_tokens", "lm_head"):
        if (found := tuple(tensors[name].shape)) != expected:
            raise UsageError(
                f"{cache.path}: {name} is {found}, (vocab_size, hidden_size) of the target is {expected}; extract again"
            )
    norm = RMSNorm(cache.hidden_size, config["rms_norm_eps"]).to(device).requires_grad_(False)
    centred = config.get("model_type") in ZERO_CENTRED
    norm.weight.copy_(tensors["norm"].float() + centred)
    return Target(tensors["embed_tokens"].to(device), tensors["lm_head"].to(device, dtype), norm)


def evaluate(config: EvalConfig) -> int:
    """The command."""
    with parallel.connect(config.device) as ranks:
        drafter, step = _drafter(config)
        out = config.out or _default_out(config, step)
        _check_out(out)
        run = read_config(config.run_dir) if config.run_dir else None
        paths = [config.cache] if config.cache else [run.cache, *run.data.caches] if run else []
        cache = Mix(paths)
        if config.run_dir and not config.cache:
            _check_same(config.run_dir, cache)
        _check_fit(drafter, cache)
        val_fraction = config.val_fraction if config.val_fraction is not None else run.data.val_fraction if run else 0.0
        if run is not None and config.split == "val" and val_fraction > run.data.val_fraction:
            raise UsageError(
                f"val_fraction = {val_fraction}: the run held out only {run.data.val_fraction} and trained on "
                "the rest; train anew with a larger --data.val-fraction"
            )
        where = ", ".join(map(str, paths))
        val = held_out(cache.prompt_keys, val_fraction)
        chosen = {"val": val, "train": ~val, "all": np.ones_like(val)}[config.split]
        numbers = in_key_order(cache.keys, chosen & cache.new & (cache.anchors > 0), config.samples)
        if not numbers:
            raise UsageError(
                f"no samples: the {config.split} split of {where} is empty at val_fraction = {val_fraction}; "
                "expected another --val-fraction, or --split all"
            )
        target = load_target(cache, ranks.device, torch.float32 if ranks.device.type == "cpu" else torch.bfloat16)
        counts = measure(bf16_weights(drafter, ranks.device), target, cache, numbers, ranks, Stop())
        assert counts is not None  # nobody asks
        result = {
            "drafter": str(config.drafter or config.run_dir),
            "step": step,
            "cache": where,
            "split": config.split,
            "generation": cache.generation,
            **summary(counts, config.resamples, config.seed),
            "per_sample": [
                {"key": cache.keys[n], "tokens": t, "steps": s}
                for n, (t, s) in zip(numbers, counts.walked_S2.tolist(), strict=True)
            ],
        }
        if ranks.first:
            with atomic_file(out) as file:
                file.write(json.dumps(result, indent=1).encode())
            print(f"{table(result)}\nwritten to {out}")
    return 0


def table(result: dict[str, Any]) -> str:
    """A result for people."""
    low, high = result["tau_interval"]
    lines = [
        f"tau            {result['tau']:.3f}   (95 % of resampled sets: {low:.3f} to {high:.3f})",
        f"tau, uniform   {result['tau_uniform']:.3f}   (over all anchors, not those that serving lands on)",
        f"samples {result['samples']}, steps {result['steps']}, tokens {result['tokens']}",
        "slot           " + " ".join(f"{k:4d}" for k in range(1, len(result["acceptance_marginal"]) + 1)),
        "hit, if asked  " + " ".join(f"{x:4.2f}" for x in result["acceptance_conditional"]),
        "hit, of all    " + " ".join(f"{x:4.2f}" for x in result["acceptance_marginal"]),
    ]
    if result["generation"] != "greedy":
        lines.append("note: " + NOT_GREEDY.format(result["generation"]))
    return "\n".join(lines)


def _drafter(config: EvalConfig) -> tuple[Drafter, int | None]:
    if config.drafter is not None:
        return load_drafter(config.drafter), None
    assert config.run_dir is not None
    return run_drafter(config.run_dir, config.step, config.best)


def _default_out(config: EvalConfig, step: int | None) -> Path:
    if config.drafter is not None:
        return config.drafter / "eval.json"
    assert config.run_dir is not None and step is not None
    count = f"-{config.samples}" if config.samples else ""
    return config.run_dir / "eval" / f"step-{step:08d}-{config.split}{count}.json"


def _check_out(out: Path) -> None:
    """Before the work: the result can be written to `out`, and replaces nothing but an earlier result."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            raise UsageError(f"{out}: is no regular file; expected the name of a JSON file in --out")
        head = b""
        if out.exists():
            with out.open("rb") as file:
                head = file.read(len(_RESULT_HEAD))
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error}; choose another --out") from None
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"{out}: its folder cannot be written; choose another --out")
    if head not in (b"", _RESULT_HEAD):
        raise UsageError(f"{out}: exists and is no result of `dflash-train eval`; choose another --out")


def _check_same(run: Path, cache: Mix) -> None:
    if (expected := read_identity(run)["cache_fingerprint"]) != cache.fingerprint:
        raise UsageError(
            f"{cache.path}: is another cache now: its fingerprint is {cache.fingerprint}, {run} was made with "
            f"{expected}; put that one back, or give --cache to measure on another"
        )


def _check_fit(drafter: Drafter, cache: Mix) -> None:
    spec, target = drafter.spec, cache.target_config
    for name, found, expected in (
        ("hidden_size", cache.hidden_size, spec.hidden_size),
        ("vocab_size", target.get("vocab_size"), spec.vocab_size),
        ("num_hidden_layers", target.get("num_hidden_layers"), spec.num_target_layers),
    ):
        if found != expected:
            raise UsageError(f"{cache.path}: {name} of the target is {found}, the drafter is for one with {expected}")
    if missing := [i for i in spec.layer_ids if i not in cache.layer_ids]:
        raise UsageError(f"{cache.path}: has layers {list(cache.layer_ids)}, the drafter also reads {missing}")


def _interval(walked_S2: Ints, resamples: int, seed: int) -> tuple[float, float]:
    generator = np.random.Generator(np.random.Philox(seed))
    sums = np.stack(
        [walked_S2[generator.integers(len(walked_S2), size=len(walked_S2))].sum(axis=0) for _ in range(resamples)]
    )
    low, high = np.quantile(sums[:, 0] / np.maximum(sums[:, 1], 1), [0.025, 0.975])
    return float(low), float(high)


def _ratios(part: Ints, whole: Ints) -> list[float]:
    return (part / np.maximum(whole, 1)).tolist()
