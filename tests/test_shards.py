"""The format: what is written is what is read, and every fault is reported by name."""

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import stranger
import torch
from caches import write_cache

from dflash_offline.shards import codecs, index, manifest, writer
from dflash_offline.shards.cache import OPEN_FILES, Cache
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.files import read_json, write_json
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import prompt_key, sample_key
from dflash_offline.shards.verify import verify
from dflash_offline.shards.writer import Identity, ShardWriter

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x807F, 0x7F7F, 0x4748]
"""Zeros, infinities, NaN payload, subnormals, the largest value, 51200: a lossless codec keeps them all."""


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.view(torch.int16)


def plain_lossless_decode(frame_planes: list[np.ndarray], mode_LD: np.ndarray, tokens: int) -> np.ndarray:
    """The format's definition in plain numpy: uint16 [T, L, D] from the two planes."""
    layers, hidden = mode_LD.shape
    e, m = (p.reshape(layers, tokens, hidden).astype(np.uint16) for p in frame_planes)
    e = (e + mode_LD[:, None, :]) & 255
    return (((m & 128) << 8) | (e << 7) | (m & 127)).transpose(1, 0, 2)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("name", ["bf16", "lossless"])
def test_codec_is_bit_exact(name: str, tokens: int) -> None:
    states_TLD = torch.randn(tokens, 3, 32, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
    special = torch.from_numpy(np.array(SPECIAL, np.uint16).view(np.int16))
    bits(states_TLD)[0, 1, : len(special)] = special
    codec = codecs.calibrate(name, states_TLD)
    planes = codec.encode(states_TLD)
    assert all(p.numel() in sizes for p, sizes in zip(planes, codec.plane_bytes(tokens), strict=True))
    assert torch.equal(bits(codec.decode(planes, tokens)), bits(states_TLD).view(tokens, -1))
    if name == "lossless":
        plain = plain_lossless_decode([p.numpy() for p in planes], codec.calibration()["mode"].numpy(), tokens)
        assert np.array_equal(plain, bits(states_TLD).numpy().view(np.uint16))


def test_lossless_is_smaller_than_raw() -> None:
    scale_D = torch.logspace(-3, 3, 64)
    states_TLD = (torch.randn(256, 2, 64, generator=torch.Generator().manual_seed(0)) * scale_D).to(torch.bfloat16)
    size = {n: sum(map(len, encode_frames(codecs.calibrate(n, states_TLD), states_TLD))) for n in ("bf16", "lossless")}
    assert size["lossless"] < 0.72 * size["bf16"]


def test_the_disk_begins_before_the_shard_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told of are the bytes that have reached the file, each once; the shard's bytes are the same."""
    write_cache(tmp_path / "a", samples=40)
    sent: list[tuple[int, int, int]] = []
    monkeypatch.setattr(writer, "_SEND_EVERY", 10_000)
    monkeypatch.setattr(writer.os, "posix_fadvise", lambda fd, *part: sent.append((os.fstat(fd).st_size, *part[:2])))
    write_cache(tmp_path / "b", samples=40)
    whole = (tmp_path / "a" / index.shard_name(0)).read_bytes()
    assert (tmp_path / "b" / index.shard_name(0)).read_bytes() == whole
    ends = [begin + count for _, begin, count in sent]
    assert [begin for _, begin, _ in sent] == [0, *ends[:-1]] and len(sent) > 5
    assert all(there >= end and count >= 10_000 for (there, _, count), end in zip(sent, ends, strict=True))


def test_a_full_disk_is_said_with_its_path_and_leaves_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B41."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left.*0\.arrow"):  # noqa: SIM117
        with ShardWriter(tmp_path / "0.arrow", task="0" * 32, metadata={}) as shard:
            shard._file.close()
            monkeypatch.setattr(shard, "_file", Full())
            shard.append(
                Identity(key="", prompt_key="", id="", source="", source_row=0, finish_reason="", response=""),
                np.zeros(2, np.int32),
                np.zeros(2, np.uint8),
                [b"x"],
            )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize("codec", list(codecs.CODECS))
def test_cache_reads_back_every_sample(tmp_path: Path, codec: str, last_hidden: bool) -> None:
    written = write_cache(tmp_path / "c", samples=7, codec=codec, last_hidden=last_hidden)
    cache = Cache(tmp_path / "c")
    assert len(cache) == 7 and cache.tokens.tolist() == [len(w.input_ids) for w in written]
    for i in (3, 0, 6, 3):
        sample = cache.read(i)
        assert np.array_equal(sample.input_ids, written[i].input_ids)
        assert np.array_equal(sample.loss_mask, written[i].loss_mask)
        near = {"ecsq": 0.1, "fp8": 0.3}.get(codec, 0)
        assert torch.allclose(sample.states, written[i].states, rtol=0, atol=near)
        assert (sample.last_hidden is not None) == last_hidden
        if sample.last_hidden is not None:
            assert len(sample.last_hidden) == sample.loss_mask[1:].sum()
            assert torch.allclose(sample.last_hidden, written[i].last_hidden, rtol=0, atol=near)
        sample.states.mul_(2)  # private memory: writing to it is allowed and reaches no file
    assert verify(tmp_path / "c", threads=2).faults == []


def test_a_moved_renamed_symlinked_cache_works(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", samples=2)
    (tmp_path / "c").rename(tmp_path / "d [v1] x")
    (tmp_path / "link").symlink_to(tmp_path / "d [v1] x")
    assert len(Cache(tmp_path / "link").read(1).input_ids) > 0


def test_other_readers_open_a_shard(tmp_path: Path) -> None:
    written = write_cache(tmp_path / "c", samples=3)
    with pa.memory_map(str(tmp_path / "c" / "shards/00000000.arrow")) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.column("input_ids").to_pylist()[0] == written[0].input_ids.tolist()


@pytest.mark.parametrize("codec", ["bf16", "lossless", "ecsq"])
def test_a_stranger_reads_the_cache_from_the_documentation(tmp_path: Path, codec: str) -> None:
    write_cache(tmp_path / "c", samples=3, tokens=200, codec=codec)
    cache = Cache(tmp_path / "c")
    for i, (ids, mask, states) in enumerate(stranger.samples(tmp_path / "c")):
        sample = cache.read(i)
        assert ids == sample.input_ids.tolist() and mask == sample.loss_mask.tolist()
        assert np.array_equal(states, bits(sample.states).numpy().view(np.uint16))


def test_index_is_rebuilt_from_trailers_alone(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", samples=5)
    stored = index.load(tmp_path / "c", manifest.read(tmp_path / "c"), ranges=True)
    assert index.build(index.scan(tmp_path / "c")).equals(stored)


@pytest.mark.parametrize(("codec", "last_hidden"), [("lossless", False), ("ecsq", True)])
def test_every_flipped_bit_and_cut_is_reported(tmp_path: Path, codec: str, last_hidden: bool) -> None:
    """B47, B48: any byte of any file: `verify` names the file; a read raises, never returns other numbers."""
    write_cache(tmp_path / "c", samples=3, codec=codec, last_hidden=last_hidden)
    rng = np.random.default_rng(0)
    for path in sorted(p for p in (tmp_path / "c").rglob("*") if p.is_file()):
        good = path.read_bytes()
        places = {0, len(good) - 1, *rng.integers(0, len(good), 25).tolist()}
        for damaged in [
            *(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :] for at in places),
            *(good[:at] for at in places),
            good + b"0123456789",
        ]:
            path.write_bytes(damaged)
            faults = verify(tmp_path / "c", threads=1).faults
            assert any(path.name in f for f in faults), (path, faults)
        path.write_bytes(good)
    assert verify(tmp_path / "c", threads=1).faults == []


def test_a_flipped_bit_names_shard_frame_and_sample(tmp_path: Path) -> None:
    written = write_cache(tmp_path / "c", samples=3, tokens=300)
    cache = Cache(tmp_path / "c")
    path = tmp_path / "c" / cache.row(1)["shard"]
    ranges = index.load(tmp_path / "c", cache.manifest, ranges=True).column("frame_offsets")[1].as_py()
    data = bytearray(path.read_bytes())
    data[ranges[2] + 40] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=rf"00000000.arrow: row 1, sample {written[1].key}: frame 2: checksum"):
        cache.read(1)
    assert len(cache.read(0).input_ids) == 300
    (fault,) = verify(tmp_path / "c", threads=1).faults
    assert fault == f"{path}: row 1, sample {written[1].key}: frame 2: checksum differs"


def test_missing_extra_and_swapped_shards_are_named(tmp_path: Path) -> None:
    """B49, also a shard of zero bytes and what a cut write left: training is refused at its start."""
    write_cache(tmp_path / "c", samples=6, per_shard=2)
    shards = tmp_path / "c" / "shards"
    a, b = shards / "00000000.arrow", shards / "00000001.arrow"
    bytes_a, bytes_b = a.read_bytes(), b.read_bytes()
    a.write_bytes(bytes_b), b.write_bytes(bytes_a)
    faults = verify(tmp_path / "c", threads=1).faults
    assert any(a.name in f for f in faults) and any(b.name in f for f in faults)
    with pytest.raises(CorruptError):
        Cache(tmp_path / "c").read(0)
    a.write_bytes(bytes_a), b.write_bytes(bytes_b)
    for damaged in (b"", bytes_a[:-1], bytes_a + b"x"):
        a.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"00000000\.arrow: \d+ bytes, expected \d+; run `dflash-shards repair"):
            Cache(tmp_path / "c")
        assert any(a.name in f for f in verify(tmp_path / "c", threads=1).faults)
    a.write_bytes(bytes_a)
    (shards / "00000001.arrow.5.tmp").touch()
    assert any("00000001.arrow.5.tmp" in f for f in verify(tmp_path / "c", threads=1).faults)
    (shards / "00000001.arrow.5.tmp").unlink()
    (shards / "00000009.arrow").write_bytes(bytes_a)
    assert any("00000009" in f for f in verify(tmp_path / "c", threads=1).faults)
    b.unlink()
    assert any("00000001" in f and "missing" in f for f in verify(tmp_path / "c", threads=1).faults)
    with pytest.raises(CorruptError, match="00000001"):
        Cache(tmp_path / "c")


def test_a_growing_cache_of_another_calibration_is_refused(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", samples=4, complete=False)
    write_cache(tmp_path / "b", samples=4, complete=False, seed=1)
    for name in ("manifest.json", "codec.safetensors"):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(CorruptError, match=r"00000000\.arrow: written with another codec, calibration"):
        Cache(tmp_path / "a", allow_incomplete=True)


def test_damage_in_a_last_hidden_frame_is_called_so(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", samples=1, tokens=40, last_hidden=True)
    path = tmp_path / "c" / index.shard_name(0)
    row = index.load(tmp_path / "c", manifest.read(tmp_path / "c"), ranges=True).to_pylist()[0]
    data = bytearray(path.read_bytes())
    data[row["frame_offsets"][1] + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="last-hidden frame 0: checksum differs"):
        Cache(tmp_path / "c").read(0)


def test_incomplete_and_absent_caches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        Cache(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"no manifest\.json"):
        Cache(tmp_path)
    write_cache(tmp_path / "c", samples=2, complete=False)
    with pytest.raises(UsageError, match="not complete"):
        Cache(tmp_path / "c")
    assert len(Cache(tmp_path / "c", allow_incomplete=True)) == 2


def test_keys_depend_on_ids_mask_and_nothing_else() -> None:
    ids, mask = np.arange(5, dtype=np.int32), np.array([0, 0, 1, 1, 1], np.uint8)
    key = sample_key(ids, mask)
    assert key == sample_key(ids.copy(), mask.copy()) and len(key) == 32
    assert key != sample_key(ids, 1 - mask) and key != sample_key(ids[::-1].copy(), mask)
    assert prompt_key(ids, mask) == prompt_key(np.array([0, 1, 9, 9], np.int32), np.array([0, 0, 1, 0], np.uint8))


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    """B52: older and newer."""
    write_cache(tmp_path / "c", samples=1)
    for version in (0, 2):
        values = read_json(tmp_path / "c" / "manifest.json")
        write_json(tmp_path / "c" / "manifest.json", {**values, "format": version})
        with pytest.raises(UsageError, match=rf"format {version}, this build reads 1"):
            Cache(tmp_path / "c")


@pytest.mark.parametrize("damage", [b"", None])
def test_an_empty_or_lost_index_is_named(tmp_path: Path, damage: bytes | None) -> None:
    write_cache(tmp_path / "c", samples=2)
    path = tmp_path / "c" / "index.parquet"
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(CorruptError, match=r"index\.parquet: .*rerun the same `dflash-extract run`"):
        Cache(tmp_path / "c")


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """B53: the same messages far out in a sparse file; the disk holds a few blocks of it."""
    written = write_cache(tmp_path / "c", samples=4)
    table = Cache(tmp_path / "c").index
    path = tmp_path / "c" / "shards" / "00000000.arrow"
    data = path.read_bytes()
    places = [1 << 20, 2**31 - 16, 2**31 + 2**20, 2**32 + 64]
    with path.open("r+b") as file:
        for row, place in zip(table.to_pylist(), places, strict=True):
            file.seek(place)
            file.write(data[row["offset"] : row["offset"] + row["length"]])
    at = table.schema.get_field_index("offset")
    table = table.set_column(at, table.schema.field(at), pa.array(places, pa.int64()))
    info = manifest.read(tmp_path / "c")
    shards = [replace(info.shards[0], bytes=path.stat().st_size)]
    index.publish(tmp_path / "c", replace(info, shards=shards), table)
    cache = Cache(tmp_path / "c")
    for i in range(4):
        assert torch.equal(bits(cache.read(i).states), bits(written[i].states))
    assert path.stat().st_blocks * 512 < 10 << 20


def test_open_files_are_bounded(tmp_path: Path) -> None:
    """B54: 120 shards, at most OPEN_FILES of them open, epoch after epoch."""
    written = write_cache(tmp_path / "c", samples=120, per_shard=1)
    cache, opened = Cache(tmp_path / "c"), []
    for _ in range(2):
        for i in range(120):
            assert cache.read(i).key == written[i].key
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    assert opened[0] == opened[1] and len(cache._files) <= OPEN_FILES
    cache.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= opened[0] - OPEN_FILES


def test_a_shard_holds_its_samples_and_nothing_else(tmp_path: Path) -> None:
    """B60: bytes are those of the states, not of a padded batch."""
    written = write_cache(tmp_path / "c", samples=40, codec="bf16", tokens=400)
    payload = sum(s.states.numel() * 2 for s in written)
    size = (tmp_path / "c" / "shards" / "00000000.arrow").stat().st_size
    extra = sum(5 * len(s.input_ids) + 2000 for s in written)  # ids, mask, Arrow, frame headers, index row
    assert payload < size < payload + extra


def test_a_forged_length_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", samples=2)
    table = Cache(tmp_path / "c").index
    at = table.schema.get_field_index("length")
    table = table.set_column(at, table.schema.field(at), pa.array([2**60, 5], pa.int64()))
    index.publish(tmp_path / "c", manifest.read(tmp_path / "c"), table)
    with pytest.raises(CorruptError, match=r"00000000\.arrow: ends at byte"):
        Cache(tmp_path / "c").read(0)
