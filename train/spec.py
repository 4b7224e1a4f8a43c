"""What a drafter is, as numbers: derived from the settings and the target, or read from an exported folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import LayerType, ModelConfig

# Inside the tokenizer, in no text: the ids of the published drafters.
_FAMILY_MASK_TOKEN = {"qwen3_5": 248070, "qwen3_6": 248070, "qwen3": 151669}


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """Everything that fixes a drafter's tensors and arithmetic."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    block_size: int
    layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def windows(self) -> list[int | None]:
        """Attention window of each layer; None where it sees everything before the anchor."""
        return [self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types]


def derive(
    model: ModelConfig,
    target: Mapping[str, Any],
    cached_layer_ids: tuple[int, ...],
    tokenizer: Mapping[str, Any],
    vocab_size: int,
) -> DrafterSpec:
    """Spec of a new drafter for `target` (its config.json). Raises UsageError where they do not fit."""
    layer_ids = cached_layer_ids if model.layer_ids is None else model.layer_ids
    if missing := [i for i in layer_ids if i not in cached_layer_ids]:
        raise UsageError(
            f"model.layer_ids: layers {missing} are not in the cache, which has {list(cached_layer_ids)}; "
            "choose among those, or extract again"
        )
    own = _target_heads(target)
    # The published drafters of targets with wide heads (Qwen3.5 and 3.6: 256) all use 32/8/128.
    heads, kv_heads, head_dim = own if own[2] <= 128 else (32, 8, 128)
    heads, kv_heads, head_dim = model.heads or heads, model.kv_heads or kv_heads, model.head_dim or head_dim
    if heads % kv_heads or head_dim % 2:
        raise UsageError(
            f"model.heads = {heads}, kv_heads = {kv_heads}, head_dim = {head_dim}: "
            "expected heads divisible by kv_heads and an even head_dim"
        )
    sliding = model.sliding_window is not None
    default_types: tuple[LayerType, ...] = (
        *(("sliding_attention" if sliding else "full_attention",) * (model.layers - 1)),
        "full_attention",
    )
    layer_types = model.layer_types or default_types
    return DrafterSpec(
        hidden_size=target["hidden_size"],
        intermediate_size=model.intermediate_size or _field(target, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layer_types=layer_types,
        sliding_window=model.sliding_window if "sliding_attention" in layer_types else None,
        block_size=model.block_size,
        layer_ids=tuple(layer_ids),
        num_target_layers=target["num_hidden_layers"],
        mask_token_id=mask_token(model.mask_token_id, str(target.get("model_type", "")), tokenizer, vocab_size),
        vocab_size=vocab_size,
        rms_norm_eps=target["rms_norm_eps"],
        rope_theta=rope_theta(target),
        max_position_embeddings=target["max_position_embeddings"],
        eos_token_id=next(iter(tokenizer["eos_ids"]), None),
        pad_token_id=tokenizer["pad_id"],
    )


def mask_token(explicit: int | None, model_type: str, tokenizer: Mapping[str, Any], vocab_size: int) -> int:
    """The id that stands for an undrafted slot: never padding or an end token, which mean something to the target."""
    forbidden = {*tokenizer["eos_ids"], tokenizer["pad_id"]}
    if explicit is not None:
        if explicit in forbidden or not 0 <= explicit < vocab_size:
            raise UsageError(
                f"model.mask_token_id = {explicit}: expected an id below the vocabulary's {vocab_size} "
                f"that is neither padding nor an end token ({sorted(i for i in forbidden if i is not None)})"
            )
        return explicit
    length = tokenizer["length"]
    family = next((i for name, i in _FAMILY_MASK_TOKEN.items() if model_type.removesuffix("_text") == name), None)
    # A family's id is only meant for its own tokenizer: the published ids lie within its last few tokens.
    if family is not None and not length - 64 <= family <= length:
        family = None
    for candidate in (family, tokenizer["mask_id"], length):
        if candidate is not None and candidate < vocab_size and candidate not in forbidden:
            return int(candidate)
    raise UsageError(
        f"no token is free to stand for undrafted slots: the tokenizer has {length} tokens, the vocabulary "
        f"{vocab_size}; give model.mask_token_id"
    )


def rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding, from either of the two places where configs keep it."""
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UsageError("target config.json: no rope_theta, neither in rope_parameters nor at the top")
    return float(theta)


def _target_heads(target: Mapping[str, Any]) -> tuple[int, int, int]:
    heads = target["num_attention_heads"]
    head_dim = target.get("head_dim") or target["hidden_size"] // heads
    return heads, target.get("num_key_value_heads") or heads, head_dim


def _field(target: Mapping[str, Any], name: str) -> int:
    if target.get(name) is None:
        raise UsageError(f"target config.json has no {name}; give model.{name}")
    return int(target[name])
