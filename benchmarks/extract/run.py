"""Extraction at the real shapes of Qwen3.6-27B, random weights: stock transformers, ours, and ours to durable shards.

    python benchmarks/extract/run.py --out FILE.json [--devices 0,1] [--work FOLDER] [--codec ecsq]

Everything is of one process (a process a GPU with several), beside the matrix rate measured before and after; results
are written as they come. Where flash_qla is installed, fla uses it for the delta rule, here as in extraction; peers and
stock are kept from it, and turns without it, and stock with it, stand beside.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import shapes
import torch
import torch.nn.functional as F

from dflash_offline.extract import checks, kernels, plan
from dflash_offline.extract.config import ExtractConfig, GuardConfig
from dflash_offline.extract.forward import batches
from dflash_offline.extract.hybrid import HybridCapture
from dflash_offline.extract.runner import Runner, launches
from dflash_offline.extract.task import calibrate, run_task
from dflash_offline.shards.index import shard_name
from dflash_offline.shards.keys import sample_key

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import by_kind, gemm_rate
from processes import Ended, heard

GFLOP_PER_TOKEN = 47.19
"""Of matrix products, layers 0 to 61."""
BUDGET = 32768
SHARD_TOKENS = 60_000
SHARDS = 3
"""Of one turn."""
QLA = "FLA_FLASH_QLA"
"""Asked by fla at every call."""


def timed(work: Any) -> float:
    """Seconds of `work()` on the device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@torch.inference_mode()
def stock_rate(model: Any, times: int = 6) -> dict[str, Any]:
    """Tokens/s of transformers' own forward, 4 x 4096 real tokens, no mask, nothing written.

    Warm is also the GPU: its clock falls in the first seconds of work, and our turns come after minutes of it.
    """
    ids = torch.randint(0, 248000, (4, 4096), device="cuda")
    first = timed(lambda: model(input_ids=ids, use_cache=False))
    seconds = [timed(lambda: [model(input_ids=ids, use_cache=False) for _ in range(2)]) for _ in range(times)]
    rates = [2 * ids.numel() / s for s in seconds]
    return {"first call s": first, "tokens/s": median(rates[-3:]), "all": [round(r) for r in rates]}


@torch.inference_mode()
def padded_rate(model: Any, lengths: list[int]) -> float:
    """Real tokens/s when 32 samples are padded to the longest of them."""
    ids = torch.randint(0, 248000, (8, max(lengths)), device="cuda")  # a quarter of the batch at a time: memory
    seconds = timed(lambda: model(input_ids=ids, use_cache=False)) * 4
    return sum(lengths) / seconds


@torch.inference_mode()
def single_rate(model: Any, lengths: list[int]) -> float:
    """Tokens/s when samples go one by one, with all logits, which a whole causal model computes."""
    head = torch.randn(model.config.vocab_size, model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
    rows = [torch.randint(0, 248000, (1, n), device="cuda") for n in lengths]

    def run() -> None:
        for ids in rows:
            F.linear(model(input_ids=ids, use_cache=False).last_hidden_state, head)

    run()
    return sum(lengths) / timed(run)


def write_plan(folder: Path, tasks: int) -> list[plan.Task]:
    """Random samples of the dataset's lengths, in tasks of about SHARD_TOKENS."""
    (folder / plan.FOLDER).mkdir(parents=True)
    (folder / "shards").mkdir()
    rng, columns = np.random.default_rng(0), {name: list[Any]() for name in plan.SCHEMA.names}
    for i, n in enumerate(shapes.lengths(4096)):
        if sum(map(len, columns["input_ids"])) > tasks * SHARD_TOKENS:
            break
        ids, mask = rng.integers(0, 248000, n).astype(np.int32), np.ones(n, np.uint8)
        key = sample_key(ids, mask)
        values = {"key": key, "prompt_key": key, "id": str(i), "source": "random", "source_row": i}
        values |= {"finish_reason": "stop", "response": "unknown", "input_ids": ids, "loss_mask": mask}
        for name, value in values.items():
            columns[name].append(value)
    batch = pa.record_batch([pa.array(columns[f.name], f.type) for f in plan.SCHEMA], schema=plan.SCHEMA)
    found, _ = plan.write_tasks(folder / plan.FOLDER / "tokens-0.arrow", [batch], {}, SHARD_TOKENS, False)
    return found[:tasks]


def runner_of(capture: Any, work: Path, codec: Any) -> Runner:
    """As extraction makes it, around a decoder with random weights."""
    from concurrent.futures import ThreadPoolExecutor

    config = ExtractConfig(cache=work, codec=codec, token_budget=BUDGET)
    device = torch.device("cuda", torch.cuda.current_device())
    return Runner(
        config=config,
        layers=shapes.FEATURES,
        captured=shapes.FEATURES,
        capture=capture,
        kernels="",
        device=device,
        writer=ThreadPoolExecutor(1, initializer=kernels.own, initargs=(device,)),
    )


def turn(runner: Runner, work: Path, tasks: list[plan.Task], discard: bool) -> float:
    """Tokens/s of all tasks but the first, from when the device is done with it: a run's beginning is not its rate.

    To durable shards, two tasks in flight as a worker has, or to nothing. A writer that fell behind would hold the
    device up: it may not be more than a few rows behind, however many tasks there are.
    """
    ends, pending = [], []
    for number, task in enumerate(tasks):
        if discard:
            before = None
            for row in launches(runner, plan.load_task(work, task)):
                if before is not None:
                    before.synchronize()
                before = row.ready
                del row
        else:
            pending.append(run_task(runner, work, number, task))
            if len(pending) > 1:
                pending.pop(0).result()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    ends[-1].synchronize()
    begin = time.perf_counter()
    if not discard:
        for future in pending:
            future.result()
        print(f"the last shard was durable {time.perf_counter() - begin:.2f} s after its states", flush=True)
        for number in range(len(tasks)):
            (work / shard_name(number)).unlink()
    return sum(task.tokens for task in tasks[1:]) / (ends[0].elapsed_time(ends[-1]) / 1e3)


def again(runner: Runner, samples: list[plan.Planned]) -> bool:
    """Whether the first row has the same bits when it is computed a second time."""
    first, second = (next(launches(runner, samples)).states_PLD for _ in range(2))
    assert first is not None and second is not None
    return torch.equal(first, second)


def disk_rate(folder: Path) -> float:
    """MB/s of one file of 1 GB, written and durable."""
    data, path = os.urandom(1 << 24), folder / "probe"
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(64):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return (1 << 30) / seconds / 1e6


KINDS = {
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "delta rule": ("_walk", "chunk_", "recompute_w_u", "kkt", "gdr"),
    "convolution and heads": ("_conv_heads", "_rope_heads", "_gates", "_gate_heads"),
    "norms": ("_norm",),
    "SwiGLU": ("_swiglu",),
    "attention": ("flash", "fmha", "sdpa"),
    "to FP8": ("_to_fp8",),
    "encode": ("_quantise", "_collect"),
    "copies": ("Memcpy", "copy", "Memset", "fill", "Cat"),
}


def split(work: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of the kernels by kind over `work()`, of the wall around them, and with no kernel at all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        wall = timed(work)
    spent = {e.key: e.self_device_time_total / 1e3 for e in prof.key_averages()}
    ran = sorted((e.time_range.start, e.time_range.end) for e in prof.events() if e.device_type.name == "CUDA")
    idle, last = 0.0, ran[0][0]
    for begin, end in ran:
        idle, last = idle + max(0.0, begin - last), max(last, end)
    return {
        "wall ms": 1e3 * wall,
        "first to last ms": (last - ran[0][0]) / 1e3,
        "idle ms": idle / 1e3,
        **by_kind(spent, KINDS),
    }


def ready(
    model: Any, device: int, work: Path, tell: Callable[[str, Any], None], codec: str = ExtractConfig.codec
) -> tuple[Runner, list[plan.Task]]:
    """The tool around `model`, calibrated and compiled: its first shard was written, and all lengths were met."""
    tell("kernels", kernels.install(model.config, torch.device("cuda"), False, hybrid=True))
    begin = time.perf_counter()
    runner = runner_of(HybridCapture(model, shapes.FEATURES, torch.device("cuda", device)), work, codec)
    torch.cuda.empty_cache()
    work.mkdir(parents=True, exist_ok=True)
    tasks = write_plan(work, SHARDS)
    calibrate(runner, work, tasks[0])
    run_task(runner, work, 0, tasks[0]).result()
    (work / shard_name(0)).unlink()
    tell("first shard s", time.perf_counter() - begin)
    turn(runner, work, tasks, True)  # cuDNN plans every new length of a sample, in steps of 128
    return runner, tasks


def measure(device: int, args: Any, barrier: Any, alone: bool, told: Connection) -> None:
    """One GPU: load, compare, and run in step with the others."""
    torch.cuda.set_device(device)
    work = args.work / str(device)
    os.environ[QLA] = "0"
    begun, result = time.perf_counter(), dict[str, Any]()

    def tell(name: str, value: Any) -> None:
        result[name] = value
        told.send(result)
        print(f"cuda:{device} {time.perf_counter() - begun:.0f} s: {name}: {json.dumps(value)}", flush=True)

    tell("burst TFLOP/s", gemm_rate(1))
    model = shapes.decoder("sdpa", torch.device("cuda", device))
    lengths = shapes.lengths(4096)
    if alone and not args.together_only:
        tell("stock", stock_rate(model))
        tell("padded to the longest of 32, tokens/s", padded_rate(model, lengths[:32]))
        tell("one by one with all logits, tokens/s", single_rate(model, lengths[:8]))
    qla = bool(importlib.util.find_spec("flash_qla"))
    os.environ[QLA] = "1"
    if qla and alone and not args.together_only:
        tell("stock, flash_qla", stock_rate(model, 3))
    torch.cuda.empty_cache()
    runner, tasks = ready(model, device, work, tell, args.codec)
    quiet = replace(runner, config=replace(runner.config, guard=GuardConfig(audit_every=0)))
    tell("distance of the delta rule from fp32", checks.check_rule(model.config, runner.device, torch.bfloat16))
    tell("a row's states are the same again", again(runner, plan.load_task(work, tasks[0])))
    tell("rows", [sum(lengths[i] for i in row) for row in batches(lengths[:200], BUDGET, False)][:8])
    barrier.wait()
    tell("disk MB/s, all at once", disk_rate(work))
    turns: dict[str, list[float]] = {"discard": [], "shards": []}
    more: dict[str, list[float]] = {}
    if alone and not args.together_only:
        more |= {"shards, no audit": []} | ({"shards, fla's rule": []} if qla else {})
    for number in range(args.pairs):
        for name, rates in (turns | more if number % 2 == 0 else turns).items():
            barrier.wait()
            os.environ[QLA] = "0" if "fla's" in name else "1"
            rates.append(turn(quiet if "no audit" in name else runner, work, tasks, "discard" in name))
            os.environ[QLA] = "1"
        tell("tokens/s", turns | more)
    if not alone:
        more["shards, the others idle"] = []
        for _ in range(2):
            barrier.wait()
            if device == 0:
                more["shards, the others idle"].append(turn(runner, work, tasks, False))
            barrier.wait()
        tell("tokens/s", turns | more)
    tell("peak GB", torch.cuda.max_memory_allocated() / 1e9)
    tell("sustained TFLOP/s", gemm_rate(4))
    if args.pairs:
        done = median(turns["shards"]) * GFLOP_PER_TOKEN / 1e3
        tell("shards, of these rates", {name: done / result[f"{name} TFLOP/s"] for name in ("burst", "sustained")})
    if alone:
        tell("tokens of the splits", [task.tokens for task in tasks[:2]])
        tell("split, discard", split(lambda: turn(runner, work, tasks[:2], True)))
        tell("split, shards", split(lambda: turn(runner, work, tasks[:2], False)))


def main() -> None:
    """Run on every device named, first alone where there are several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", default="0")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "extract-bench")
    parser.add_argument("--pairs", type=int, default=5, help="0: only the splits of one device")
    parser.add_argument("--codec", default=ExtractConfig.codec)
    parser.add_argument("--together-only", action="store_true", help="neither one device first, nor stock transformers")
    args = parser.parse_args()
    devices = [int(d) for d in args.devices.split(",")]
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name()}
    found["versions"] = {n: version(n) for n in ("torch", "triton", "transformers", "fla-core")}
    found["codec"] = args.codec
    for group in [devices[:1], devices] if len(devices) > 1 and not args.together_only else [devices]:
        shutil.rmtree(args.work, ignore_errors=True)
        barrier = multiprocessing.get_context("spawn").Barrier(len(group), timeout=300)
        results = found.setdefault(f"{len(group)} GPU", {})
        for place, told in heard(measure, [(device, args, barrier, len(group) == 1) for device in group]):
            if not isinstance(told, Ended):
                results[group[place]] = told
                args.out.write_text(json.dumps(found, indent=1))
            elif told.code:
                sys.exit(f"the process of cuda:{group[place]} failed, see above; the others are ended with it")
    shutil.rmtree(args.work, ignore_errors=True)


if __name__ == "__main__":
    main()
