"""The target decoder: only what is needed, straight from safetensors to the device.

Layers after the last captured one, vision towers, MTP heads and the lm_head are never built nor loaded. Every name the
decoder needs must be in the checkpoint, and every decoder name in the checkpoint must be known: weights that silently
keep their random initial values are the worst fault this tool could have.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, file_hash

FAMILIES = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5TextModel"),
    "qwen3": ("qwen3", "Qwen3Model"),
    "llama": ("llama", "LlamaModel"),
}
"""Text model type -> (transformers module, decoder class)."""
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""Where checkpoints put the decoder: multimodal, older multimodal, causal LM, bare decoder."""
_SAMPLED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Target:
    """A checkpoint on disk: what its files say, nothing loaded."""

    folder: Path
    name: str
    """As the user gave it."""
    revision: str | None
    model_type: str
    config: Any
    """The decoder's transformers configuration."""
    weight_map: dict[str, str]
    """Tensor name -> safetensors file."""
    prefix: str
    """What the decoder's names start with in this checkpoint."""


def open_target(path: str, revision: str | None) -> Target:
    """Find the checkpoint and read its configuration and tensor names. Raises UsageError naming what is wrong."""
    from transformers import AutoConfig

    folder = _folder(path, revision)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(f"{folder / 'config.json'}: {str(error).splitlines()[0]}") from None
    config = config.get_text_config()
    if "moe" in config.model_type or getattr(config, "num_experts", None):
        raise UsageError(f"{path}: model type {config.model_type} is a mixture of experts, which is not supported")
    if config.model_type not in FAMILIES:
        raise UsageError(f"{path}: model type {config.model_type}; expected one of {', '.join(FAMILIES)}")
    weight_map = _weight_map(folder)
    for prefix in PREFIXES:
        if prefix + "embed_tokens.weight" in weight_map:
            break
    else:
        raise UsageError(f"{folder}: no embed_tokens.weight under any of {', '.join(map(repr, PREFIXES))}")
    return Target(
        folder=folder,
        name=path,
        revision=revision,
        model_type=config.model_type,
        config=config,
        weight_map=weight_map,
        prefix=prefix,
    )


def _folder(path: str, revision: str | None) -> Path:
    if not path:
        raise UsageError("target.path is not set; expected a checkpoint folder or a hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UsageError(f"target.path: no such folder: {path}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(f"target.path: {path} is no folder here and no hub id: {str(error).splitlines()[0]}") from None


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the headers themselves: an index file may promise what the files do not hold."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder}: no .safetensors files; convert the checkpoint to safetensors")
    names: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    if name in names:
                        raise UsageError(f"{folder}: {name} is in both {names[name]} and {file.name}")
                    names[name] = file.name
        except SafetensorError as error:
            raise UsageError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        promised = json.loads(index.read_text())["weight_map"]
        if missing := sorted(set(promised) - set(names)):
            raise UsageError(f"{index}: promises {missing[0]} and {len(missing) - 1} more, which no file holds")
    return names


def load_decoder(
    target: Target, last_layer: int, device: torch.device, dtype: torch.dtype, attention: str
) -> nn.Module:
    """Build layers 0..last_layer and load them. Peak memory is the weights alone.

    With bfloat16 each tensor keeps its stored type (fp32 decay parameters stay fp32); with float32 all are cast.
    Raises UsageError naming missing, unexpected and misshapen tensors.
    """
    import transformers

    config = type(target.config)(**target.config.to_dict())
    config.num_hidden_layers = last_layer + 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: last_layer + 1]
    config.use_cache = False
    config._attn_implementation = attention
    with torch.device("meta"):
        model = getattr(transformers, FAMILIES[target.model_type][1])(config)
    model.norm = nn.Identity()
    expected = model.state_dict()
    _check_names(target, set(expected), last_layer)
    state: dict[str, Tensor] = {}
    for name, tensor in _tensors(target, [target.prefix + n for n in expected], device):
        short = name.removeprefix(target.prefix)
        if tensor.shape != expected[short].shape:
            raise UsageError(
                f"{target.folder}: {name} is {list(tensor.shape)}, the configuration says {list(expected[short].shape)}"
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise UsageError(f"{target.folder}: {name} is {tensor.dtype}; quantised checkpoints are not supported yet")
        state[short] = tensor.float() if dtype == torch.float32 else tensor
    model.load_state_dict(state, strict=True, assign=True)
    # Rotary tables are buffers that no checkpoint holds; built on meta they are empty.
    model.rotary_emb = type(model.rotary_emb)(config=config).to(device)
    stranded = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise UsageError(f"{target.name}: {stranded[0]} was not loaded (transformers {transformers.__version__})")
    return model.eval().requires_grad_(False)


def _check_names(target: Target, expected: set[str], last_layer: int) -> None:
    found = {n.removeprefix(target.prefix) for n in target.weight_map if n.startswith(target.prefix)}
    if missing := sorted(expected - found):
        raise UsageError(f"{target.folder}: missing {target.prefix}{missing[0]} (and {len(missing) - 1} more tensors)")
    known = expected | {"norm.weight"}
    unexpected = sorted(n for n in found - known if not _is_left_out(n, last_layer, target.config.num_hidden_layers))
    if unexpected:
        raise UsageError(
            f"{target.folder}: unexpected {target.prefix}{unexpected[0]} (and {len(unexpected) - 1} more); "
            f"the files do not fit config.json"
        )


def _is_left_out(name: str, last_layer: int, num_layers: int) -> bool:
    """Layers after the last captured one, and towers and heads that are not the text decoder."""
    if match := re.match(r"layers\.(\d+)\.", name):
        return last_layer < int(match[1]) < num_layers
    return bool(re.match(r"(visual|vision_tower|language_model|model|mtp|lm_head)\b", name))


def _tensors(target: Target, names: list[str], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, file by file."""
    for file in sorted({target.weight_map[n] for n in names}):
        with safe_open(target.folder / file, "pt", device=str(device)) as handle:
            for name in names:
                if target.weight_map[name] == file:
                    yield name, handle.get_tensor(name)


def identity(target: Target) -> str:
    """Quick identity of config and weights: headers, sizes and sampled blocks of every file."""
    digest = blake2b(digest_size=16)
    for path in [target.folder / "config.json", *sorted(target.folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(_SAMPLED_BYTES, size // 16)):
                file.seek(at)
                digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def full_hashes(target: Target) -> dict[str, str]:
    """xxh3-64 of every weight file, whole."""
    return {p.name: file_hash(p) for p in sorted(target.folder.glob("*.safetensors"))}


def tokenizer_facts(tokenizer: Any, config: Any) -> dict[str, Any]:
    """What a trainer must know without loading the tokenizer."""
    eos = getattr(config, "eos_token_id", None)
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    return {
        "length": len(tokenizer),
        "eos_ids": sorted(eos_ids),
        "pad_id": tokenizer.pad_token_id,
        "mask_id": getattr(tokenizer, "mask_token_id", None),
    }


def write_target_folder(target: Target, tokenizer: Any, folder: Path) -> dict[str, str]:
    """Copy what training and evaluation need of the target: embedding, head, final norm, configuration, tokenizer.

    Returns the hash of every file written.
    """
    from safetensors.torch import save

    folder.mkdir(exist_ok=True)
    wanted = {
        "embed_tokens": target.prefix + "embed_tokens.weight",
        "norm": target.prefix + "norm.weight",
        "lm_head": next((n for n in ("lm_head.weight", "language_model.lm_head.weight") if n in target.weight_map), ""),
    }
    if not wanted["lm_head"]:
        if not getattr(target.config, "tie_word_embeddings", False):
            raise UsageError(f"{target.folder}: no lm_head.weight, and tie_word_embeddings is false")
        del wanted["lm_head"]
    if missing := [n for n in wanted.values() if n not in target.weight_map]:
        raise UsageError(f"{target.folder}: missing {missing[0]}")
    loaded = dict(_tensors(target, list(wanted.values()), "cpu"))
    with atomic_file(folder / "target.safetensors") as file:
        file.write(save({short: loaded[name].to(torch.bfloat16).contiguous() for short, name in wanted.items()}))
    target.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {p.name: file_hash(p) for p in sorted(folder.iterdir()) if p.is_file()}
