"""Shards on several disks."""

from pathlib import Path

import pytest
from runs import arguments, extract, tree

from dflash_offline.extract import roots
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.verify import verify


def test_shards_lie_under_the_roots_and_read_as_before(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "disk0", tmp_path / "disk1"]
    turn = iter(range(100))
    free = {p: 0 for p in places}

    def room(root: Path) -> object:
        return type("Usage", (), {"free": free[root]})

    monkeypatch.setattr(roots.shutil, "disk_usage", room)
    for place in places:
        roots.prepare([place], tmp_path / "c")
    chosen = []
    for name in ("a.arrow", "b.arrow"):
        free[places[next(turn)]] = 5
        free[places[1]] *= 3
        chosen.append(roots.choose(places, tmp_path / "c", name))
    assert [p and p.parent.parent for p in chosen] == places
    monkeypatch.undo()

    done = extract(*arguments(site, tmp_path / "c"), "--roots", *places)
    assert done.returncode == 0, done.stderr
    links = sorted((tmp_path / "c" / "shards").glob("*.arrow"))
    assert links and all(p.is_symlink() and p.resolve().parent.parent in places for p in links)
    want, found = tree(site / "cache"), tree(tmp_path / "c")
    for name in (n for n in want if n.endswith(".arrow") or n == "codec.safetensors"):
        assert found[name] == want[name]
    assert verify(tmp_path / "c", threads=1).faults == []
    Cache(tmp_path / "c").read(3)


def test_a_lost_disk_is_named_and_written_again(site: Path, tmp_path: Path) -> None:
    assert extract(*arguments(site, tmp_path / "c"), "--roots", tmp_path / "disk").returncode == 0
    link = min((tmp_path / "c" / "shards").glob("*.arrow"))
    body = link.resolve()
    good = body.read_bytes()
    body.unlink()
    orphan = body.with_name("99999999.arrow")  # a shard whose link was never made, and one half written
    orphan.write_bytes(good)
    body.with_name("00000001.arrow.77.tmp").write_bytes(b"half")
    with pytest.raises(CorruptError, match=rf"{link.name} \(a link to {body}\): missing"):
        Cache(tmp_path / "c")
    assert any("missing" in fault and link.name in fault for fault in verify(tmp_path / "c", threads=1).faults)
    done = extract(*arguments(site, tmp_path / "c"), "--roots", tmp_path / "disk")
    assert done.returncode == 0, done.stderr
    assert link.resolve().read_bytes() == good and not orphan.exists() and not list(body.parent.glob("*.tmp"))


def test_a_root_that_cannot_be_written_is_named(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = extract(*arguments(site, tmp_path / "c"), "--roots", tmp_path / "file")
    assert done.returncode == 2 and str(tmp_path / "file") in done.stderr and not (tmp_path / "c").exists()
