"""Checking a whole cache: every byte of every file against a checksum, every sample against its key.

Faults are collected, not raised: one damaged shard must not hide the next. Threads take a shard each and hold one
sample at a time; reading and hashing both run outside the interpreter lock.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import xxhash

from dflash_offline.shards import calibration, index, manifest
from dflash_offline.shards.cache import TARGET_FOLDER, frame_names
from dflash_offline.shards.errors import CorruptError, RunError
from dflash_offline.shards.files import file_hash
from dflash_offline.shards.frames import FRAME_TOKENS
from dflash_offline.shards.keys import eligible_anchors, last_positions, prompt_key, sample_key
from dflash_offline.shards.layout import (
    IDENTITY,
    frame_ranges,
    ids_and_mask,
    read_range,
    read_sample,
    read_schema,
    read_trailer,
)
from dflash_offline.shards.manifest import Manifest, ShardInfo

ASIDE = (".torn", ".foreign")
"""Endings of what was set aside in the shards folder; nobody reads such files."""
_PIECE = 1 << 18
_SUM = 8
"""A frame ends with the xxh3 of all before."""
_local = threading.local()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What `verify` found."""

    faults: list[str]
    """One line each, naming file, row and sample."""
    shards: int
    samples: int
    tokens: int
    bytes: int
    """Of the shards."""
    checked: int
    """Samples whose bytes were read."""
    read: int
    """Bytes of the shards that were read."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found in one shard."""

    faults: list[str]
    samples: int = 0
    tokens: int = 0
    checked: int = 0
    read: int = 0


def verify(
    folder: Path,
    threads: int,
    share: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda read, total: None,
) -> Findings:
    """Check the cache at `folder`, or a random `share` of every shard's samples and all else.

    `progress` is told bytes read so far and in all. Raises UsageError when it is no cache; damage is returned.
    """
    try:
        info = manifest.read(folder)
    except CorruptError as error:
        return Findings(faults=[str(error)], shards=0, samples=0, tokens=0, bytes=0, checked=0, read=0)
    faults = [*check_side_files(folder, info), *check_names(folder, info)]
    shards, table = info.shards if info.complete else _finished(folder), None
    if info.complete:
        try:
            table = index.load(folder, info, ranges=True)
        except CorruptError as error:
            faults.append(str(error))
    first_rows = np.cumsum([0, *(s.rows for s in shards)]).tolist()
    if table is not None and first_rows[-1] != len(table):
        faults.append(f"{folder / index.NAME}: {len(table)} rows, the manifest lists {first_rows[-1]} in shards")
        table = None
    present = [n for n, s in enumerate(shards) if (folder / s.name).is_file()]
    total, done, lock = int(share * sum(shards[n].bytes for n in present)), 0, threading.Lock()

    def note(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, total)

    def check(number: int) -> Checked:
        shard = shards[number]
        rows = None if table is None else table.slice(first_rows[number], shard.rows)
        rng = np.random.default_rng([seed, number])
        return check_shard(folder, shard, info, rows, lambda n: _draw(rng, n, share), note)

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(check, present))
    return Findings(
        faults=faults + [fault for result in results for fault in result.faults],
        shards=len(present),
        samples=sum(r.samples for r in results),
        tokens=sum(r.tokens for r in results),
        bytes=sum((folder / shards[n].name).stat().st_size for n in present),
        checked=sum(r.checked for r in results),
        read=sum(r.read for r in results),
    )


def check_side_files(folder: Path, info: Manifest) -> Iterator[str]:
    """Faults of the calibration and of the copied target files."""
    files = {calibration.CODEC_FILE: info.codec.calibration}
    files |= {f"{TARGET_FOLDER}/{name}": digest for name, digest in info.target.get("copied", {}).items()}
    for name, digest in files.items():
        if not (folder / name).is_file():
            yield f"{folder / name}: missing"
        elif file_hash(folder / name) != digest:
            yield f"{folder / name}: changed after writing"


def check_names(folder: Path, info: Manifest) -> Iterator[str]:
    """Shards that a complete cache lacks, and files that do not belong to it."""
    if not info.complete:
        return
    known = {s.name for s in info.shards}
    for name in sorted(known):
        if not (folder / name).is_file():
            yield f"{folder / name}: missing"
    for path in strangers(folder, info):
        yield f"{path}: not a shard of this cache"
    for path in sorted(folder.glob("*.tmp")):
        yield f"{path}: left over from a write that was cut"


def strangers(folder: Path, info: Manifest) -> list[Path]:
    """Files among the shards that are none, nor set aside."""
    known = {s.name for s in info.shards}
    shards = folder / index.SHARDS_FOLDER
    return [
        path
        for path in (sorted(shards.iterdir()) if shards.is_dir() else ())
        if f"{index.SHARDS_FOLDER}/{path.name}" not in known and not path.name.endswith((".skipped.jsonl", *ASIDE))
    ]


def _finished(folder: Path) -> list[ShardInfo]:
    """What is there so far in a cache being written; its trailers say the rest."""
    paths = sorted((folder / index.SHARDS_FOLDER).glob("*.arrow"))
    return [ShardInfo(name=f"{index.SHARDS_FOLDER}/{p.name}", task="", rows=0, bytes=p.stat().st_size) for p in paths]


def _draw(rng: np.random.Generator, rows: int, share: float) -> list[int]:
    """Random rows in order, at least one."""
    if share >= 1:
        return list(range(rows))
    return sorted(rng.choice(rows, min(rows, int(np.ceil(share * rows))), replace=False).tolist())


def check_shard(
    folder: Path,
    shard: ShardInfo,
    info: Manifest,
    rows: pa.Table | None,
    pick: Callable[[int], list[int]] = lambda n: list(range(n)),
    note: Callable[[int], None] = lambda count: None,
) -> Checked:
    """All faults of one shard. `rows` are its rows of index.parquet where known; `pick(n)` says which of n to read."""
    path, faults, read = folder / shard.name, list[str](), 0
    metadata = manifest.stored_metadata(info)
    try:
        with path.open("rb", buffering=0) as file:
            trailer = read_trailer(file, str(path))
            found = (trailer.task, len(trailer.index), path.stat().st_size)
            if shard.task and found != (shard.task, shard.rows, shard.bytes):
                faults.append(f"{path}: not the shard the manifest lists (task {trailer.task}, expected {shard.task})")
            elif rows is not None and not rows.equals(index.build([(shard, trailer)])):
                faults.append(
                    f"{folder / index.NAME}: differs from the trailer of {shard.name}; run `dflash-shards repair`"
                )
            try:
                if read_schema(file, trailer, str(path)).metadata != metadata:
                    faults.append(f"{path}: written with another codec, calibration or layers than the manifest says")
            except CorruptError as error:
                faults.append(str(error))
            chosen = pick(len(trailer.index))
            for n in chosen:
                row = trailer.index.slice(n, 1).to_pylist()[0]
                _, found_here = read_message(file, row, info.last_hidden)
                faults += [f"{path}: row {row['row']}, sample {row['key']}: {fault}" for fault in found_here]
                read += row["length"]
                note(row["length"])
            return Checked(
                faults=faults,
                samples=len(trailer.index),
                tokens=sum(trailer.index.column("tokens").to_pylist()),
                checked=len(chosen),
                read=read,
            )
    except (RunError, OSError, MemoryError) as error:
        reason = error if isinstance(error, RunError) else f"{path}: {error or type(error).__name__}"
        return Checked(faults=[*faults, str(reason)], read=read)


def read_message(
    file: BinaryIO, row: dict[str, Any], last_hidden: bool, shift: int = 0, frames: bool = False
) -> tuple[memoryview, list[str]]:
    """The message of an index row, and what is wrong with it; with `frames` it holds those too.

    Its memory is used again by this thread's next call. Frames are hashed in pieces that stay in the CPU's cache, for
    themselves and for the message, and are not kept unless asked for: that is what makes it as fast as the disk.
    """
    size, fd, faults = os.fstat(file.fileno()).st_size, file.fileno(), list[str]()
    data = _memory("message", min(row["length"], size))
    digest, at = xxhash.xxh3_64(), 0

    def take(stop: int, out: memoryview | None, *digests: Any) -> bool:
        nonlocal at
        while at < stop:
            end = min(at + _PIECE, stop)
            piece = read_range(fd, row["offset"] + shift + at, end - at, data[at:end] if out is None else out)
            if len(piece) < end - at:
                return False
            for each in digests:
                each.update(piece)
            at = end
        return True

    names = frame_names(row)
    places = [
        (offset - row["offset"], n) for offset, n in zip(row["frame_offsets"], row["frame_lengths"], strict=False)
    ]
    for name, (start, length) in zip(names, places, strict=False):
        if not at <= start <= start + length <= len(data) or length < _SUM:
            return data, [f"{name} is said to be at byte {start}, {length} long; out of order or outside the message"]
        own, out = xxhash.xxh3_64(), None if frames else _memory("piece", _PIECE)
        if not (
            take(start, None, digest)
            and take(start + length - _SUM, out, digest, own)
            and take(at + _SUM, None, digest)
        ):
            break
        if int.from_bytes(data[at - _SUM : at], "little") != own.intdigest():
            faults.append(f"{name}: checksum differs")
    if not take(row["length"], None, digest) or digest.intdigest() != row["xxh3"]:
        return data, faults[:1] or ["checksum differs outside the frames"]
    try:
        faults += _content_faults(data, row, last_hidden)
    except CorruptError as error:
        faults.append(str(error))
    return data, faults


def _memory(name: str, size: int) -> memoryview:
    """This thread's memory of that name: new pages for every sample would cost a page fault every 4 KiB."""
    if len(getattr(_local, name, b"")) < size:
        setattr(_local, name, np.empty(size, np.uint8).data)
    return getattr(_local, name)[:size]


def _content_faults(data: memoryview, row: dict[str, Any], last_hidden: bool) -> Iterator[str]:
    batch = read_sample(data, last_hidden)
    ids, mask = ids_and_mask(batch)
    found = {
        **{field.name: batch.column(field.name)[0].as_py() for field in IDENTITY},
        "key": sample_key(ids, mask),
        "prompt_key": prompt_key(ids, mask),
        "tokens": len(ids),
        "supervised": int(np.count_nonzero(mask)),
        "anchors": len(eligible_anchors(mask)),
    }
    for name, value in found.items():
        if row[name] != value:
            yield f"{name} is {value!r}, the index says {row[name]!r}"
    shift, places = row["offset"] - pa.py_buffer(data).address, list[tuple[int, int]]()
    for name, rows in [("frames", len(ids)), *([("last_frames", len(last_positions(mask)))] if last_hidden else [])]:
        frames, expected = batch.column(name).values, -(-rows // FRAME_TOKENS)
        if len(frames) != expected:
            yield f"{len(frames)} {name} for {rows} tokens, expected {expected}"
        places += zip(*frame_ranges(frames, shift), strict=True)
    if places != list(zip(row["frame_offsets"], row["frame_lengths"], strict=False)):
        yield f"frames lie at {[at for at, _ in places]}, the index says {row['frame_offsets']}"


def describe(info: Manifest) -> str:
    """The codec as one word with its parameters."""
    return info.codec.name + (f" {json.dumps(info.codec.parameters)}" if info.codec.parameters else "")
