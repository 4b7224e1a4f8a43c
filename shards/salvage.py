"""What is sound of one damaged shard, and what is lost.

Nothing is guessed. A sample is kept when its message has the hash that its shard's trailer, or else index.parquet,
vouches for; a shard that lost some carries `layout.salvaged` of its task, so that extraction runs that task again.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from dflash_offline.shards import manifest
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.layout import IDENTITY, ids_and_mask, read_sample, read_schema, read_trailer, salvaged
from dflash_offline.shards.manifest import Manifest, ShardInfo
from dflash_offline.shards.verify import read_message
from dflash_offline.shards.writer import Identity, ShardWriter

TORN = ".torn"


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """Where the message of an index row may lie."""

    row: dict[str, Any]
    file: BinaryIO
    shift: int


def salvage(
    path: Path, info: Manifest, shard: ShardInfo, known: pa.Table | None, dry_run: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Write what is sound of a damaged shard in its place; returns how many samples, and a line for each that is lost.

    `known` are the shard's rows of the index, where there is one. A shard that has lost nothing is the original again.
    """
    listed = [] if known is None else known.to_pylist()
    # What was set aside earlier too: a repair may have been killed just then.
    sources = [p for p in (path, *sorted(path.parent.glob(f"{path.name}*{TORN}"))) if p.exists()]
    claims: dict[str, list[_Claim]] = {row["key"]: [] for row in listed}
    with ExitStack() as stack:
        for source in sources:
            file = stack.enter_context(source.open("rb", buffering=0))
            rows = _vouched(file, info, shard, source)
            listed = listed if known is not None or rows is None else [*listed, *rows]
            for row in listed if rows is None else rows:
                # Bytes inserted or cut out in front of a message move it.
                for shift in dict.fromkeys((0, source.stat().st_size - shard.bytes)):
                    claims.setdefault(row["key"], []).append(_Claim(row=row, file=file, shift=shift))
        kept = {row["key"] for row, _ in _sound(claims.values(), info.last_hidden)}
        if not dry_run:
            task = shard.task if len(kept) == shard.rows else salvaged(shard.task)
            _rewrite(path, info, task, _sound(claims.values(), info.last_hidden))
    missing = {row["key"]: row for row in listed if row["key"] not in kept}
    unnamed = shard.rows - len(missing) - len(kept) if known is None else 0
    return len(kept), [*(_line(shard, row) for row in missing.values()), *(_unnamed(shard, n) for n in range(unnamed))]


def _vouched(file: BinaryIO, info: Manifest, shard: ShardInfo, path: Path) -> list[dict[str, Any]] | None:
    """The rows of the shard's own trailer; None where it is not sound; none where another cache made the shard."""
    try:
        trailer = read_trailer(file, str(path))
        if salvaged(trailer.task) != salvaged(shard.task):
            return []
        if read_schema(file, trailer, str(path)).metadata != _metadata(info):
            return []
    except CorruptError:
        return None
    return trailer.index.to_pylist()


def _metadata(info: Manifest) -> dict[bytes, bytes]:
    return manifest.stored_metadata(info)


def _sound(claims: Iterable[list[_Claim]], last_hidden: bool) -> Iterator[tuple[dict[str, Any], memoryview]]:
    """The row and the message of every sample that one of its claims is true of; the message until the next."""
    for each in claims:
        for claim in each:
            try:
                data, faults = read_message(claim.file, claim.row, last_hidden, claim.shift, frames=True)
            except OSError:  # a bad block of the disk, or a place before the file
                continue
            if not faults:
                yield claim.row, data
                break


def _rewrite(path: Path, info: Manifest, task: str, sound: Iterable[tuple[dict[str, Any], memoryview]]) -> None:
    """The shard of these samples at `path`; the damaged one is set aside just before."""
    metadata = manifest.shard_metadata(info.codec, info.layer_ids)
    with ShardWriter(path, task=task, metadata=metadata, last_hidden=info.last_hidden) as writer:
        for row, data in sound:
            batch = read_sample(data, info.last_hidden)
            ids, mask = ids_and_mask(batch)
            names = ("frames", "last_frames")[: 1 + info.last_hidden]
            frames = [[frame.as_py() for frame in batch.column(name).values] for name in names]
            writer.append(Identity(**{f.name: row[f.name] for f in IDENTITY}), ids, mask, *frames)
        if path.exists():
            beside = dict.fromkeys(p.name for p in path.parent.iterdir())
            path.replace(path.with_name(free_name(beside, path.name, TORN)))


def absent(shard: ShardInfo, at: ShardInfo, folder: Path, known: pa.Table | None) -> list[dict[str, Any]]:
    """What a sound shard no longer holds of its rows in the index: a repair that was killed dropped it."""
    if known is None:
        return [_unnamed(shard, n) for n in range(shard.rows - at.rows)]
    with (folder / at.name).open("rb") as file:
        keys = set(read_trailer(file, at.name).index.column("key").to_pylist())
    return [_line(shard, row) for row in known.to_pylist() if row["key"] not in keys]


def _line(shard: ShardInfo, row: dict[str, Any]) -> dict[str, Any]:
    detail = f"{shard.name} row {row['row']}, key {row['key']}"
    return {
        "file": row["source"],
        "line": row["source_row"] + 1,
        "id": row["id"],
        "reason": "damaged",
        "detail": detail,
    }


def _unnamed(shard: ShardInfo, number: int) -> dict[str, Any]:
    detail = f"{shard.name}: sample {number + 1} of those that neither trailer nor index names any more"
    return {"file": "", "line": 0, "id": "", "reason": "damaged", "detail": detail}


def free_name(found: Mapping[str, object], name: str, ending: str) -> str:
    """A name for what is set aside; never one in use."""
    names = (f"{name}{f'.{n}' if n else ''}{ending}" for n in itertools.count())
    return next(candidate for candidate in names if candidate not in found)
