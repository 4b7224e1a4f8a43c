"""What stops `dflash-shards merge`, `split` and `convert`: a kill, damage, a full disk, another command's folder."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from caches import write_cache
from test_rewrite import assert_equal, edit, same_target, stored, tree
from test_tools import shards

from dflash_offline.shards import manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.verify import verify
from dflash_offline.tools import rewrite, rewrite_cache
from dflash_offline.tools.config import Convert, Split

KILL = """
import os, signal, sys
from dflash_offline.tools import cli, rewrite_cache
entries, left = rewrite_cache._entries, [int(sys.argv.pop(1))]
def counted(*args):
    for entry in entries(*args):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        yield entry
rewrite_cache._entries = counted
cli.main()
"""


@pytest.mark.parametrize(("kind", "after"), [("convert", 0), ("convert", 13), ("merge", 17), ("split", 7)])
def test_a_killed_command_continues_to_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, after: int
) -> None:
    write_cache(tmp_path / "a", samples=20, tokens=1200, per_shard=6)
    if kind == "merge":
        write_cache(tmp_path / "b", samples=4, tokens=1200, seed=1)
        same_target(tmp_path / "b", tmp_path / "a")
    words = {"convert": ["--codec", "bf16"], "merge": [tmp_path / "b"], "split": ["--fraction", "0.8"]}[kind]
    args = [kind, tmp_path / "a", *words, "--shard-mib", 1, "--threads", 2, "--out"]
    assert shards(capsys, *args, tmp_path / "whole")[0] == 0
    killed = subprocess.run([sys.executable, "-c", KILL, str(after), *map(str, [*args, tmp_path / "c"])], check=False)
    assert killed.returncode == -9
    with pytest.raises(UsageError, match="not complete"):
        Cache(tmp_path / "c")
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").glob("shards/*.arrow")}
    code, out, _ = shards(capsys, *args, tmp_path / "c")
    assert code == 0 and ("resuming" in out) == bool(kept)
    assert all(p.stat().st_mtime_ns == at for p, at in kept.items())
    assert len(Cache(tmp_path / "c").manifest.shards) > 2 and verify(tmp_path / "c", threads=1).faults == []
    assert tree(tmp_path / "c") == tree(tmp_path / "whole")
    assert shards(capsys, *args, tmp_path / "c")[0] == 0  # and once more changes nothing
    assert tree(tmp_path / "c") == tree(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["convert", "split"])
def test_a_damaged_source_stops_it_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    write_cache(tmp_path / "a", samples=20, tokens=300, per_shard=5)
    cache = Cache(tmp_path / "a")
    row = cache.row(17)
    path = tmp_path / "a" / row["shard"]
    good = path.read_bytes()
    at = row["offset"] + row["length"] // 2
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    words = {"convert": ["--codec", "bf16"], "split": ["--limit", "19"]}[kind]
    args = [kind, tmp_path / "a", *words, "--shard-mib", 1, "--out", tmp_path / "c"]
    code, _, err = shards(capsys, *args)
    assert code == 1 and f"{path}: row 2, sample {row['key']}: frame" in err and err.count("\n") == 1
    with pytest.raises(UsageError):
        Cache(tmp_path / "c")
    path.write_bytes(good)
    assert shards(capsys, *args)[0] == 0 and verify(tmp_path / "c", threads=1).faults == []


@pytest.mark.parametrize("name", ["target/target.safetensors", "codec.safetensors"])
def test_a_damaged_side_file_stops_it_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    write_cache(tmp_path / "a", samples=3)
    with (tmp_path / "a" / name).open("ab") as file:
        file.write(b"x")
    code, _, err = shards(capsys, "split", tmp_path / "a", "--limit", 2, "--out", tmp_path / "c")
    assert code == 1 and f"{tmp_path / 'a' / name}: missing or changed" in err
    with pytest.raises(UsageError):
        Cache(tmp_path / "c")


def test_another_command_on_the_same_folder_is_refused_by_name(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", samples=6)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = Split(cache=tmp_path / "a", out=tmp_path / "c", limit=2)
    rewrite.split(first)
    whole = tree(tmp_path / "c")
    for changed, message in (
        (replace(first, limit=3), "made_by was .*'limit': 2.*, now .*'limit': 3"),
        (replace(first, shard_mib=7), "shard_mib was 2048, now 7"),
        (replace(first, out=tmp_path / "b"), "made_by was None, now"),
        (replace(first, out=tmp_path / "a" / "new"), "lies in .*, which is only read"),
        (replace(first, out=tmp_path / "a"), "lies in .*, which is only read"),
        (replace(first, out=tmp_path), "holds a and is not a cache"),
    ):
        with pytest.raises((UsageError, CorruptError), match=message):
            rewrite.split(changed)
    assert tree(tmp_path / "c") == whole and tree(tmp_path / "b") == tree(tmp_path / "a")


def test_a_full_disk_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(tmp_path / "a", samples=6, tokens=2000)
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(rewrite_cache.shutil, "disk_usage", lambda path: free)
    with pytest.raises(UsageError, match="needs about 2 MiB more, 1 are free"):
        rewrite.convert(Convert(cache=tmp_path / "a", out=tmp_path / "new" / "c", codec="bf16"))
    assert not (tmp_path / "new").exists()
    rewrite.convert(Convert(cache=tmp_path / "a", out=tmp_path / "new" / "c", codec="ecsq", delta=1.0))


def test_a_cache_being_written_gives_what_is_finished_when_asked(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", samples=12, per_shard=4, complete=False)
    m = manifest.read(tmp_path / "a")
    manifest.write(tmp_path / "a", replace(m, dataset={"rows": 15, "skipped": {"empty": 1}}))
    asked = Convert(cache=tmp_path / "a", out=tmp_path / "c", codec="bf16", allow_incomplete=True)
    with pytest.raises(UsageError, match="not complete"):
        rewrite.convert(replace(asked, allow_incomplete=False))
    late = tmp_path / "a" / "shards" / "00000002.arrow"
    late.rename(tmp_path / "late")
    rewrite.convert(asked)
    cache = Cache(tmp_path / "c")
    assert_equal(cache, stored(Cache(tmp_path / "a", allow_incomplete=True)))
    assert len(cache) == 8 and cache.manifest.dataset["rows"] == 15
    assert cache.manifest.dataset["skipped"] == {"empty": 1, "not_extracted": 6}
    (tmp_path / "late").rename(late)
    with pytest.raises(UsageError, match="begun with other samples than the sources hold now"):
        rewrite.convert(asked)
    for path in (tmp_path / "a" / "shards").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="no shard is finished yet"):
        rewrite.convert(asked)


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    write_cache(tmp_path / "a", samples=2)
    edit(tmp_path / "a", target={"copied": {"../../stolen": "0" * 16}})
    with pytest.raises(CorruptError, match=r"target\.copied is .*'../../stolen'"):
        rewrite.split(Split(cache=tmp_path / "a", out=tmp_path / "c", limit=1))
