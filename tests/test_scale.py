"""The scaling benchmark without GPUs: the flow with pretended ones, and the arithmetic of the plan."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "scale"))
import host
import run


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "Watch", partial(host.Watch, every=0.05))


def pretended(device: int, work: Path, tell: Callable[[str, Any], None]) -> Callable[[Path], float]:
    """A GPU of 100 tokens/s; the second of several has 80 and fails where `work` says so."""
    tell("burst TFLOP/s", 700 - device)
    done: list[Path] = []

    def turn(place: Path) -> float:
        done.append(place)
        if device == 1 and len(done) == 2:
            if (work / "fails").exists():
                raise ValueError("the second GPU fails")
            if (work / "dies").exists():
                os._exit(9)
            time.sleep(60 * (work / "hangs").exists())
        time.sleep(0.3)
        return 80.0 if device else 100.0

    return turn


def extracted(work: Path, seconds: float = 60) -> dict[str, Any]:
    memory = work / "memory"
    memory.mkdir()
    saved: list[str] = []
    begin = time.monotonic()
    run.extraction([1, 3, 2], work, memory, begin + seconds, lambda v: saved.append(json.dumps(v)), pretended)
    assert not multiprocessing.active_children()
    assert len(saved) > 1  # as they come
    return {"extraction": json.loads(saved[-1])}


def test_turns_of_all_counts(tmp_path: Path) -> None:
    found = extracted(tmp_path)
    turns = found["extraction"]["turns"]
    assert [t["gpus"] for t in turns] == [1, 3, 2, 1, 3] and turns[1]["each"] == [100.0, 80.0, 80.0]
    assert "error" not in found["extraction"] and turns[0]["host"]["resident GB"] > 0
    assert found["extraction"]["GPUs"]["2"]["burst TFLOP/s"] == 698
    told = run.summary(found)
    assert told[f"extraction to {tmp_path}"][3] == {
        "tokens/s": 260, "efficiency": 0.8667, "first GPU, over alone": 1.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fails", "cuda:1: ValueError: the second"),
        ("dies", "cuda:1: ended"),
        pytest.param("hangs", "not done in", marks=pytest.mark.slow),
    ],
)
def test_what_fails_is_said_and_what_was_found_is_kept(how: str, said: str, tmp_path: Path) -> None:
    (tmp_path / how).touch()
    found = extracted(tmp_path, 7 if how == "hangs" else 60)
    assert said in found["extraction"]["error"]
    assert [t["gpus"] for t in found["extraction"]["turns"]] == [1, 3]


TRAINER = """
import json, os, sys, time
from pathlib import Path
work, out = (Path(sys.argv[sys.argv.index(f) + 1]) for f in ("--work", "--out"))
world = int(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    (work / f"published-{world}").mkdir()
    out.write_text(json.dumps({"published": {"step ms": 200 + 10 * world, "phases ms": {"data": 2}}}))
    with (work / f"published-{world}" / "metrics.jsonl").open("a") as file:
        for step in range(12):
            time.sleep(0.25)
            print(json.dumps({"step": step}), file=file, flush=True)
    if (work / "fails").exists():
        sys.exit(1)
"""


def test_training_that_fails_leaves_its_numbers(tmp_path: Path) -> None:
    (program := tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "fails").touch()
    begin = time.monotonic()
    found = run.training(2, tmp_path, 12, 60, program)
    whole = time.monotonic() - begin
    assert found["error"] == "ended with 1" and found["published"]["step ms"] == 220
    assert 0.2 < found["host"]["seconds"] < whole - 1  # of the late steps, not of the start
    assert run.summary({"training": {1: {"published": {"step ms": 210, "phases ms": {"data": 3}}}, 2: found}})[
        "training"
    ][2] == {"step ms": 220, "efficiency": round(210 / 220, 4), "data wait": round(2 / 220, 4)}


def no_cache(folder: str) -> None:
    Path(folder).mkdir()


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that are not there are left out; extraction that fails does not keep training from running."""
    (program := tmp_path / "trainer.py").write_text(TRAINER)
    work, out = tmp_path / "work", tmp_path / "out.json"
    kept = work / "of others"
    kept.mkdir(parents=True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # not imported above: spawned processes would, too
    monkeypatch.setattr(run, "version", lambda name: "1")  # triton need not be here
    monkeypatch.setattr(run, "extraction", partial(run.extraction, make=failing))
    monkeypatch.setattr(run, "training", partial(run.training, program=program))
    monkeypatch.setattr(run, "make_cache", no_cache)
    words = ["--out", out, "--work", work, "--memory", work, "--steps", 12, "--seconds", 120]
    monkeypatch.setattr(sys, "argv", ["run", *map(str, words)])
    run.main()
    found = json.loads(out.read_text())
    assert "cuda:1: ValueError: no room" in found["extraction"]["error"]
    assert [found["training"][n]["published"]["step ms"] for n in "12"] == [210, 220]
    assert found["summary"]["training"]["2"]["efficiency"] == round(210 / 220, 4)
    assert found["codec"] == "lossless"  # the default of what is measured
    assert list(work.iterdir()) == [kept]


def failing(device: int, work: Path, tell: Callable[[str, Any], None]) -> Callable[[Path], float]:
    if device == 1:
        raise ValueError("no room")
    return pretended(device, work, tell)


def test_the_ends_come_first() -> None:
    assert run.ends_first([1, 2, 4, 8]) == [1, 8, 4, 2]
    assert run.ends_first([2]) == [2]


def test_rates_of_the_host() -> None:
    names = ("busy", "ours", "read", "written")
    samples = [
        {"time": t, **{n: t * k for k, n in enumerate(names, 1)}, "available": 9e9 - t, "resident": 1e9}
        for t in (0.0, 1.0, 2.0, 3.0)
    ]
    found = host.between(samples, 1, 3)
    assert found and (found["seconds"], found["busy cores of the host"], found["cores of ours"]) == (2, 1, 2)
    assert host.between(samples, 2.5, 3) is None


def test_a_busy_process_is_a_core_of_ours() -> None:
    before, begin = host.counters(), time.process_time()
    while time.process_time() < begin + 0.5:
        pass
    after = host.counters()
    assert 0.4 < after["ours"] - before["ours"] < 0.8 and after["busy"] - before["busy"] > 0.3


@cache
def benchmark() -> Any:
    """That of training. Not imported above: spawned processes would import torch, too."""
    return run.script("train")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """It at shapes that a CPU computes at once."""
    train_run = benchmark()
    shapes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 248320, "head_dim": 16}
    shapes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(train_run, "TARGET", train_run.TARGET | shapes)
    monkeypatch.setattr(train_run, "HIDDEN", 64)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 0)
    return train_run


FLAGS = ["--data.row-tokens", "64", "--data.row-anchors", "4", "--model.block-size", "4", "--model.layers", "1"]


def test_what_a_training_benchmark_says_of_its_steps(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs after the first step and at the end, the codec of the cache, and steps split by kernel."""
    import torch.profiler
    from torch._dynamo.utils import counters

    small.make_cache(tmp_path / "ecsq", [40, 50, 30, 20, 44], 0.7, None)
    small.make_cache(tmp_path / "exact", [40, 50, 30, 20], 0.7, tmp_path / "ecsq" / "target", "lossless")
    passed: list[int] = []
    real = small.steps_of

    def counting(*words: Any) -> Any:
        *others, after = words

        def at_end(step: int) -> None:
            counters["stats"]["unique_graphs"] += {1: 3, 4: 1}.get(step, 0)  # a CPU compiles nothing
            passed.append(step)
            after(step)

        return real(*others, at_end)

    monkeypatch.setattr(small, "steps_of", counting)
    found = small.run(tmp_path / "run", tmp_path / "ecsq", 6, FLAGS)
    assert passed == [1, 2, 3, 4, 5, 6] and not list((tmp_path / "run").glob("checkpoints/step*"))
    assert found["codec"] == "ecsq" and found["graphs"] == {"after the first step": 3, "at the end": 4}
    assert None not in found.values() and found["step ms"] > 0
    assert small.run(tmp_path / "other", tmp_path / "exact", 3, FLAGS)["codec"] == "lossless"
    of_cpu = partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU])
    monkeypatch.setattr("torch.profiler.profile", lambda activities: of_cpu())
    told = small.split(tmp_path / "split", tmp_path / "ecsq", FLAGS)
    assert passed[-1] == small.WARM + small.SPLIT and told["wall ms"] > 0 and told["kernels ms"] == 0


def test_kernels_by_kind() -> None:
    names = {
        "nvjet_sm90_tst_192x208": 100.0,
        "triton_tem_fused_flex_attention_backward_1": 20.0,
        "triton_red_fused_add_mul_2": 5.0,
        "_adamw": 15.0,
        "_losses": 4.0,
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": 8.0,
        "Memcpy HtoD (Pinned -> Device)": 2.0,
        "Memset (Device)": 1.0,
        "void at::native::reduce_kernel<512>": 3.0,
        **{f"small {n}": 0.001 for n in range(30)},
    }
    train = benchmark()
    found = train.by_kind(names, train.KINDS)
    assert found["by kind"] == {
        "matrix products": 100, "attention": 20, "AdamW": 15, "collectives": 8, "norms and SwiGLU": 5, "loss": 4,
        "other": 3.03, "copies": 2, "memset": 1,
    }  # fmt: skip
    assert found["kernels ms"] == 158.03 and len(found["largest"]) == 25
    assert next(iter(found["largest"].items())) == ("matrix products: nvjet_sm90_tst_192x208", 100)
