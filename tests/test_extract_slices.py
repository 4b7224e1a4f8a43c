"""One cache by several machines: slices of a shared plan, and actors of Ray."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from runs import arguments, call, command, extract, tree

from dflash_offline.extract import events


def same_as_one_machine(site: Path, cache: Path) -> bool:
    ours, theirs = tree(cache), tree(site / "cache")
    return {k: v for k, v in ours.items() if ".lock" not in k} == {k: v for k, v in theirs.items() if k != ".lock"}


def sliced(site: Path, cache: Path, which: str, **changes: Any) -> list[object]:
    return arguments(site, cache, task_slice=which, **changes)


def test_slices_side_by_side_make_the_cache_of_one_machine(site: Path, tmp_path: Path) -> None:
    """Prepared once; two at a time, one of them over several disks; a run without a slice completes."""
    cache = tmp_path / "c"
    done = extract(*sliced(site, cache, "0/2"))
    assert done.returncode == 2 and "not prepared; run the same command with --task-slice prepare" in done.stderr
    assert not cache.exists()
    assert "prepared" in extract(*sliced(site, cache, "prepare")).stdout
    with subprocess.Popen(command(*sliced(site, cache, "0/2")), stdout=subprocess.DEVNULL) as first:
        while not list(cache.glob("events-0-of-2.jsonl")) and first.poll() is None:
            time.sleep(0.01)
        # Beside a slice at work: the same slice and the whole are refused, the other slice is not.
        assert "in use by pid" in extract(*sliced(site, cache, "0/2")).stderr
        whole = extract(*arguments(site, cache))
        assert whole.returncode == 2 and "in use by several processes, a part each" in whole.stderr
        assert f"held by pid {first.pid} on " in call("status", cache).stdout
        second = extract(*sliced(site, cache, "1/2", **{"data.files": "/not/on/this/machine.jsonl"}))
        assert second.returncode == 0 and "slice 1/2 is done" in second.stdout, second.stderr
    assert first.returncode == 0
    given = {
        path.name: {e["task"] for e in events.lines(path) if e["event"] == "given"} for path in cache.glob("events-*")
    }
    assert given == {"events-0-of-2.jsonl": {0, 2}, "events-1-of-2.jsonl": {1}}
    done = extract(*arguments(site, cache))
    assert done.returncode == 0 and same_as_one_machine(site, cache)


def test_a_slice_leaves_what_others_are_writing(site: Path, tmp_path: Path) -> None:
    cache, disk = tmp_path / "c", tmp_path / "disk"
    assert extract(*sliced(site, cache, "prepare"), "--roots", disk).returncode == 0
    (root,) = disk.iterdir()
    theirs = [cache / "shards" / "00000000.arrow.7.tmp", root / "00000002.arrow.7.tmp", root / "00000000.arrow"]
    own = [cache / "shards" / "00000001.arrow.7.tmp", root / "00000001.arrow.7.tmp"]
    for path in theirs + own:
        path.write_bytes(b"half")
    assert extract(*sliced(site, cache, "1/2"), "--roots", disk).returncode == 0
    assert all(path.read_bytes() == b"half" for path in theirs) and not any(path.exists() for path in own)
    done = extract(*arguments(site, cache), "--roots", disk)
    assert done.returncode == 0 and not any(path.exists() for path in theirs[:2]), done.stderr
    assert same_as_one_machine(site, cache)


def test_a_slice_with_other_settings_is_refused(site: Path, tmp_path: Path) -> None:
    assert extract(*sliced(site, tmp_path / "c", "prepare")).returncode == 0
    done = extract(*sliced(site, tmp_path / "c", "0/2", **{"data.max-length": 99}))
    assert done.returncode == 2 and "data.max_length was 4096, now 99; use the same settings in every" in done.stderr


def test_ray_makes_the_same_cache(site: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="the optional engine")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        done = extract(*arguments(site, tmp_path / "c", engine="ray", workers=2))
    finally:
        ray.shutdown()
    assert done.returncode == 0, done.stderr
    assert same_as_one_machine(site, tmp_path / "c")


def test_without_ray_it_says_how_to_get_it(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    done = extract(*arguments(site, tmp_path / "c", engine="ray", workers=2))
    assert done.returncode == 2 and "pip install ray" in done.stderr
