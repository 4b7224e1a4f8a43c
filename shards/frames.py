"""A frame: up to 128 tokens of one sample, self-contained, under one checksum.

    offset  size      field (all little-endian)
    0       4         magic "DFF1"
    4       4         u32 tokens T
    8       4         u32 planes P
    12      4         u32 reserved, 0
    16      16 * P    per plane: u64 raw bytes, u64 stored bytes
    ...               the planes' stored bytes, one after the other
    end-8   8         u64 xxh3-64 of everything before it

Whether a plane is a zstd frame or stored as is belongs to the codec (`Codec.compressed`). Sizes are compared with what
the codec expects before anything is allocated, so a hostile header cannot make the reader allocate.
"""

import struct
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from dflash_offline.shards.codecs import Codec
from dflash_offline.shards.errors import CorruptError

FRAME_TOKENS = 128
MAGIC = b"DFF1"
_HEAD = struct.Struct("<4sIII")
_PLANE = struct.Struct("<QQ")
_SUM = struct.Struct("<Q")

# zstd reduced to its Huffman coder: on noise-like planes the match finder finds only chance matches, which cost both
# bits and time (level 3, the library's default, is larger and 3-7 times slower). Any zstd decoder reads the result.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    chain_log=6,
    hash_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=1,
    write_checksum=0,
)
# zstandard objects are not thread-safe.
_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return _local.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def spans(tokens: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) token ranges of a sample's frames."""
    for start in range(0, tokens, FRAME_TOKENS):
        yield start, min(start + FRAME_TOKENS, tokens)


def encode_frames(codec: Codec, states_TLD: Tensor) -> list[bytes]:
    """bf16 [T, L, D] -> the sample's frames. The planes are made on the states' device, the bytes on the CPU."""
    return [pack(codec, codec.encode(states_TLD[a:b]), b - a) for a, b in spans(states_TLD.shape[0])]


def pack(codec: Codec, planes: Sequence[Tensor], tokens: int) -> bytes:
    """One frame from its planes (uint8, any device)."""
    raw = [plane.cpu().numpy().data for plane in planes]
    stored = [_compressor().compress(p) if c else p for p, c in zip(raw, codec.compressed, strict=True)]
    head = _HEAD.pack(MAGIC, tokens, len(raw), 0)
    sizes = [_PLANE.pack(r.nbytes, len(s)) for r, s in zip(raw, stored, strict=True)]
    digest = xxhash.xxh3_64()
    parts = [head, *sizes, *stored]
    for part in parts:
        digest.update(part)
    return b"".join([*parts, _SUM.pack(digest.intdigest())])


def unpack(codec: Codec, frame: memoryview, tokens: int) -> list[Tensor]:
    """A frame's planes as uint8 tensors on the CPU. Raises CorruptError; the caller adds shard, frame and sample."""
    if not is_sound(frame):
        raise CorruptError("checksum differs")
    magic, found_tokens, planes, _ = _HEAD.unpack_from(frame)
    expected = codec.plane_bytes(tokens)
    if magic != MAGIC or found_tokens != tokens or planes != len(expected):
        raise CorruptError(f"header says {magic!r}, {found_tokens} tokens, {planes} planes; expected {tokens} tokens")
    sizes = [_PLANE.unpack_from(frame, _HEAD.size + i * _PLANE.size) for i in range(planes)]
    at = _HEAD.size + planes * _PLANE.size
    if at + sum(stored for _, stored in sizes) + _SUM.size != len(frame) or [r for r, _ in sizes] != list(expected):
        raise CorruptError(f"plane sizes are {sizes}, expected raw sizes {list(expected)} in {len(frame)} bytes")
    out = []
    for (raw, stored), compressed in zip(sizes, codec.compressed, strict=True):
        data = frame[at : at + stored]
        at += stored
        out.append(_inflate(data, raw) if compressed else torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
    return out


def decode_frame(codec: Codec, frame: memoryview, tokens: int) -> Tensor:
    """A frame -> bf16 [T, L * D]."""
    return codec.decode(unpack(codec, frame, tokens), tokens)


def is_sound(frame: memoryview) -> bool:
    """True when the frame's checksum matches its bytes."""
    return len(frame) >= _HEAD.size + _SUM.size and _SUM.unpack_from(frame, len(frame) - _SUM.size)[
        0
    ] == xxhash.xxh3_64_intdigest(frame[: -_SUM.size])


def _inflate(data: memoryview, size: int) -> Tensor:
    """Decompress exactly `size` bytes. A frame that holds less or more is refused, never cut or padded."""
    out = torch.empty(size, dtype=torch.uint8)
    view, at = out.numpy().data, 0
    try:
        with _decompressor().stream_reader(data) as reader:
            while at < size and (count := reader.readinto(view[at:])):
                at += count
            extra = len(reader.read(1))
    except zstandard.ZstdError as error:
        raise CorruptError(f"plane does not decompress: {error}") from None
    if at != size or extra:
        raise CorruptError(f"plane inflates to {'more than ' if extra else ''}{at} bytes, expected {size}")
    return out
