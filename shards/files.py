"""Files that appear whole or not at all."""

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import xxhash

from dflash_offline.shards.errors import CorruptError, UsageError


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable; a rename alone may be lost on power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, final: Path) -> None:
    """Rename an already fsynced file or folder to its final name, durably."""
    temporary.replace(final)
    fsync_folder(final.parent)


def link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, durably and at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    publish(temporary, path)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; it becomes `path` if the block ends without an error."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` with a checksum of themselves, atomically, readable by a person."""
    with atomic_file(path) as file:
        file.write(seal(values).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote. Raises CorruptError when it is cut or changed, FileNotFoundError when absent."""
    return unseal(path.read_bytes(), str(path))


def seal(values: dict[str, Any]) -> str:
    """`values` as JSON with a checksum of themselves."""
    return json.dumps({**values, "checksum": _checksum(values)}, indent=1, ensure_ascii=False)


def unseal(raw: bytes, where: str) -> dict[str, Any]:
    """Inverse of `seal`. Raises CorruptError naming `where`."""
    try:
        values = json.loads(raw)
        found = values.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptError(
            f"{where}: not readable ({len(raw)} bytes: {error}); restore it, or delete it and rerun the same command"
        ) from None
    if found != _checksum(values):
        raise CorruptError(f"{where}: checksum is {_checksum(values)}, expected {found}; it was changed after writing")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(
        json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    )


def file_hash(path: Path) -> str:
    """xxh3-64 (hex) of a whole file, in constant memory."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def take_lock(lock: TextIO, folder: Path) -> None:
    """Hold `folder` by its open lock file until that is closed; the kernel closes it for a process that died.

    Raises UsageError naming the holder.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UsageError(f"{folder}: in use by {lock.read().strip() or 'another process'}") from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {platform.node()}")
    lock.flush()


def is_locked(lock: Path) -> bool:
    """True while another open file holds that lock."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or none of ours
        return False
    return False
