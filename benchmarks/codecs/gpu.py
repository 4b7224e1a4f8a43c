"""The codecs' kernels on a GPU: equality with the torch path, and bandwidth beside a device copy of the same process.

    python benchmarks/codecs/gpu.py --out FILE.json

Writes FILE.md too. Legend: T tokens, L layers, D hidden.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from page import gpu_page
from torch import Tensor

from dflash_offline.shards import codecs
from dflash_offline.shards.codecs import kernels, plain
from dflash_offline.shards.codecs.ecsq import DEFAULT_DELTA, L1_TO_SPREAD, Ecsq
from dflash_offline.shards.codecs.lossless import Lossless
from dflash_offline.shards.frames import FRAME_TOKENS


def states(tokens: int, layers: int, hidden: int) -> Tensor:
    """Heavy-tailed channels of very different sizes, a massive one, and sink tokens."""
    generator = torch.Generator("cuda").manual_seed(0)
    x_TLD = torch.randn(tokens, layers, hidden, device="cuda", generator=generator)
    x_TLD /= torch.rand(tokens, layers, 1, device="cuda", generator=generator).clamp(min=0.1)
    x_TLD *= torch.logspace(-3, 3, hidden, device="cuda")
    x_TLD += 3 * torch.logspace(-3, 3, hidden, device="cuda")
    x_TLD[..., 7] *= 300
    x_TLD[::512, :, 100] = 24832
    x_TLD[torch.rand(x_TLD.shape, device="cuda", generator=generator) < 1e-5] *= 50
    return x_TLD.to(torch.bfloat16)


def seconds(work: Callable[[], object], repeats: int = 20, calls: int = 10) -> float:
    """Median by device events, after two that are not counted.

    `calls` are queued behind one another: alone, a kernel of 0.1 ms would be timed with the CPU's work to launch it.
    """
    times = []
    for i in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(stop) / 1e3 / calls)
    return median(times)


def equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    """Bit for bit."""
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a.cpu().view(-1).view(torch.uint8), b.cpu().view(-1).view(torch.uint8)) for a, b in pairs)


def main() -> None:
    """Compare, then measure each kernel between two copies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", type=int, nargs=3, default=(4096, 5, 5120), metavar=("T", "L", "D"))
    args = parser.parse_args()
    tokens, layers, hidden = args.shape
    x_TLD = states(tokens, layers, hidden)
    codec, exact = codecs.calibrate("ecsq", x_TLD, {"delta": DEFAULT_DELTA}), codecs.calibrate("lossless", x_TLD)
    assert isinstance(codec, Ecsq) and isinstance(exact, Lossless)
    to_symbols = (codec.mean_LD, codec.inverse_LD, codec.delta, L1_TO_SPREAD / hidden, codec.limit)
    to_states = (codec.mean_LD, codec.spread_LD, codec.delta, codec.limit)

    symbols_LTD, scale_LT, index, escaped = kernels.quantise(x_TLD, *to_symbols)
    halves = kernels.split(x_TLD, exact.mode_LD)
    on_cpu = [t.cpu() if isinstance(t, Tensor) else t for t in to_symbols]
    few = slice(0, 256)
    checks = {
        "quantise = torch on the GPU": equal(
            (symbols_LTD, scale_LT, index, escaped), plain.quantise(x_TLD, *to_symbols)
        ),
        "quantise = torch on the CPU": equal(
            kernels.quantise(x_TLD[few], *to_symbols), plain.quantise(x_TLD[few].cpu(), *on_cpu)
        ),
        "restore = torch": equal(
            (kernels.restore(symbols_LTD, scale_LT, *to_states),), (plain.restore(symbols_LTD, scale_LT, *to_states),)
        ),
        "split = torch": equal(halves, plain.split(x_TLD, exact.mode_LD)),
        "merge(split) = states": equal((kernels.merge(*halves, exact.mode_LD),), (x_TLD,)),
    }

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy_rate() -> float:
        return 2 * source.numel() / seconds(lambda: target.copy_(source)) / 1e9

    values, frame_TLD = x_TLD.numel(), x_TLD[:FRAME_TOKENS]
    frame_planes = codec.encode(frame_TLD)
    works: dict[str, tuple[Callable[[], object], float]] = {
        "quantise (ecsq encode)": (lambda: kernels.quantise_rows(x_TLD, *to_symbols), 3 * values),
        "quantise with escapes": (lambda: kernels.quantise(x_TLD, *to_symbols), 3 * values),
        "restore (ecsq decode)": (lambda: kernels.restore(symbols_LTD, scale_LT, *to_states), 3 * values),
        "split (lossless encode)": (lambda: kernels.split(x_TLD, exact.mode_LD), 4 * values),
        "merge (lossless decode)": (lambda: kernels.merge(*halves, exact.mode_LD), 4 * values),
        "quantise in torch": (lambda: plain.quantise(x_TLD, *to_symbols), 3 * values),
        "restore in torch": (lambda: plain.restore(symbols_LTD, scale_LT, *to_states), 3 * values),
    }
    rows: list[dict[str, Any]] = []
    for name, (work, moved) in works.items():
        before = copy_rate()
        taken = seconds(work)
        copy = (before + copy_rate()) / 2
        rate = moved / taken / 1e9
        rows.append({"work": name, "ms": 1e3 * taken, "GB/s": rate, "copy GB/s": copy, "share": rate / copy})
        print(f"{name:26} {1e3 * taken:7.3f} ms {rate:7.0f} GB/s, copy {copy:5.0f}: {rate / copy:.0%}", flush=True)
    frame_rates = {
        "encode": FRAME_TOKENS / seconds(lambda: codec.encode(frame_TLD)),
        "decode": FRAME_TOKENS / seconds(lambda: codec.decode(frame_planes, FRAME_TOKENS)),
    }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {n: version(n) for n in ("torch", "triton")},
        "shape": [tokens, layers, hidden],
        "escape rate": len(index) / values,
        "equal": checks,
        "kernels": rows,
        "one frame of 128 tokens, tokens/s": frame_rates,
    }
    args.out.write_text(json.dumps(result, indent=1))
    args.out.with_suffix(".md").write_text(gpu_page(result))
    print(json.dumps(checks))


if __name__ == "__main__":
    main()
