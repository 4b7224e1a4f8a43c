"""`dflash-train eval`: what is measured on which samples, and how it is told."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.train import parallel
from dflash_offline.train.config import EvalConfig
from dflash_offline.train.evaluate import (
    NOT_GREEDY,
    bf16_weights,
    breakdown,
    load_target,
    measure,
    sampled_summary,
    summary,
)
from dflash_offline.train.export import load_drafter, run_drafter
from dflash_offline.train.folder import read_config, read_identity
from dflash_offline.train.memory import fits
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter
from dflash_offline.train.plan import chosen, held_out, in_key_order
from dflash_offline.train.stop import Stop

_RESULT_HEAD = b'{\n "drafter": '  # how every result begins
_SAMPLES = 10_000
"""Samples that a result names one by one."""
_ROWS = 20
"""Lines of a printed table."""
_NO_ROOM = "a GPU that nothing else uses, one with more memory, or --device cpu, which is slow"
SAMPLED_NOTE = "right for responses that the target sampled at temperature {} from its whole distribution; these are {}"


def evaluate(config: EvalConfig) -> int:
    """The command."""
    with parallel.connect(config.device) as ranks, fits(ranks, _NO_ROOM) as place:
        place.now = "measuring"
        drafter, step = _drafter(config)
        run = read_config(config.run_dir) if config.run_dir else None
        paths = [config.cache] if config.cache else [run.cache, *run.data.caches] if run else []
        cache = Mix(paths)
        if config.run_dir and not config.cache:
            _check_same(config.run_dir, cache)
        check_fit(drafter, cache, config.temperature)
        val_fraction = config.val_fraction if config.val_fraction is not None else run.data.val_fraction if run else 0.0
        if run is not None and config.split == "val" and val_fraction > run.data.val_fraction:
            raise UsageError(
                f"val_fraction = {val_fraction}: the run held out only {run.data.val_fraction} and trained on "
                "the rest; train anew with a larger --data.val-fraction"
            )
        # What a report and a model card may say of the run.
        own = run is not None and config.cache is None and val_fraction == run.data.val_fraction
        out = config.out or _default_out(config, step, "" if own else f"-{cache.fingerprint[:8]}-{val_fraction:g}")
        _check_out(out)
        where = ", ".join(map(str, paths))
        val = held_out(cache.prompt_keys, val_fraction)
        trained = ~val & chosen(cache.keys, run.data.fraction) if run else ~val
        wanted = {"val": val, "train": trained, "all": np.ones_like(val)}[config.split]
        numbers = in_key_order(cache.keys, wanted & cache.new & (cache.anchors > 0), config.samples)
        if not numbers:
            raise UsageError(
                f"no samples: the {config.split} split of {where} is empty at val_fraction = {val_fraction}; "
                "expected another --val-fraction, or --split all"
            )
        target = load_target(cache, ranks.device, torch.float32 if ranks.device.type == "cpu" else torch.bfloat16)
        weights, temperature = bf16_weights(drafter, ranks.device), config.temperature or 0.0
        counts = measure(weights, target, cache, numbers, ranks, Stop(), temperature)
        assert counts is not None  # nobody asks
        greedy = cache.generation == "greedy"
        result = {
            "drafter": str(config.drafter or config.run_dir),
            "step": step,
            "cache": where,
            "split": config.split,
            "own_held_out": own and config.split == "val",
            "trained_on": int(trained[numbers].sum()) if run else None,
            "generation": cache.generation,
            "note": None if greedy else NOT_GREEDY.format(cache.generation),
            **summary(counts, config.resamples, config.seed),
        }
        if temperature:
            found = sampled_summary(counts, temperature, config.resamples, config.seed)
            result["sampled"] = {**found, "note": SAMPLED_NOTE.format(temperature, cache.generation)}
        if config.draft_ms is not None and config.verify_ms is not None:
            times = (config.draft_ms, config.verify_ms, config.target_ms or config.verify_ms)
            result["speedup"] = {
                **dict(zip(("draft_ms", "verify_ms", "target_ms"), times, strict=True)),
                "speedup": speedup(result["tau"], *times),
                "interval": [speedup(tau, *times) for tau in result["tau_interval"]],
                **({"sampled": speedup(result["sampled"]["tau"], *times)} if temperature else {}),
            }
        # Buckets of tokens by powers of two, named by their lower end.
        result["by_length"] = breakdown(counts, 2 ** np.log2(cache.tokens[numbers]).astype(np.int64))
        sources = [source for part in cache.caches for source in part.sources]
        result["by_source"] = breakdown(counts, [sources[n] for n in numbers])
        result["per_sample"] = [
            {"key": cache.keys[n], "tokens": t, "steps": s, "tau": t / max(s, 1)}
            for n, (t, s) in zip(numbers[:_SAMPLES], counts.walked_S2.tolist(), strict=False)
        ]
        if ranks.first:
            with atomic_file(out) as file:
                file.write(_dumps(result).encode())
            print(f"{table(result)}\nwritten to {out}")
    return 0


def speedup(tau: float, draft_ms: float, verify_ms: float, target_ms: float) -> float:
    """Modelled speed-up over plain decoding: tau * target_ms / (draft_ms + verify_ms).

    The three are milliseconds of drafting a block, of the target's pass over a block of K tokens, and of its pass over
    one token. It knows nothing of prefill, sampling and scheduling, nor of how the times grow with the batch: measure
    them at the batch size and length that you serve.
    """
    return tau * target_ms / (draft_ms + verify_ms)


def table(result: dict[str, Any]) -> str:
    """A result for people."""
    low, high = result["tau_interval"]
    step, seen = result.get("step"), result.get("trained_on")
    lines = [
        f"{result['drafter']}{'' if step is None else f', step {step}'}: {result['split']} samples of {result['cache']}"
        + (f", {seen} of them trained on" if seen else ""),
        f"tau            {result['tau']:.3f}   (95 % of resampled sets: {low:.3f} to {high:.3f})",
        f"tau, uniform   {result['tau_uniform']:.3f}   (over all anchors, not those that serving lands on)",
        f"samples {result['samples']}, steps {result['steps']}, tokens {result['tokens']}",
        "slot           " + " ".join(f"{k:4d}" for k in range(1, len(result["acceptance_marginal"]) + 1)),
        "hit, if asked  " + " ".join(f"{x:4.2f}" for x in result["acceptance_conditional"]),
        "hit, of all    " + " ".join(f"{x:4.2f}" for x in result["acceptance_marginal"]),
    ]
    if sampled := result.get("sampled"):
        low, high = sampled["tau_interval"]
        lines += [
            f"at temperature {sampled['temperature']}, drafts sampled too ({sampled['note']}):",
            f"tau            {sampled['tau']:.3f}   (95 % of resampled sets: {low:.3f} to {high:.3f})",
            f"tau, uniform   {sampled['tau_uniform']:.3f}",
            "kept, of all   " + " ".join(f"{x:4.2f}" for x in sampled["acceptance_marginal"]),
        ]
    for name in ("length", "source"):
        rows = result.get(f"by_{name}", [])
        if len(rows) > 1:
            lines.append(f"by {name}" + (", from so many tokens" if name == "length" else ""))
            lines += [
                f"  {row['label']!s:>12}  tau {row['tau']:.3f}  samples {row['samples']}, steps {row['steps']}"
                for row in rows[:_ROWS]
            ]
            lines += [f"  ... {len(rows) - _ROWS} more in the file"] * (len(rows) > _ROWS)
    if model := result.get("speedup"):
        low, high = model["interval"]
        lines.append(
            f"speed-up       {model['speedup']:.2f}   ({low:.2f} to {high:.2f}), modelled: "
            f"tau * {model['target_ms']} / ({model['draft_ms']} + {model['verify_ms']}) ms"
        )
    if result["note"]:
        lines.append("note: " + result["note"])
    return "\n".join(lines)


def _dumps(result: dict[str, Any]) -> str:
    """JSON with a line for each entry, and for each row of a table."""

    def value(entry: Any) -> str:
        if isinstance(entry, list) and entry and isinstance(entry[0], dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, entry)) + "\n ]"
        return json.dumps(entry)

    return "{\n " + ",\n ".join(f"{json.dumps(name)}: {value(entry)}" for name, entry in result.items()) + "\n}\n"


def _drafter(config: EvalConfig) -> tuple[Drafter, int | None]:
    if config.drafter is not None:
        return load_drafter(config.drafter), None
    assert config.run_dir is not None
    return run_drafter(config.run_dir, config.step, config.best)


def _default_out(config: EvalConfig, step: int | None, other: str) -> Path:
    """`other` tells samples that are not the run's own from those that are."""
    if config.drafter is not None:
        return config.drafter / "eval.json"
    assert config.run_dir is not None and step is not None
    count = f"-{config.samples}" if config.samples else ""
    return config.run_dir / "eval" / f"step-{step:08d}-{config.split}{count}{other}.json"


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


def check_fit(drafter: Drafter, cache: Mix, temperature: float | None) -> None:
    """Raises UsageError where the drafter is for another target, or the cache lacks what it reads."""
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
    without = [part.path for part in cache.caches if not part.manifest.last_hidden]
    if temperature and without:
        raise UsageError(
            f"{without[0]}: does not store the target's last hidden state, which --temperature needs; extract again "
            "with --last-hidden True, or leave --temperature out"
        )
