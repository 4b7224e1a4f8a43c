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
the codec allows and with the frame's own length before anything is allocated, so a hostile header cannot make the
reader allocate more than a frame's worth.
"""

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
_LARGEST_WINDOW = 1 << 23
"""The decoder's own buffer is bounded too; our windows are 2^17, and zstd asks every decoder for 2^23."""

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
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    return _local.decompressor


def spans(tokens: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) token ranges of a sample's frames."""
    for start in range(0, tokens, FRAME_TOKENS):
        yield start, min(start + FRAME_TOKENS, tokens)


def encode_frames(codec: Codec, states_TLD: Tensor) -> list[bytes]:
    """bf16 [T, L, D] -> the sample's frames. The planes are made on the states' device, the bytes on the CPU.

    Raises ValueError for states that are not finite: no codec may store them.
    """
    # By the exponent's bits: isfinite takes as long as the entropy coder.
    if states_TLD.numel() and int(states_TLD.view(torch.int16).bitwise_and(0x7FFF).amax()) >= 0x7F80:
        token, layer, channel = (~torch.isfinite(states_TLD)).nonzero()[0].tolist()
        raise ValueError(f"state of token {token}, layer {layer}, channel {channel} is not finite")
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


def allocate_bytes(size: int) -> Tensor:
    """Ordinary memory: uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8)


class Layout(NamedTuple):
    """Where the planes of a checked frame lie: raw and stored bytes of each, one after the other from `start`."""

    start: int
    sizes: list[tuple[int, int]]


def inspect(codec: Codec, frame: memoryview, tokens: int) -> Layout:
    """Check a frame's checksum and sizes before anything is allocated. Raises CorruptError."""
    if not is_sound(frame):
        raise CorruptError("checksum differs")
    allowed = codec.plane_bytes(tokens)
    at = _HEAD.size + len(allowed) * _PLANE.size
    if _HEAD.unpack_from(frame) != (MAGIC, tokens, len(allowed), 0) or len(frame) < at + _SUM.size:
        raise CorruptError(f"header is {frame[: _HEAD.size].hex()}, expected {tokens} tokens, {len(allowed)} planes")
    sizes = list(_PLANE.iter_unpack(frame[_HEAD.size : at]))
    for i, ((raw, stored), sizes_allowed, compressed) in enumerate(zip(sizes, allowed, codec.compressed, strict=True)):
        if raw not in sizes_allowed or (raw != stored and not compressed):
            raise CorruptError(f"plane {i} says {raw} bytes, {stored} stored; expected {_describe(sizes_allowed)}")
    if at + sum(stored for _, stored in sizes) + _SUM.size != len(frame):
        raise CorruptError(f"planes of {[stored for _, stored in sizes]} bytes do not fill a frame of {len(frame)}")
    return Layout(at, sizes)


def unpack(
    codec: Codec, frame: memoryview, tokens: int, allocate: Callable[[int], Tensor] = allocate_bytes
) -> list[Tensor]:
    """A frame's planes as uint8 tensors on the CPU, sound and consistent: what `codec.decode` may trust.

    `allocate(size)` gives the memory that a plane is decompressed into, pinned for instance; 4-byte aligned.
    Raises CorruptError; the caller adds shard, frame and sample.
    """
    return inflate(codec, frame, tokens, inspect(codec, frame, tokens), allocate)


def inflate(
    codec: Codec, frame: memoryview, tokens: int, layout: Layout, allocate: Callable[[int], Tensor]
) -> list[Tensor]:
    """`unpack` of a frame that was inspected."""
    planes, at = [], layout.start
    for (raw, stored), compressed in zip(layout.sizes, codec.compressed, strict=True):
        plane = allocate(raw)
        data = frame[at : at + stored]
        if compressed:
            _inflate(data, plane.numpy().data)
        else:
            plane.numpy()[:] = np.frombuffer(data, np.uint8)
        planes.append(plane)
        at += stored
    codec.check(planes, tokens)
    return planes


def decode_frame(codec: Codec, frame: memoryview, tokens: int) -> Tensor:
    """A frame -> bf16 [T, L * D]."""
    return codec.decode(unpack(codec, frame, tokens), tokens)


def is_sound(frame: memoryview) -> bool:
    """True when the frame's checksum matches its bytes."""
    return len(frame) >= _HEAD.size + _SUM.size and _SUM.unpack_from(frame, len(frame) - _SUM.size)[
        0
    ] == xxhash.xxh3_64_intdigest(frame[: -_SUM.size])


def _describe(sizes: range) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"up to {sizes[-1]} in steps of {sizes.step}"


def _inflate(data: memoryview, out: memoryview) -> None:
    """Decompress `data` into all of `out`. A frame that holds less or more is refused, never cut or padded."""
    try:
        announced = zstandard.get_frame_parameters(data).content_size
        if announced != len(out):
            raise CorruptError(f"plane announces {announced} bytes, expected {len(out)}")
        at = 0
        with _decompressor().stream_reader(data, read_across_frames=True) as reader:
            while at < len(out) and (count := reader.readinto(out[at:])):
                at += count
            extra = reader.read(1)
    except zstandard.ZstdError as error:
        raise CorruptError(f"plane does not decompress: {error}") from None
    if at != len(out) or extra:
        raise CorruptError(f"plane inflates to {'more than ' if extra else ''}{at} bytes, expected {len(out)}")
