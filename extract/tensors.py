"""Tensors of safetensors files, read in large pieces straight to a device.

The library maps its files, and a mapping is read by page faults: three times slower than `pread` from the page cache
here, while other threads import. A file that is cut meanwhile kills who has mapped it; here it is an error.
"""

import itertools
import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""By safetensors' names: those that weights of a target may have."""
_PIECE = 32 << 20
"""Bytes on their way to a GPU at once; two of them, one being read while the other is copied."""


def read_header(file: BinaryIO) -> tuple[bytes, dict[str, Any], int]:
    """The header as it is, its entries by name without the metadata, and where the tensors begin."""
    (length,) = struct.unpack("<Q", file.read(8))
    raw = file.read(length)
    entries: dict[str, Any] = json.loads(raw)
    entries.pop("__metadata__", None)
    return raw, entries, 8 + length


def read_tensors(path: Path, names: Sequence[str], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of one file, in order. A GPU has to be this thread's own (kernels.own).

    Raises OSError, and ValueError, KeyError or struct.error where the file is no longer what it was.
    """
    with path.open("rb", buffering=0) as file:
        _, entries, base = read_header(file)
        size = base + max(entry["data_offsets"][1] for entry in entries.values())
        if (found := os.fstat(file.fileno()).st_size) != size:
            raise ValueError(f"{path.name} has {found} bytes, its header says {size}")
        pieces = itertools.cycle([_Piece(), _Piece()]) if torch.device(device).type == "cuda" else None
        for name in names:
            begin, end = entries[name]["data_offsets"]
            tensor = torch.empty(entries[name]["shape"], dtype=DTYPES[entries[name]["dtype"]], device=device)
            bytes_N = tensor.reshape(-1).view(torch.uint8)
            if len(bytes_N) != end - begin:
                raise ValueError(f"{name} has {end - begin} bytes for shape {list(tensor.shape)}")
            if pieces is None:
                _fill(bytes_N, file.fileno(), base + begin)
            else:
                for at in range(0, end - begin, _PIECE):
                    next(pieces).send(bytes_N[at : at + _PIECE], file.fileno(), base + begin + at)
            yield name, tensor


class _Piece:
    """Pinned memory between a file and a GPU."""

    def __init__(self) -> None:
        self._bytes = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
        self._copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def send(self, part_N: Tensor, file: int, offset: int) -> None:
        """Queue the copy of a part, when the one before it has left."""
        self._copied.synchronize()
        read_N = self._bytes[: len(part_N)]
        _fill(read_N, file, offset)
        part_N.copy_(read_N, non_blocking=True)
        self._copied.record()


def _fill(bytes_N: Tensor, file: int, offset: int) -> None:
    """Read into memory of the CPU; one call of the system reads 2 GiB at most."""
    rest = memoryview(bytes_N.numpy().data)
    while len(rest):
        if not (count := os.preadv(file, [rest], offset)):
            raise ValueError(f"{len(rest)} bytes are missing at its end")
        rest, offset = rest[count:], offset + count
