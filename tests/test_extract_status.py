"""What tells of a run: status, events, and the look at GPUs and memory before."""

import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import call, copy_without_shards

from dflash_offline.extract import events, preflight
from dflash_offline.extract.config import ExtractConfig, GuardConfig
from dflash_offline.extract.target import open_target
from dflash_offline.extract.weights import read_weights
from dflash_offline.shards.build import claim
from dflash_offline.shards.errors import UsageError

CPU = torch.device("cpu")
LAYERS = (1, 2, 3, 4, 5)


def test_status_of_complete_and_foreign_folders(site: Path, tmp_path: Path) -> None:
    done = call("status", site / "cache")
    assert done.returncode == 0 and f"{site / 'cache'}: complete" in done.stdout
    assert "40 of              40  100.00%" in done.stdout and "complete: pid " in done.stdout
    for place, message in (
        (tmp_path, "not a cache"),
        (tmp_path / "none", "no such folder"),
        (site / "chats.jsonl", "a f"),
    ):
        done = call("status", place)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_status_of_dead_and_running_caches(site: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    copy_without_shards(site, cache)
    shutil.copy(site / "cache" / "shards" / "00000000.arrow", cache / "shards")
    log = events.Events(cache)
    log("start", tasks=3)
    log("done", task=0, tokens=6000, seconds=2.0)
    log.close()
    with (cache / "events.jsonl").open("ab") as file:
        file.write(b'{"time": 5, "ev')  # torn by a kill
    done = call("status", cache, "--events", 1)
    assert "not complete, nobody is at work" in done.stdout and "it was killed" in done.stdout
    assert "shards                 1 of               3" in done.stdout and "tokens/s" not in done.stdout
    with claim(cache):
        done = call("status", cache)
        assert f"{cache}: running" in done.stdout and "held by pid " in done.stdout
        assert "tokens/s in the last" in done.stdout and "min left" in done.stdout
    log = events.Events(cache)  # after the torn line
    log("stop", error="signal 15")
    assert [e["event"] for e in events.read(cache)] == ["start", "done", "stop"]
    assert "stopped: signal 15; rerun" in call("status", cache).stdout


def test_events_tell_the_whole_run(site: Path) -> None:
    happened = events.read(site / "cache")
    names = [e["event"] for e in happened]
    assert names[0] == "start" and names[-1] == "complete" and names.index("kernels") < names.index("calibrated")
    assert names.count("done") == 3 and names.count("worker") == 2
    assert all(e["time"] <= time.time() and e["pid"] > 0 for e in happened)
    done = [e for e in happened if e["event"] == "done"]
    assert sum(e["samples"] for e in done) == 40 and all(e["bytes"] > 0 and e["seconds"] >= 0 for e in done)


class FakeNvml:
    """The part of pynvml that is used, over GPUs given as (free, [(pid, bytes)])."""

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: tuple[int, list[tuple[int, int | None]]], fails: bool = False) -> None:
        self._gpus, self._fails = gpus, fails

    def nvmlInit(self) -> None:
        if self._fails:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"Fake"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(free=self._gpus[handle][0], total=100 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=n) for pid, n in self._gpus[handle][1]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        return []


def look(
    site: Path,
    nvml: Any,
    monkeypatch: pytest.MonkeyPatch,
    devices: tuple[str, ...] = ("cuda:0", "cuda:1"),
    **changes: Any,
) -> list[str]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    config = ExtractConfig(**changes)
    return preflight.check_devices(config, list(devices), open_target(str(site / "t"), None), LAYERS)


BIG = 90 << 30


def test_gpus_are_looked_at_before(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = FakeNvml((BIG, []), (BIG, [(77, 5 << 30), (78, None)]))
    assert look(site, nvml, monkeypatch) == ["cuda:0", "cuda:1"]
    said = capsys.readouterr().out
    assert "cuda:0 (Fake): 96,636,764,160 of 107,374,182,400 bytes free; no process on it; about " in said
    assert "pid 77 holds 5,368,709,120 bytes, pid 78 holds ? bytes" in said
    assert look(site, nvml, monkeypatch, gpus="free") == ["cuda:0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-0")
    assert look(site, nvml, monkeypatch, gpus="free") == ["cuda:1"]


def test_gpus_without_room_are_refused(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = FakeNvml((1 << 20, [(77, BIG)]), (BIG, []))
    with pytest.raises(
        UsageError, match=r"bytes are needed: cuda:0 .*pid 77 holds 96,636,764,160 bytes; use --gpus free"
    ):
        look(site, nvml, monkeypatch)
    assert look(site, nvml, monkeypatch, gpus="free") == ["cuda:1"]
    assert look(site, nvml, monkeypatch, guard=GuardConfig(preflight="warn")) == ["cuda:0", "cuda:1"]
    assert "warning: about" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"no GPU is free with .* bytes: cuda:0"):
        look(site, nvml, monkeypatch, ("cuda:0",), gpus="free")


@pytest.mark.parametrize(("nvml", "reason"), [(None, "pip install nvidia-ml-py"), (FakeNvml(fails=True), "Driver Not")])
def test_without_nvml_it_says_so(
    site: Path, nvml: Any, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert look(site, nvml, monkeypatch) == ["cuda:0", "cuda:1"] and reason in capsys.readouterr().out
    with pytest.raises(UsageError, match="which are free is not known"):
        look(site, nvml, monkeypatch, gpus="free")
    assert reason in capsys.readouterr().out
    assert look(site, nvml, monkeypatch, ("cpu",)) == ["cpu"] and not capsys.readouterr().out


def test_the_memory_needed_is_that_of_the_layers_loaded(site: Path) -> None:
    target = open_target(str(site / "t"), None)
    config = ExtractConfig(token_budget=1000)
    few, all_of_them = (preflight.memory_need(config, target, layers, CPU) for layers in ((1,), LAYERS))
    weights = sum(w.numel() * 4 for w in read_weights(target, 5, CPU, torch.float32).values())
    assert all_of_them - (1 << 30) - weights == 1000 * (4 * (4 * 96 + 12 * 64) + 10 * 5 * 64) and few < all_of_them


def test_one_config_for_all_that_watches() -> None:
    with pytest.raises(ValueError, match=r"guard\.hang is -1\.0, expected 0 or more"):
        GuardConfig(hang=-1.0)
    for bad in ("1", "2/2", "a/b", "-1/3", "prepared"):
        with pytest.raises(ValueError, match="task_slice is "):
            ExtractConfig(task_slice=bad)
    assert json.dumps(ExtractConfig(task_slice="1/3").share()) == "[1, 3]"
