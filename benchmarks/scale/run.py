"""Extraction and training of the 27B shapes at 1, 2, 4 and 8 GPUs of this machine, in one command of under 10 minutes.

    python benchmarks/scale/run.py --out FILE.json [--gpus 1,2,4,8] [--work FOLDER] [--memory /dev/shm] [--seconds 570]

Extraction starts one process a GPU once; then 1, 8, 4, 2 of them work while the others wait, three shards of 60,000
tokens each, and are timed from the end of the first. To FOLDER, durable; the ends of the row also to memory, which
tells what the disk costs. Training starts anew for each count, a row a GPU and step, 40 steps, the last two thirds
count. The smallest and the largest count come first. Results are written as they come. Both use the default codec.

Training reads from the page cache, not from the disk: its cache of 256,535 tokens was just written.

Seconds on 8 GPUs, from runs on one and two: start and weights 25, first shards 56 (16 with a kernel cache), a turn to
warm up and 6 more of 14; cache for training 25; 67 + 3 x 70. Together about 480. On a disk of 0.5 GB/s, at 34 kB a
token, the first shards of eight GPUs take 33 more, their turn 99 and those of four and two 49 and 25: some 640, so that
the last count of training is left out ("no time left") unless --seconds says more.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import host

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import Ended, heard

HERE = Path(__file__).resolve().parent
TRAIN = HERE.parent / "train" / "run.py"
SAMPLES = 128
"""Of the cache for training: 77 rows as the trainer packs them, 94 % full, 13 % of the tokens cut."""
SHARD_BYTES = 2.3e9
"""Room for one shard of extraction: 60,000 tokens of the default codec are 2.06e9."""
GOALS = {"extraction": 0.97, "training": 0.95}


def script(name: str) -> Any:
    """benchmarks/NAME/run.py as a module."""
    path = HERE.parent / name / "run.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"{name}_run", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extractor(device: int, work: Path, tell: Callable[[str, Any], None]) -> Callable[[Path], float]:
    """Load one GPU. Returns what runs one turn of it into a folder: tokens/s."""
    import torch

    run = script("extract")
    torch.cuda.set_device(device)
    tell("burst TFLOP/s", run.gemm_rate(1))
    model = run.shapes.decoder("sdpa", torch.device("cuda", device))
    runner, tasks = run.ready(model, device, work / str(device), tell)

    def turn(place: Path) -> float:
        folder = place / str(device)
        if not folder.exists():
            shutil.copytree(work / str(device), folder)
        rate = run.turn(runner, folder, tasks, False)
        tell("peak GB", torch.cuda.max_memory_allocated() / 1e9)
        return rate

    return turn


def worker(
    make: Callable[..., Callable[[Path], float]],
    device: int,
    work: Path,
    turns: Sequence[tuple[int, Path]],
    barrier: Any,
    told: Connection,
) -> None:
    """One GPU of an extraction: its part of every turn."""
    try:
        turn = make(device, work, lambda name, value: told.send((name, value)))
        for number, (count, place) in enumerate(turns):
            barrier.wait()
            begin = time.monotonic()
            if device < count:
                rate = turn(place)
                told.send((number, (begin, time.monotonic(), rate)))
            barrier.wait()
    except BaseException as error:
        told.send(("error", f"{type(error).__name__}: {error}"))
        raise


def extraction(
    counts: Sequence[int],
    work: Path,
    memory: Path,
    deadline: float,
    save: Callable[[dict[str, Any]], None],
    make: Callable[..., Callable[[Path], float]] = extractor,
) -> None:
    """All turns of one set of processes, one a GPU; each result is saved as it comes."""
    barrier = multiprocessing.get_context("spawn").Barrier(max(counts))
    found: dict[str, Any] = {"GPUs": {}, "turns": []}
    turns = [(count, work) for count in counts] + [(count, memory) for count in counts[:2]]
    for count, place in list(turns):
        if shutil.disk_usage(place).free < (need := 3 * count * SHARD_BYTES):
            turns.remove((count, place))
            found["turns"].append({"gpus": count, "to": str(place), "error": f"not run: needs {need:.3g} bytes free"})
    parts: dict[int, dict[int, tuple[float, float, float]]] = {}
    given = [(make, device, work, turns, barrier) for device in range(max(counts))]
    with host.Watch() as watch:
        try:
            for device, told in heard(worker, given, deadline):
                if isinstance(told, Ended):
                    if told.code and "error" not in found:
                        why = found["GPUs"].get(device, {}).get("error", f"ended with {told.code}")
                        found["error"] = f"cuda:{device}: {why}"
                    continue
                name, value = told
                if isinstance(name, str):
                    found["GPUs"].setdefault(device, {})[name] = value
                    print(f"extraction, cuda:{device}: {name}: {value}", flush=True)
                    continue
                got = parts.setdefault(name, {})
                got[device] = value
                count, place = turns[name]
                if len(got) == count:
                    begin, end, _ = got[0]
                    rates = [got[d][2] for d in range(count)]
                    # The first of its three shards is not timed.
                    busy = host.between(watch.samples, begin + (end - begin) / 3, end)
                    facts = {"gpus": count, "to": str(place), "tokens/s": sum(rates), "each": rates, "host": busy}
                    found["turns"].append(facts)
                    save(found)
        except TimeoutError as error:
            found.setdefault("error", f"{error}, {len(parts)} of {len(turns)} turns begun")
    save(found)


def make_cache(folder: str) -> None:
    """The cache that training reads: random states of samples of the usual lengths, in the default codec."""
    import numpy as np

    from dflash_offline.extract.config import ExtractConfig

    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(1500), 0.75, SAMPLES), 64, 8192).astype(int).tolist()
    script("train").make_cache(Path(folder), lengths, 0.7, None, ExtractConfig.codec)


def training(count: int, work: Path, steps: int, seconds: float, program: Path = TRAIN) -> dict[str, Any]:
    """The training benchmark on `count` GPUs, and the host meanwhile. Its own processes are ended after `seconds`."""
    out = work / f"train-{count}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["--local-addr=127.0.0.1", str(program)]  # a host's name need not be one that it can look up
    command += ["--rank", "--work", str(work), "--steps", str(steps), "--out", str(out), "--only", "published"]

    def lines() -> int:
        return sum(path.read_bytes().count(b"\n") for path in work.glob("*/metrics.jsonl"))

    before = lines()
    found: dict[str, Any] = {}
    # As torchrun sets it for several processes, for one too, or the rates of one and of several are not of one thing.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with host.Watch(lambda: {"lines": lines() - before}) as watch:
        process = subprocess.Popen(command, env=environment)
        try:
            if code := process.wait(seconds):
                found["error"] = f"ended with {code}"
        except subprocess.TimeoutExpired:
            found["error"] = f"not done in {seconds:.0f} s"
        finally:
            process.terminate()  # torchrun ends its processes, after half a minute by force
            process.wait()
    with suppress(OSError, ValueError):
        found |= json.loads(out.read_text())
    late = [s["time"] for s in watch.samples if steps / 3 <= s["lines"] < steps]
    return found | {"host": host.between(watch.samples, late[0], late[-1]) if late else None}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Efficiencies: rate over the count times the rate of one; what one GPU does alone and among all, besides."""
    out: dict[str, Any] = {"goals": GOALS}
    for place in dict.fromkeys(t["to"] for t in found.get("extraction", {}).get("turns", ())):
        rates = {t["gpus"]: t["each"] for t in found["extraction"]["turns"] if t["to"] == place and "each" in t}
        if 1 in rates:
            alone = rates[1][0]
            out[f"extraction to {place}"] = {
                n: {
                    "tokens/s": round(sum(each)),
                    "efficiency": round(sum(each) / n / alone, 4),
                    "first GPU, over alone": round(each[0] / alone, 4),
                }
                for n, each in sorted(rates.items())
            }
    steps = {int(n): part["published"] for n, part in found.get("training", {}).items() if "published" in part}
    if 1 in steps:
        out["training"] = {
            n: {
                "step ms": part["step ms"],
                "efficiency": round(steps[1]["step ms"] / part["step ms"], 4),
                "data wait": round(part["phases ms"]["data"] / part["step ms"], 4),
            }
            for n, part in sorted(steps.items())
        }
    return out


def ends_first(counts: Sequence[int]) -> list[int]:
    """The smallest and the largest count, then the others from the top: should time run out, the ends are there."""
    ordered = sorted(set(counts))
    return [*dict.fromkeys([ordered[0], ordered[-1], *reversed(ordered)])]


def main() -> None:
    """Both parts, each on its own: what fails is noted and the next begins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="1,2,4,8", help="counts; those that the machine has are run")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="the same without a disk")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=570, help="for everything")
    parser.add_argument("--parts", default="extraction,training")
    args = parser.parse_args()
    import torch

    from dflash_offline.extract.config import ExtractConfig

    begin, there = time.monotonic(), torch.cuda.device_count()  # by NVML: no GPU is opened here
    counts = ends_first([n for n in map(int, args.gpus.split(",")) if 0 < n <= there] or sys.exit(f"{there} GPUs here"))
    args.work.mkdir(parents=True, exist_ok=True)
    work, memory = (Path(tempfile.mkdtemp(prefix="scale-", dir=place)) for place in (args.work, args.memory))
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "gpus": there, "host": host.facts(work)}
    found["codec"] = ExtractConfig.codec
    found["versions"] = {n: version(n) for n in ("torch", "triton", "transformers")}

    def save(part: str, value: Any) -> None:
        found[part] = value
        found["summary"], found["seconds"] = summary(found), round(time.monotonic() - begin)
        args.out.write_text(json.dumps(found, indent=1))

    def left() -> float:
        return begin + args.seconds - time.monotonic()

    try:
        if "extraction" in args.parts:
            deadline = begin + (0.6 if "training" in args.parts else 1) * args.seconds
            try:
                extraction(counts, work, memory, deadline, lambda value: save("extraction", value))
            except Exception as error:
                save("extraction", found.get("extraction", {}) | {"error": f"{type(error).__name__}: {error}"})
        if "training" in args.parts:
            maker = multiprocessing.get_context("spawn").Process(target=make_cache, args=(str(work / "mixed"),))
            maker.start()  # a process of its own, which gives the GPU back
            maker.join(max(left(), 1))
            maker.terminate()
            maker.join()
            parts: dict[int, Any] = {}
            for count in counts:
                if maker.exitcode:
                    parts[count] = {"error": f"no cache: ended with {maker.exitcode}"}
                elif left() < 30:
                    parts[count] = {"error": "no time left"}
                else:
                    parts[count] = training(count, work, args.steps, left())
                save("training", parts)
    finally:
        for folder in (work, memory):
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found["summary"], indent=1))


if __name__ == "__main__":
    main()
