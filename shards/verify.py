"""Checking a whole cache: every byte of every file against a checksum, every sample against its key.

Faults are collected, not raised: one damaged shard must not hide the next.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from dflash_offline.shards import calibration, index, manifest
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.errors import CorruptError, RunError
from dflash_offline.shards.files import file_hash
from dflash_offline.shards.frames import is_sound, spans
from dflash_offline.shards.keys import eligible_anchors, last_positions, prompt_key, sample_key
from dflash_offline.shards.layout import Trailer, read_sample, read_schema, read_trailer
from dflash_offline.shards.manifest import Manifest, ShardInfo


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What `verify` found."""

    faults: list[str]
    """One line each, naming file, row and sample."""
    shards: int
    samples: int
    tokens: int
    bytes: int


def verify(folder: Path, threads: int) -> Findings:
    """Check the cache at `folder`. Raises UsageError when it is none; damage is returned, never raised."""
    try:
        info = manifest.read(folder)
    except CorruptError as error:
        return Findings(faults=[str(error)], shards=0, samples=0, tokens=0, bytes=0)
    last_hidden = info.last_hidden
    faults = [*_check_side_files(folder, info), *_check_names(folder, info)]
    shards = info.shards if info.complete else _finished(folder)
    present = [s for s in shards if (folder / s.name).is_file()]
    metadata = {k.encode(): v.encode() for k, v in manifest.shard_metadata(info.codec, info.layer_ids).items()}
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda s: _check_shard(folder / s.name, s, metadata, last_hidden), present))
    trailers = [t for _, t in results]
    for shard_faults, _ in results:
        faults += shard_faults
    if info.complete:
        faults += _check_index(folder, info, trailers)
    tables = [t.index for t in trailers if t]
    return Findings(
        faults=faults,
        shards=len(present),
        samples=sum(len(t) for t in tables),
        tokens=sum(sum(t.column("tokens").to_pylist()) for t in tables),
        bytes=sum((folder / s.name).stat().st_size for s in present),
    )


def _check_side_files(folder: Path, info: Manifest) -> Iterator[str]:
    files = {calibration.CODEC_FILE: info.codec.calibration}
    files |= {f"{TARGET_FOLDER}/{name}": digest for name, digest in info.target.get("copied", {}).items()}
    for name, digest in files.items():
        if not (folder / name).is_file():
            yield f"{folder / name}: missing"
        elif file_hash(folder / name) != digest:
            yield f"{folder / name}: changed after writing"


def _finished(folder: Path) -> list[ShardInfo]:
    """What is there so far in a cache being written; its trailers say the rest."""
    paths = sorted((folder / index.SHARDS_FOLDER).glob("*.arrow"))
    return [ShardInfo(name=f"{index.SHARDS_FOLDER}/{p.name}", task="", rows=-1, bytes=p.stat().st_size) for p in paths]


def _check_names(folder: Path, info: Manifest) -> Iterator[str]:
    if not info.complete:
        return
    known = {s.name for s in info.shards}
    for name in sorted(known):
        if not (folder / name).is_file():
            yield f"{folder / name}: missing"
    for path in sorted((folder / index.SHARDS_FOLDER).iterdir()):
        name = f"{index.SHARDS_FOLDER}/{path.name}"
        if name not in known and not path.name.endswith(".skipped.jsonl"):
            yield f"{path}: not a shard of this cache"


def _check_index(folder: Path, info: Manifest, trailers: list[Trailer | None]) -> Iterator[str]:
    try:
        table = index.load(folder, info, ranges=True)
    except CorruptError as error:
        yield str(error)
        return
    whole = [(s, t) for s, t in zip(info.shards, trailers, strict=False) if t]
    if len(whole) == len(info.shards) and not table.equals(index.build(whole)):
        yield f"{folder / index.NAME}: differs from the shards' trailers; delete it and rerun `dflash-extract run`"


def _check_shard(
    path: Path, info: ShardInfo, metadata: dict[bytes, bytes], last_hidden: bool
) -> tuple[list[str], Trailer | None]:
    """All faults of one shard, and its trailer if that is sound."""
    try:
        with path.open("rb") as file:
            trailer = read_trailer(file, str(path))
            faults = []
            found = (trailer.task, len(trailer.index), path.stat().st_size)
            if info.task and found != (info.task, info.rows, info.bytes):
                faults.append(f"{path}: not the shard the manifest lists (task {trailer.task}, expected {info.task})")
            try:
                if read_schema(file, trailer, str(path)).metadata != metadata:
                    faults.append(f"{path}: written with another codec, calibration or layers than the manifest says")
            except CorruptError as error:
                faults.append(str(error))
            faults += [f"{path}: {fault}" for fault in _check_samples(file, trailer, last_hidden)]
            return faults, trailer
    except (RunError, OSError) as error:
        return [str(error)], None


def _check_samples(file: BinaryIO, trailer: Trailer, last_hidden: bool) -> Iterator[str]:
    for row, message in zip(trailer.index.to_pylist(), trailer.messages[1:], strict=True):
        where = f"row {row['row']}, sample {row['key']}"
        data = os.pread(file.fileno(), message.length, message.offset)
        if xxhash.xxh3_64_intdigest(data) != message.xxh3:
            yield f"{where}: checksum differs"
            continue
        try:
            batch = read_sample(data, last_hidden)
        except CorruptError as error:
            yield f"{where}: {error}"
            continue
        ids = batch.column("input_ids").values.to_numpy()
        mask = batch.column("loss_mask").values.to_numpy()
        found = (sample_key(ids, mask), prompt_key(ids, mask), len(ids), len(eligible_anchors(mask)))
        if found != (row["key"], row["prompt_key"], row["tokens"], row["anchors"]):
            yield f"{where}: ids and mask give key {found[0]}, {found[2]} tokens, {found[3]} anchors"
        columns = [("frames", len(ids))] + ([("last_frames", len(last_positions(mask)))] if last_hidden else [])
        for name, rows in columns:
            frames = batch.column(name).values
            if len(frames) != len(list(spans(rows))):
                yield f"{where}: {len(frames)} {name} for {rows} tokens"
            for i, frame in enumerate(frames):
                if not is_sound(memoryview(frame.as_buffer())):
                    yield f"{where}: {name} {i}: checksum differs"


def describe(info: Manifest) -> str:
    """The codec as one word with its parameters."""
    return info.codec.name + (f" {json.dumps(info.codec.parameters)}" if info.codec.parameters else "")
