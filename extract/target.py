"""The target decoder: only what is needed, straight from safetensors to the device.

Layers after the last captured one, vision towers, MTP heads and the lm_head are never built nor loaded. Every name the
decoder needs must be in the checkpoint, and every decoder name in the checkpoint must be known: weights that silently
keep their random initial values are the worst fault this tool could have.
"""

import json
import re
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflash_offline.extract import fp8
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, file_hash

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
_READERS = 8
"""Files of weights read at once."""
_alone = threading.Lock()
"""One tensor at a time exists in fp32."""


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


def open_target(path: str, revision: str | None) -> Target:
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


def check(target: Target, last_layer: int, packed: bool) -> None:
    """Everything about the checkpoint that can be known from its headers, before any work.

    Raises UsageError naming missing, unexpected, misshapen and quantised tensors, and layers that `packed` cannot do.
    """
    kinds = set(getattr(target.config, "layer_types", None) or ()) - {"full_attention", "linear_attention"}
    if packed and (kinds or getattr(target.config, "use_sliding_window", False)):
        raise UsageError(f"{target.name}: has {', '.join(sorted(kinds)) or 'a sliding window'}; use batching = padded")
    rope = getattr(target.config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in ("dynamic", "longrope"):
        raise UsageError(f"{target.name}: rope_type {kind} makes states depend on the batch; it is not supported")
    expected = {n: t.shape for n, t in _skeleton(target, last_layer, "sdpa").state_dict().items()}
    _check_names(target, set(expected), last_layer)
    width = (target.config.vocab_size, target.config.hidden_size)
    for short, name in head_names(target).items():
        expected[name] = torch.Size(width[1:] if short == "norm" else width)
    full = {(n if n in target.weight_map else target.prefix + n): shape for n, shape in expected.items()}
    for file in sorted({target.weight_map[n] for n in full}):
        with safe_open(target.folder / file, "pt") as handle:
            for name in (n for n in full if target.weight_map[n] == file):
                part = handle.get_slice(name)
                scaled = part.get_dtype() == "F8_E4M3" and target.block is not None
                if part.get_dtype() not in ("BF16", "F16", "F32", "F64") and not scaled:
                    raise UsageError(
                        f"{target.folder}: {name} is {part.get_dtype()}, quantised in a way that config.json does not "
                        f"say; expected floats, or fp8 in blocks with scales"
                    )
                if tuple(part.get_shape()) != tuple(full[name]):
                    raise UsageError(
                        f"{target.folder}: {name} is {part.get_shape()}, the configuration says {list(full[name])}"
                    )
                if scaled:
                    _check_scale(target, name, tuple(full[name]))


def _check_scale(target: Target, name: str, shape: tuple[int, ...]) -> None:
    assert target.block is not None
    scale, expected = name + fp8.SCALE, fp8.scale_shape(shape, target.block)
    if scale not in target.weight_map:
        raise UsageError(f"{target.folder}: missing {scale}; {name} is quantised and means nothing without it")
    with safe_open(target.folder / target.weight_map[scale], "pt") as handle:
        part = handle.get_slice(scale)
        if tuple(part.get_shape()) != expected or part.get_dtype() not in ("BF16", "F16", "F32"):
            raise UsageError(
                f"{target.folder}: {scale} is {part.get_dtype()} {part.get_shape()}, expected floats {list(expected)} "
                f"for blocks of {list(target.block)}"
            )


def loaded_bytes(target: Target, last_layer: int, dtype: torch.dtype) -> int:
    """Memory of layers 0..last_layer and the embedding."""
    return sum(t.numel() * dtype.itemsize for t in _skeleton(target, last_layer, "sdpa").state_dict().values())


def _skeleton(target: Target, last_layer: int, attention: str) -> nn.Module:
    """Layers 0..last_layer without weights, and without the final norm."""
    import transformers

    config = type(target.config)(**target.config.to_dict())
    config.num_hidden_layers = last_layer + 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: last_layer + 1]
    config.use_cache = False
    config._attn_implementation = attention
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, FAMILIES[target.model_type][1])(config)
    model.norm = nn.Identity()
    return model


def load_decoder(
    target: Target, last_layer: int, device: torch.device, dtype: torch.dtype, attention: str
) -> nn.Module:
    """Build layers 0..last_layer and load them. Peak memory is the weights alone, and of FP8 one tensor in fp32.

    With bfloat16 each tensor keeps its stored type (fp32 decay parameters stay fp32; FP8 becomes bfloat16); with
    float32 all are cast.
    """
    model = _skeleton(target, last_layer, attention)
    names = [target.prefix + n for n in model.state_dict()]

    def read(file: str) -> dict[str, Tensor]:
        found = _tensors(target, [n for n in names if target.weight_map[n] == file], device, dtype)
        return {
            name.removeprefix(target.prefix): tensor.float() if dtype == torch.float32 else tensor
            for name, tensor in found
        }

    state: dict[str, Tensor] = {}
    with ThreadPoolExecutor(_READERS) as pool:  # a mapped file is read by the thread that copies from it
        for part in pool.map(read, sorted({target.weight_map[n] for n in names})):
            state |= part
    model.load_state_dict(state, strict=True, assign=True)
    # Rotary tables are buffers that no checkpoint holds; built on meta they are empty.
    rotary: Any = model.rotary_emb
    model.rotary_emb = type(rotary)(config=model.config).to(device)
    stranded = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise UsageError(f"{target.name}: {stranded[0]} was not loaded; use another transformers release")
    return model.eval().requires_grad_(False)


def _check_names(target: Target, expected: set[str], last_layer: int) -> None:
    found = {n.removeprefix(target.prefix) for n in target.weight_map if n.startswith(target.prefix)}
    if missing := sorted(expected - found):
        raise UsageError(f"{target.folder}: missing {target.prefix}{missing[0]} (and {len(missing) - 1} more tensors)")
    known = expected | {"norm.weight"} | {name + fp8.SCALE for name in expected if target.block}
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


def _tensors(
    target: Target, names: list[str], device: torch.device | str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, file by file; those in FP8 as `dtype`, all others as they are."""
    for file in sorted({target.weight_map[n] for n in names}):
        with safe_open(target.folder / file, "pt", device=str(device)) as handle:
            for name in (n for n in names if target.weight_map[n] == file):
                tensor = handle.get_tensor(name)
                if tensor.dtype == torch.float8_e4m3fn and target.block is not None:
                    scale = name + fp8.SCALE  # often in another file
                    where = target.folder / target.weight_map[scale]
                    with safe_open(where, "pt", device=str(device)) as scales, _alone:
                        tensor = fp8.dequantise(name, tensor, scales.get_tensor(scale), target.block).to(dtype)
                yield name, tensor


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


def head_names(target: Target) -> dict[str, str]:
    """embed_tokens, norm, and lm_head unless it is tied -> their names in the checkpoint. Raises UsageError."""
    names = {"embed_tokens": target.prefix + "embed_tokens.weight", "norm": target.prefix + "norm.weight"}
    head = next((n for n in ("lm_head.weight", "language_model.lm_head.weight") if n in target.weight_map), None)
    if head is not None:
        names["lm_head"] = head
    elif not target.tied:
        raise UsageError(f"{target.folder}: no lm_head.weight, and tie_word_embeddings is false")
    if missing := [n for n in names.values() if n not in target.weight_map]:
        raise UsageError(f"{target.folder}: missing {missing[0]}")
    return names


def write_target_folder(target: Target, tokenizer: Any, folder: Path, known: str = "") -> dict[str, str]:
    """Copy what training and evaluation need of the target: embedding, head, final norm, configuration, tokenizer.

    `known`: the hash of tensors that an earlier run may have written. Returns the hash of every file.
    """
    folder.mkdir(exist_ok=True)
    tensors = folder / "target.safetensors"
    kept = bool(known) and tensors.is_file() and file_hash(tensors) == known
    if not kept:
        wanted = head_names(target)
        loaded = dict(_tensors(target, list(wanted.values()), "cpu", torch.bfloat16))
        with atomic_file(tensors) as file:
            _save({short: loaded[name].to(torch.bfloat16) for short, name in sorted(wanted.items())}, file)
    target.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {p.name: known if kept and p == tensors else file_hash(p) for p in sorted(folder.iterdir()) if p.is_file()}


def _save(tensors: dict[str, Tensor], file: BinaryIO) -> None:
    """bf16 tensors as safetensors' own `save` has them, which copies all of them first: five gigabytes here."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    for tensor in tensors.values():
        file.write(tensor.contiguous().view(torch.uint8).numpy().data)
