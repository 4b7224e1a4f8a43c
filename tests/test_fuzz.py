"""Seeded damage to whole caches. Honest checksums: every fault is reported by name, no number is ever wrong. Forged
checksums: an error of ours, never another one, no crash, and no memory for what a forger claims.
"""

import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
import zstandard
from caches import HIDDEN, LAYERS, write_cache

from dflash_offline.shards import calibration, index, manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.calibration import CODEC_FILE
from dflash_offline.shards.errors import CorruptError, RunError, UsageError
from dflash_offline.shards.keys import sample_key
from dflash_offline.shards.layout import END_OF_STREAM, INDEX_SCHEMA, Message, Trailer, pack_trailer, read_trailer
from dflash_offline.shards.manifest import Manifest
from dflash_offline.shards.repair import repair
from dflash_offline.shards.sample import Sample
from dflash_offline.shards.verify import verify

ROUNDS = 30


def parts(sample: Sample) -> list[torch.Tensor]:
    both = [sample.states] + ([] if sample.last_hidden is None else [sample.last_hidden])
    return [
        *(x.view(torch.int16) for x in both),
        torch.from_numpy(sample.input_ids),
        torch.from_numpy(sample.loss_mask),
    ]


def damage(rng: random.Random, files: dict[Path, bytes]) -> dict[Path, bytes | None]:
    """New contents of one or two files; None: gone."""
    path = rng.choice(list(files))
    data, at = files[path], rng.randrange(len(files[path]))
    size = min(len(data) - at, rng.choice([1, 5, 64, 4096]))
    same_kind = [p for p in files if p.suffix == path.suffix and p != path] or [p for p in files if p != path]
    match rng.randrange(10):
        case 0 | 1:
            return {path: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]}
        case 2:
            return {path: data[:at] + rng.randbytes(size) + data[at + size :]}
        case 3:
            return {path: data[:at]}
        case 4:
            return {path: data[:at] + data[at + size :]}
        case 5:
            return {path: data[:at] + rng.randbytes(size) + data[at:]}
        case 6:
            return {path: data + rng.randbytes(size)}
        case 7:
            return {path: None}
        case 8:
            return {path: files[rng.choice(same_kind)]}
        case _:
            other = rng.choice(same_kind)
            return {path: files[other], other: data}


@pytest.mark.parametrize(
    ("codec", "last_hidden"), [("bf16", False), ("lossless", True), ("ecsq", True), ("fp8", False)]
)
def test_random_damage_is_named_and_never_a_wrong_number(tmp_path: Path, codec: str, last_hidden: bool) -> None:
    """B47, B48, B49: flips, cuts, bytes that came or went, files that are gone, doubled or swapped."""
    folder = tmp_path / "c"
    write_cache(folder, samples=6, per_shard=2, tokens=140, codec=codec, last_hidden=last_hidden)
    files = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    cache = Cache(folder)
    right = {key: parts(cache.read(i)) for i, key in enumerate(cache.keys)}
    rng = random.Random(f"{codec} 1")
    for number in range(ROUNDS):
        changed = {p: data for p, data in damage(rng, files).items() if data != files[p]}
        for path, data in changed.items():
            path.unlink() if data is None else path.write_bytes(data)
        try:
            said = "\n".join(verify(folder, threads=1).faults)
        except UsageError as error:  # without a manifest it is no cache
            said = str(error)
            assert not (folder / manifest.NAME).exists()
        for path in changed:
            assert path.name in said or manifest.NAME in said, (number, path, said)
        try:
            found = Cache(folder)
        except (RunError, UsageError):
            found = None
        for i in range(len(found) if found else 0):
            assert found is not None
            try:
                sample = found.read(i)
            except RunError as error:
                assert found.row(i)["shard"] in str(error) or "codec.safetensors" in str(error), (number, error)
            else:
                assert all(torch.equal(a, b) for a, b in zip(parts(sample), right[sample.key], strict=True)), number
        for path in changed:
            path.write_bytes(files[path])
    assert verify(folder, threads=1).faults == []


def test_random_damage_is_mended_or_named(tmp_path: Path) -> None:
    """After `repair` a cache verifies, or what is left is named; it never holds another number."""
    folder = tmp_path / "c"
    write_cache(folder, samples=6, per_shard=2, tokens=140, codec="ecsq")
    files = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    cache = Cache(folder)
    right = {key: parts(cache.read(i)) for i, key in enumerate(cache.keys)}
    rng = random.Random(2)
    for _ in range(ROUNDS):
        for _ in range(rng.choice([1, 2, 3])):
            for path, data in damage(rng, files).items():
                path.unlink(missing_ok=True) if data is None else path.write_bytes(data)
        try:
            left = repair(folder, 1, say=lambda _: None).left
        except RunError as error:
            left = [str(error)]
            assert "both lost" in left[0]
        if not left:
            assert verify(folder, threads=1).faults == []
            found = Cache(folder, allow_incomplete=True)
            for i in range(len(found)):
                sample = found.read(i)
                assert all(torch.equal(a, b) for a, b in zip(parts(sample), right[sample.key], strict=True))
        shutil.rmtree(folder)
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


# Forged files. They run in a process of their own, under a limit of memory.

HUGE = 1 << 60
ROOM = 600 << 20
"""Address space a forged cache may take: a few threads' stacks and arenas."""


class Forge:
    """A cache of one shard that is written anew, with right checksums, after each change."""

    def __init__(self, folder: Path) -> None:
        write_cache(folder, samples=3, tokens=140, codec="ecsq")
        self.folder, self.path = folder, folder / index.shard_name(0)
        self.info, self.shard = manifest.read(folder), self.path.read_bytes()
        with self.path.open("rb") as file:
            self.trailer = read_trailer(file, "")
        self.messages = [self.shard[m.offset : m.offset + m.length] for m in self.trailer.messages]
        self.rows = self.trailer.index.to_pylist()

    def write(self, messages: list[bytes], rows: list[dict[str, Any]] | None = None, **claims: Any) -> None:
        """Shard, index and manifest of these messages; `claims` are put into the index rows afterwards."""
        at, table, places = 0, [], []
        for number, message in enumerate(messages):
            places.append(Message(offset=at, length=len(message), xxh3=xxhash.xxh3_64_intdigest(message)))
            at += len(message)
            if number:
                row, place = (rows or self.rows)[number - 1], places[-1]
                shift = place.offset - row["offset"]
                moved = [offset + shift for offset in row["frame_offsets"]]
                table.append(row | {"frame_offsets": moved} | vars(place))
        body = pack_trailer(
            Trailer(
                task=self.trailer.task,
                messages=tuple(places),
                index=pa.Table.from_pylist(table, schema=INDEX_SCHEMA),
            )
        )
        self.file(b"".join(messages) + END_OF_STREAM + body, [row | claims for row in table])

    def file(self, shard: bytes, rows: list[dict[str, Any]], info: Manifest | None = None) -> None:
        """The shard's bytes, and an index of these rows."""
        self.path.write_bytes(shard)
        table = pa.Table.from_pylist([{"shard": index.shard_name(0)} | row for row in rows], schema=index.SCHEMA)
        one = replace(self.info.shards[0], rows=len(rows), bytes=len(shard))
        index.publish(self.folder, replace(info or self.info, shards=[one]), table)

    def trailer_of(self, index_batch: bytes, count: int | None = None, index_bytes: int | None = None) -> bytes:
        """The shard with another trailer, sealed."""
        places = self.trailer.messages
        head = struct.pack(
            "<8s16sQQ",
            b"DFTRAIL1",
            bytes.fromhex(self.trailer.task),
            len(places) if count is None else count,
            len(index_batch) if index_bytes is None else index_bytes,
        )
        body = head + b"".join(struct.pack("<QQQ", m.offset, m.length, m.xxh3) for m in places) + index_batch
        tail = struct.pack("<QQ8s", xxhash.xxh3_64_intdigest(body), len(body), b"DFSHARD1")
        return b"".join(self.messages) + END_OF_STREAM + body + tail


def with_frame(forge: Forge, body: bytes) -> list[bytes]:
    """The messages, the first sample's first frame replaced by this body and its checksum, cut or filled to fit."""
    row, message = forge.rows[0], bytearray(forge.messages[1])
    start, size = row["frame_offsets"][0] - row["offset"], row["frame_lengths"][0]
    body = body[: size - 8].ljust(size - 8, b"\0")
    message[start : start + size] = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    return [forge.messages[0], bytes(message), *forge.messages[2:]]


def forgeries(forge: Forge) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every forged cache by name: (name, what writes it)."""
    plain, rows, first = forge.messages, forge.rows, forge.messages[1]
    for name, claims in {
        "length": {"length": HUGE},
        "negative length": {"length": -5},
        "offset": {"offset": HUGE},
        "negative offset": {"offset": -HUGE},
        "shard's tokens": {"tokens": HUGE},
        "negative row": {"row": -1},
        "frame offsets": {"frame_offsets": [-HUGE, HUGE], "frame_lengths": [HUGE, -1]},
        "frame lengths": {"frame_lengths": [HUGE]},
    }.items():
        yield f"index: {name}", lambda claims=claims: forge.write(plain, **claims)
        yield f"trailer: {name}", lambda claims=claims: forge.write(plain, [r | claims for r in rows], **claims)
    ids, at = struct.pack("<ii", 0, 140), 8 + int.from_bytes(first[4:8], "little")  # where the message's body begins
    assert first[at:].count(ids) == 2  # of ids and mask
    for low, high in [(0, 2**31 - 1), (-(2**31), 140), (2**30, 2**31 - 1), (140, 0), (7, 140), (0, 139)]:
        message = first[:at] + first[at:].replace(ids, struct.pack("<ii", low, high))
        yield f"list offsets {low} {high}", lambda m=message: forge.write([plain[0], m, *plain[2:]])
    a, b = rows[0]["frame_lengths"]
    cuts = struct.pack("<qqq", 0, a, a + b)
    assert first.count(cuts) == 1
    for values in [(0, HUGE, 2 * HUGE), (0, -a, b), (0, a, HUGE), (-8, a, a + b), (0, a + b, a)]:
        message = first.replace(cuts, struct.pack("<qqq", *values))
        yield f"frame cuts {values}", lambda m=message: forge.write([plain[0], m, *plain[2:]])
    yield "schema", lambda: forge.write([b"\xff" * 64, *plain[1:]])
    yield "schema of another table", lambda: forge.write([INDEX_SCHEMA.serialize().to_pybytes(), *plain[1:]])
    sample = pa.ipc.read_record_batch(first, pa.ipc.read_schema(pa.py_buffer(plain[0])))
    for column, value in [("input_ids", -1), ("loss_mask", 2)]:
        columns = {name: sample.column(name).to_pylist() for name in sample.schema.names}
        columns[column][0][-1] = value
        key = sample_key(np.array(columns["input_ids"][0], np.int32), np.array(columns["loss_mask"][0], np.uint8))
        columns["key"] = [key]
        arrays = [pa.array(columns[f.name], f.type) for f in sample.schema]
        message = pa.record_batch(arrays, schema=sample.schema).serialize().to_pybytes()
        keyed = [rows[0] | {"key": key}, *rows[1:]]
        yield f"{column} with a {value}", lambda m=message, r=keyed: forge.write([plain[0], m, *plain[2:]], r)
    names = index.build([(forge.info.shards[0], forge.trailer)])
    coder, zeros = zstandard.ZstdCompressor().compressobj(size=1 << 30), bytes(1 << 20)
    bomb = b"".join([coder.compress(zeros) for _ in range(1 << 10)]) + coder.flush()
    tokens, values = 128, 128 * len(LAYERS) * HIDDEN
    for name, raw, stored, data in [
        ("inflates to 1 GiB", values, len(bomb), bomb),
        ("claims 2^60", HUGE, len(bomb), bomb),
        ("stored 2^60", values, HUGE, bomb),
        ("claims 1 GiB", 1 << 30, len(bomb), bomb),
    ]:
        head = struct.pack("<4sIII", b"DFF1", tokens, 4, 0) + struct.pack("<QQ", raw, stored)
        yield f"plane {name}", lambda h=head, d=data: forge.write(with_frame(forge, h + bytes(48) + d))
    for count, size in [(HUGE, None), (None, HUGE), (2**64 - 1, 2**64 - 1), (0, None), (2**40, 2**40)]:
        shard = forge.trailer_of(b"", count, size)
        yield f"trailer counts {count} {size}", lambda s=shard: forge.file(s, rows)
    for length in (HUGE, 2**64 - 1, len(forge.shard), 0):
        shard = forge.shard[:-16] + struct.pack("<Q8s", length, b"DFSHARD1")
        yield f"trailer length {length}", lambda s=shard: forge.file(s, rows)
    yield "no rows", lambda: forge.file(forge.trailer_of(stream(forge.trailer.index.slice(0, 0))), rows)
    yield "rows of another schema", lambda: forge.file(forge.trailer_of(stream(names)), rows)
    great = pa.table({"x": pa.array(np.zeros(1 << 23), pa.float64())})
    for codec in ("zstd", "lz4"):
        packed = stream(great, codec)
        yield f"{codec} trailer batch of 64 MiB", lambda p=packed: forge.file(forge.trailer_of(p), rows)
        packed = stream(forge.trailer.index, codec)
        yield f"{codec} trailer batch", lambda p=packed: forge.file(forge.trailer_of(p), rows)
    message = stream(pa.Table.from_batches([sample]), "zstd", header=False)
    yield "compressed sample", lambda: forge.write([plain[0], message, *plain[2:]])
    good = stream(forge.trailer.index)
    rng = random.Random(3)
    for number in range(40):
        mutated = bytearray(good if number % 2 else first)
        for _ in range(rng.randrange(1, 4)):
            word = rng.randrange(min(len(mutated), 1500)) & ~3
            mutated[word : word + 4] = struct.pack("<i", rng.choice([0, 1, -1, 2**31 - 1, -(2**31), 8, 2**20, word]))
        data = bytes(mutated)
        if number % 2:
            yield f"mutation {number} of the trailer's batch", lambda d=data: forge.file(forge.trailer_of(d), rows)
        else:
            yield f"mutation {number} of a sample", lambda d=data: forge.write([plain[0], d, *plain[2:]])
    for name, change in {
        "width": {"hidden_size": 1 << 40},
        "no width": {"hidden_size": 0},
        "negative width": {"hidden_size": -1},
        "layers": {"layer_ids": list(range(1 << 16))},
        "step": {"codec": replace(forge.info.codec, parameters={"delta": 1e30})},
        "no step": {"codec": replace(forge.info.codec, parameters={})},
        "word": {"codec": replace(forge.info.codec, parameters={"delta": "x"})},
        "codec": {"codec": replace(forge.info.codec, name="bf16")},
    }.items():
        info = replace(forge.info, **change)  # type: ignore[arg-type]
        yield f"manifest: {name}", lambda i=info: forge.file(forge.shard, rows, i)

    for name, data in {
        "calibration header of 2^60": struct.pack("<Q", HUGE) + b"{}",
        "calibration of 1 TiB": _safetensors(
            {"mean": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
        ),
        "calibration with nothing in it": _safetensors({}),
        "calibration of another type": _safetensors({"mean": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    }.items():
        (forge.folder / CODEC_FILE).write_bytes(data)
        codec = calibration.info(forge.folder, "ecsq", forge.info.codec.parameters)
        yield name, lambda c=codec: forge.file(forge.shard, rows, replace(forge.info, codec=c))


def _safetensors(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def stream(table: pa.Table, compression: str | None = None, header: bool = True) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    if header:
        return sink.getvalue().to_pybytes()
    message = list(pa.ipc.MessageReader.open_stream(sink.getvalue()))[1]
    return message.serialize().to_pybytes()


def attack(folder: Path) -> None:
    """Run in a process of its own: every forged cache is refused by an error of ours, or read; memory stays small."""
    forge = Forge(folder)
    _attempt(folder)
    limit = _status("VmSize") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    refused = 0
    for name, write in forgeries(forge):
        write()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = _status("VmHWM")
        found = _attempt(folder)
        grown = _status("VmHWM") - before
        assert grown < 32 << 20, f"{name}: took {grown >> 20} MiB"
        assert not any("Memory" in text for text in found), f"{name}: {found}"
        if not name.startswith("mutation"):
            assert found, f"{name}: not refused"
        refused += bool(found)
    print(f"refused {refused}")


def _attempt(folder: Path) -> list[str]:
    """What verify, opening and reading say."""
    found = list(verify(folder, threads=2).faults)
    try:
        cache = Cache(folder)
        for i in range(len(cache)):
            try:
                cache.read(i)
            except CorruptError as error:
                found.append(str(error))
    except (CorruptError, UsageError) as error:
        found.append(str(error))
    return found


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_forged_files_are_refused_without_allocating(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "c")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 70


if __name__ == "__main__":
    os.fsync = lambda fd: None  # 500 of them, of files that nobody needs
    attack(Path(sys.argv[1]))
