"""`python extract_killed.py KILLS SEED WORKERS FOLDER ARGUMENTS...`: extract, killed KILLS times, each time run again.

Every attempt is a fork of this process, which has imported torch and computed nothing, and so are its workers: starting
them anew takes longer than all they do. It dies by SIGKILL of a worker, the parent or all of them, at a random moment
(two of three times after a shard of its own) or at a named point of the code. Whenever a cache gets finished it is
compared with one that was not disturbed, and a new one is begun. Prints a line for every kill; anything wrong ends it
with an AssertionError.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: F401

from dflash_offline.extract import events, pool
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.run import run
from dflash_offline.shards.command import parse
from dflash_offline.tools.compare import diff
from dflash_offline.tools.config import Diff

FILES = ("plan.json", "tokens-*", "/skipped.jsonl", "target.safetensors", "codec.safetensors", "index.parquet",
         "manifest.json")  # fmt: skip
POINTS = [
    *(f"{point}:*{name}" for name in FILES for point in ("fsync", "rename", "renamed")),
    *(f"{where}{point}:*/shards/0*.arrow" for where in ("", "link of a root ") for point in ("rename", "renamed")),
    *(f"{point}:*/disk/*/0*.arrow" for point in ("rename", "renamed")),
]
CRITICAL = ["rename:*/shards/0*.arrow", "rename:*index.parquet", "renamed:*index.parquet", "rename:*manifest.json"]


def attempt(arguments: list[str], point: str, marker: Path, log: Path) -> int:
    """Start a run in a fork."""
    if (child := os.fork()) == 0:
        code = 99
        try:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            if point:
                os.environ |= {"DFLASH_TEST_KILL": point, "DFLASH_TEST_KILLED": str(marker)}
            pool.multiprocessing = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))  # type: ignore[assignment]
            pool.serve = serve
            code = run(parse(ExtractConfig, arguments, "", ""))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def serve(*args: Any, plain: Any = pool.serve) -> None:
    """A worker like one started anew: SIGTERM ends it, and it does not hold the cache in its parent's place."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for fd in Path("/proc/self/fd").iterdir():
        if fd.is_symlink() and fd.readlink().name == ".lock":
            os.close(int(fd.name))
    plain(*args)


def children(pid: int) -> list[int]:
    """Its workers."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def shards(cache: Path) -> int:
    return len(list(cache.glob("shards/*.arrow")))


def kill_at_random(pid: int, victim: str, cache: Path, late: bool, seconds: float, rng: random.Random) -> bool:
    """SIGKILL to `victim` within so many seconds of the start or of its first shard. False when the run was over."""
    before, deadline = shards(cache), time.monotonic() + 120
    if late:
        while shards(cache) == before and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    time.sleep(rng.uniform(0, seconds))
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return False
    found = children(pid)
    if victim == "worker" and not found:
        return False
    for each in [pid] if victim == "parent" else [rng.choice(found)] if victim == "worker" else [pid, *found]:
        os.kill(each, signal.SIGKILL)
    print(f"{victim} at a random moment {'after' if late else 'before'} a shard of its own", flush=True)
    return True


def check(cache: Path, want: Path, deaths: int, workers: int) -> None:
    """The cache is what an undisturbed run makes; each death cost at most a shard per worker."""
    assert diff(Diff(first=want, second=cache)) == 0
    names = [p.relative_to(want) for p in want.rglob("*") if p.is_file() and not p.name.startswith((".lock", "events"))]
    assert all((cache / name).read_bytes() == (want / name).read_bytes() for name in names)
    left = [p for p in cache.rglob("*") if p.is_file() and p.relative_to(cache) not in names]
    assert {p.name for p in left} <= {".lock", "events.jsonl"}, left
    happened = events.read(cache)
    given = Counter(e["task"] for e in happened if e["event"] == "given" and e["task"] >= 0)
    lost = sum(e["event"] == "lost" for e in happened)
    assert given.total() - len(given) <= lost + workers * deaths, given


def main(kills: int, seed: int, workers: int, folder: Path, arguments: list[str]) -> None:
    rng = random.Random(seed)
    want, cache, disk, marker, log = (folder / n for n in ("want", "c", "disk", "marker", "log"))

    def argv(place: Path) -> list[str]:
        return [*arguments, "--workers", str(workers), "--cache", str(place)]

    begun, first = time.monotonic(), 0.0
    pid = attempt(argv(want), "", marker, log)
    while (code := ended(pid)) is None:
        first = first or (time.monotonic() - begun if shards(want) else 0.0)
        time.sleep(0.01)
    assert code == 0, log.read_text()
    rest = time.monotonic() - begun - first
    print(f"undisturbed: {shards(want)} shards, the first after {first:.1f} s, the rest in {rest:.1f} s", flush=True)

    named = [*CRITICAL, *rng.sample(POINTS, len(POINTS))] if kills >= 2 * len(POINTS) else CRITICAL[:1] + CRITICAL[2:]
    plans = [*named, *["worker", "parent", "all"] * kills][:kills]
    rng.shuffle(plans)
    deaths = caches = early = late = 0
    with_roots, pid = False, 0
    while plans or deaths:
        plan = plans[-1] if plans else ""
        point = plan.removeprefix("link of a root ") if ":" in plan else ""
        roots = with_roots or "disk" in plan or "root" in plan
        if roots != with_roots:  # only in a new cache
            shutil.rmtree(cache, ignore_errors=True)
            deaths, with_roots = 0, roots
        pid = attempt([*argv(cache), *(["--roots", str(disk)] if roots else [])], point, marker, log)
        hit = False
        if plan and not point:
            is_late = late < 2 / 3 * (early + late + 1)
            seconds = rest * (1 - shards(cache) / shards(want)) if is_late else first
            hit = kill_at_random(pid, plan, cache, is_late, seconds, rng)
            late, early = late + (hit and is_late), early + (hit and not is_late)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), log.read_text()[-2000:]
        if point and marker.exists():
            marker.unlink()
            hit = True
            print(f"at {plan}", flush=True)
        if hit:
            plans.pop()
        deaths += code != 0
        if code == 0:
            check(cache, want, deaths, workers)
            shutil.rmtree(cache)
            shutil.rmtree(disk, ignore_errors=True)
            deaths, caches, with_roots = 0, caches + 1, rng.random() < 0.3
    print(f"{kills} kills, {late} of {early + late} random ones late, {caches} caches compared", flush=True)


if __name__ == "__main__":
    kills, seed, workers = map(int, sys.argv[1:4])
    main(kills, seed, workers, Path(sys.argv[4]), sys.argv[5:])
