"""The README.md of an exported drafter: what it was trained on and how, what was measured, how to serve it."""

import json
import re
from pathlib import Path
from typing import Any

import tomli_w

from dflash_offline.shards.command import unstructure
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.log import read_metrics
from dflash_offline.train.mix import Mix
from dflash_offline.train.spec import DrafterSpec

# How fast a run was made, and where its files lay, is nobody's business here.
_LEFT_OUT = {"data": ("caches", "threads", "rows_ahead"), "model": ("init",), "loss": ("chunk",)}


def card(run: Path, config: TrainConfig, spec: DrafterSpec, step: int, name: str) -> str:
    """Markdown. Says so where the cache or a measurement is not at hand; names files without their folders."""
    (target, data), layers = _data(config), len(spec.layer_types)
    window = f", window {spec.sliding_window} in {spec.layer_types.count('sliding_attention')}"
    settings = {"seed": config.seed, **{n: _section(config, n) for n in ("model", "data", "loss", "optim")}}
    return "\n".join(
        [
            "---",
            *([f"base_model: {target}"] if re.fullmatch(r"[\w.-]+/[\w.-]+", target) else []),
            "tags: [dflash, speculative-decoding]",
            "---",
            f"# DFlash drafter for {Path(target).name}",
            "",
            f"{layers} layers{window if spec.sliding_window else ''}; blocks of {spec.block_size} tokens; "
            f"reads the target after layers {', '.join(map(str, spec.layer_ids))} of {spec.num_target_layers}, from 0; "
            f"mask token {spec.mask_token_id}. Embedding and head are the target's. Step {step} of its training.",
            "",
            "## Acceptance",
            "",
            *measured(run, step),
            "",
            "## Data",
            "",
            *data,
            "",
            "## Settings",
            "",
            "```toml",
            tomli_w.dumps(settings).strip(),
            "```",
            "",
            "## Serve",
            "",
            *serve(spec, target, name),
            "",
        ]
    )


def serve(spec: DrafterSpec, target: str, name: str) -> list[str]:
    """Commands for the three servers and clients, as their sources have the flags."""
    slots, runner = spec.block_size - 1, ""
    if len(set(spec.layer_types)) > 1:  # sliding and full layers need two groups of keys and values
        runner = "VLLM_USE_V2_MODEL_RUNNER=1 "
    speculative = json.dumps({"method": "dflash", "model": name, "num_speculative_tokens": slots})
    return [
        "```",
        f"{runner}vllm serve {target} --speculative-config '{speculative}'",
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\",
        f"    --speculative-draft-model-path {name} --speculative-num-draft-tokens {spec.block_size}",
        f"python -c \"from dflash import DFlashDraftModel; DFlashDraftModel.from_pretrained('{name}')\"",
        "```",
    ]


def measured(run: Path, step: int) -> list[str]:
    """What `dflash-train eval`, or else training itself, found of this step."""
    found = [json.loads(p.read_text()) for p in sorted((run / "eval").glob(f"step-{step:08d}-val*.json"))]
    # Not of another cache, or of another part held out.
    if found := [result for result in found if result.get("own_held_out")]:
        best = max(found, key=lambda result: result["samples"])
        return _tau(best) + ([f"Note: {best['note']}."] if best.get("note") else [])
    for entry in read_metrics(run):
        if entry["step"] == step and "validation" in entry:
            return _tau(entry["validation"])
    return ["Not measured on held-out samples; `dflash-train eval` and another export put it here."]


def _tau(result: dict[str, Any]) -> list[str]:
    low, high = result["tau_interval"]
    slots = " ".join(f"{x:.2f}" for x in result["acceptance_conditional"])
    return [
        f"Mean accepted length (tau) {result['tau']:.3f}, 95 % interval {low:.3f} to {high:.3f}, on "
        f"{result['samples']} held-out samples ({result['tokens']} tokens), from the cache by the serving walk.",
        f"Acceptance of each slot, if those before it were accepted: {slots}.",
    ]


def _data(config: TrainConfig) -> tuple[str, list[str]]:
    """The target's name, and what is known of the caches."""
    try:
        cache = Mix([config.cache, *config.data.caches])
    except (UsageError, RunError) as error:
        return "TARGET", [f"The cache was not at hand when this was written ({type(error).__name__})."]
    lines = []
    for part in cache.caches:
        files = sorted(Path(file["name"]).name for file in part.manifest.dataset.get("files", []))
        more = f" and {len(files) - 5} more" if len(files) > 5 else ""
        lines.append(
            f"- {len(part)} samples, {int(part.tokens.sum())} tokens, responses {part.generation}, stored as "
            f"{part.manifest.codec.name}" + (f"; {', '.join(files[:5])}{more}" if files else "")
        )
    return str(cache.caches[0].manifest.target.get("path", "TARGET")), lines


def _section(config: TrainConfig, name: str) -> dict[str, Any]:
    return {k: v for k, v in unstructure(getattr(config, name)).items() if k not in _LEFT_OUT.get(name, ())}
