"""Frames from a stranger. Every one here carries a correct checksum, so that what lies behind it must hold alone."""

import struct

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from torch import Tensor

from dflash_offline.shards import codecs, frames
from dflash_offline.shards.errors import CorruptError

EXTREMES = [0, 1, 2**31, 2**60, 2**63, 2**64 - 8, 2**64 - 1]


def gaussian(tokens: int, layers: int, hidden: int) -> Tensor:
    return torch.randn(tokens, layers, hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def seal(body: bytes) -> memoryview:
    return memoryview(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)))


def forge(
    planes: list[tuple[int, int, bytes]], tokens: int = 4, count: int | None = None, reserved: int = 0
) -> memoryview:
    """A frame whose header says what it is told to: (raw size, stored size, bytes) a plane."""
    head = struct.pack("<4sIII", b"DFF1", tokens, len(planes) if count is None else count, reserved)
    return seal(head + b"".join(struct.pack("<QQ", r, s) for r, s, _ in planes) + b"".join(b for *_, b in planes))


def zstd(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)  # type: ignore[arg-type]


@pytest.fixture
def honest() -> tuple[codecs.Codec, list[tuple[int, int, bytes]]]:
    """An ecsq codec of 2 layers by 8 channels and the planes of a 4-token frame with two escapes."""
    codec = codecs.calibrate("ecsq", gaussian(64, 2, 8))
    symbols, scales = bytes(range(1, 65)), np.full(8, 0x3F80, np.uint16).tobytes()
    index, values = np.array([3, 60], np.uint32).tobytes(), np.array([0x4748, 0x4749], np.uint16).tobytes()
    coded = zstd(symbols)
    return codec, [(64, len(coded), coded), *((len(p), len(p), p) for p in (scales, index, values))]


def test_hostile_headers_are_refused_before_anything_is_allocated(
    honest: tuple[codecs.Codec, list[tuple[int, int, bytes]]],
) -> None:
    codec, planes = honest
    symbols, scales, index, values = planes
    asked: list[int] = []

    def allocate(size: int) -> Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    assert len(frames.unpack(codec, forge(planes), 4, allocate)) == 4
    assert asked == [64, 16, 8, 4]
    asked.clear()
    huge, negative = 2**60, 2**64 - 8
    hostile_frames = {
        "raw 2^60": forge([(huge, symbols[1], symbols[2]), scales, index, values]),
        "stored 2^60": forge([(64, huge, symbols[2]), scales, index, values]),
        "negative raw": forge([(negative, symbols[1], symbols[2]), scales, index, values]),
        "negative stored": forge([(64, negative, symbols[2]), scales, index, values]),
        "sizes that cancel": forge([(64, 2**64 - 1, symbols[2]), scales, index, (4, 4 + symbols[1] + 1, values[2])]),
        "escapes beyond the frame": forge([symbols, scales, (4 * 65, 4 * 65, bytes(260)), values]),
        "escapes not whole": forge([symbols, scales, (7, 7, index[2][:7]), values]),
        "stored plane of another size": forge([symbols, scales, (8, 4, index[2][:4]), values]),
        "no planes": forge([]),
        "2^32 - 1 planes": forge(planes, count=2**32 - 1),
        "planes cut off": forge([], count=4),
        "other tokens": forge(planes, tokens=5),
        "reserved": forge(planes, reserved=1),
        "trailing bytes": seal(bytes(forge(planes))[:-8] + b"more"),
        "empty": memoryview(b""),
    }
    for name, frame in hostile_frames.items():
        with pytest.raises(CorruptError):
            frames.unpack(codec, frame, 4, allocate)
        assert asked == [], name


def test_hostile_planes_are_refused(honest: tuple[codecs.Codec, list[tuple[int, int, bytes]]]) -> None:
    codec, (symbols, scales, index, values) = honest

    def plane(data: bytes) -> tuple[int, int, bytes]:
        return len(data), len(data), data

    def coded(data: bytes) -> tuple[int, int, bytes]:
        return 64, len(data), data

    one_frame = zstandard.ZstdCompressor(write_content_size=False).compress(symbols[2])
    bad = {
        "bomb": [coded(zstd(bytes(1 << 24))), scales, index, values],
        "one byte more": [coded(zstd(bytes(65))), scales, index, values],
        "one byte less": [coded(zstd(bytes(63))), scales, index, values],
        "announces 64, holds more": [coded(_announce(zstd(bytes(200)), 64)), scales, index, values],
        "announces 64, holds less": [coded(_announce(zstd(bytes(33)), 64)), scales, index, values],
        "announces nothing": [coded(one_frame), scales, index, values],
        "two frames": [coded(zstd(bytes(64)) + zstd(bytes(1))), scales, index, values],
        "cut": [coded(symbols[2][:-3]), scales, index, values],
        "not zstd": [coded(b"x" * 20), scales, index, values],
        "nothing": [coded(b""), scales, index, values],
        "dead scale": [symbols, plane(bytes(16)), index, values],
        "nan scale": [symbols, plane(b"\xff\x7f" * 8), index, values],
        "one index too many": [symbols, scales, plane(np.array([1, 2, 3], np.uint32).tobytes()), values],
    }
    for name, indices in {"same": [5, 5], "down": [6, 5], "end": [0, 64], "sign": [2**31 - 1, 2**32 - 5]}.items():
        bad[f"indices: {name}"] = [symbols, scales, plane(np.array(indices, np.uint32).tobytes()), values]
    for name, planes in bad.items():
        with pytest.raises(CorruptError):
            frames.decode_frame(codec, forge(planes), 4)
            pytest.fail(name)


def _announce(frame: bytes, size: int) -> bytes:
    """The same zstd frame with another content size in its header (1 byte: single segment below 256)."""
    assert frame[4] == 0x20
    return frame[:5] + bytes([size]) + frame[6:]


@pytest.mark.parametrize("name", list(codecs.CODECS))
def test_fuzzed_frames_decode_or_are_refused(name: str) -> None:
    """Random damage under a correct checksum: CorruptError or numbers of the right shape; never another error."""
    rng = np.random.default_rng(0)
    x_TLD = gaussian(40, 2, 24)
    x_TLD[:, 1, 3] *= 500  # escapes
    codec = codecs.calibrate(name, gaussian(64, 2, 24))
    (frame,) = frames.encode_frames(codec, x_TLD)
    for _ in range(600):
        body = bytearray(frame[:-8])
        for _ in range(rng.integers(1, 4)):
            near_head = rng.random() < 0.5
            at = int(rng.integers(0, 80 if near_head else len(body)))
            match rng.integers(0, 4):
                case 0:
                    body[at] ^= 1 << int(rng.integers(0, 8))
                case 1:
                    body[at : at + 8] = struct.pack("<Q", EXTREMES[int(rng.integers(0, len(EXTREMES)))])
                case 2:
                    del body[at : at + int(rng.integers(1, 9))]
                case _:
                    body[at:at] = rng.bytes(int(rng.integers(1, 9)))
        try:
            y = frames.decode_frame(codec, seal(bytes(body)), 40)
        except CorruptError:
            continue
        assert y.shape == (40, 48) and y.dtype == torch.bfloat16
