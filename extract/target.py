"""The target's checkpoint: where it is, what its files say, and what identifies it. Nothing is loaded here."""

import json
import re
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash_offline.extract import fp8
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import file_hash

FAMILIES = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5TextModel"),
    "qwen3": ("qwen3", "Qwen3Model"),
    "llama": ("llama", "LlamaModel"),
}
"""Text model type -> (transformers module, decoder class)."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""Where checkpoints put the decoder: multimodal, older multimodal, causal LM, bare decoder."""
_SAMPLED_BYTES = 1 << 14


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
    tied: bool
    """The head is the embedding."""
    block: tuple[int, int] | None = None
    """Of a checkpoint in FP8: rows and columns that share a scale."""
    native: tuple[int, int] | None = None
    """The same where FP8 is multiplied as it is."""


def open_target(path: str, revision: str | None, use: str = "dequantise") -> Target:
    """Find the checkpoint and read its configuration and tensor names. Raises UsageError naming what is wrong."""
    from transformers import AutoConfig

    folder = _folder(path, revision)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder")
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = whole.get_text_config()
    except Exception as error:  # transformers raises whatever a strange value leads to
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{folder / 'config.json'}: {type(error).__name__}: {reason}") from None
    if "moe" in config.model_type or getattr(config, "num_experts", None):
        raise UsageError(f"{path}: model type {config.model_type} is a mixture of experts, which is not supported")
    if config.model_type not in FAMILIES:
        raise UsageError(f"{path}: model type {config.model_type}; expected one of {', '.join(FAMILIES)}")
    block = fp8.block_of(folder, whole)
    if block:  # nothing below reads it, and what is copied to a cache is not quantised
        for each in (whole, config):
            each.__dict__.pop("quantization_config", None)
    if use == "native" and not block:
        raise UsageError(f"{path}: target.fp8 is native, but config.json does not say that it is quantised in FP8")
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
        tied=bool(getattr(whole, "tie_word_embeddings", False)),
        block=block,
        native=block if use == "native" else None,
    )


def _folder(path: str, revision: str | None) -> Path:
    if not path:
        raise UsageError("target.path is not set; expected a checkpoint folder or a hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(path):
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
        try:
            promised = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{index}: not a weight index ({error}); fetch it again or remove it") from None
        if missing := sorted(set(promised) - set(names)):
            raise UsageError(f"{index}: promises {missing[0]} and {len(missing) - 1} more, which no file holds")
    return names


def identity(target: Target) -> str:
    """Quick identity of config and weights: every header, and two blocks of every tensor."""
    digest = blake2b((target.folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(target.folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length)
            digest.update(header)
            for name, entry in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    for at in (begin, (begin + end) // 2):
                        file.seek(8 + length + at)
                        digest.update(file.read(min(_SAMPLED_BYTES, end - at)))
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
