"""Mending a damaged cache without the target: what is sound is kept, what is lost is named and counted.

Shards come first, each under its name at once, then skipped.jsonl, index.parquet and manifest.json: a repair that was
killed is finished by the next one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash_offline.shards import index, manifest
from dflash_offline.shards.build import SKIPPED, finish
from dflash_offline.shards.cache import LOCK
from dflash_offline.shards.errors import CorruptError, RunError, UsageError
from dflash_offline.shards.files import atomic_file, file_hash, take_lock
from dflash_offline.shards.layout import read_trailer, salvaged
from dflash_offline.shards.manifest import Manifest, ShardInfo
from dflash_offline.shards.salvage import TORN, absent, free_name, salvage
from dflash_offline.shards.verify import check_shard, check_side_files, strangers

FOREIGN = ".foreign"
AGAIN = "rerun the same `dflash-extract run`"


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """What `repair` did, or would do."""

    changes: int
    lost: int
    """Samples that were dropped now."""
    left: list[str]
    """Damage it cannot mend, each with the next step."""


@dataclass(kw_only=True)
class _Job:
    """One repair under way."""

    folder: Path
    dry_run: bool
    delete: bool
    threads: int
    say: Callable[[str], None]
    changes: int = 0
    left: list[str] = field(default_factory=list)

    def note(self, what: str) -> bool:
        """Say what is done, and whether to do it."""
        self.changes += 1
        self.say(what)
        return not self.dry_run


def repair(
    folder: Path, threads: int, *, dry_run: bool = False, delete: bool = False, say: Callable[[str], None] = print
) -> Repaired:
    """Mend the cache at `folder`. `dry_run` says what would be done; `delete` keeps no damaged originals.

    Raises UsageError when it is no cache or another process holds it, RunError when manifest and index are both lost.
    """
    if not (folder / index.SHARDS_FOLDER).is_dir():
        manifest.read(folder)  # says what it is instead
        raise UsageError(f"{folder}: has no folder {index.SHARDS_FOLDER}; rerun `dflash-extract run` to make it")
    job = _Job(folder=folder, threads=threads, dry_run=dry_run, delete=delete, say=say)
    with nullcontext() if dry_run else (folder / LOCK).open("a+") as lock:
        if lock is not None:
            take_lock(lock, folder)
        cut = sorted([*folder.glob("*.tmp"), *folder.glob("*/*.tmp")])
        for path in cut:
            if job.note(f"{path}: left over from a write that was cut; removed"):
                path.unlink()
        found = {p.name: _finished(p) for p in sorted((folder / index.SHARDS_FOLDER).iterdir()) if p not in cut}
        info, table = _records(job, found)
        lost = _mend(job, info, table, found) if info.complete else _set_aside(job, info)
        job.left += [f"{fault}; restore it from a copy, or {AGAIN}" for fault in check_side_files(folder, info)]
        torn = sorted((folder / index.SHARDS_FOLDER).glob(f"*{TORN}")) if delete else []
        for path in torn:
            if job.note(f"{path}: deleted"):
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
    return Repaired(changes=job.changes, lost=lost, left=job.left)


def _finished(path: Path) -> ShardInfo | None:
    """What the trailer of `path` says, or None where it is no finished shard."""
    try:
        with path.open("rb") as file:
            trailer = read_trailer(file, str(path))
            size = path.stat().st_size
    except (CorruptError, OSError):
        return None
    return ShardInfo(name=f"{index.SHARDS_FOLDER}/{path.name}", task=trailer.task, rows=len(trailer.index), bytes=size)


def _records(job: _Job, found: dict[str, ShardInfo | None]) -> tuple[Manifest, pa.Table | None]:
    """The manifest, from itself or the index, and the index rows where they can be trusted."""
    folder, own, path = job.folder, None, job.folder / index.NAME
    if (folder / manifest.NAME).exists():
        try:
            own = manifest.read(folder)
        except CorruptError as error:
            job.say(f"FAULT {error}")
    if own is not None and not own.complete:
        return own, None
    carried = _carried(path)
    candidates = [info for info in (own, carried) if info is not None]
    if not candidates:
        raise RunError(
            f"{folder}: {manifest.NAME} and {index.NAME} are both lost or damaged; only they say what this cache is; "
            f"restore one from a copy, or remove {manifest.NAME} and {AGAIN}: it keeps the finished shards"
        )
    # A repair that was killed between the two has left the newer one in the index.
    fits = (i for i in candidates if all(found.get(Path(s.name).name) == s for s in i.shards))
    info = next(fits, candidates[0])
    if own is not None and path.is_file() and file_hash(path) == own.index.get("xxh3"):
        return info, index.load(folder, own, ranges=True)
    return info, _unverified(path) if info is carried else None


def _carried(path: Path) -> Manifest | None:
    """The manifest inside index.parquet, which has a checksum of its own."""
    try:
        values = pq.read_metadata(path).metadata or {}
        info = manifest.loads(values[index.MANIFEST_KEY], str(path))
    except (OSError, pa.ArrowException, KeyError, CorruptError, UsageError):
        return None
    return info if info.format == manifest.FORMAT else None


def _unverified(path: Path) -> pa.Table | None:
    """The rows of an index whose hash went with the manifest. Every use of a row compares its message's hash."""
    try:
        table = pq.read_table(path, page_checksum_verification=True).replace_schema_metadata()
        table.validate(full=True)
    except (OSError, pa.ArrowException):
        return None
    return table.combine_chunks() if table.schema.equals(index.SCHEMA) else None


def _set_aside(job: _Job, info: Manifest) -> int:
    """An incomplete cache: damaged shards are moved out of the way of extraction. Returns their samples."""
    lost = 0
    for path in sorted((job.folder / index.SHARDS_FOLDER).glob("*.arrow")):
        shard = _finished(path) or ShardInfo(name=f"{index.SHARDS_FOLDER}/{path.name}", task="", rows=0, bytes=0)
        if faults := check_shard(job.folder, shard, info, None).faults:
            lost += shard.rows
            if job.note(f"{faults[0]}; moved to {path.name}{TORN}; {AGAIN} to write it again"):
                path.replace(path.with_name(path.name + TORN))
    return lost


def _mend(job: _Job, info: Manifest, table: pa.Table | None, found: dict[str, ShardInfo | None]) -> int:
    """A complete cache. Returns how many samples it lost."""
    _place(job, info, found)
    at = [found.get(Path(s.name).name) for s in info.shards]
    with ThreadPoolExecutor(job.threads) as pool:
        checks = list(pool.map(lambda s: _faults(job, info, s, found), info.shards))
    lost = list[dict[str, Any]]()
    for shard, is_there, faults in zip(info.shards, at, checks, strict=True):
        path = job.folder / shard.name
        if not faults and is_there is not None and is_there.rows >= shard.rows:
            continue
        known = None if table is None else table.filter(pc.equal(table.column("shard"), shard.name))
        if not faults and is_there is not None:
            lost += absent(shard, is_there, job.folder, known)
        elif path.is_symlink() and not path.exists():
            job.left.append(
                f"{path}: a link to {path.readlink()}, which is not there; mount that disk, or mend the link"
            )
        elif path.exists() and not _is_readable(path):
            job.left.append(f"{faults[0]}; make it readable")
        else:
            job.say(f"FAULT {faults[0]}" + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""))
            kept, gone = salvage(path, info, shard, known, job.dry_run)
            job.note(f"{path}: {kept} samples kept, {len(gone)} lost")
            lost += gone
    if not job.left:  # else index and manifest still describe what may come back
        moved = [s.name for s in info.shards] != [s and s.name for s in at]
        _publish(job, info, table, lost, compare=not (moved and job.dry_run))
    return len(lost)


def _place(job: _Job, info: Manifest, found: dict[str, ShardInfo | None]) -> None:
    """Every listed shard under its own name again; what belongs to no name is set aside. `found` follows."""
    folder = job.folder / index.SHARDS_FOLDER

    def task(name: str) -> str | None:
        return None if (shard := found.get(name)) is None else salvaged(shard.task)

    def move(name: str, to: str, why: str) -> None:
        done = job.note(f"{folder / name}: {why}; moved to {to}")
        if done:
            (folder / name).replace(folder / to)
        shard = found.pop(name)
        found[to] = replace(shard, name=f"{index.SHARDS_FOLDER}/{to}") if shard and done else shard

    wanted = {Path(s.name).name: salvaged(s.task) for s in info.shards}
    for name in [*wanted, *(path.name for path in strangers(job.folder, info))]:
        if name in found and (found[name] is not None or name not in wanted) and task(name) != wanted.get(name, ""):
            move(name, free_name(found, name, FOREIGN), "not a shard of this name")
    for name, hash_ in wanted.items():
        source = next((other for other in found if task(other) == hash_ and other not in wanted), None)
        if source is not None and task(name) is None:
            if name in found:
                move(name, free_name(found, name, TORN), "torn")
            move(source, name, f"is {name}")


def _faults(job: _Job, info: Manifest, shard: ShardInfo, found: Mapping[str, ShardInfo | None]) -> Sequence[str]:
    name = Path(shard.name).name
    at = found.get(name)
    if at is None:
        return [f"{job.folder / shard.name}: {'torn' if name in found else 'missing'}"]
    return check_shard(job.folder, at, info, None).faults


def _is_readable(path: Path) -> bool:
    try:
        path.open("rb").close()
    except OSError:
        return False
    return True


def _publish(job: _Job, info: Manifest, table: pa.Table | None, lost: list[dict[str, Any]], compare: bool) -> None:
    """skipped.jsonl, index and manifest, where they do not say what the shards are."""
    folder, both = job.folder, f"{index.NAME} and {manifest.NAME}"
    if lost:
        if not job.note(f"{folder}: {SKIPPED} names what was lost, {both} say what is left"):
            return
        lines = (folder / SKIPPED).read_bytes().splitlines() if (folder / SKIPPED).is_file() else []
        more = [line for line in (json.dumps(entry).encode() for entry in lost) if line not in set(lines)]
        with atomic_file(folder / SKIPPED) as file:
            file.write(b"".join(line + b"\n" for line in [*lines, *more]))
        skipped = info.dataset.get("skipped", {})
        facts: dict[str, Any] = {"skipped": {**skipped, "damaged": skipped.get("damaged", 0) + len(lost)}}
        if "files" in info.dataset:
            # Not every row of them is here any more: without its hash a file is read again when the plan is gone.
            facts["files"] = [{**entry, "xxh3": ""} for entry in info.dataset["files"]]
        finish(folder, info, {s.name: s.task for s, _ in index.scan(folder)}, facts)
        return
    own = None
    with suppress(CorruptError, UsageError):
        own = manifest.read(folder)
    good = own == info and table is not None
    what = f"{folder}: {both} written again, from each other and the shards' trailers"
    if not compare:
        if not good:
            job.note(what)
        return
    shards = index.scan(folder)
    now = [s for s, _ in shards]
    if (good and now == info.shards and index.build(shards).equals(table)) or not job.note(what):
        return
    if sum(s.rows for s in now) == sum(s.rows for s in info.shards):
        index.publish(folder, replace(info, shards=now), index.build(shards))
    else:  # somebody has put a shard back
        skipped = {k: n for k, n in info.dataset.get("skipped", {}).items() if k != "damaged"}
        finish(folder, info, {s.name: s.task for s in now}, {"skipped": skipped})
