"""Training steps of the 27B drafter on random states: the trainer itself on a cache of the real shapes.

    python benchmarks/train/run.py --out FILE.json [--steps 60] [--gpus 2] [--codec ecsq] [--split] [--work FOLDER]

Everything beside the matrix rate of the same process, before and after; --split adds the kernels of a few more steps
by kind. Results are written as they come. The cache is read from the page cache: it was just written.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_offline.shards import calibration, manifest
from dflash_offline.shards.build import Entry, Part, build, claim
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.files import file_hash
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import prompt_key, sample_key
from dflash_offline.shards.writer import Identity

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import TARGET, by_kind, gemm_rate

LAYERS, HIDDEN, VOCAB, LONG = [1, 16, 31, 46, 61], 5120, 248320, 3072
WARM, SPLIT = 4, 8
"""Steps before those that are split by kernel, and these."""
KINDS = {
    "collectives": ("nccl",),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "attention": ("flex", "triton_tem"),
    "AdamW": ("_adamw",),
    "loss": ("_losses",),
    "decoding": ("_restore", "_merge"),
    "norms and SwiGLU": ("triton_",),
    "memset": ("Memset", "fill", "Fill"),
    "copies": ("Memcpy", "copy", "Cat"),
}
"""By words of a kernel's name; the first that fits."""


def make_cache(folder: Path, lengths: list[int], asked: float, target: Path | None, codec: str = "ecsq") -> None:
    """Random states of samples of some lengths, the last `asked` of their tokens supervised."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make_target(here: Path) -> None:
        here.mkdir(parents=True)
        if target:
            for path in target.iterdir():
                (here / path.name).hardlink_to(path)
            return
        (here / "config.json").write_text(json.dumps(TARGET))
        table = torch.randn(VOCAB, HIDDEN, device=device).mul_(0.02).bfloat16().cpu()
        save_file({"embed_tokens": table, "norm": torch.zeros(HIDDEN).bfloat16()}, here / "target.safetensors")

    def states(tokens: int) -> Any:
        return torch.randn(tokens, len(LAYERS), HIDDEN, device=device).bfloat16()

    def entries(mine: list[tuple[int, int]]) -> Iterator[Entry]:
        rng = np.random.default_rng(mine[0][0])
        for number, n in mine:
            ids = rng.integers(0, 248000, n).astype(np.int32)
            mask = (np.arange(n) >= n * (1 - asked)).astype(np.uint8)
            who = Identity(
                key=sample_key(ids, mask),
                prompt_key=prompt_key(ids, mask),
                id=str(number),
                source="random",
                source_row=number,
                finish_reason="stop",
                response="unknown",
            )
            yield Entry(identity=who, input_ids=ids, loss_mask=mask, frames=encode_frames(encoder, states(n)))

    with claim(folder):
        make_target(folder / TARGET_FOLDER)
        info = calibration.write(folder, codec, {}, states(4096))
        encoder = calibration.read(folder, info, len(LAYERS), HIDDEN, last_hidden=False).to(device).states
        draft = manifest.Manifest(
            complete=False,
            layer_ids=LAYERS,
            hidden_size=HIDDEN,
            codec=info,
            settings={"random": len(lengths)},
            target={"copied": {p.name: file_hash(p) for p in (folder / TARGET_FOLDER).iterdir()}},
            tokenizer={"length": 248077, "eos_ids": [248046], "pad_id": 248044, "mask_id": None},
            generation="unknown",
            dataset={},
            versions={},
            kernels="none",
        )
        numbered = list(enumerate(lengths))
        build(folder, draft, [Part(task=f"{i:032x}", samples=lambda i=i: entries(numbered[i::4])) for i in range(4)], 4)


def steps_of(run_dir: Path, cache: Path, steps: int, flags: list[str], after: Any) -> list[dict[str, Any]]:
    """The trainer in this process, without its checkpoints: its metrics. `after(step)` is called at each one's end."""
    from dflash_offline.shards import command
    from dflash_offline.train.config import TrainConfig
    from dflash_offline.train.log import read_metrics
    from dflash_offline.train.loop import train
    from dflash_offline.train.step_end import StepEnd

    world, close = int(os.environ.get("WORLD_SIZE", "1")), StepEnd.close

    def closed(self: Any, entry: dict[str, Any], stopping: bool, show: bool) -> bool:
        after(entry["step"])
        return close(self, entry, stopping, show)

    words = ["--cache", str(cache), "--run-dir", str(run_dir), "--data.rows-per-step", str(world)]
    words += ["--optim.max-steps", str(steps), "--optim.epochs", "50", "--data.val-fraction", "0", *flags]
    # A checkpoint's 21 GB say nothing of a step.
    with patch.object(StepEnd, "close", closed), patch.object(StepEnd, "_save", lambda *_: None):
        assert train(command.parse(TrainConfig, words, "train", "")) == 0
    return read_metrics(run_dir)


def run(run_dir: Path, cache: Path, steps: int, flags: list[str]) -> dict[str, Any]:
    """Where the time of a step goes."""
    from torch._dynamo.utils import counters

    torch.cuda.reset_peak_memory_stats()
    counters.clear()
    graphs: list[int] = []
    begin = time.perf_counter()
    lines = steps_of(run_dir, cache, steps, flags, lambda _: graphs.append(counters["stats"]["unique_graphs"]))
    seconds = time.perf_counter() - begin
    late = lines[len(lines) // 3 :]
    phases = {k: round(1e3 * median(e["seconds"][k] for e in late), 2) for k in late[-1]["seconds"]}
    return {
        "codec": manifest.read(cache).codec.name,
        "first step s": sum(lines[0]["seconds"].values()),
        "step ms": round(1e3 * median(sum(e["seconds"].values()) for e in late), 2),
        "phases ms": phases,
        "wall s": seconds,
        "graphs": {"after the first step": graphs[0], "at the end": graphs[-1]},
        "loader": [e.get("loader_seconds") for e in late[-3:]],
        "last": {k: late[-1].get(k) for k in ("loss", "tokens", "anchors", "tflops", "mfu", "gpu_gb")},
        "peak GB": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def split(run_dir: Path, cache: Path, flags: list[str]) -> dict[str, Any]:
    """Milliseconds a step of this rank's kernels by kind, over SPLIT steps, and of the wall around them.

    Kernels run in several queues side by side, so that together they may take longer than the wall.
    """
    from torch.profiler import ProfilerActivity, profile

    prof, moments = profile(activities=[ProfilerActivity.CUDA]), list[float]()

    def after(step: int) -> None:
        if step in (WARM, WARM + SPLIT):
            if step == WARM:
                prof.start()
            torch.cuda.synchronize()
            moments.append(time.perf_counter())
            if step > WARM:
                prof.stop()

    steps_of(run_dir, cache, WARM + SPLIT, flags, after)
    kernels = {e.key: e.self_device_time_total / 1e3 / SPLIT for e in prof.key_averages()}
    return {"steps": SPLIT, "wall ms": 1e3 * (moments[1] - moments[0]) / SPLIT, **by_kind(kernels, KINDS)}


def main() -> None:
    """Make the caches, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/tmp/train-bench"))
    parser.add_argument("--only", default="full,published")
    parser.add_argument("--codec", default="ecsq", help="of the caches that are made")
    parser.add_argument("--split", action="store_true", help="also the kernels of the published layout by kind")
    parser.add_argument("--rank", action="store_true", help="one of the processes of --gpus")
    args = parser.parse_args()
    found: dict[str, Any] = {"gpus": int(os.environ.get("WORLD_SIZE", "1"))}
    first = os.environ.get("RANK", "0") == "0"

    def tell(**facts: Any) -> None:
        found.update(facts)
        if first:
            args.out.write_text(json.dumps(found, indent=1))
            print(json.dumps(facts), flush=True)

    if first and not args.rank:
        shutil.rmtree(args.work, ignore_errors=True)
        begin = time.perf_counter()
        lengths = np.clip(np.random.default_rng(0).lognormal(np.log(1500), 0.75, 64), 64, 8192).astype(int).tolist()
        make_cache(args.work / "long", [LONG] * 24, 1.0, None, args.codec)
        make_cache(args.work / "mixed", lengths, 0.7, args.work / "long" / TARGET_FOLDER, args.codec)
        tell(date=time.strftime("%Y-%m-%d"), device=torch.cuda.get_device_name(), caches_s=time.perf_counter() - begin)
        tell(versions={n: version(n) for n in ("torch", "triton", "transformers")})
    flags = {
        "full": (args.work / "long", []),
        "published": (args.work / "mixed", ["--model.sliding-window", "2048"]),
    }
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    tell(**{"burst TFLOP/s": gemm_rate(1)})
    for name in args.only.split(","):
        cache, rest = flags[name]
        tell(**{name: run(args.work / f"{name}-{found['gpus']}", cache, args.steps, rest)})
    tell(**{"sustained TFLOP/s": gemm_rate(4)})
    if args.split:
        tell(split=split(args.work / f"split-{found['gpus']}", *flags["published"]))
    if args.gpus > 1 and not args.rank:
        torch.cuda.empty_cache()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.gpus}"]
        command += [f"--master-port={port}", __file__, "--rank", "--work", str(args.work), "--steps", str(args.steps)]
        out = args.out.with_name(f"{args.out.stem}-{args.gpus}.json")
        command += ["--split"] * args.split
        subprocess.run([*command, "--out", str(out), "--only", args.only], check=True)
        found[f"{args.gpus} GPUs"] = json.loads(out.read_text())
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
