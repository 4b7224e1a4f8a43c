"""`dflash-shards repair`: what is sound is kept, what is lost is named, and a killed repair is finished by the next."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from caches import write_cache
from runs import arguments, extract, states, tree

from dflash_offline.shards import index, manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import CorruptError, RunError, UsageError
from dflash_offline.shards.layout import is_salvaged
from dflash_offline.shards.repair import Repaired, repair
from dflash_offline.shards.verify import verify
from dflash_offline.tools.cli import main

FIRST, SECOND = "shards/00000000.arrow", "shards/00000001.arrow"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of four shards of three samples, of several frames each."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    write_cache(folder, samples=12, per_shard=3, tokens=150, codec="ecsq", last_hidden=True)
    return folder


@pytest.fixture
def cache(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize(
    "change",
    [
        {"shards": ["../precious.arrow"]},
        {"shards": ["shards/../../precious.arrow"]},
        {"shards": ["shards/\0.arrow"]},
        {"target": {"copied": {"../precious.arrow": "0"}}},
        {"target": {"copied": [1]}},
        {"layer_ids": []},
        {"hidden_size": 0},
    ],
)
def test_a_manifest_that_leads_out_of_its_cache_is_refused(cache: Path, change: dict[str, object]) -> None:
    precious = cache.parent / "precious.arrow"
    precious.write_text("mine")
    info = manifest.read(cache)
    if "shards" in change:
        more = [replace(info.shards[0], name=name, rows=0, task="ab" * 16) for name in change["shards"]]
        change = {"shards": [*info.shards, *more]}
    index.publish(cache, replace(info, **change), index.load(cache, info, ranges=True))
    assert len(verify(cache, 1).faults) == 1
    with pytest.raises(CorruptError, match=r"manifest\.json: (shards has|target.copied is|layers)"):
        Cache(cache)
    with pytest.raises(RunError, match="both lost or damaged"):
        mended(cache)
    assert precious.read_text() == "mine" and not list(cache.parent.glob("*.torn"))


def test_a_complete_manifest_without_its_index_is_named(cache: Path) -> None:
    manifest.write(cache, replace(manifest.read(cache), index={}))
    with pytest.raises(CorruptError, match=r"index\.parquet: changed or cut"):
        Cache(cache)
    assert mended(cache)[0].lost == 0 and len(Cache(cache)) == 12


def files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if name != ".lock"}


def mended(folder: Path, **options: bool) -> tuple[Repaired, str]:
    said: list[str] = []
    return repair(folder, 2, say=said.append, **options), "\n".join(said)


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 16
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swap(folder: Path) -> None:
    (folder / FIRST).rename(folder / "x")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "x").rename(folder / SECOND)


def test_a_sound_cache_is_not_touched(cache: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()}
    assert mended(cache) == (Repaired(changes=0, lost=0, left=[]), "")
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file() and p.name != ".lock"} == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: (c / "index.parquet").unlink(),
        lambda c: (c / "index.parquet").write_bytes(b""),
        lambda c: flip(c / "index.parquet"),
        lambda c: flip(c / "index.parquet", 0.999),
        lambda c: cut(c / "index.parquet"),
        lambda c: (c / "manifest.json").unlink(),
        lambda c: flip(c / "manifest.json"),
        lambda c: cut(c / "manifest.json"),
        swap,
        lambda c: (c / FIRST).rename(c / "shards" / "x.arrow"),
        lambda c: shutil.copy(c / FIRST, c / "shards" / "00000009.arrow.1.tmp"),
        lambda c: ((c / "index.parquet.7.tmp").touch(), (c / "manifest.json").unlink(), swap(c)),
        lambda c: (c / SECOND).write_bytes((c / SECOND).read_bytes()[:-3]),
        lambda c: flip(c / SECOND, 0.001),  # in the schema message
        lambda c: (flip(c / SECOND, 0.99), (c / "manifest.json").unlink()),  # in the trailer
        lambda c: ((c / FIRST).rename(c / "shards" / "copy"), (c / FIRST).touch(), (c / "index.parquet").unlink()),
    ],
)
def test_what_was_not_lost_comes_back_byte_for_byte(whole: Path, cache: Path, damage: Callable[[Path], object]) -> None:
    damage(cache)
    planned, said = mended(cache, dry_run=True)
    assert planned.changes and not planned.lost
    assert mended(cache) == (planned, said)
    found = files(cache)
    assert {name: found[name] for name in files(whole)} == files(whole)
    assert all(name.endswith(".torn") for name in found.keys() - files(whole).keys())
    assert verify(cache, threads=1).faults == []
    assert mended(cache)[0].changes == 0


def test_foreign_files_are_set_aside(whole: Path, cache: Path, tmp_path: Path) -> None:
    write_cache(tmp_path / "d", samples=3, seed=5, codec="ecsq", last_hidden=True)
    shutil.copy(cache / FIRST, cache / "shards" / "00000009.arrow")
    shutil.copy(tmp_path / "d" / FIRST, cache / "shards" / "a.arrow")
    (cache / "shards" / "notes.txt").write_text("x")
    assert len(verify(cache, threads=1).faults) == 3
    assert not mended(cache)[0].lost and verify(cache, threads=1).faults == []
    for name in ("00000009.arrow", "a.arrow", "notes.txt"):
        assert (cache / "shards" / f"{name}.foreign").is_file()
    assert files(whole).items() <= files(cache).items()


def sample_at(folder: Path, number: int) -> tuple[Path, int, int]:
    row = Cache(folder).row(number)
    return folder / row["shard"], row["offset"], row["length"]


def flip_sample(folder: Path) -> None:
    path, offset, length = sample_at(folder, 4)
    flip(path, (offset + length // 2) / path.stat().st_size)


def insert_in_sample(folder: Path) -> None:
    path, offset, _ = sample_at(folder, 4)
    data = path.read_bytes()
    path.write_bytes(data[: offset + 99] + b"12345" + data[offset + 99 :])


def delete_in_sample(folder: Path) -> None:
    path, offset, _ = sample_at(folder, 4)
    data = path.read_bytes()
    path.write_bytes(data[: offset + 99] + data[offset + 299 :])


def cut_second_sample(folder: Path) -> None:
    path, offset, _ = sample_at(folder, 4)
    path.write_bytes(path.read_bytes()[: offset + 99])


def flip_sample_and_lose(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        flip_sample(folder)
        for name in names:
            (folder / name).unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (flip_sample, [4]),
        (insert_in_sample, [4]),
        (delete_in_sample, [4]),
        (cut_second_sample, [4, 5]),
        (lambda c: (c / SECOND).unlink(), [3, 4, 5]),
        (lambda c: (c / SECOND).write_bytes(b""), [3, 4, 5]),
        (lambda c: (c / SECOND).write_bytes(bytes(999)), [3, 4, 5]),
        (lambda c: shutil.copy(c / FIRST, c / SECOND), [3, 4, 5]),
        (flip_sample_and_lose("index.parquet"), [4]),
        (flip_sample_and_lose("manifest.json"), [4]),
        (lambda c: (cut_second_sample(c), (c / "manifest.json").unlink()), [4, 5]),
    ],
)
def test_sound_samples_of_a_damaged_shard_are_kept(
    whole: Path, cache: Path, damage: Callable[[Path], object], lost: list[int]
) -> None:
    rows = Cache(whole).index.to_pylist()
    damage(cache)
    torn = (cache / SECOND).read_bytes() if (cache / SECOND).is_file() else None
    assert not (cache / "manifest.json").exists() or verify(cache, threads=1).faults
    planned, said = mended(cache, dry_run=True)
    assert mended(cache) == (planned, said) and planned.lost == len(lost) and not planned.left
    assert verify(cache, threads=1).faults == []
    names = {row["key"] for i, row in enumerate(rows) if i not in lost}
    want, have = states(whole), states(cache)
    assert have.keys() == names and all(torch.equal(have[k], want[k]) for k in have)
    lines = [json.loads(line) for line in (cache / "skipped.jsonl").read_text().splitlines()]
    assert [(x["file"], x["line"], x["id"], x["reason"]) for x in lines] == [
        (rows[i]["source"], rows[i]["source_row"] + 1, rows[i]["id"], "damaged") for i in lost
    ]
    info = manifest.read(cache)
    assert info.dataset["skipped"] == {"damaged": len(lost)} and info.dataset["samples"] == 12 - len(lost)
    assert [is_salvaged(s.task) for s in info.shards] == [False, True, False, False]
    beside = [p.read_bytes() for p in (cache / "shards").iterdir() if p.name.startswith(Path(SECOND).name + ".")]
    assert beside == ([] if torn is None else [torn])
    assert mended(cache) == (Repaired(changes=0, lost=0, left=[]), "")


def test_samples_that_nothing_names_are_counted(cache: Path) -> None:
    """Index and trailer are both gone: nobody can say which message was sound."""
    (cache / "index.parquet").unlink()
    cut(cache / SECOND)
    assert mended(cache)[0].lost == 3 and verify(cache, threads=1).faults == []
    lines = [json.loads(line) for line in (cache / "skipped.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(SECOND in line["detail"] for line in lines)


def test_a_salvaged_shard_may_be_damaged_again(cache: Path) -> None:
    flip_sample(cache)
    assert mended(cache)[0].lost == 1
    path, offset, length = sample_at(cache, 3)
    flip(path, (offset + length // 2) / path.stat().st_size)
    done, _ = mended(cache, delete=True)
    # The first original still holds it.
    assert done.lost == 0 and len(Cache(cache)) == 11 and verify(cache, threads=1).faults == []
    assert not list((cache / "shards").glob("*.torn"))
    path, offset, length = sample_at(cache, 3)
    flip(path, (offset + length // 2) / path.stat().st_size)
    assert mended(cache)[0].lost == 1 and verify(cache, threads=1).faults == []
    assert manifest.read(cache).dataset["skipped"] == {"damaged": 2}


def test_a_shard_that_is_put_back_is_taken(whole: Path, cache: Path) -> None:
    flip_sample(cache)
    assert mended(cache)[0].lost == 1
    shutil.copy(whole / SECOND, cache / SECOND)
    assert mended(cache, delete=True)[0].lost == 0 and verify(cache, threads=1).faults == []
    assert len(Cache(cache)) == 12 and manifest.read(cache).dataset["skipped"] == {}
    assert (cache / "skipped.jsonl").read_bytes() == b""


def test_what_it_cannot_mend_is_named_with_the_next_step(cache: Path) -> None:
    flip(cache / "codec.safetensors")
    (cache / "target" / "config.json").unlink()
    flip_sample(cache)
    done, _ = mended(cache)
    assert done.lost == 1 and [x.split(":")[0] for x in done.left] == [
        str(cache / "codec.safetensors"),
        str(cache / "target" / "config.json"),
    ]
    assert all(x.endswith("restore it from a copy, or rerun the same `dflash-extract run`") for x in done.left)


def test_a_disk_that_is_not_mounted_costs_no_samples(cache: Path, tmp_path: Path) -> None:
    body = tmp_path / "disk" / "00000001.arrow"
    body.parent.mkdir()
    (cache / SECOND).rename(body)
    (cache / SECOND).symlink_to(body)
    body.parent.rename(tmp_path / "away")
    before = files(cache)
    done, _ = mended(cache)
    assert done.lost == 0 and "mount that disk" in done.left[0] and files(cache) == before
    (tmp_path / "away").rename(body.parent)
    assert mended(cache)[0].changes == 0 and verify(cache, threads=1).faults == []


def test_shards_that_are_links_are_mended_too(cache: Path, tmp_path: Path) -> None:
    body = tmp_path / "disk" / "00000001.arrow"
    body.parent.mkdir()
    (cache / SECOND).rename(body)
    (cache / SECOND).symlink_to(body)
    flip_sample(cache)
    assert mended(cache)[0].lost == 1 and verify(cache, threads=1).faults == []
    torn = (cache / SECOND).with_name("00000001.arrow.torn")
    assert torn.resolve() == body and not (cache / SECOND).is_symlink()
    mended(cache, delete=True)
    assert not torn.is_symlink() and not body.exists() and verify(cache, threads=1).faults == []


def test_manifest_and_index_both_lost_is_one_clear_error(cache: Path, tmp_path: Path) -> None:
    cut(cache / "manifest.json"), cut(cache / "index.parquet")
    with pytest.raises(RunError, match=r"manifest.json and index.parquet are both lost or damaged; .*rerun the same"):
        mended(cache)
    with pytest.raises(UsageError, match="not a cache"):
        mended(tmp_path)
    assert list(tmp_path.iterdir()) == [cache]


def test_an_incomplete_cache_is_cleared_for_extraction(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", samples=6, per_shard=3, complete=False)
    flip(tmp_path / "c" / SECOND)
    done, said = mended(tmp_path / "c")
    assert done.lost == 3 and "00000001.arrow.torn" in said and verify(tmp_path / "c", threads=1).faults == []
    assert (tmp_path / "c" / FIRST).is_file() and not (tmp_path / "c" / SECOND).exists()


def test_a_held_cache_is_refused(cache: Path) -> None:
    code = (
        "import sys, pathlib; from dflash_offline.shards.files import take_lock\n"
        f"folder = pathlib.Path({str(cache)!r}); lock = (folder / '.lock').open('a+'); take_lock(lock, folder)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"in use by pid {holder.pid} on"):
            mended(cache)
        holder.communicate(b"")
    assert mended(cache)[0].changes == 0


def test_a_killed_repair_is_finished_by_the_next(whole: Path, tmp_path: Path) -> None:
    """Killed just before and just after every rename: the next one ends with the same files."""

    def damage(folder: Path) -> Path:
        shutil.copytree(whole, folder)
        swap(folder)
        (folder / FIRST).rename(folder / "shards" / "00000007.arrow")  # the second shard is here now
        path = folder / "shards" / "00000003.arrow"
        path.write_bytes(path.read_bytes()[: sample_at(whole, 10)[1] + 9])
        return folder

    mended(damage(tmp_path / "want"))
    want = files(tmp_path / "want")
    assert len(Cache(tmp_path / "want")) == 10
    for step in range(100):
        folder = damage(tmp_path / f"{step}")
        child = os.fork()
        if child == 0:
            _die_at_rename(folder, step)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        mended(folder)
        found = files(folder)
        assert found == want, (step, {n for n in found.keys() | want.keys() if found.get(n) != want.get(n)})
        assert verify(folder, threads=1).faults == []
        shutil.rmtree(folder)
    assert step >= 12


def _die_at_rename(folder: Path, step: int) -> None:
    """In a forked child: die before (even steps) or after (odd ones) a rename; exit with 0 when there is none left."""
    rename, count = Path.replace, 0

    def counted(path: Path, to: Path) -> Path:
        nonlocal count
        if count == step:
            os._exit(9)
        done = rename(path, to)
        if count + 1 == step:
            os._exit(9)
        count += 2
        return done

    Path.replace = counted  # type: ignore[method-assign,assignment]
    try:
        repair(folder, 1, say=lambda _: None)
        os._exit(0)
    finally:
        os._exit(1)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["dflash-shards", *map(str, args)])
        main()
    return int(left.value.code or 0), capsys.readouterr().out


def test_the_command(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "repair", cache)
    assert code == 0 and "nothing to mend" in out
    (cache / "index.parquet").unlink()
    before = files(cache)
    code, out = run(capsys, "repair", cache, "--dry-run")
    assert code == 0 and "dry run: nothing was changed" in out and files(cache) == before
    assert run(capsys, "repair", cache)[0] == 0
    flip_sample(cache)
    code, out = run(capsys, "repair", cache, "--delete")
    assert (
        code == 3 and "00000001.arrow: 2 samples kept, 1 lost" in out and "rerun the same `dflash-extract run`" in out
    )
    assert not list((cache / "shards").glob("*.torn"))
    assert run(capsys, "verify", cache)[0] == 0
    flip(cache / "codec.safetensors")
    code, out = run(capsys, "repair", cache)
    assert code == 1 and "NOT MENDED" in out
    shutil.rmtree(cache / "shards")
    assert run(capsys, "repair", cache)[0] == 2


def test_extraction_after_a_repair_writes_what_was_lost_and_nothing_else(site: Path, tmp_path: Path) -> None:
    """With the plan: exactly those tasks, to the bytes of the uninterrupted cache. Without it: a new shard."""
    want = files(site / "cache")
    shutil.copytree(site / "cache", tmp_path / "c")
    flip(tmp_path / "c" / SECOND)
    (tmp_path / "c" / "shards" / "00000002.arrow").unlink()
    done, _ = mended(tmp_path / "c", delete=True)
    lost = done.lost
    assert 0 < lost < 40 and len(Cache(tmp_path / "c")) == 40 - lost
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "c" / "shards").glob("*.arrow")}
    again = extract(*arguments(site, tmp_path / "c"))
    assert again.returncode == 0, again.stderr
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "c" / "shards").glob("*.arrow")}
    assert {name for name in after if before[name] != after[name]} == {"00000001.arrow", "00000002.arrow"}
    assert files(tmp_path / "c") == want
    shutil.rmtree(tmp_path / "d" / "plan")
    again = extract(*arguments(site, tmp_path / "d"))
    assert again.returncode == 0, again.stderr
    assert verify(tmp_path / "d", threads=1).faults == []
    original, found = states(site / "cache"), states(tmp_path / "d")
    assert found.keys() == original.keys()
    assert index.scan(tmp_path / "d")[-1][0].rows == lost
