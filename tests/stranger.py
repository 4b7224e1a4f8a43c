"""A reader written from docs/format.md alone, by somebody without this project: pyarrow, zstandard, numpy."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    kinds = {"U8": np.uint8, "F32": np.float32}
    out = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(data[8 + size + begin : 8 + size + end], kinds[entry["dtype"]])
            out[name] = flat.reshape(entry["shape"])
    return out


def widen(bf16: np.ndarray) -> np.ndarray:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(codec: dict, tables: dict[str, np.ndarray], frame: bytes, layers: int, hidden: int) -> np.ndarray:
    """bf16 bits, uint16 [T, L * D]."""
    tokens, count = np.frombuffer(frame, "<u4", 2, 4)
    sizes, at, planes = np.frombuffer(frame, "<u8", 2 * count, 16).reshape(-1, 2), 16 + 16 * int(count), []
    for i, (_, stored) in enumerate(sizes.tolist()):
        piece, at = frame[at : at + stored], at + stored
        coded = {"bf16": [], "lossless": [0], "ecsq": [0]}[codec["name"]]
        planes.append(np.frombuffer(zstandard.decompress(piece) if i in coded else piece, np.uint8))
    shape = (layers, int(tokens), hidden)
    if codec["name"] == "bf16":
        x = planes[0].view(np.uint16).reshape(shape)
    elif codec["name"] == "lossless":
        e, m = (p.reshape(shape).astype(np.uint16) for p in planes)
        x = (m & 128) << 8 | ((e + tables["mode"][:, None]) & 255) << 7 | m & 127
    else:
        q, s, index, value = planes[0].reshape(shape), planes[1].view(np.uint16), planes[2], planes[3]
        step = widen(s).reshape(layers, int(tokens), 1) * np.float32(codec["parameters"]["delta"])
        centred = (q.astype(np.float32) - 128) * step * tables["spread"][:, None]
        x = narrow(centred + tables["mean"][:, None]).reshape(-1)
        x[index.view(np.uint32)] = value.view(np.uint16)
        x = x.reshape(shape)
    return x.transpose(1, 0, 2).reshape(int(tokens), -1)


def samples(cache: Path) -> Iterator[tuple[list[int], list[int], np.ndarray]]:
    manifest, tables = json.loads((cache / "manifest.json").read_text()), read_safetensors(cache / "codec.safetensors")
    for row in pq.read_table(cache / "index.parquet").to_pylist():
        with pa.OSFile(str(cache / row["shard"])) as file:
            schema = pa.ipc.open_stream(file).schema
            file.seek(row["offset"])
            batch = pa.ipc.read_record_batch(pa.py_buffer(file.read(row["length"])), schema)
        ids, mask, frames = (batch.column(n)[0].as_py() for n in ("input_ids", "loss_mask", "frames"))
        shape = (len(manifest["layer_ids"]), manifest["hidden_size"])
        yield ids, mask, np.concatenate([decode(manifest["codec"], tables, f, *shape) for f in frames])
