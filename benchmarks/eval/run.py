"""`dflash-train eval` at the shapes of Qwen3.6-27B: seconds for 100 held-out samples of 2,000 tokens on one GPU.

    python benchmarks/eval/run.py --out FILE.json

A drafter, embedding and head of random weights on the device, and a cache of a few random samples in its codec, read
again and again: what is timed is reading, de-quantising, drafting from every anchor, the head and the walk. Writes what
it knows after every stage, and begins none that would not end within --limit seconds.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline.shards import calibration, index, manifest
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.files import file_hash
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import last_positions, prompt_key, sample_key
from dflash_offline.shards.writer import Identity, ShardWriter
from dflash_offline.train.config import ModelConfig
from dflash_offline.train.evaluate import measure
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter, RMSNorm, Target
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.spec import derive
from dflash_offline.train.stop import Stop

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import TARGET

LAYERS = (1, 16, 31, 46, 61)
SMALL = TARGET | {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}
TOKENIZER = {"length": 4000, "eos_ids": [2], "pad_id": 3, "mask_id": None}
PROMPT = 200
"""Tokens of a sample that are not supervised."""


def write_cache(folder: Path, target: dict[str, Any], samples: int, tokens: int, codec: str) -> Mix:
    """Random samples, one after the other in one shard; without the target's tensors, which are made on the device."""
    for name in ("shards", TARGET_FOLDER):
        (folder / name).mkdir(parents=True)
    (folder / TARGET_FOLDER / "config.json").write_text(json.dumps(target))
    rng, hidden = np.random.default_rng(0), target["hidden_size"]
    states = torch.randn(tokens, len(LAYERS), hidden).bfloat16()
    last = torch.randn(tokens, 1, hidden).bfloat16()
    info = calibration.write(folder, codec, {}, states[:256], last[:256, 0])
    coder = calibration.read(folder, info, len(LAYERS), hidden, True)
    assert coder.last is not None
    frames = encode_frames(coder.states, states)
    mask = (np.arange(tokens) >= PROMPT).astype(np.uint8)
    last_frames = encode_frames(coder.last, last[: len(last_positions(mask))])
    metadata = manifest.shard_metadata(info, LAYERS)
    with ShardWriter(folder / index.shard_name(0), task="0" * 32, metadata=metadata, last_hidden=True) as writer:
        for i in range(samples):
            ids = rng.integers(4, 4000, tokens).astype(np.int32)
            who = Identity(
                key=sample_key(ids, mask), prompt_key=prompt_key(ids, mask), id=str(i), source="random", source_row=i,
                finish_reason="stop", response="unknown",
            )  # fmt: skip
            writer.append(who, ids, mask, frames, last_frames)
    shards = index.scan(folder)
    made = manifest.Manifest(
        complete=True, layer_ids=list(LAYERS), hidden_size=hidden, last_hidden=True, codec=info, settings={},
        target={"copied": {"config.json": file_hash(folder / TARGET_FOLDER / "config.json")}}, tokenizer=TOKENIZER,
        generation="unknown", dataset={}, versions={}, kernels="none", shards=[shard for shard, _ in shards],
    )  # fmt: skip
    index.publish(folder, made, index.build(shards))
    return Mix([folder])


def random_drafter(target: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Drafter:
    """The published layout: 5 layers, 4 of them sliding, blocks of 16."""
    spec = derive(ModelConfig(sliding_window=2048), target, LAYERS, TOKENIZER, target["vocab_size"])
    with torch.device("meta"):
        drafter = Drafter(spec)
    drafter = drafter.to(dtype).to_empty(device=device).requires_grad_(False)
    for p in drafter.parameters():
        p.normal_(0, 0.02) if p.ndim == 2 else p.fill_(1)
    return drafter


def split(work: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of the device's kernels of one sample, the largest by name, and of the wall around them."""
    from torch.profiler import ProfilerActivity, profile

    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        work()
        torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    found: Counter[str] = Counter()
    for event in prof.key_averages():
        found[event.key[:90]] += event.self_device_time_total / 1e3
    kernels = {name: round(ms, 2) for name, ms in found.most_common(20)}
    return {"wall ms": 1e3 * wall, "kernels ms": sum(found.values()), "largest": kernels}


def main() -> None:
    """Set up, then each stage while there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=85)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--codec", default="ecsq")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script without a GPU")
    args = parser.parse_args()
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, dtype = SMALL if args.small else TARGET, torch.bfloat16 if device.type == "cuda" else torch.float32
    work, result = Path(tempfile.mkdtemp()), dict[str, Any]()

    def tell(**more: Any) -> None:
        result.update(more, seconds=round(time.perf_counter() - start, 1))
        args.out.write_text(json.dumps(result, indent=1))
        print(json.dumps(more), flush=True)

    def timed(count: int, temperature: float = 0.0) -> float:
        """Seconds of so many samples."""
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        ranks = Ranks(0, 1, device)
        numbers = [i % len(cache) for i in range(count)]
        assert measure(drafter, shared, cache, numbers, ranks, Stop(), temperature) is not None
        return time.perf_counter() - begin

    def left() -> float:
        return args.limit - (time.perf_counter() - start)

    cache = write_cache(work / "cache", target, 4, args.tokens, args.codec)
    drafter = random_drafter(target, device, dtype)
    shape = (target["vocab_size"], target["hidden_size"])
    embedding, head = (torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02) for _ in range(2))
    norm = RMSNorm(target["hidden_size"], 1e-6).to(device).requires_grad_(False)
    shared = Target(embedding, head, norm)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    tell(date=time.strftime("%Y-%m-%d"), device=name, torch=torch.__version__, tokens=args.tokens, codec=args.codec)
    tell(first_sample=timed(1))
    each = timed(4) / 4
    tell(four_samples_each=each)
    if device.type == "cuda":
        tell(split=split(lambda: timed(1)))
    if left() > 12 * each:
        timed(1, 1.0)
        tell(at_a_temperature_each=timed(2, 1.0) / 2)
    count = max(4, min(100, int((left() - 5) / each)))
    tell(samples=count, total=(total := timed(count)), hundred=100 * total / count)
    if device.type == "cuda":
        tell(peak_gb=torch.cuda.max_memory_allocated() / 1e9)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
