"""Ranks: uneven data, drifting weights, busy ports, ranks that die."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from train_reference import chats, make_cache
from train_runs import FLAGS, finish, hashes, metrics, start, wait_for

from dflash_offline.train import checkpoint

FOREVER = ["--optim.max-steps", "100000", "--optim.epochs", "100000"]


def test_uneven_data_hang_no_rank_and_ranks_that_differ_are_found(tmp_path: Path) -> None:
    """B62, B80: 10, 7, 2 and 1 samples on three ranks that take two rows a step each; some rows hold nothing."""
    unsupervised = (np.arange(80, dtype=np.int32), np.array([0] * 60 + [1] * 20, np.uint8))  # after the cut
    no_anchor = (np.arange(30, dtype=np.int32), np.eye(30, dtype=np.uint8)[7])
    runs = []
    flags = [
        *FLAGS, "--data.rows-per-step", "6", "--data.row-tokens", "50", "--data.val-fraction", "0", "--save.every", "1",
        "--optim.epochs", "2", "--optim.max-steps", "50",
    ]  # fmt: skip
    for count in (10, 7, 2, 1):
        samples = [*chats(count, seed=count, longest=20), no_anchor, *([unsupervised] if count == 7 else [])]
        cache = make_cache(tmp_path / f"cache{count}", samples).path
        runs.append([["--cache", cache, "--run-dir", tmp_path / f"{count}-{world}", *flags] for world in (1, 3)])
    drift = ["drift", *runs[0][1], "--run-dir", tmp_path / "drift"]
    others = ["cache", tmp_path / "cache2", *runs[3][1], "--run-dir", tmp_path / "others"]
    begun = time.monotonic()
    finish(3, *(both[1] for both in runs), drift, others, ["stale", *runs[3][1]])
    assert time.monotonic() - begun < 60
    finish(1, *(both[0] for both in runs))
    for count in (10, 7, 2, 1):
        one, three = (metrics(tmp_path / f"{count}-{world}") for world in (1, 3))
        assert sum(m["samples"] for m in three) == 2 * (count + (count == 7))
        assert len(one) == len(three) == (4 if count == 10 else 2) and three[-1]["empty_rows"] > 0
        for a, b in zip(one, three, strict=True):
            for name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-4), name
    assert json.loads((tmp_path / "drift" / "status.json").read_text())["state"] == "failed"


@contextmanager
def listener(port: int) -> Iterator[int]:
    """A port in use."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", port))
            held.listen()
        except OSError:  # somebody else's already
            assert port
        yield held.getsockname()[1]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks of a torchrun."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"dflash_offline.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def kill_and_go_on(cache: Path, run: Path, whole: Path, times: int, everything: bool) -> None:
    """Kill one rank, or launcher and ranks, in the middle of a run, `times` times; then let it end."""
    flags = ["--cache", cache, "--run-dir", run, *FLAGS, "--save.every", "1"]
    for count in range(1, times + 1):
        process = start(2, *flags)
        wait_for(lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) > 2 * count, process)  # noqa: B023
        victims = ranks_of(process)
        assert len(victims) == 2
        for victim in [process.pid, *victims] if everything else victims[1:]:
            os.kill(victim, signal.SIGKILL)
        begun = time.monotonic()
        output = process.communicate(timeout=60)[0]
        assert process.returncode != 0 and time.monotonic() - begun < 25, output
    finish(2, flags)
    assert hashes(run, 12) == hashes(whole, 12) and metrics(run) == metrics(whole)


def test_two_jobs_at_once_one_of_which_loses_a_rank(cache: Path, together: dict[str, Path], tmp_path: Path) -> None:
    """B94, B69: torchrun's own port is taken, another job runs on the host, and the death of a rank ends its job."""
    with listener(29500):
        other = start(2, "--cache", cache, "--run-dir", tmp_path / "other", *FLAGS)
        kill_and_go_on(cache, tmp_path / "run", together["decay"], times=1, everything=False)
        output = other.communicate(timeout=60)[0]
    assert other.returncode == 0, output
    assert hashes(tmp_path / "other", 12) == hashes(together["decay"], 12)


@pytest.mark.slow
def test_all_ranks_are_killed_five_times(cache: Path, together: dict[str, Path], tmp_path: Path) -> None:
    """B69: nothing that the dead leave stops the next start."""
    kill_and_go_on(cache, tmp_path / "run", together["decay"], times=5, everything=True)


def test_a_port_that_was_asked_for_and_is_taken(cache: Path, tmp_path: Path) -> None:
    """B94, as a rank meets it that no torchrun started."""
    with listener(0) as port:
        environment = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "dflash_offline.train", "run", "--cache", cache, "--run-dir", tmp_path / "run"],
            env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"dflash-train run: error: rank 0: cannot meet the other ranks at 127.0.0.1:{port}: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_in_time_and_a_rerun_goes_on(ranks: int, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(ranks, "--cache", cache, "--run-dir", run, *FLAGS, *FOREVER)
    wait_for(lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) > 3, process)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - begun < 25
    assert process.returncode == (143 if ranks == 1 else 1), output  # torchrun has its own code
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["code"]) == ("stopped", 143), output
    found, passed = checkpoint.newest(run / "checkpoints")
    assert found is not None and found.step == metrics(run)[-1]["step"] and not passed
