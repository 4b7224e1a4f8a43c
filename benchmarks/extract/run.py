"""Extraction at the real shapes of Qwen3.6-27B, random weights: stock transformers, ours, and ours to durable shards.

    python benchmarks/extract/run.py --out FILE.json [--devices 0,1] [--work FOLDER] [--codec ecsq]

Everything is of one process (a process a GPU with several), beside the matrix rate measured before and after. Where
flash_qla is installed, fla would use it for the delta rule: it is kept from it, and has turns of its own.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import shapes
import torch
import torch.nn.functional as F

from dflash_offline.extract import kernels, plan
from dflash_offline.extract.config import ExtractConfig, GuardConfig
from dflash_offline.extract.forward import batches
from dflash_offline.extract.hybrid import HybridCapture
from dflash_offline.extract.runner import Runner, launches, rows
from dflash_offline.extract.task import calibrate, run_task
from dflash_offline.shards.index import shard_name
from dflash_offline.shards.keys import sample_key

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import by_kind, gemm_rate

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
def stock_rate(model: Any) -> dict[str, float]:
    """Tokens/s of transformers' own forward, 4 x 4096 real tokens, no mask, nothing written.

    Warm is also the GPU: its clock falls in the first seconds of work, and our turns come after minutes of it.
    """
    ids = torch.randint(0, 248000, (4, 4096), device="cuda")
    first = timed(lambda: model(input_ids=ids, use_cache=False))
    seconds = [timed(lambda: [model(input_ids=ids, use_cache=False) for _ in range(2)]) for _ in range(6)]
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
    "delta rule": ("_walk", "chunk_", "recompute_w_u"),
    "convolution and heads": ("_conv_heads", "_rope_heads", "_gates", "_gate_heads"),
    "norms": ("_norm",),
    "SwiGLU": ("_swiglu",),
    "attention": ("flash", "fmha", "sdpa"),
    "encode": ("_quantise", "_collect"),
    "copies": ("Memcpy", "copy", "Memset", "fill", "Cat"),
}


def split(runner: Runner, work: Path, task: plan.Task) -> dict[str, Any]:
    """Milliseconds of the device's kernels by kind over one task, and of the wall around them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        wall = timed(lambda: [row for row in rows(runner, plan.load_task(work, task))] and None)
    spent = {e.key: e.self_device_time_total / 1e3 for e in prof.key_averages()}
    return {"wall ms": 1e3 * wall, "tokens": task.tokens, **by_kind(spent, KINDS)}


def ready(
    model: Any, device: int, work: Path, tell: Callable[[str, Any], None], codec: str = ExtractConfig.codec
) -> tuple[Runner, list[plan.Task]]:
    """The tool around `model`, calibrated and compiled: its first shard was written."""
    tell("kernels", kernels.install("qwen3_5_text", torch.device("cuda"), False, hybrid=True))
    begin = time.perf_counter()
    runner = runner_of(HybridCapture(model, shapes.FEATURES, torch.device("cuda", device)), work, codec)
    torch.cuda.empty_cache()
    work.mkdir(parents=True, exist_ok=True)
    tasks = write_plan(work, SHARDS)
    calibrate(runner, work, tasks[0])
    run_task(runner, work, 0, tasks[0]).result()
    (work / shard_name(0)).unlink()
    tell("first shard s", time.perf_counter() - begin)
    return runner, tasks


def measure(device: int, args: Any, barrier: Any, answers: Any, alone: bool) -> None:
    """One GPU: load, compare, and run in step with the others."""
    torch.cuda.set_device(device)
    work = args.work / str(device)
    os.environ[QLA] = "0"
    begun, result = time.perf_counter(), dict[str, Any]()

    def tell(name: str, value: Any) -> None:
        result[name] = value
        print(f"cuda:{device} {time.perf_counter() - begun:.0f} s: {name}: {json.dumps(value)}", flush=True)

    tell("burst TFLOP/s", gemm_rate(1))
    model = shapes.decoder("sdpa", torch.device("cuda", device))
    lengths = shapes.lengths(4096)
    if alone and not args.together_only:
        tell("stock", stock_rate(model))
        tell("padded to the longest of 32, tokens/s", padded_rate(model, lengths[:32]))
        tell("one by one with all logits, tokens/s", single_rate(model, lengths[:16]))
        torch.cuda.empty_cache()
    runner, tasks = ready(model, device, work, tell, args.codec)
    quiet = replace(runner, config=replace(runner.config, guard=GuardConfig(audit_every=0)))
    tell("rows", [sum(lengths[i] for i in row) for row in batches(lengths[:200], BUDGET, False)][:8])
    barrier.wait()
    tell("disk MB/s, all at once", disk_rate(work))
    turns: dict[str, list[float]] = {"discard": [], "shards": []}
    if alone and not args.together_only:
        turns["shards, no audit"] = []
    if importlib.util.find_spec("flash_qla"):
        turns |= {"discard, flash_qla": [], "shards, flash_qla": []}
        os.environ[QLA] = "1"
        tell("flash_qla, first row s", timed(lambda: next(rows(runner, plan.load_task(work, tasks[0])))))
    for _ in range(args.pairs):
        for name in turns:
            barrier.wait()
            os.environ[QLA] = "1" if "qla" in name else "0"
            turns[name].append(turn(quiet if "no audit" in name else runner, work, tasks, "discard" in name))
        tell("tokens/s so far", turns)
    if not alone:
        turns["shards, the others idle"] = []
        for _ in range(2):
            barrier.wait()
            if device == 0:
                turns["shards, the others idle"].append(turn(runner, work, tasks, False))
            barrier.wait()
    tell("tokens/s", turns)
    tell("peak GB", torch.cuda.max_memory_allocated() / 1e9)
    tell("sustained TFLOP/s", gemm_rate(4))
    if alone:
        tell("split", split(runner, work, tasks[0]))
    answers.put((device, result))


def main() -> None:
    """Run on every device named, first alone where there are several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", default="0")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "extract-bench")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--codec", default=ExtractConfig.codec)
    parser.add_argument("--together-only", action="store_true", help="neither one device first, nor stock transformers")
    args = parser.parse_args()
    devices = [int(d) for d in args.devices.split(",")]
    context = multiprocessing.get_context("spawn")
    found = {}
    for group in [devices[:1], devices] if len(devices) > 1 and not args.together_only else [devices]:
        shutil.rmtree(args.work, ignore_errors=True)
        barrier, answers = context.Barrier(len(group)), context.Queue()
        processes = [
            context.Process(
                target=measure,
                args=(d, args, barrier, answers, len(group) == 1),
                daemon=True,
            )
            for d in group
        ]
        for process in processes:
            process.start()
        results = found[f"{len(group)} GPU"] = dict[int, Any]()
        while len(results) < len(group):
            with suppress(queue.Empty):
                results |= [answers.get(timeout=2)]
            if len(results) < len(group) and any(p.exitcode for p in processes):
                sys.exit("a device's process ended, see above; the others are ended with it")
        for process in processes:
            process.join()
        args.out.write_text(json.dumps(found, indent=1))
    shutil.rmtree(args.work, ignore_errors=True)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {n: version(n) for n in ("torch", "triton", "transformers", "fla-core")},
        "codec": args.codec,
        **found,
    }
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
