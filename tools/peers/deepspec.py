"""DeepSpec's target cache, version 2: manifest.json, samples.idx, shard-00000.bin.

    samples.idx   56 bytes a sample, little-endian: u64 sample, u32 shard, u32 tokens T, u64 offsets of the five below
    shards        int32 ids [T], uint8 attention mask [T], uint8 loss mask [T], bf16 [T, L * D], bf16 [T, D]

Layers: the manifest's target_layer_ids are decoder layers whose output a forward hook took, the stream after the layer
as ours; -1 is the embedding, which no layer of ours is. The last hidden state is the model's last_hidden_state, after
the final norm, so it is not read.
"""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.layout import read_range
from dflash_offline.tools.peers.contract import PeerCache, PeerSample, Shape, ids_and_mask

_RECORD = struct.Struct("<QII5Q")
_FIELDS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")
_EXPECTED = {
    "version": 2,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": _RECORD.size,
}


def open_cache(folder: Path, shape: Shape) -> PeerCache:
    """A finished cache: DeepSpec writes the manifest last."""
    manifest, layers = _manifest(folder, shape)
    index = folder / "samples.idx"
    records = index.read_bytes() if index.is_file() else b""
    count = manifest["num_samples"]
    if len(records) != count * _RECORD.size or not count:
        raise UsageError(f"{index}: {len(records)} bytes, expected {count * _RECORD.size} for {count} samples")
    shards = [folder / Path(str(entry["file_name"])).name for entry in manifest["shards"]]
    sizes = [path.stat().st_size if path.is_file() else -1 for path in shards]

    def sample(number: int) -> PeerSample:
        sample_id, shard, tokens, *offsets = _RECORD.unpack_from(records, number * _RECORD.size)
        if sample_id != number or shard >= len(shards) or not tokens:
            found = f"sample {sample_id} of {tokens} tokens in shard {shard}"
            raise UsageError(f"{index}: record {number} is {found}; expected sample {number} of {len(shards)} shards")
        path = shards[shard]
        width = 2 * len(layers) * shape.hidden

        ids_at, _, mask_at, states_at, _ = offsets
        for name, at, each in zip(_FIELDS, offsets, (4, 1, 1, width, 2 * shape.hidden), strict=True):
            if at + tokens * each > sizes[shard]:  # before reading: the length is what would be allocated
                found = f"ends at byte {sizes[shard]}" if sizes[shard] >= 0 else "missing"
                where = f"{name} of sample {number} ends at {at + tokens * each}"
                raise UsageError(f"{path}: {found}, but {where}; prepare the cache again")

        def read(at: int, each: int, dtype: torch.dtype) -> Tensor:
            with path.open("rb") as file:
                data = read_range(file.fileno(), at, tokens * each)
            if len(data) < tokens * each:
                raise RunError(f"{path}: cut while it was read; prepare the cache again")
            return torch.frombuffer(data, dtype=dtype)

        ids, mask = read(ids_at, 4, torch.int32), read(mask_at, 1, torch.uint8)

        ids_T, mask_T = ids_and_mask(ids, mask, path.with_name(f"{path.name} sample {number}"))
        return PeerSample(
            place=path.name,
            id=str(number),
            input_ids=ids_T,
            loss_mask=mask_T,
            states=lambda: read(states_at, width, torch.bfloat16).view(tokens, len(layers), shape.hidden),
        )

    return PeerCache(layers=layers, count=count, sample=sample)


def _manifest(folder: Path, shape: Shape) -> tuple[dict[str, Any], tuple[int, ...]]:
    path = folder / "manifest.json"
    try:
        found = json.loads(path.read_text())
        layers = tuple(int(i) for i in found["target_layer_ids"])
        int(found["num_samples"])
        [str(entry["file_name"]) for entry in found["shards"]]
    except FileNotFoundError:
        raise UsageError(f"{folder}: no manifest.json; expected a finished cache of DeepSpec") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{path}: not a manifest of DeepSpec ({type(error).__name__}: {error})") from None
    for name, value in {**_EXPECTED, "hidden_size": shape.hidden}.items():
        if found.get(name) != value:
            raise UsageError(f"{path}: {name} is {found.get(name)!r}, expected {value!r}")
    if shape.layers and shape.layers != layers:
        raise UsageError(f"{path}: target_layer_ids are {list(layers)}, but layers says {list(shape.layers)}")
    if -1 in layers:
        raise UsageError(f"{path}: target_layer_ids has -1, the embedding; expected decoder layers only")
    return found, layers
