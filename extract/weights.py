"""The target's weights, straight from safetensors to the device: which must be there, loading, and those a cache keeps.

Layers after the last captured one, vision towers, MTP heads and the lm_head are never built nor loaded. Every name the
decoder needs must be in the checkpoint, and every decoder name in the checkpoint must be known: weights that silently
keep their random initial values are the worst fault this tool could have.
"""

import json
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dflash_offline.extract import fp8
from dflash_offline.extract.target import FAMILIES, Target
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, file_hash

_READERS = 8
"""Files of weights read at once."""
_alone = threading.Lock()
"""One tensor at a time exists in fp32."""


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
    if target.native and not any(_is_native(target, target.prefix + n, shape) for n, shape in expected.items()):
        raise UsageError(
            f"{target.name}: target.fp8 is native, but no matrix has whole blocks of {list(target.native)}"
        )
    expected |= {name: _head_shape(target, short) for short, name in head_names(target).items()}
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
    shapes = {n: t.shape for n, t in _skeleton(target, last_layer, "sdpa").state_dict().items()}
    return sum(
        shape.numel() * (1 if _is_native(target, target.prefix + n, shape) else dtype.itemsize)
        for n, shape in shapes.items()
    )


def _is_native(target: Target, name: str, shape: Sequence[int]) -> bool:
    """Whether the tensor stays in FP8: a matrix of whole blocks in a layer, to which nothing is added."""
    if target.native is None or not name.startswith(target.prefix + "layers."):
        return False
    added = name.removesuffix("weight") + "bias" in target.weight_map
    return name + fp8.SCALE in target.weight_map and not added and fp8.is_whole(shape, target.native)


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


def read_weights(target: Target, last_layer: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Embedding and layers 0..last_layer. Peak memory is the weights alone, and of FP8 one tensor in fp32.

    With bfloat16 each tensor keeps its stored type (fp32 decay parameters stay fp32; FP8 becomes bfloat16 where it is
    not multiplied as it is); with float32 all others are cast.
    """
    names = [target.prefix + n for n in _names(target, last_layer) if not (target.block and n.endswith(fp8.SCALE))]

    def read(file: str) -> dict[str, Tensor]:
        found = _tensors(target, [n for n in names if target.weight_map[n] == file], device, dtype)
        cast = dtype == torch.float32
        return {
            name.removeprefix(target.prefix): tensor.float() if cast and tensor.dtype.itemsize > 1 else tensor
            for name, tensor in found
        }

    state: dict[str, Tensor] = {}
    with ThreadPoolExecutor(_READERS) as pool:  # a mapped file is read by the thread that copies from it
        for part in pool.map(read, sorted({target.weight_map[n] for n in names})):
            state |= part
    return state


def build_decoder(
    target: Target, last_layer: int, weights: dict[str, Tensor], device: torch.device, attention: str
) -> nn.Module:
    """Layers 0..last_layer with the weights that were read for them, and that leave `weights`."""
    model = _skeleton(target, last_layer, attention)
    for name in (n.removesuffix(fp8.SCALE) for n in weights if n.endswith(fp8.SCALE)):
        assert target.native
        rows, columns = weights[name].shape
        model.set_submodule(name.removesuffix(".weight"), fp8.Linear((rows, columns), target.native))
    model.load_state_dict(weights, strict=True, assign=True)
    weights.clear()  # whoever takes one from the model has the only one
    # Rotary tables are buffers that no checkpoint holds; built on meta they are empty.
    rotary: Any = model.rotary_emb
    model.rotary_emb = type(rotary)(config=model.config).to(device)
    stranded = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise UsageError(f"{target.name}: {stranded[0]} was not loaded; use another transformers release")
    return model.eval().requires_grad_(False)


def _check_names(target: Target, expected: set[str], last_layer: int) -> None:
    found = _names(target, last_layer)
    if missing := sorted(expected - found):
        raise UsageError(f"{target.folder}: missing {target.prefix}{missing[0]} (and {len(missing) - 1} more tensors)")
    if unexpected := sorted(found - expected - {name + fp8.SCALE for name in expected if target.block}):
        raise UsageError(
            f"{target.folder}: unexpected {target.prefix}{unexpected[0]} (and {len(unexpected) - 1} more); "
            f"the files do not fit config.json"
        )


def _names(target: Target, last_layer: int) -> set[str]:
    """What the checkpoint holds of layers 0..last_layer and the embedding, by the decoder's names."""
    found = {n.removeprefix(target.prefix) for n in target.weight_map if n.startswith(target.prefix)}
    return {n for n in found if not _is_left_out(n, last_layer, target.config.num_hidden_layers)}


def _is_left_out(name: str, last_layer: int, num_layers: int) -> bool:
    """Layers after the last captured one, the final norm, and towers and heads that are not the text decoder."""
    if match := re.match(r"layers\.(\d+)\.", name):
        return last_layer < int(match[1]) < num_layers
    return name == "norm.weight" or bool(re.match(r"(visual|vision_tower|language_model|model|mtp|lm_head)\b", name))


def _tensors(
    target: Target, names: list[str], device: torch.device | str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, file by file; those in FP8 as `dtype`, or with their scales; all others as they are."""
    try:
        yield from _read(target, names, device, dtype)
    except (SafetensorError, FileNotFoundError, KeyError) as error:
        raise UsageError(f"{target.folder}: has changed since it was looked at ({error}); fetch it again") from error


def _read(
    target: Target, names: list[str], device: torch.device | str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for file in sorted({target.weight_map[n] for n in names}):
        with safe_open(target.folder / file, "pt", device=str(device)) as handle:
            for name in (n for n in names if target.weight_map[n] == file):
                tensor = handle.get_tensor(name)
                if tensor.dtype == torch.float8_e4m3fn and target.block is not None:
                    scale = name + fp8.SCALE  # often in another file
                    where = target.folder / target.weight_map[scale]
                    with safe_open(where, "pt", device=str(device)) as scales:
                        factors = scales.get_tensor(scale)
                    if _is_native(target, name, tensor.shape):
                        yield scale, fp8.checked(name, tensor, factors)
                    else:
                        with _alone:
                            tensor = fp8.dequantise(name, tensor, factors, target.block).to(dtype)
                yield name, tensor


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


def head_bytes(target: Target) -> int:
    """Of embedding, head and final norm as a cache has them."""
    return sum(2 * _head_shape(target, short).numel() for short in head_names(target))


def _head_shape(target: Target, short: str) -> torch.Size:
    width = (target.config.vocab_size, target.config.hidden_size)
    return torch.Size(width[1:] if short == "norm" else width)


def write_target_folder(target: Target, tokenizer: Any, folder: Path, known: str = "") -> dict[str, str]:
    """Copy what training and evaluation need of the target: embedding, head, final norm, configuration, tokenizer.

    `known`: the hash of tensors that an earlier run may have written. Returns the hash of every file.
    """
    folder.mkdir(exist_ok=True)
    tensors = folder / "target.safetensors"
    kept = bool(known) and tensors.is_file() and file_hash(tensors) == known
    if not kept:
        wanted = head_names(target)
        loaded = dict(_tensors(replace(target, native=None), list(wanted.values()), "cpu", torch.bfloat16))
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
