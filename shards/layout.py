"""The layout of a shard file, and of the trailer that makes it trustworthy.

A shard is an Arrow IPC stream that pyarrow, datasets and polars open as it is: a schema message, one record batch
message a sample, the end-of-stream marker. After the marker comes a trailer, which those readers ignore:

    trailer = head | u64 offset, u64 length, u64 xxh3-64 of every message (schema first) | index batch | tail
    head    = magic "DFTRAIL1", 16-byte task hash, u64 messages, u64 bytes of the index batch
    tail    = u64 xxh3-64 of head..index batch, u64 bytes of head..index batch, magic "DFSHARD1"

The index batch is an Arrow IPC stream with this shard's rows of index.parquet, so the index is rebuilt from trailers
alone. A cut stream at a batch boundary reads as a shorter, valid one, and Arrow does not check its metadata: so no
message is given to Arrow before its hash is checked, and a file without a trailer is torn, never a shard.
"""

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from dflash_offline.shards.errors import CorruptError

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_HEAD = struct.Struct("<8s16sQQ")
_MESSAGE = struct.Struct("<QQQ")
_TAIL = struct.Struct("<QQ8s")
_MAGIC, _END_MAGIC = b"DFTRAIL1", b"DFSHARD1"
_ONE_READ = 1 << 30
"""The kernel gives at most 2 GiB for one call, whatever was asked."""
_BROKEN = (pa.ArrowException, OSError, ValueError, struct.error)
"""What Arrow raises for bytes that are none of its own."""
_SALVAGED = "5a17a6ed" * 2

IDENTITY = [
    pa.field("key", pa.string(), nullable=False),
    pa.field("prompt_key", pa.string(), nullable=False),
    pa.field("id", pa.string(), nullable=False),
    pa.field("source", pa.string(), nullable=False),
    pa.field("source_row", pa.int64(), nullable=False),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("response", pa.string(), nullable=False),
]
"""What a sample is: content key, prompt key, the dataset's own id, file and row, and how its response was made."""

SAMPLE_SCHEMA = pa.schema(
    [
        *IDENTITY,
        pa.field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("loss_mask", pa.list_(pa.field("item", pa.uint8(), nullable=False)), nullable=False),
        pa.field("frames", pa.large_list(pa.field("item", pa.large_binary(), nullable=False)), nullable=False),
    ]
)
"""One record batch of a shard. Each shard adds metadata (codec, layers, calibration hash) to it."""

LAST_FRAMES = pa.field("last_frames", SAMPLE_SCHEMA.field("frames").type, nullable=False)


def sample_schema(last_hidden: bool) -> pa.Schema:
    """SAMPLE_SCHEMA, with the optional column of frames of the last hidden state."""
    return SAMPLE_SCHEMA.append(LAST_FRAMES) if last_hidden else SAMPLE_SCHEMA


INDEX_SCHEMA = pa.schema(
    [
        *IDENTITY,
        pa.field("row", pa.int32(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("supervised", pa.int64(), nullable=False),
        pa.field("anchors", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("xxh3", pa.uint64(), nullable=False),
        pa.field("frame_offsets", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("frame_lengths", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
    ]
)
"""One row of a trailer's index batch; index.parquet adds the shard's name. Offsets are absolute in the file.

frame_offsets and frame_lengths list the frames of the states, then those of the last hidden state.
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Where an Arrow message lies, and its hash over metadata, body and padding."""

    offset: int
    length: int
    xxh3: int


@dataclass(frozen=True, kw_only=True)
class Trailer:
    """What a finished shard says about itself."""

    task: str
    """Hash of the task that wrote it, 32 hex digits."""
    messages: tuple[Message, ...]
    """Schema message first, then one a sample."""
    index: pa.Table
    """INDEX_SCHEMA, one row a sample."""


def pack_trailer(trailer: Trailer) -> bytes:
    """The bytes that follow the end-of-stream marker."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, INDEX_SCHEMA) as writer:
        writer.write_table(trailer.index)
    index = sink.getvalue().to_pybytes()
    body = b"".join(
        [
            _HEAD.pack(_MAGIC, bytes.fromhex(trailer.task), len(trailer.messages), len(index)),
            *(_MESSAGE.pack(m.offset, m.length, m.xxh3) for m in trailer.messages),
            index,
        ]
    )
    return body + _TAIL.pack(xxhash.xxh3_64_intdigest(body), len(body), _END_MAGIC)


def read_trailer(file: BinaryIO, name: str) -> Trailer:
    """Read and check the trailer of an open shard. Raises CorruptError naming the shard."""
    size = os.fstat(file.fileno()).st_size

    def bad(why: str) -> CorruptError:
        return CorruptError(f"{name}: {why}; rerun the same `dflash-extract run` to write it again")

    if size < _TAIL.size:
        raise bad(f"no trailer ({size} bytes): torn or not a shard")
    checksum, length, magic = _TAIL.unpack(os.pread(file.fileno(), _TAIL.size, size - _TAIL.size))
    start = size - _TAIL.size - length
    if magic != _END_MAGIC or length < _HEAD.size or start < len(END_OF_STREAM):
        raise bad("no trailer: torn, cut or not a shard")
    # Before the rest is read: its length is what would be allocated.
    magic, task, count, index_bytes = _HEAD.unpack(os.pread(file.fileno(), _HEAD.size, start))
    if magic != _MAGIC or _HEAD.size + count * _MESSAGE.size + index_bytes != length or count < 1:
        raise bad("trailer head is not one of this version")
    body = read_range(file.fileno(), start, length)
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise bad("trailer checksum differs")
    messages, at = [], 0
    for i in range(count):
        offset, size_i, xxh3 = _MESSAGE.unpack_from(body, _HEAD.size + i * _MESSAGE.size)
        if offset != at:
            raise bad(f"message {i} starts at {offset}, expected {at}")
        messages.append(Message(offset=offset, length=size_i, xxh3=xxh3))
        at += size_i
    if at + len(END_OF_STREAM) != start or os.pread(file.fileno(), len(END_OF_STREAM), at) != END_OF_STREAM:
        raise bad(f"the stream ends at byte {at}, but the trailer starts at {start}")
    try:
        index = _read_index(body[_HEAD.size + count * _MESSAGE.size :])
    except (*_BROKEN, CorruptError) as error:  # its hash is right, so it was written so
        raise bad(f"trailer's index: {str(error).splitlines()[0]}") from None
    columns = (index.column(name).to_pylist() for name in ("row", "offset", "length", "xxh3"))
    if list(zip(*columns, strict=True)) != [(i, m.offset, m.length, m.xxh3) for i, m in enumerate(messages[1:])]:
        raise bad(f"trailer's index of {len(index)} rows does not list its {count - 1} samples")
    return Trailer(task=task.hex(), messages=tuple(messages), index=index)


def _read_index(stream: memoryview) -> pa.Table:
    """A trailer's index batch. Nothing in it points outside it."""
    messages = list(pa.ipc.MessageReader.open_stream(pa.py_buffer(stream)))
    schema = pa.ipc.read_schema(messages[0])
    if not schema.equals(INDEX_SCHEMA):
        raise CorruptError(f"columns are {schema.names}, expected {INDEX_SCHEMA.names}")
    return pa.Table.from_batches([_read_batch(message, INDEX_SCHEMA) for message in messages[1:]], INDEX_SCHEMA)


def read_schema(file: BinaryIO, trailer: Trailer, name: str) -> pa.Schema:
    """The schema of an open shard; its metadata says how the frames were made. Raises CorruptError."""
    first = trailer.messages[0]
    data = os.pread(file.fileno(), first.length, first.offset)
    if xxhash.xxh3_64_intdigest(data) != first.xxh3:
        raise CorruptError(f"{name}: schema message: checksum differs")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
    except _BROKEN as error:  # its hash is right, so it was written so
        raise CorruptError(f"{name}: schema message: {str(error).splitlines()[0]}") from None
    if not any(schema.remove_metadata().equals(sample_schema(last)) for last in (False, True)):
        raise CorruptError(f"{name}: columns are {schema.names}, expected {SAMPLE_SCHEMA.names}")
    return schema


def read_sample(message: bytes | memoryview, last_hidden: bool) -> pa.RecordBatch:
    """A record batch message whose hash was checked. Raises CorruptError when it is none of ours."""
    try:
        batch = _read_batch(pa.ipc.read_message(pa.py_buffer(message)), sample_schema(last_hidden))
    except _BROKEN as error:
        raise CorruptError(f"not a sample: {str(error).splitlines()[0]}") from None
    if len(batch) != 1:
        raise CorruptError(f"{len(batch)} rows in a message, expected 1")
    for column in batch.columns[len(IDENTITY) :]:  # readers take `values` whole
        if column.offsets.to_pylist() != [0, len(column.values)]:
            raise CorruptError("not a sample: a list that is not all of its values")
    return batch


def ids_and_mask(batch: pa.RecordBatch) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """A sample's ids [T] and mask [T], in the batch's memory. Raises CorruptError for what no writer of ours stores."""
    ids, mask = (batch.column(name).values.to_numpy() for name in ("input_ids", "loss_mask"))
    if len(ids) != len(mask) or not len(ids):
        raise CorruptError(f"{len(ids)} ids and a mask of {len(mask)}; expected as many, at least one")
    if ids.min() < 0 or mask.max() > 1:
        raise CorruptError(f"ids from {ids.min()}, a mask up to {mask.max()}; expected ids from 0, a mask of 0 and 1")
    return ids, mask


def _read_batch(message: pa.ipc.Message, schema: pa.Schema) -> pa.RecordBatch:
    """A batch that was written by ours or is refused: a forged one may have the right hash, and point anywhere."""
    if _is_compressed(message.metadata):
        raise CorruptError("a compressed batch, expected a plain one")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)
    for column in batch.columns:
        while column is not None:
            if column.null_count:
                raise CorruptError("a batch with nulls, expected none")
            column = getattr(column, "values", None)
    return batch


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether a record batch's flatbuffer asks Arrow to inflate buffers, to sizes of its own choice.

    Message.header (its third field) -> RecordBatch.compression (its fourth); Arrow checked the flatbuffer.
    """
    data = memoryview(metadata)

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        (size,) = struct.unpack_from("<H", data, vtable)
        at = 4 + 2 * number
        return table + offset if at < size and (offset := struct.unpack_from("<H", data, vtable + at)[0]) else 0

    (root,) = struct.unpack_from("<I", data)
    header = field(root, 2)
    return bool(header and field(header + struct.unpack_from("<I", data, header)[0], 3))


def frame_ranges(frames: pa.Array, shift: int) -> tuple[list[int], list[int]]:
    """Offset and length in the file of every frame; `shift` takes an address in memory to an offset in the file."""
    if not len(frames):
        return [], []
    starts = np.frombuffer(frames.buffers()[1], np.int64, len(frames) + 1)
    return (shift + frames.buffers()[2].address + starts[:-1]).tolist(), np.diff(starts).tolist()


def read_range(fd: int, offset: int, length: int, out: memoryview | None = None) -> memoryview:
    """`length` bytes from `offset`, into the beginning of `out` where it is given; fewer at the end of the file."""
    out = np.empty(length, np.uint8).data if out is None else out[:length]
    at = 0
    while at < length and (count := os.preadv(fd, [out[at : at + _ONE_READ]], offset + at)):
        at += count
    return out[:at]


def salvaged(task: str) -> str:
    """The task hash of what is left of a task's shard: another one, so that extraction runs the task again."""
    return _SALVAGED + task[len(_SALVAGED) :]


def is_salvaged(task: str) -> bool:
    """True for what `salvaged` gives."""
    return task.startswith(_SALVAGED)
