"""Making a cache of shards: who holds the folder, which shards are finished, and the end that makes it complete.

Shared by extraction and by everything that writes a cache from samples at hand (merge, convert, import).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_offline.shards import index, manifest
from dflash_offline.shards.cache import LOCK
from dflash_offline.shards.calibration import CODEC_FILE
from dflash_offline.shards.errors import CorruptError, RunError, UsageError
from dflash_offline.shards.files import atomic_file, take_lock
from dflash_offline.shards.keys import keys_hash
from dflash_offline.shards.layout import is_salvaged, read_schema, read_trailer, salvaged
from dflash_offline.shards.manifest import Manifest
from dflash_offline.shards.writer import Identity, ShardWriter

SKIPPED = "skipped.jsonl"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One sample as it goes to disk."""

    identity: Identity
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    frames: Sequence[bytes]
    last_frames: Sequence[bytes] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one shard will hold."""

    task: str
    """Hash of everything that decides the bytes, 32 hex digits: a finished shard of this hash is not made again."""
    samples: Callable[[], Iterator[Entry]]


@contextmanager
def claim(cache: Path, subfolders: Sequence[str] = (index.SHARDS_FOLDER,), share: str = "") -> Iterator[None]:
    """Make or take the cache folder and hold it for this process; what a dead one left half-written is removed.

    Processes that each name another `share` hold it together, and no other beside them; they clean up after themselves.
    Raises UsageError when another process holds it, or it holds something else; a folder made for a run that is refused
    is taken away again.
    """
    if cache.exists() and not cache.is_dir():
        raise UsageError(f"{cache}: is a file; expected a folder for the cache")
    ours = (cache / LOCK).is_file() or (cache / manifest.NAME).is_file()
    if cache.is_dir() and not ours and (found := sorted(p.name for p in cache.iterdir())):
        raise UsageError(f"{cache}: holds {found[0]} and is not a cache; choose an empty or new folder")
    missing = [p for p in (cache, *cache.parents) if not p.exists()]
    try:
        for folder in (cache, *(cache / name for name in subfolders)):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{cache}: {error.strerror}; expected a folder that can be written") from None
    try:
        with (cache / LOCK).open("a+") as lock, (cache / f"{LOCK}{share}").open("a+") as own:
            take_lock(lock, cache, "several processes, a part each" if share else "")
            if share:
                take_lock(own, cache)
            else:
                for leftover in (*cache.glob("*.tmp"), *cache.glob("*/*.tmp")):
                    leftover.unlink()
            yield
    except UsageError:
        if not ours and not any(path for name in subfolders for path in (cache / name).iterdir()):
            for path in (cache / LOCK, cache / f"{LOCK}{share}", cache / SKIPPED):
                path.unlink(missing_ok=True)
            for folder in (*(cache / name for name in subfolders), *missing):
                with suppress(OSError):
                    folder.rmdir()
        raise


def is_done(path: Path, task: str) -> bool:
    """True when the task's shard is finished. A torn one is set aside, to be written again.

    Raises CorruptError when a shard is there that this task did not make.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            found = read_trailer(file, str(path)).task
        except CorruptError as error:
            print(f"{error}; moved to {path.name}.torn", file=sys.stderr)
            path.replace(path.with_name(f"{path.name}.torn"))
            return False
    if found != task and found == salvaged(task):
        return False  # what a repair kept of it
    if found != task:
        raise CorruptError(f"{path}: written by task {found}, the plan says {task}; use another cache folder")
    return True


def build(cache: Path, draft: Manifest, parts: Sequence[Part], threads: int) -> Manifest:
    """Write the shards that are missing, then index and manifest. Call it under `claim`, codec.safetensors in place.

    `draft` is the manifest as far as it is known; see `finish`. A failing part ends the build; finished shards stay.
    """
    manifest.write(cache, replace(draft, complete=False))
    metadata = manifest.shard_metadata(draft.codec, draft.layer_ids)

    def make(number: int) -> None:
        path, part = cache / index.shard_name(number), parts[number]
        if is_done(path, part.task):
            return
        with ShardWriter(path, task=part.task, metadata=metadata, last_hidden=draft.last_hidden) as writer:
            for entry in part.samples():
                writer.append(entry.identity, entry.input_ids, entry.loss_mask, entry.frames, entry.last_frames)

    in_threads(make, range(len(parts)), threads)
    return finish(cache, draft, {index.shard_name(n): part.task for n, part in enumerate(parts)}, {})


def in_threads(work: Callable[[int], None], numbers: Iterable[int], threads: int) -> None:
    """`work` on every number. After an error nothing new begins, and it is raised."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, number) for number in numbers]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def finish(
    cache: Path,
    draft: Manifest,
    tasks: Mapping[str, str],
    facts: Mapping[str, Any],
    audit: Callable[[list[str]], dict[str, Any]] = lambda keys: {},
) -> Manifest:
    """Index and complete manifest from the finished shards, whose names and hashes `tasks` lists.

    `facts` are added to the manifest's dataset; `audit` of the samples' keys is what it says of their audit. Raises
    RunError when a shard is not of this making.
    """
    metadata = manifest.stored_metadata(draft)
    shards = index.scan(cache)
    for shard, trailer in shards:
        if tasks.get(shard.name) != shard.task:
            raise RunError(f"{cache / shard.name}: not a shard of this plan; move it away and rerun")
        with (cache / shard.name).open("rb") as file:
            if read_schema(file, trailer, str(cache / shard.name)).metadata != metadata:
                raise RunError(
                    f"{cache / shard.name}: written with another {CODEC_FILE}; restore that file, or remove the shard"
                )
    if lacking := sorted(tasks.keys() - {shard.name for shard, _ in shards}):
        raise RunError(f"{cache / lacking[0]}: missing ({len(lacking)} such shards); rerun the same command")
    if (cache / SKIPPED).is_file() and not any(is_salvaged(task) for task in tasks.values()):
        _forget_damage(cache / SKIPPED)
    table = index.build(shards)
    modes = table.column("response").unique().to_pylist()
    counts = {"samples": len(table), "tokens": sum(table.column("tokens").to_pylist())}
    keys = table.column("key").to_pylist()
    return index.publish(
        cache,
        replace(
            draft,
            generation=modes[0] if len(modes) == 1 else "mixed",
            dataset={**draft.dataset, **facts, **counts, "keys": keys_hash(keys)},
            audit=audit(keys),
            shards=[shard for shard, _ in shards],
        ),
        table,
    )


def _forget_damage(path: Path) -> None:
    """Samples that a repair had dropped are back: they are not skipped any more."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"reason": "damaged"' not in line]
    if len(kept) < len(lines):
        with atomic_file(path) as file:
            file.write(b"".join(kept))
