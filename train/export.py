"""Drafters as Hugging Face folders: written for `dflash`, vLLM and SGLang, read from anyone's."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import atomic_file, file_hash, publish
from dflash_offline.train import checkpoint
from dflash_offline.train.config import ModelConfig
from dflash_offline.train.folder import CHECKPOINTS, check_checkpoints, read_config, read_identity
from dflash_offline.train.hf import from_config, to_config
from dflash_offline.train.log import METRICS, read_metrics, say
from dflash_offline.train.model import Drafter, new_drafter
from dflash_offline.train.spec import DrafterSpec

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
# What the weights of a drafter were learnt with, besides their own shapes.
_START = (
    "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "layer_ids", "num_target_layers",
    "vocab_size", "mask_token_id", "rms_norm_eps", "rope_theta",
)  # fmt: skip


def export_drafter(drafter: Drafter, folder: Path, card: str | None = None) -> None:
    """Write `folder`, which must not exist: bf16 weights, config.json and the model card, whole or not at all."""
    if folder.exists():
        raise UsageError(f"{folder}: exists; expected a new folder")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    if name := checkpoint.not_finite(tensors):
        raise RunError(
            f"{folder}: not written: {name} is not finite in bf16; expected finite weights, try another --step"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error}; choose another --out") from None
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        checkpoint.write_tensors(temporary / WEIGHTS, tensors)
        with atomic_file(temporary / CONFIG) as file:
            file.write(json.dumps(to_config(drafter.spec), indent=2).encode())
        if card is not None:
            with atomic_file(temporary / CARD) as file:
                file.write(card.encode())
        publish(temporary, folder)
    except OSError as error:
        raise RunError(f"{folder}: not written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_spec(folder: Path) -> DrafterSpec:
    """Spec of the drafter in `folder`, exported here or published, whose tensors have the names and shapes of it.

    Raises UsageError when it is another model.
    """
    config, weights = folder / CONFIG, folder / WEIGHTS
    for path in (config, weights):
        if not path.is_file():
            raise UsageError(f"{path}: no such file; expected a drafter folder with {CONFIG} and {WEIGHTS}")
    try:
        spec = from_config(json.loads(config.read_text()), str(config))
    except ValueError as error:
        raise UsageError(f"{config}: not valid JSON: {error}") from None
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise UsageError(f"{config}: not the config of a drafter: {error}") from None
    with torch.device("meta"):
        expected: dict[str, Any] = {name: tuple(p.shape) for name, p in Drafter(spec).named_parameters()}
    try:
        with safe_open(weights, "pt") as file:
            found = {n.removeprefix("model."): tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UsageError(f"{weights}: cut or no safetensors file: {error}; copy or export it again") from None
    if wrong := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
        name = wrong[0]
        raise UsageError(
            f"{weights}: {len(wrong)} tensors do not fit {CONFIG}; the first: {name} is {found.get(name, 'missing')}, "
            f"expected {expected.get(name, 'no such tensor')}"
        )
    return spec


def load_drafter(folder: Path) -> Drafter:
    """The drafter in `folder`, in fp32. Raises UsageError as `read_spec`, and for weights that are not finite."""
    spec, weights = read_spec(folder), folder / WEIGHTS
    with safe_open(weights, "pt") as file:
        tensors = {n.removeprefix("model."): file.get_tensor(n).float() for n in file.keys()}  # noqa: SIM118
    if bad := checkpoint.not_finite(tensors):
        raise UsageError(f"{weights}: {bad} holds inf or nan; expected finite weights, export another step")
    with torch.device("meta"):
        drafter = Drafter(spec)
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def check_start(config: ModelConfig, spec: DrafterSpec) -> None:
    """Raise UsageError where the weights at `model.init` mean something else in a drafter of `spec`.

    Block size and windows may differ: a drafter can be taught others.
    """
    if config.init is None:
        return
    start = read_spec(config.init)
    for name in _START:
        if (found := getattr(start, name)) != (expected := getattr(spec, name)):
            raise UsageError(f"model.init: {config.init} has {name} = {found}, this run {expected}; they must be equal")
    if len(start.layer_types) != len(spec.layer_types):
        raise UsageError(
            f"model.init: {config.init} has {len(start.layer_types)} layers, this run {len(spec.layer_types)}; "
            "they must be equal"
        )


def first_drafter(config: ModelConfig, spec: DrafterSpec, seed: int) -> Drafter:
    """What training begins with: the weights at `model.init`, or random ones. Raises UsageError as `check_start`."""
    drafter = new_drafter(spec, seed)
    if config.init is not None:
        check_start(config, spec)
        drafter.load_state_dict(load_drafter(config.init).state_dict())
    return drafter


def run_drafter(run: Path, step: int | None, best: bool = False) -> tuple[Drafter, int]:
    """The drafter of a run after `step` steps (None: the newest, or the best; 0: untrained), and the step."""
    config, identity = read_config(run), read_identity(run)
    check_checkpoints(run, config, identity)
    spec = from_config(identity["drafter"], str(run / "identity.json"))
    if step == 0:
        if config.model.init and file_hash(config.model.init / WEIGHTS) != identity.get("init"):
            raise UsageError(f"{config.model.init / WEIGHTS}: is not what {run} started from; put that back")
        return first_drafter(config.model, spec, config.seed), 0
    root = run / CHECKPOINTS
    if not any(root.glob("step-*")) and (lines := read_metrics(run)):  # a sweep tidies its trials up
        raise UsageError(
            f"{root}: none left of the {lines[-1]['step']} steps in {METRICS}: no longer kept, or the run died "
            f"before save.every = {config.save.every}; a sweep keeps only its best trial's unless "
            "keep_checkpoints = true: take that one, or train this one again"
        )
    found, passed = checkpoint.newest(root) if step is None else (checkpoint.at_step(root, step), [])
    if best:
        found = checkpoint.at_best(root)
    for reason in passed:
        say(f"passed over an incomplete checkpoint: {reason}")
    if found is None:
        raise UsageError(f"{root}: no checkpoint yet; --step 0 gives the untrained drafter")
    drafter = Drafter(spec)
    drafter.load_state_dict(found.load(found.served))
    return drafter, found.step
