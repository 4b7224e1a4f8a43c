"""Reading a cache: any sample by number, touching only its bytes.

Reads are `pread` into private memory rather than page faults of a mapping: a shard that is cut or lost under a mapping
kills the process with SIGBUS, and a fault blocks every Python thread; a read returns an error (docs/decisions.md).
"""

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from dflash_offline.shards import calibration, index, manifest
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.errors import CorruptError, RunError, UsageError
from dflash_offline.shards.files import file_hash, is_locked
from dflash_offline.shards.frames import FRAME_TOKENS, allocate_bytes, is_sound
from dflash_offline.shards.keys import sample_key
from dflash_offline.shards.layout import frame_ranges, ids_and_mask, read_range, read_sample, read_trailer
from dflash_offline.shards.manifest import Manifest
from dflash_offline.shards.sample import Encoded, Sample, unpack_sample

LOCK = ".lock"
OPEN_FILES = 32
_LARGEST_SCRATCH = 256 << 20
"""Bytes; a message of more, or with a forged length, is read into memory of its own."""
PATIENCE = 10.0
"""Seconds."""
TARGET_FOLDER = "target"


class Cache:
    """An open cache. Reading is thread-safe; at most OPEN_FILES shards are open at a time."""

    def __init__(self, path: Path, *, allow_incomplete: bool = False) -> None:
        """Open the cache at `path`.

        Raises UsageError when it is no cache, is incomplete (unless allowed: then only finished shards are seen) or has
        no samples; CorruptError when manifest, index or calibration are damaged.
        """
        self.path = path
        self.manifest, self.index = _load(path, allow_incomplete)
        if len(self.index) == 0 and not allow_incomplete:
            raise UsageError(f"{path}: the cache has no samples; extract a dataset with at least one usable row")
        for shard in self.manifest.shards:
            _check_size(path / shard.name, shard.bytes)
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The captured layers, 0-based, in the order of the hidden axis."""
        return tuple(self.manifest.layer_ids)

    @property
    def hidden_size(self) -> int:
        """Width of one layer's state."""
        return self.manifest.hidden_size

    @property
    def generation(self) -> str:
        """How the responses were made: greedy, sampled, mixed or unknown."""
        return self.manifest.generation

    @property
    def tokenizer_facts(self) -> dict[str, Any]:
        """length, eos_ids, pad_id, mask_id."""
        return self.manifest.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """Identity of settings, target and samples: two caches with equal fingerprints train the same."""
        facts = {
            "settings": self.manifest.settings,
            "target": self.manifest.target.get("files"),
            "keys": self.manifest.dataset.get("keys"),
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())

    @cached_property
    def keys(self) -> list[str]:
        """Content key of every sample."""
        return self.index.column("key").to_pylist()

    @cached_property
    def prompt_keys(self) -> list[str]:
        """Prompt key of every sample."""
        return self.index.column("prompt_key").to_pylist()

    @cached_property
    def sources(self) -> list[str]:
        """Dataset file of every sample."""
        return self.index.column("source").to_pylist()

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """Length of every sample [N]."""
        return self.index.column("tokens").to_numpy()

    @cached_property
    def supervised(self) -> NDArray[np.int64]:
        """Supervised tokens of every sample [N]."""
        return self.index.column("supervised").to_numpy()

    @cached_property
    def anchors(self) -> NDArray[np.int64]:
        """Eligible anchors of every sample [N]."""
        return self.index.column("anchors").to_numpy()

    @cached_property
    def codec(self) -> Calibrated:
        """The codecs the frames were written with. Raises CorruptError when their calibration file changed."""
        m = self.manifest
        return calibration.read(self.path, m.codec, len(m.layer_ids), m.hidden_size, m.last_hidden)

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The target decoder's Hugging Face configuration."""
        config = json.loads(self._target_file("config.json").read_text())
        return config.get("text_config", config)

    def target_tensors(self) -> dict[str, Tensor]:
        """embed_tokens [V, D], lm_head [V, D] and norm [D], as stored in target/."""
        with safe_open(self._target_file("target.safetensors"), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors.setdefault("lm_head", tensors["embed_tokens"])
        return tensors

    def tokenizer_folder(self) -> Path:
        """Where the target's tokenizer lies. Raises CorruptError when a file of it is not what was copied."""
        for name in self.manifest.target.get("copied", {}):
            if name != "target.safetensors":  # large, and no part of it
                self._target_file(name)
        return self.path / TARGET_FOLDER

    def _target_file(self, name: str) -> Path:
        path, expected = self.path / TARGET_FOLDER / name, self.manifest.target.get("copied", {}).get(name)
        if not path.is_file() or file_hash(path) != expected:
            raise CorruptError(f"{path}: missing or changed; rerun the same `dflash-extract run` to copy it again")
        return path

    def read(self, number: int) -> Sample:
        """Read and decode one sample. Raises CorruptError naming shard, frame and sample key."""
        return self.read_encoded(number).decode(self.codec)

    def read_encoded(self, number: int, allocate: Callable[[int], Tensor] = allocate_bytes) -> Encoded:
        """Read, verify and entropy-decode one sample into one buffer of `allocate(bytes)`, pinned for instance.

        `Encoded.decode(cache.codec)` makes the states of it. Raises CorruptError naming shard, frame and sample key.
        """
        row = self.row(number)
        try:
            batch = self.read_batch(row, self._scratch_bytes(row["length"]))
            ids, mask = tokens_of(row, batch)
            frames = _buffers(batch.column("frames"))
            last = _buffers(batch.column("last_frames")) if self.manifest.last_hidden else []
            return unpack_sample(row["key"], ids.copy(), mask.copy(), frames, last, self.codec, allocate)
        except CorruptError as error:
            raise CorruptError(f"{self._where(row)}: {error}") from None

    def row(self, number: int) -> dict[str, Any]:
        """The index row of sample `number`."""
        return self.index.slice(number, 1).to_pylist()[0]

    def read_batch(self, row: dict[str, Any], out: memoryview | None = None) -> pa.RecordBatch:
        """The sample's record batch, after its message hash was checked; it lies in `out` where that is given."""
        message = self._pread(row["shard"], row["offset"], row["length"], out)
        if xxhash.xxh3_64_intdigest(message) != row["xxh3"]:
            raise CorruptError(self._blame(row, message))
        return read_sample(message, self.manifest.last_hidden)

    def _where(self, row: dict[str, Any]) -> str:
        return f"{self.path / row['shard']}: row {row['row']}, sample {row['key']}"

    def _scratch_bytes(self, length: int) -> memoryview | None:
        """This thread's own buffer: new pages for every message cost a third of reading it."""
        if length > _LARGEST_SCRATCH:
            return None
        if len(getattr(self._scratch, "bytes", b"")) < length:
            self._scratch.bytes = np.empty(length, np.uint8).data
        return self._scratch.bytes

    def _pread(self, shard: str, offset: int, length: int, out: memoryview | None) -> memoryview:
        with self._lock:
            # The descriptor is duplicated, so that evicting it cannot close it under a reader.
            fd = os.dup(self._open(shard))
        try:
            size = os.fstat(fd).st_size
            if offset + length > size:  # before reading: the length is what would be allocated
                raise CorruptError(f"{self.path / shard}: ends at byte {size}, expected {offset + length}")
            return read_range(fd, offset, length, out)
        finally:
            os.close(fd)

    def _open(self, shard: str) -> int:
        if shard not in self._files:
            try:
                self._files[shard] = os.open(self.path / shard, os.O_RDONLY)
            except OSError as error:
                raise RunError(f"{self.path / shard}: {error.strerror}") from None
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(shard)
        return self._files[shard]

    def _blame(self, row: dict[str, Any], message: memoryview) -> str:
        """Which frame a damaged message is damaged in, from the frame ranges in the shard's trailer."""
        try:
            with (self.path / row["shard"]).open("rb") as file:
                ranges = read_trailer(file, row["shard"]).index.slice(row["row"], 1).to_pylist()[0]
        except CorruptError as error:
            return f"checksum differs, and {error}"
        places = zip(ranges["frame_offsets"], ranges["frame_lengths"], strict=True)
        for name, (offset, length) in zip(frame_names(ranges), places, strict=True):
            at = offset - row["offset"]
            if not is_sound(message[at : at + length]):
                return f"{name}: checksum differs"
        return "checksum differs outside the frames (ids, mask or metadata)"

    def close(self) -> None:
        """Close all shards."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])


def frame_names(row: dict[str, Any]) -> list[str]:
    """What errors call the frames of a trailer's row."""
    count = -(-row["tokens"] // FRAME_TOKENS)
    return [f"frame {i}" if i < count else f"last-hidden frame {i - count}" for i in range(len(row["frame_offsets"]))]


def tokens_of(row: dict[str, Any], batch: pa.RecordBatch) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Ids [T] and mask [T] in the batch's memory. Raises CorruptError when they are not those of the index row."""
    ids, mask = ids_and_mask(batch)
    if sample_key(ids, mask) != row["key"]:
        raise CorruptError("holds another sample than the index says")
    return ids, mask


def _buffers(column: pa.Array) -> list[memoryview]:
    values = column.values  # sliced by hand: a scalar's as_buffer() copies
    if not len(values):
        return []
    data = values.buffers()[2]
    return [memoryview(data)[at : at + n] for at, n in zip(*frame_ranges(values, -data.address), strict=True)]


def _load(path: Path, allow_incomplete: bool) -> tuple[Manifest, pa.Table]:
    """Manifest and index. A writer replaces one after the other: while it is at work they are given time to agree."""
    deadline = time.monotonic() + PATIENCE
    while True:
        info = manifest.read(path)
        if not info.complete and not allow_incomplete:
            raise UsageError(f"{path}: extraction is not complete; rerun the same `dflash-extract run` to finish it")
        try:
            return info, index.load(path, info)
        except CorruptError:
            held = is_locked(path / LOCK)
            if time.monotonic() > deadline or (not held and manifest.read(path) == info):
                raise
            time.sleep(0.02)


def _check_size(path: Path, expected: int) -> None:
    """Before training, not in its middle. Raises CorruptError."""
    try:
        found = path.stat().st_size
    except OSError as error:
        link = f" (a link to {path.readlink()})" if path.is_symlink() else ""
        what = "missing" if isinstance(error, FileNotFoundError) else error.strerror
        raise CorruptError(f"{path}{link}: {what}; rerun the same `dflash-extract run` to write it again") from None
    if found != expected:
        raise CorruptError(f"{path}: {found} bytes, expected {expected}; run `dflash-shards repair {path.parents[1]}`")
