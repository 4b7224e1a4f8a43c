"""Storage at scale and in strange places: memory, open files, random checks, mixed and read-only caches."""

import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import caches
import numpy as np
import pytest
import torch
from caches import write_cache

from dflash_offline.shards import codecs, frames, index, layout, manifest
from dflash_offline.shards.build import claim
from dflash_offline.shards.cache import OPEN_FILES, Cache
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import file_hash
from dflash_offline.shards.layout import read_trailer
from dflash_offline.shards.manifest import ShardInfo
from dflash_offline.shards.verify import verify
from dflash_offline.tools.cli import main


def multiply(folder: Path, count: int) -> None:
    """The one shard of a cache under `count` names."""
    first = folder / index.shard_name(0)
    with first.open("rb") as file:
        trailer = read_trailer(file, "")
    shards = []
    for number in range(count):
        if number:
            (folder / index.shard_name(number)).hardlink_to(first)
        name, size = index.shard_name(number), first.stat().st_size
        shards.append((ShardInfo(name=name, task=trailer.task, rows=len(trailer.index), bytes=size), trailer))
    index.publish(folder, replace(manifest.read(folder), shards=[s for s, _ in shards]), index.build(shards))


def resident() -> int:
    """Anonymous memory of this process in bytes; the page cache is not in it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_memory_and_open_files_stay_flat(tmp_path: Path) -> None:
    """B54, B67: 300 MB in 40 shards, read twice and verified, in less than 30 MB more than the first samples took."""
    folder = tmp_path / "c"
    write_cache(folder, samples=4, tokens=10_000, codec="bf16")
    multiply(folder, 40)
    cache = Cache(folder)
    assert sum(s.bytes for s in cache.manifest.shards) > 300_000_000
    opened = set[int]()

    def epoch() -> None:
        for i in range(len(cache)):
            assert len(cache.read(i).states) == 10_000
            if i % 16 == 0:
                opened.add(len(list(Path("/proc/self/fd").iterdir())))

    for i in range(8):
        cache.read(i)
    verify(folder, threads=2, share=0.01)
    before, files = resident(), len(list(Path("/proc/self/fd").iterdir()))
    epoch()
    epoch()
    assert verify(folder, threads=2).faults == []
    assert resident() - before < 30 << 20
    assert max(opened) <= files + OPEN_FILES and len(list(Path("/proc/self/fd").iterdir())) <= files + OPEN_FILES


def test_fifty_thousand_samples_open_at_once_and_only_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B61: opening a cache of 500 shards opens none of them; each sample opens its own."""
    import time

    folder = tmp_path / "c"
    monkeypatch.setattr(caches, "HIDDEN", 16)
    write_cache(folder, samples=100, tokens=3, codec="bf16")
    multiply(folder, 500)
    opened: Counter[str] = Counter()
    real = os.open

    def counted(path: str | Path, *args: int, **named: int) -> int:
        opened[Path(path).name] += str(path).endswith(".arrow")
        return real(path, *args, **named)

    monkeypatch.setattr(os, "open", counted)
    start = time.perf_counter()
    cache = Cache(folder)
    assert len(cache) == 50_000 and int(cache.tokens.sum()) == 150_000 and opened.total() == 0
    for i in (49_999, 7, 25_000, 8):
        assert len(cache.read(i).states) == 3
    assert time.perf_counter() - start < 5
    assert {name: n for name, n in opened.items() if n} == {
        "00000499.arrow": 1,
        "00000000.arrow": 1,
        "00000250.arrow": 1,
    }


def test_a_random_share_is_checked_and_everything_beside_the_samples(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_cache(folder, samples=60, per_shard=20)
    row = Cache(folder).row(25)
    path = folder / row["shard"]
    good = path.read_bytes()
    at = row["offset"] + row["length"] // 2
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    full = verify(folder, threads=2)
    assert (full.checked, full.samples) == (60, 60) and len(full.faults) == 1
    found = [verify(folder, threads=2, share=0.2, seed=seed) for seed in range(20)]
    assert all(f.checked == 12 and f.samples == 60 and f.read < 0.4 * full.read for f in found)
    hits = [bool(f.faults) for f in found]
    assert 0 < sum(hits) < 12  # 4 expected: a share of 0.2 of each shard
    again = [bool(verify(folder, threads=1, share=0.2, seed=seed).faults) for seed in range(20)]
    assert again == hits
    path.write_bytes(good)
    (folder / "codec.safetensors").write_bytes(b"x")
    path.write_bytes(good[:-30] + b"x" + good[-29:])
    faults = verify(folder, threads=2, share=0.01).faults
    assert len(faults) == 2 and "codec.safetensors" in faults[0] and "00000001.arrow" in faults[1]


def test_verify_says_what_it_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=10)

    def run(*words: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
            patch.setattr(sys, "argv", ["dflash-shards", "verify", str(tmp_path / "c"), *words])
            main()
        return int(left.value.code or 0), capsys.readouterr().out

    code, out = run()
    assert code == 0 and "1 shards, 10 samples" in out
    code, out = run("--sample", "0.25", "--seed", "3")
    assert code == 0 and "checked 3 of 10 samples" in out
    assert run("--sample", "0")[0] == 2 and run("--sample", "1.5")[0] == 2


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", samples=9, per_shard=3)
    told: list[tuple[int, int]] = []
    found = verify(tmp_path / "c", threads=1, progress=lambda read, total: told.append((read, total)))
    assert [read for read, _ in told] == sorted({read for read, _ in told}) and len(told) == 9
    assert told[-1][0] == found.read <= told[-1][1] == found.bytes


def test_a_read_longer_than_the_kernel_gives_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of more than 2 GiB comes in several pieces: here of 1,000 bytes."""
    (sample,) = write_cache(tmp_path / "c", samples=1, tokens=300)
    monkeypatch.setattr(layout, "_ONE_READ", 1000)
    assert torch.equal(Cache(tmp_path / "c").read(0).states, sample.states)
    assert verify(tmp_path / "c", threads=1).faults == []


def test_an_index_that_is_rewritten_all_the_time_is_never_torn(tmp_path: Path) -> None:
    """B50: files appear whole or not at all, so that a reader never meets half of one."""
    folder = tmp_path / "c"
    write_cache(folder, samples=20)
    info, table, stop = manifest.read(folder), index.load(folder, manifest.read(folder), ranges=True), threading.Event()
    written = 0

    def rewrite() -> None:
        nonlocal written
        with claim(folder):
            while not stop.is_set():
                # Other bytes each time, so that index and manifest of two moments do not fit.
                index.publish(folder, replace(info, dataset={"written": written}), table)
                written += 1

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for i in range(60):
            assert len(Cache(folder).read(i % 20).states) > 0
    finally:
        stop.set()
        writer.join()
    assert written > 5 and verify(folder, threads=1).faults == []


@pytest.mark.parametrize("other", [{"codec": "bf16"}, {"codec": "ecsq"}, {"codec": "lossless", "layers": (1, 2, 4)}])
def test_a_shard_of_other_settings_is_never_read_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    """B52: same samples, same name and task, but another codec or other layers."""
    write_cache(tmp_path / "a", samples=3)
    monkeypatch.setattr(caches, "LAYERS", other.get("layers", caches.LAYERS))
    write_cache(tmp_path / "b", samples=3, codec=str(other["codec"]))
    shutil.copy(tmp_path / "b" / index.shard_name(0), tmp_path / "a" / index.shard_name(0))
    if "layers" in other:  # the same bytes a sample: only the schema's metadata and the hashes tell
        sizes = {p.stat().st_size for p in tmp_path.glob("*/shards/*.arrow")}
        assert len(sizes) == 1
    else:
        with pytest.raises(CorruptError, match=r"00000000\.arrow"):
            Cache(tmp_path / "a").read(0)
    assert any("00000000.arrow" in f for f in verify(tmp_path / "a", threads=1).faults)
    # The index made to fit: what made the frames is still not what the manifest says.
    info = manifest.read(tmp_path / "a")
    found = index.scan(tmp_path / "a")
    index.publish(tmp_path / "a", replace(info, shards=[s for s, _ in found]), index.build(found))
    faults = verify(tmp_path / "a", threads=1).faults
    assert faults and "written with another codec, calibration or layers" in faults[0]


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users may enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_read_only_cache_is_read_by_somebody_else_and_not_written(public: Path) -> None:
    """B56: by a user who may not write, whoever runs the tests."""
    folder = public / "c"
    write_cache(folder, samples=3)
    paths = [folder, *sorted(folder.rglob("*"))]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {p: (p.stat().st_mtime_ns, p.is_file() and file_hash(p)) for p in paths}
    child = os.fork()
    if child == 0:
        _as_nobody(folder)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(folder.rglob("*")) == paths[1:]
    assert {p: (p.stat().st_mtime_ns, p.is_file() and file_hash(p)) for p in paths} == before
    for path in paths:
        path.chmod(0o755)


def _as_nobody(folder: Path) -> None:
    """In a forked child: read, change what was read, verify, and look, without root's rights."""
    try:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        assert not os.access(folder, os.W_OK) and not os.access(folder / "index.parquet", os.W_OK)
        warnings.simplefilter("error")
        cache = Cache(folder)
        sample = cache.read(2)
        sample.states.mul_(2)
        sample.input_ids[:] = 0
        assert not torch.equal(cache.read(2).states, sample.states)
        assert verify(folder, threads=2).faults == []
        for command in (["info"], ["ls"], ["verify"]):
            sys.argv = ["dflash-shards", *command, str(folder)]
            try:
                main()
            except SystemExit as left:
                assert left.code == 0
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode())
    finally:
        os._exit(1)


@pytest.mark.parametrize("measured", ["with the outliers", "without"])
@pytest.mark.parametrize("name", list(codecs.CODECS))
def test_outlier_channels_survive_every_codec(name: str, measured: str) -> None:
    """B58: channels of 7e4 (beyond fp16) and 3e5, and channels of 1e-6, beside ordinary ones."""
    generator = torch.Generator().manual_seed(0)
    plain_TLD = torch.randn(256, 2, 256, generator=generator)
    states_TLD = plain_TLD.clone()
    states_TLD[..., 3] = 7e4 * (1 + 0.02 * plain_TLD[..., 3])
    states_TLD[..., 90] = -3e5 * (1 + 0.02 * plain_TLD[..., 90])
    states_TLD[..., 200:] *= 1e-6
    x_TLD = states_TLD.to(torch.bfloat16)
    codec = codecs.calibrate(name, x_TLD if measured == "with the outliers" else plain_TLD.to(torch.bfloat16))
    made = frames.encode_frames(codec, x_TLD)
    y_TLD = torch.cat([frames.decode_frame(codec, memoryview(f), 128) for f in made]).view(x_TLD.shape)
    if name in ("bf16", "lossless"):
        assert torch.equal(y_TLD.view(torch.int16), x_TLD.view(torch.int16))
        return
    assert bool(torch.isfinite(y_TLD).all())
    x, y = x_TLD.double(), y_TLD.double()
    error_TL = (y - x).norm(dim=2) / x.norm(dim=2)
    assert float(error_TL.max()) < 0.07
    assert bool(((y - x).abs() <= 0.07 * x.abs())[..., [3, 90]].all())
    if name == "ecsq":  # fp8 has one scale a token: what is ordinary beside 3e5 is lost to it
        assert float((y - x)[..., 4:90].square().mean().sqrt()) < 0.05
    if measured == "with the outliers":
        assert float((y - x)[..., 200:].square().mean().sqrt()) < 1.1e-6  # lost beside 3e5, and nothing in their place


def test_the_index_of_every_sample_counts_in_64_bits() -> None:
    """B53: nothing in the layout is narrower than an offset may be."""
    for name in ("offset", "length", "tokens", "frame_offsets", "frame_lengths", "source_row"):
        kind = index.SCHEMA.field(name).type
        assert np.dtype((getattr(kind, "value_type", kind)).to_pandas_dtype()).itemsize == 8
