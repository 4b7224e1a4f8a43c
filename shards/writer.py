"""Writing one shard: temporary file -> fsync -> rename -> fsync of the folder. It appears whole or not at all."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from dflash_offline.shards.files import link, publish
from dflash_offline.shards.keys import eligible_anchors
from dflash_offline.shards.layout import (
    END_OF_STREAM,
    INDEX_SCHEMA,
    LAST_FRAMES,
    SAMPLE_SCHEMA,
    Message,
    Trailer,
    frame_ranges,
    pack_trailer,
    sample_schema,
)

_SEND_EVERY = 64 << 20
"""Bytes after which the disk is told to begin with them."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a sample is; the columns of layout.IDENTITY."""

    key: str
    prompt_key: str
    id: str
    source: str
    source_row: int
    finish_reason: str
    response: str


class ShardWriter:
    """Context manager. Leaving it without an error publishes the shard; an error leaves no file behind."""

    def __init__(
        self, path: Path, *, task: str, metadata: dict[str, str], last_hidden: bool = False, body: Path | None = None
    ) -> None:
        """`path` is the final name; `task` the hash of the task, 32 hex digits; `metadata` goes into the schema.

        With `body` the bytes lie there, on another disk for instance, and `path` becomes a link to it.
        """
        self._path, self._body = path, body or path
        self._temporary = self._body.with_name(f"{self._body.name}.{os.getpid()}.tmp")
        self._task = task
        self._schema = sample_schema(last_hidden).with_metadata(metadata)
        self._messages: list[Message] = []
        self._rows: list[dict[str, object]] = []
        self._file = self._temporary.open("wb")
        self._sent = 0
        self._put(self._schema.serialize())

    def append(
        self,
        identity: Identity,
        input_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        frames: Sequence[bytes],
        last_frames: Sequence[bytes] = (),
    ) -> None:
        """Write one sample: ids [T], mask [T], its frames in token order, and those of the last hidden state."""
        columns = asdict(identity)
        coded = [frames, last_frames] if LAST_FRAMES.name in self._schema.names else [frames]
        batch = pa.record_batch(
            [
                *(pa.array([columns[field.name]], field.type) for field in SAMPLE_SCHEMA if field.name in columns),
                _one_list(pa.array(input_ids, pa.int32()), SAMPLE_SCHEMA.field("input_ids").type),
                _one_list(pa.array(loss_mask, pa.uint8()), SAMPLE_SCHEMA.field("loss_mask").type),
                *(_one_list(pa.array(part, pa.large_binary()), LAST_FRAMES.type) for part in coded),
            ],
            schema=self._schema,
        )
        buffer = batch.serialize()
        message = self._put(buffer)
        stored = pa.ipc.read_record_batch(buffer, self._schema)
        ranges = [
            frame_ranges(stored.column(name).values, message.offset - buffer.address)
            for name in ("frames", "last_frames")[: len(coded)]
        ]
        self._rows.append(
            {
                **columns,
                "row": len(self._rows),
                "tokens": len(input_ids),
                "supervised": int(np.count_nonzero(loss_mask)),
                "anchors": len(eligible_anchors(loss_mask)),
                "offset": message.offset,
                "length": message.length,
                "xxh3": message.xxh3,
                "frame_offsets": [offset for offsets, _ in ranges for offset in offsets],
                "frame_lengths": [length for _, lengths in ranges for length in lengths],
            }
        )

    def _put(self, buffer: pa.Buffer) -> Message:
        message = Message(
            offset=self._file.tell(), length=buffer.size, xxh3=xxhash.xxh3_64_intdigest(memoryview(buffer))
        )
        try:
            self._file.write(buffer)
            self._send()
        except OSError as error:  # a write to an open file does not know its name
            raise OSError(error.errno, error.strerror, str(self._body)) from None
        self._messages.append(message)
        return message

    def _send(self) -> None:
        """Begin to write back. Else the disk idles until fsync, which then waits for a whole shard."""
        if (at := self._file.tell()) - self._sent >= _SEND_EVERY and hasattr(os, "posix_fadvise"):
            self._file.flush()
            # Of pages that are not written yet it forgets none.
            os.posix_fadvise(self._file.fileno(), self._sent, at - self._sent, os.POSIX_FADV_DONTNEED)
            self._sent = at

    def close(self) -> pa.Table:
        """Write the trailer, make the file durable, give it its name. Returns the shard's index rows."""
        index = pa.Table.from_pylist(self._rows, schema=INDEX_SCHEMA)
        self._file.write(END_OF_STREAM)
        self._file.write(pack_trailer(Trailer(task=self._task, messages=tuple(self._messages), index=index)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        publish(self._temporary, self._body)
        if self._body != self._path:
            link(self._path, self._body)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and not self._file.closed:
                self.close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._body)) from None
        finally:
            # After a full disk even closing may fail, and the room must be given back all the same.
            self._temporary.unlink(missing_ok=True)
            with suppress(OSError):
                self._file.close()


def _one_list(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """`values` as the only row of a list column, without a copy."""
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values, type=kind)
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values, type=kind)
