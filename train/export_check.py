"""`dflash-train export --check`: a written folder, read back by code that did not write it.

The files are read as they are and compared with the cache, whose manifest and target say what they must hold. Then the
PyPI package `dflash` loads the folder and drafts; its tokens are compared with the trainer's own.

Shapes: A anchors, K block, D hidden, V vocabulary.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.keys import eligible_anchors
from dflash_offline.train.evaluate import bf16_weights, load_target
from dflash_offline.train.export import CONFIG, WEIGHTS
from dflash_offline.train.hf import to_config
from dflash_offline.train.masks import Blocks
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter, Target, block_inputs
from dflash_offline.train.plan import in_key_order
from dflash_offline.train.rows import column_index, select_layers

_SAMPLES, _ANCHORS = 4, 8
_CLOSE = 1e-4
"""Of the largest logit: how far the client's may lie from the trainer's, both in fp32."""


def require_client() -> None:
    """Raises UsageError where the package is missing, before anything is written."""
    if importlib.util.find_spec("dflash") is None:
        raise UsageError(
            "--check loads the folder with the PyPI package dflash, which is not installed; "
            "pip install --no-deps dflash==0.1.0, or export without --check"
        )


def check_export(folder: Path, drafter: Drafter, cache: Mix) -> str:
    """One line on what was compared.

    Raises UsageError where `folder` is no exported one, RunError with the first fault; it is then not to be served.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(f"{folder / name}: no such file; expected an exported folder, or a new --out")
    faults, said = _read_faults(folder, drafter, cache), ""
    if not faults:
        faults, said = _client_faults(folder, drafter, cache)
    if faults:
        raise RunError(f"{folder}: not what was trained, do not serve it: {faults[0]} ({len(faults)} faults)")
    return said


def _read_faults(folder: Path, drafter: Drafter, cache: Mix) -> list[str]:
    """What the files themselves say. Weights are looked at once the config is right: it says how they should be."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        return [f"{CONFIG}: not valid JSON: {error}, export again"]
    if not isinstance(config, dict):
        return [f"{CONFIG}: is a {type(config).__name__}, expected an object, export again"]
    # vLLM loads every file of weights that it finds.
    faults = [
        f"{path.name}: more weights, expected only {WEIGHTS}; remove it"
        for path in sorted(folder.iterdir())
        if path.suffix in (".safetensors", ".bin", ".pt", ".pth") and path.name != WEIGHTS
    ]
    faults += config_faults(config, drafter, cache)
    try:
        return faults or list(tensor_faults(folder / WEIGHTS, config))
    except SafetensorError as error:
        return [f"{WEIGHTS}: cut or no safetensors file: {error}, export again"]


def config_faults(config: dict[str, Any], drafter: Drafter, cache: Mix) -> Iterator[str]:
    """What config.json says against the cache's target and the drafter."""
    spec, target = drafter.spec, cache.target_config
    theta = float((target.get("rope_parameters") or {}).get("rope_theta") or target["rope_theta"])
    sliding = "sliding_attention" in spec.layer_types
    expected = to_config(spec) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.layer_ids)},
        "num_target_layers": target["num_hidden_layers"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_scaling": None,
        "layer_types": list(spec.layer_types),
        "num_hidden_layers": len(spec.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window if sliding else None,
        "dtype": "bfloat16",
    }
    for name, wanted in expected.items():
        if name not in config or config[name] != wanted:
            yield f"config.json: {name} is {config.get(name)}, expected {wanted}"
    # Servers and clients read many more, wherever they stand: vLLM alone has two for the layers, three for the windows.
    for name in sorted({*config} - {*expected}):
        yield f"config.json: has {name} = {config[name]}, which an export does not; expected none, remove it"
    if missing := [i for i in spec.layer_ids if i not in cache.layer_ids]:
        yield f"config.json: target_layer_ids has {missing}, which the cache does not have: {list(cache.layer_ids)}"
    facts = cache.tokenizer_facts
    if spec.mask_token_id in (*facts["eos_ids"], facts["pad_id"]):
        yield f"config.json: mask_token_id {spec.mask_token_id} is an end or padding token of the target"


def tensor_faults(weights: Path, config: dict[str, Any]) -> Iterator[str]:
    """Names, shapes and dtypes of the published layout, by the sizes in `config`."""
    expected = expected_shapes(config)
    with safe_open(weights, "pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name in sorted({*expected, *found}):
            shape = tuple(found[name].get_shape()) if name in found else None
            if shape != expected.get(name):
                wanted = expected.get(name, "no such name")
                yield f"model.safetensors: {name} is {shape or 'missing'}, expected {wanted}"
            elif found[name].get_dtype() != "BF16":
                yield f"model.safetensors: {name} is {found[name].get_dtype()}, expected BF16 as config.json says"


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """11 tensors a layer and 3 more."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    features = len(config["dflash_config"]["target_layer_ids"]) * hidden
    return {
        "fc.weight": (hidden, features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **{
            f"layers.{i}.{name}.weight": shape
            for i in range(config["num_hidden_layers"])
            for name, shape in layer.items()
        },
    }


def _client_faults(folder: Path, drafter: Drafter, cache: Mix) -> tuple[list[str], str]:
    """Load as a client does; compare how it understood the config, and what it drafts."""
    from dflash import DFlashDraftModel

    spec, faults = drafter.spec, []
    client, loading = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    client.eval()
    if loading["missing_keys"] or loading["unexpected_keys"]:
        faults.append(f"dflash finds missing keys {loading['missing_keys']}, unexpected {loading['unexpected_keys']}")
    understood = {
        "block_size": (client.block_size, spec.block_size),
        "mask_token_id": (client.mask_token_id, spec.mask_token_id),
        "target_layer_ids": (tuple(client.target_layer_ids), spec.layer_ids),
        "sliding windows": (
            [layer.self_attn.sliding_window for layer in client.layers],
            spec.windows,
        ),
        "causal layers": (
            [layer.self_attn.is_causal for layer in client.layers],
            [kind == "sliding_attention" for kind in spec.layer_types],
        ),
        "rotary frequencies": (len(client.rotary_emb.inv_freq), spec.head_dim // 2),
    }
    faults += [f"dflash reads {n} as {found}, expected {wanted}" for n, (found, wanted) in understood.items()
               if found != wanted]  # fmt: skip
    if faults:
        return faults, ""
    target = load_target(cache, torch.device("cpu"), torch.float32)
    rounded, layers = bf16_weights(drafter, torch.device("cpu")), column_index(cache.layer_ids, spec.layer_ids)
    blocks, worst = 0, 0.0
    for number in in_key_order(cache.keys, cache.anchors > 0, _SAMPLES):
        sample = cache.read(number)
        anchors = eligible_anchors(sample.loss_mask)
        anchors = anchors[np.unique(np.linspace(0, len(anchors) - 1, _ANCHORS).astype(np.int64))]
        states = select_layers(sample.states, layers, spec.hidden_size)
        ours, theirs = _drafts(rounded, client, target, sample.input_ids, states, anchors)
        apart = float((ours - theirs).abs().max() / ours.abs().max())
        worst, blocks = max(worst, apart), blocks + len(anchors)
        if not apart <= _CLOSE:
            other = int((ours.argmax(-1) != theirs.argmax(-1)).any(dim=1).sum())
            faults.append(
                f"sample {sample.key}: dflash drafts other tokens in {other} of {len(anchors)} blocks, logits differ "
                f"by {apart:.1e} of the largest, expected at most {_CLOSE:.0e}"
            )
    return faults, f"checked: dflash reads the folder and drafts the same in {blocks} blocks, logits within {worst:.0e}"


@torch.inference_mode()
def _drafts(
    drafter: Drafter, client: Any, target: Target, input_ids: Any, states: torch.Tensor, anchors: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [A, K - 1, V] of the trainer's arithmetic and of the client's."""
    size, ids = drafter.spec.block_size, torch.from_numpy(input_ids.astype(np.int64))
    at = torch.from_numpy(anchors)
    inputs = block_inputs(target.embedding_VD, ids[at], size, drafter.spec.mask_token_id)
    blocks = Blocks(at, torch.zeros_like(at), size)
    ours = drafter(states, torch.arange(len(states)), inputs, blocks)[:, 1:] @ target.head_VD.T
    theirs = []
    for anchor, embedded in zip(anchors.tolist(), inputs, strict=True):
        hidden = client(
            target_hidden=states[None, :anchor].float(),
            noise_embedding=embedded[None].float(),
            position_ids=torch.arange(anchor + size)[None],
        )
        theirs.append(client.compute_logits(hidden[0, 1:], lambda x: x @ target.head_VD.T))
    return ours, torch.stack(theirs)
