"""`dflash-shards bench`: how fast a cache becomes states, stage by stage, beside what this machine can copy.

Every stage is timed alone on the same samples, with a warm page cache: five rounds, the median counts.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.layout import read_range
from dflash_offline.shards.sample import Encoded
from dflash_offline.tools.config import Bench
from dflash_offline.tools.estimate import label
from dflash_offline.tools.stats_states import choose

ROUNDS = 5
MOST_BYTES = 1 << 30
"""Of planes held in memory; no fewer than one sample."""
COPY_BYTES = 1 << 28
"""Of one copy by one thread: beyond any processor's cache."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Something that is done to every sample."""

    name: str
    delivers: int
    """Bytes that all samples together become."""
    work: Callable[[int], object]
    """Of a sample's place in the list."""
    beside: str
    """The machine's own rate to compare with."""
    on_device: bool = False
    """Done by the GPU, in one queue, whatever the number of threads."""


def bench(args: Bench) -> int:
    """Print the table, and what bounds training."""
    cache = Cache(args.cache, allow_incomplete=True)
    if len(cache) == 0:
        raise UsageError(f"{args.cache}: no finished samples yet; expected some to time")
    torch.set_num_threads(1)  # threads are ours
    threads = args.threads or len(os.sched_getaffinity(0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    held = hold(cache, args.samples, pinned=cuda)
    tokens = sum(len(encoded.input_ids) for _, encoded in held)
    machine = {count: copies(count, cuda) for count in {1, threads}}
    codec = label(cache.manifest.codec.name, cache.manifest.codec.parameters)
    name = torch.cuda.get_device_name() if cuda else "no GPU: de-quantised on the CPU"
    print(f"{args.cache}: {codec}, {len(held)} samples, {tokens:,} tokens, warm page cache; {name}")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: what others do slows this down")
    print(f"median of {ROUNDS}; GB/s are of the bytes that a stage delivers, the share is of the copy named\n")
    counts = sorted(machine)
    print(f"{'':44}" + "".join(f"{f'{n} thread' + 's' * (n > 1):^36}" for n in counts))
    print(f"{'stage':28} {'copy':15}" + f"{'GB/s':>10} {'tokens/s':>13} {'share':>8}    " * len(counts))
    rates: dict[str, dict[int, float]] = {}
    for stage in stages(cache, held, device):
        cells = []
        for count in counts:
            if stage.on_device and count > 1 and 1 in rates.get(stage.name, {}):
                rates[stage.name][count] = rates[stage.name][1]
                cells.append(f"{'-':>10} {'-':>13} {'-':>8}    ")
                continue
            seconds = time_stage(stage, len(held), count)
            gb = stage.delivers / seconds / 1e9
            rates.setdefault(stage.name, {})[count] = tokens / seconds
            cells.append(f"{gb:10.2f} {tokens / seconds:13,.0f} {gb / machine[count][stage.beside]:8.0%}    ")
        print(f"{stage.name:28} {stage.beside:15}" + "".join(cells))
    print()
    for beside in machine[1]:
        print(f"{beside}: " + ", ".join(f"{machine[n][beside]:.1f} GB/s with {n}" for n in counts))
    print(verdict(rates, threads, cuda))
    return 0


def hold(cache: Cache, samples: int, pinned: bool) -> list[tuple[int, Encoded]]:
    """Number and planes of samples spread over the cache, up to MOST_BYTES. Reading them warms the page cache."""
    found: list[tuple[int, Encoded]] = []
    size = 0
    for number in choose(len(cache), samples, seed=0):
        encoded = cache.read_encoded(number)
        size += encoded.buffer.numel()
        if found and size > MOST_BYTES:
            break
        found.append((number, replace(encoded, buffer=encoded.buffer.pin_memory()) if pinned else encoded))
    return found


def stages(cache: Cache, held: Sequence[tuple[int, Encoded]], device: torch.device) -> list[Stage]:
    """What a trainer does to a sample, in order."""
    rows = [cache.row(number) for number, _ in held]
    planes = [encoded for _, encoded in held]
    codec, local = cache.codec.to(device), threading.local()
    most = max(encoded.buffer.numel() for encoded in planes)
    plane_bytes = sum(encoded.buffer.numel() for encoded in planes)
    values = sum(len(encoded.input_ids) for encoded in planes) * len(cache.layer_ids) * cache.hidden_size
    values += sum(frame.tokens for encoded in planes for frame in encoded.last_frames) * cache.hidden_size

    def read(i: int) -> object:
        with (cache.path / rows[i]["shard"]).open("rb", buffering=0) as file:
            return read_range(file.fileno(), rows[i]["offset"], rows[i]["length"])

    def buffer(size: int) -> Tensor:
        if not hasattr(local, "buffer"):  # one a thread, used again and again, as a loader does
            local.buffer = torch.zeros(most, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return local.buffer[:size]

    def decode(i: int) -> object:
        return cache.read_encoded(held[i][0], buffer)

    found = [
        Stage(name="read (pread)", delivers=sum(row["length"] for row in rows), work=read, beside="memory"),
        Stage(name="read, verify, entropy decode", delivers=plane_bytes, work=decode, beside="memory"),
    ]
    there, beside = planes, "memory"
    if device.type == "cuda":
        there, beside = [replace(e, buffer=e.buffer.to(device)) for e in planes], "device"

        def copy(i: int) -> object:
            return planes[i].buffer.to(device, non_blocking=True)

        found.append(
            Stage(name="host to device", delivers=plane_bytes, work=copy, beside="host to device", on_device=True)
        )
    restore = Stage(
        name="de-quantise",
        delivers=2 * values,
        work=lambda i: there[i].decode(codec),
        beside=beside,
        on_device=device.type == "cuda",
    )
    return [*found, restore]


def time_stage(stage: Stage, samples: int, threads: int) -> float:
    """Median seconds that all samples take, after one round that does not count."""

    def do(i: int) -> None:
        stage.work(i)  # and drop it: all results together may be more than memory holds

    with ThreadPoolExecutor(threads) as pool:

        def once() -> None:
            if stage.on_device:
                for i in range(samples):
                    do(i)
                torch.cuda.synchronize()
            else:
                list(pool.map(do, range(samples)))

        return _median(once)


def copies(threads: int, cuda: bool) -> dict[str, float]:
    """GB/s that this machine copies, the bytes counted once: in memory with `threads`, to the device, on it."""
    pairs = [
        (torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)) for _ in range(threads)
    ]
    with ThreadPoolExecutor(threads) as pool:
        found = {
            "memory": threads * COPY_BYTES / _median(lambda: list(pool.map(lambda p: p[1].copy_(p[0]), pairs))) / 1e9
        }
    if cuda:
        host, one = pairs[0][0].pin_memory(), torch.zeros(4 * COPY_BYTES, dtype=torch.uint8, device="cuda")
        other = torch.zeros_like(one)

        def timed(work: Callable[[], object], size: int) -> float:
            def once() -> None:
                work()
                torch.cuda.synchronize()

            return size / _median(once) / 1e9

        found["host to device"] = timed(lambda: one[:COPY_BYTES].copy_(host, non_blocking=True), COPY_BYTES)
        found["device"] = timed(lambda: other.copy_(one), 4 * COPY_BYTES)
    return found


def verdict(rates: dict[str, dict[int, float]], threads: int, cuda: bool) -> str:
    """Which stage bounds training, and what a core gives."""
    _, decoding, *others = rates
    core, many = rates[decoding][1], rates[decoding][threads]
    if cuda:
        slowest = min((decoding, *others), key=lambda name: rates[name][threads])
        most, how = rates[slowest][threads], f"the slowest stage is {slowest!r}"
    else:
        # Both stages need the same cores.
        most = 1 / (1 / many + 1 / rates[others[0]][threads])
        slowest = min((decoding, others[0]), key=lambda name: rates[name][threads])
        how = f"decoding and de-quantising share the processor, most time goes to {slowest!r}"
    return (
        f"a core reads, verifies and decodes {core:,.0f} tokens/s, {threads} thread{'s' * (threads > 1)} {many:,.0f}\n"
        f"a trainer here gets at most {most:,.0f} tokens/s from this cache: {how}; "
        "a drafter that takes fewer is bound by its own steps"
    )


def _median(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
