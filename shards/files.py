"""Files that appear whole or not at all."""

import fcntl
import json
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
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
    _may_die("rename", final)
    temporary.replace(final)
    _may_die("renamed", final)
    fsync_folder(final.parent)


def _may_die(point: str, path: Path) -> None:
    """For tests: with DFLASH_TEST_KILL=POINT:PATH this process ends by SIGKILL when it gets there, once.

    Points are fsync (written, not yet durable), rename (durable, without its name) and renamed (the folder is not yet
    durable); PATH is a pattern. The death is noted in the file DFLASH_TEST_KILLED, and none follows.
    """
    if (wanted := os.environ.get("DFLASH_TEST_KILL")) and fnmatch(f"{point}:{path}", wanted):
        with suppress(FileExistsError):
            os.close(os.open(os.environ["DFLASH_TEST_KILLED"], os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)


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
            _may_die("fsync", path)
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
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


def take_lock(lock: TextIO, folder: Path, shared: str = "") -> None:
    """Hold `folder` by its open lock file until that is closed; the kernel closes it for a process that died.

    Several processes may hold it as `shared`, which says what they are. Raises UsageError naming the holder.
    """
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UsageError(f"{folder}: in use by {lock.read().strip() or 'another process'}") from None
    lock.truncate(0)
    lock.write(shared or f"pid {os.getpid()} on {platform.node()}")
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
