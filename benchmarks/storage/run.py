"""What the kernel does with our files: how long a shard's end takes, and weights read by a mapping or by `pread`.

    python benchmarks/storage/run.py --out FILE.json [--work FOLDER] [--gib 1] [--rate 450]

The real writer appends 8 MiB a sample at so many MB/s, with the disk told to begin every 64 MiB and without, in turns;
seconds are of what follows the last sample, which is fsync. Weights are read by one thread from the page cache, where
they were just written: into new memory, as for a CPU, and into one buffer again and again, as on the way to a GPU.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_offline.shards import writer
from dflash_offline.shards.writer import Identity, ShardWriter

TURNS = 3
PIECE = 8 << 20
Reader = Callable[[Path, list[str], Tensor | None], None]
WHO = Identity(key="0" * 32, prompt_key="0" * 32, id="", source="", source_row=0, finish_reason="", response="")


def end_of_shard(path: Path, size: int, rate: float, every: int) -> float:
    """Seconds that closing takes."""
    writer._SEND_EVERY = every
    frame, ids, mask = os.urandom(PIECE), np.zeros(2, np.int32), np.zeros(2, np.uint8)
    with ShardWriter(path, task="0" * 32, metadata={}) as shard:
        begun = time.perf_counter()
        for number in range(size // PIECE):
            shard.append(WHO, ids, mask, [frame])
            time.sleep(max(0.0, begun + (number + 1) * PIECE / rate - time.perf_counter()))
        ends = time.perf_counter()
    seconds = time.perf_counter() - ends
    path.unlink()
    os.sync()
    return seconds


def by_mapping(path: Path, names: list[str], buffer_N: Tensor | None) -> None:
    """As the library reads; a copy touches every page."""
    with safe_open(path, "pt") as file:
        for name in names:
            tensor = file.get_tensor(name)
            if buffer_N is None:
                tensor.clone()
                continue
            for part_N in tensor.view(torch.uint8).split(len(buffer_N)):
                buffer_N[: len(part_N)].copy_(part_N)


def by_pread(path: Path, names: list[str], buffer_N: Tensor | None) -> None:
    """As shards are read; the header goes with the tensors."""
    size = path.stat().st_size // len(names)
    with path.open("rb", buffering=0) as file:
        for number in range(len(names)):
            into_N = torch.empty(size, dtype=torch.uint8) if buffer_N is None else buffer_N
            for at in range(0, size, len(into_N)):
                os.preadv(file.fileno(), [into_N.numpy()], number * size + at)


def rate_of(read: Reader, path: Path, names: list[str], buffer_N: Tensor | None) -> float:
    """GB/s."""
    begun = time.perf_counter()
    read(path, names, buffer_N)
    return path.stat().st_size / (time.perf_counter() - begun) / 1e9


def main() -> None:
    """Both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--rate", type=float, default=450, help="MB/s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, usual = int(args.gib * 2**30), writer._SEND_EVERY
    found: dict[str, Any] = {"GiB": args.gib, "MB/s": args.rate, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        shard, weights = Path(folder) / "0.arrow", Path(folder) / "weights.safetensors"
        for _ in range(TURNS):
            for name, every in (("told to begin", usual), ("not told", 1 << 62)):
                seconds = end_of_shard(shard, size, args.rate * 1e6, every)
                found.setdefault(f"end of a shard s, {name}", []).append(round(seconds, 3))
        names = [str(n) for n in range(max(1, size // (128 << 20)))]
        save_file({name: torch.randn(64 << 20).bfloat16() for name in names}, weights)
        for _ in range(TURNS):
            for place, buffer_N in (
                ("new memory", None),
                ("one buffer", torch.empty(4 * PIECE, dtype=torch.uint8)),
            ):
                for read in (by_mapping, by_pread):
                    rate = rate_of(read, weights, names, buffer_N)
                    found.setdefault(f"GB/s {read.__name__} to {place}", []).append(round(rate, 2))
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(args.out.read_text())


if __name__ == "__main__":
    main()
