"""A drafter's spec as the config.json of a Hugging Face folder, and back. The only form in which a spec is stored.

Reading tolerates the layouts seen in published folders, and refuses by name whatever would change the arithmetic.
"""

from collections.abc import Mapping
from typing import Any

from dflash_offline.shards.errors import UsageError
from dflash_offline.train.spec import DrafterSpec, rope_theta

ARCHITECTURE = "DFlashDraftModel"
# Fields that switch on arithmetic this drafter does not have, with the values that leave it off. Servers read some of
# them at the top, some in dflash_config, some in rope_parameters; here they are refused wherever they stand.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_swa_attention_sink_bias": (None, False),
    "attention_bias": (None, False),
    "attention_sink_bias": (None, False),
    "final_logit_softcapping": (None, 0),
    "hidden_act": (None, "silu"),
    "input_embedding_scale": (None, 1),
    "is_neox_style": (None, True),
    "logit_scale": (None, 1),
    "mrope_section": (None,),
    "output_multiplier": (None, 1),
    "partial_rotary_factor": (None, 1),
    "rope_scaling": (None,),
    "rope_type": (None, "default"),
    "use_aux_hidden_state": (None, True),
    "use_swa": (None, False),
}
_SIZES = ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "block_size", "vocab_size")


def to_config(spec: DrafterSpec) -> dict[str, Any]:
    """config.json of an exported drafter."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.layer_ids)},
        "num_target_layers": spec.num_target_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layer_types),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": spec.sliding_window is not None,
        "max_window_layers": len(spec.layer_types),
        # transformers 5 and vLLM read rope_parameters, older readers the other two.
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def from_config(config: Mapping[str, Any], where: str) -> DrafterSpec:
    """Spec of the drafter that `config` describes. `where` names it in errors."""
    if not isinstance(config, Mapping):
        raise UsageError(f"{where}: is a {type(config).__name__}; expected an object, the config of a drafter")
    nested = config.get("dflash_config") or {}

    def get(name: str) -> Any:
        value = nested.get(name, config.get(name))
        if value is None:
            raise UsageError(f"{where}: no {name}, neither in dflash_config nor at the top; expected a DFlash drafter")
        return value

    if (architectures := config.get("architectures")) != [ARCHITECTURE]:
        raise UsageError(f"{where}: architectures is {architectures}; expected ['{ARCHITECTURE}']")
    layers, heads = get("num_hidden_layers"), get("num_attention_heads")
    layer_types = tuple(config.get("layer_types") or ("full_attention",) * layers)
    sliding = "sliding_attention" in layer_types
    if len(layer_types) != layers or not {*layer_types} <= {"full_attention", "sliding_attention"}:
        raise UsageError(f"{where}: layer_types {list(layer_types)} do not fit num_hidden_layers = {layers}")
    spec = DrafterSpec(
        hidden_size=get("hidden_size"),
        intermediate_size=get("intermediate_size"),
        heads=heads,
        kv_heads=get("num_key_value_heads"),
        head_dim=config.get("head_dim") or get("hidden_size") // heads,
        layer_types=layer_types,
        sliding_window=get("sliding_window") if sliding else None,
        block_size=get("block_size"),
        layer_ids=tuple(nested.get("target_layer_ids") or config.get("target_layer_ids") or _default_layers(config)),
        num_target_layers=get("num_target_layers"),
        mask_token_id=get("mask_token_id"),
        vocab_size=get("vocab_size"),
        rms_norm_eps=get("rms_norm_eps"),
        rope_theta=rope_theta(config),
        max_position_embeddings=get("max_position_embeddings"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
    )
    for name, neutral in (_NEUTRAL | _neutral_for(spec)).items():
        for place in (nested, config, config.get("rope_parameters") or {}):
            if (value := place.get(name)) not in neutral:
                expected = "no such field" if neutral[-1] is None else neutral[-1]
                raise UsageError(
                    f"{where}: {name} = {value} is not supported; expected {expected}; "
                    "its weights were learnt with other arithmetic, choose another drafter"
                )
    for name in _SIZES:
        if not isinstance(value := getattr(spec, name), int) or value < 1:
            raise UsageError(f"{where}: {name} = {value!r}; expected a whole number above 0")
    if not 0 <= spec.mask_token_id < spec.vocab_size:
        raise UsageError(f"{where}: mask_token_id = {spec.mask_token_id} is not below vocab_size = {spec.vocab_size}")
    return spec


def _neutral_for(spec: DrafterSpec) -> dict[str, tuple[Any, ...]]:
    """Fields that say again, or otherwise, what a drafter of `spec` computes, as vLLM reads them."""
    slides = {kind == "sliding_attention" for kind in spec.layer_types}
    causal = (None, *slides) if len(slides) == 1 else (None,)  # one value for all layers
    return {
        "is_causal": causal,
        "causal": causal,
        "swa_window_size": (None, spec.sliding_window),
        "draft_vocab_size": (None, spec.vocab_size),
        "target_hidden_size": (None, spec.hidden_size),
        # Taken before target_layer_ids and as it is: counted from the embedding.
        "eagle_aux_hidden_state_layer_ids": (None, [], [i + 1 for i in spec.layer_ids]),
    }


def _default_layers(config: Mapping[str, Any]) -> list[int]:
    """The published rule where a config names no layers: evenly from the second to the third last."""
    target, count = config["num_target_layers"], config["num_hidden_layers"]
    if count == 1:
        return [target // 2]
    return [round(1 + i * (target - 4) / (count - 1)) for i in range(count)]
