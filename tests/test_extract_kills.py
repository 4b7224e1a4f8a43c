"""B38: SIGKILL anywhere, and the same command again: the cache equals one that nothing happened to."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from targets import write_chats

from dflash_offline.shards.files import atomic_file, link


def killed(site: Path, folder: Path, kills: int, seed: int, workers: int) -> list[str]:
    """What tests/extract_killed.py says."""
    write_chats(folder / "chats.jsonl", 80 * workers)
    values = {"target.path": site / "t", "data.files": folder / "chats.jsonl", "shard-mib": 1}
    arguments = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    script = Path(__file__).with_name("extract_killed.py")
    done = subprocess.run(
        [sys.executable, script, *map(str, (kills, seed, workers, folder)), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_few_kills(site: Path, tmp_path: Path) -> None:
    said = killed(site, tmp_path, kills=3, seed=3, workers=1)
    assert said[-1].startswith("3 kills, ") and "0 with other states" in said[-2]


@pytest.mark.slow
def test_a_hundred_kills(site: Path, tmp_path: Path) -> None:
    said = killed(site, tmp_path, kills=100, seed=100, workers=2)
    late, drawn = map(int, re.findall(r"100 kills, (\d+) of (\d+) random", said[-1])[0])
    assert late >= 0.6 * drawn and sum(line.startswith("at ") for line in said) >= 29
    print("\n".join(line for line in said if "samples in both" not in line))


@pytest.mark.parametrize(("point", "there"), [("fsync", False), ("rename", False), ("renamed", True)])
def test_named_points(tmp_path: Path, point: str, there: bool) -> None:
    """A file is there whole or not at all, wherever its writer dies; the second time it does not die."""
    code = (
        "from pathlib import Path; from dflash_offline.shards.files import atomic_file\n"
        f"with atomic_file(Path({str(tmp_path)!r}) / 'x') as f: f.write(b'whole')"
    )
    for died in (True, False):
        hook = {"DFLASH_TEST_KILL": f"{point}:*/x", "DFLASH_TEST_KILLED": str(tmp_path / "killed")}
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **hook}, check=False)
        assert done.returncode == (-9 if died else 0)
        assert (tmp_path / "x").exists() == (there or not died)
    assert (tmp_path / "x").read_bytes() == b"whole"


def test_without_the_variable_nothing_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_TEST_KILL", raising=False)
    with atomic_file(tmp_path / "x") as file:
        file.write(b"whole")
    link(tmp_path / "y", tmp_path / "x")
    assert (tmp_path / "y").read_bytes() == b"whole"
