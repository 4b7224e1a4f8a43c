"""Shards on several disks: the bytes lie in a folder under each root, and the cache holds links to them.

So every reader works as with one disk, and a disk that moved needs new links, nothing else.
"""

import shutil
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.index import SHARDS_FOLDER


def folder(root: Path, cache: Path) -> Path:
    """Where shards of `cache` lie under `root`: a name of its own, so that caches can share roots."""
    return root.resolve() / f"{cache.name}-{blake2b(str(cache.resolve()).encode(), digest_size=4).hexdigest()}"


def prepare(roots: Sequence[Path], cache: Path, ours: Callable[[Path], bool] = lambda path: True) -> None:
    """Make the folders, and remove what a dead run left in them: shards without their link were never finished.

    Only files that are `ours` are touched. Raises UsageError naming a root that cannot be written.
    """
    linked = {path.resolve() for path in (cache / SHARDS_FOLDER).glob("*.arrow")}
    for root in roots:
        place = folder(root, cache)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{root}: {error.strerror}; expected a folder that can be written") from None
        for path in (*place.glob("*.tmp"), *place.glob("*.arrow")):
            if path not in linked and ours(path):
                path.unlink()


def choose(roots: Sequence[Path], cache: Path, name: str) -> Path | None:
    """Where shard file `name` goes: the root with most room; None: the cache folder itself."""
    if not roots:
        return None
    return folder(max(roots, key=lambda root: shutil.disk_usage(root).free), cache) / name
