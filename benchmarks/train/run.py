"""Training steps of the 27B drafter on random states: the trainer itself on a cache of the real shapes, ecsq codec.

    python benchmarks/train/run.py --out FILE.json [--steps 60] [--gpus 2] [--work FOLDER]

Everything beside the matrix rate of the same process, before and after. Results are written as they come.
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
from common import TARGET, gemm_rate

LAYERS, HIDDEN, VOCAB, LONG = [1, 16, 31, 46, 61], 5120, 248320, 3072


def make_cache(folder: Path, lengths: list[int], asked: float, target: Path | None) -> None:
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
            yield Entry(identity=who, input_ids=ids, loss_mask=mask, frames=encode_frames(codec, states(n)))

    with claim(folder):
        make_target(folder / TARGET_FOLDER)
        info = calibration.write(folder, "ecsq", {}, states(4096))
        codec = calibration.read(folder, info, len(LAYERS), HIDDEN, last_hidden=False).to(device).states
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


def run(work: Path, name: str, cache: Path, steps: int, *flags: str) -> dict[str, Any]:
    """The trainer in this process, without its checkpoints: where the time of a step goes."""
    from torch._dynamo.utils import counters

    from dflash_offline.shards import command
    from dflash_offline.train.config import TrainConfig
    from dflash_offline.train.log import read_metrics
    from dflash_offline.train.loop import train
    from dflash_offline.train.step_end import StepEnd

    StepEnd._save = lambda *_: None  # 21 GB that say nothing of a step
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.reset_peak_memory_stats()
    counters.clear()
    words = ["--cache", str(cache), "--run-dir", str(work / name), "--data.rows-per-step", str(world)]
    words += ["--optim.max-steps", str(steps), "--optim.epochs", "50", "--data.val-fraction", "0", *flags]
    begin = time.perf_counter()
    assert train(command.parse(TrainConfig, words, "train", "")) == 0
    seconds = time.perf_counter() - begin
    lines = read_metrics(work / name)
    late = lines[len(lines) // 3 :]
    phases = {k: round(1e3 * median(e["seconds"][k] for e in late), 2) for k in late[-1]["seconds"]}
    return {
        "first step s": sum(lines[0]["seconds"].values()),
        "step ms": round(1e3 * median(sum(e["seconds"].values()) for e in late), 2),
        "phases ms": phases,
        "supervised": median(sum(e["supervised"]) if "supervised" in e else 0 for e in late),
        "wall s": seconds,
        "graphs after": dict(counters["stats"]),
        "recompiled": len(counters["recompiles"]) if "recompiles" in counters else None,
        "loader": [e.get("loader_seconds") for e in late[-3:]],
        "last": {k: late[-1].get(k) for k in ("loss", "tokens", "anchors", "tflops", "mfu", "gpu_gb")},
        "peak GB": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def main() -> None:
    """Make the caches, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/tmp/train-bench"))
    parser.add_argument("--only", default="full,published")
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
        make_cache(args.work / "long", [LONG] * 24, 1.0, None)
        make_cache(args.work / "mixed", lengths, 0.7, args.work / "long" / TARGET_FOLDER)
        tell(date=time.strftime("%Y-%m-%d"), device=torch.cuda.get_device_name(), caches_s=time.perf_counter() - begin)
        tell(versions={n: version(n) for n in ("torch", "triton", "transformers")})
    flags = {
        "full": [args.work / "long"],
        "published": [args.work / "mixed", "--model.sliding-window", "2048"],
    }
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    tell(**{"burst TFLOP/s": gemm_rate(1)})
    for name in args.only.split(","):
        cache, *rest = flags[name]
        tell(**{name: run(args.work, f"{name}-{found['gpus']}", cache, args.steps, *map(str, rest))})
    tell(**{"sustained TFLOP/s": gemm_rate(4)})
    if args.gpus > 1 and not args.rank:
        torch.cuda.empty_cache()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.gpus}"]
        command += [f"--master-port={port}", __file__, "--rank", "--work", str(args.work), "--steps", str(args.steps)]
        out = args.out.with_name(f"{args.out.stem}-{args.gpus}.json")
        subprocess.run([*command, "--out", str(out), "--only", args.only], check=True)
        found[f"{args.gpus} GPUs"] = json.loads(out.read_text())
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
