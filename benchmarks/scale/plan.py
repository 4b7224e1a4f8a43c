"""The whole job from measured rates: hours, terabytes, and what disk, bus, network and cores must give.

    python benchmarks/scale/plan.py [--gpus 8] [--scale FILE.json] [--extract FILE.json] [--extract-rate N] ...

Rates not given are read: what several GPUs extract from a result of run.py here, training on one and two and what one
extracts from benchmarks/train and extract (of a --scale of your own, from that), coders from benchmarks/codecs. A GPU's
rate was timed with one codec and is taken for all of them: writing cost 0.6 % with lossless. The tables are those of
docs/scale.md.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import run

from dflash_offline.shards.codecs import nominal_bits
from dflash_offline.tools.estimate import CHOICES, SIDE_BYTES, label
from dflash_offline.train.plan import make_plan

HERE = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, ROW, ANCHORS = 5, 5120, 3072, 512
SCALE, TRAIN = "scale/2026-11-30.json", "train/2026-11-30-two.json"
"""Extraction and training on one and two GPUs: what is taken where --scale does not tell."""
COPIED = {"bf16": 2.0, "lossless": 2.0, "fp8": 1.0, "ecsq": 1.0}
"""Bytes a value in the planes that go to the GPU; ecsq's are half from a step of 0.7 on."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done, and the rates of one GPU."""

    tokens: float
    epochs: int
    gpus: int
    extract_rate: float
    """Tokens/s of one GPU."""
    extract_scaling: float
    step_s: float
    """Seconds of a step of one row a GPU, on one GPU."""
    train_scaling: float
    decode_s: float
    """Thread seconds of reading and decoding a row."""
    fill: float
    """Part of a row that holds tokens."""
    kept: float
    """Part of the tokens that are trained on: not held out, not cut."""

    @property
    def made(self) -> float:
        """Tokens/s of extraction, all GPUs."""
        return self.gpus * self.extract_rate * self.extract_scaling

    @property
    def read(self) -> float:
        """Tokens/s of training, all GPUs; rows have room for some more."""
        return self.gpus * ROW * self.fill / self.step_s * self.train_scaling

    @property
    def steps(self) -> int:
        """Of all epochs, a row a GPU and step."""
        rows = -(-int(self.tokens * self.kept) // int(ROW * self.fill))
        return self.epochs * -(-rows // self.gpus)

    @property
    def training_hours(self) -> float:
        """Of all epochs, without measuring and saving."""
        return self.steps * self.step_s / self.train_scaling / 3600

    def extraction_hours(self, bytes_a_token: float = 0.0, written: float = float("inf")) -> float:
        """By the GPUs, or by the disk where that is slower. `written`: bytes/s."""
        return self.tokens / min(self.made, written / max(bytes_a_token, 1e-9)) / 3600


def ring(size: float, ranks: int, bytes_s: float) -> float:
    """Seconds of an all-reduce: every rank sends and receives 2 (n - 1) / n of the bytes."""
    return 2 * (ranks - 1) / ranks * size / bytes_s


def step_at(ranks: int, steps: Mapping[int, float]) -> float:
    """Seconds of a step at `ranks`: measured, or from those of one and of the fewest that were measured beside it.

    What a step of n loses to sums and to spreading weights, and what it gains by stepping a share of them, both are as
    (n - 1) / n: the part of its gradients that a rank sends, and the part of the optimizer that others take from it.
    """
    few = min(n for n in steps if n > 1)
    return steps.get(ranks) or steps[1] + (steps[few] - steps[1]) * (1 - 1 / ranks) / (1 - 1 / few)


def packing(samples: int, mean: float, longest: int) -> tuple[float, float]:
    """How full the trainer's own packing makes rows, and the part of tokens that rows have room for.

    Lengths are lognormal with sigma 0.75 (benchmarks/extract/shapes.py), from 64 to `longest`, of that mean.
    """
    drawn, low, high = np.exp(0.75 * np.random.default_rng(0).standard_normal(samples)), 1.0, 1e6
    for _ in range(60):
        middle = (low * high) ** 0.5
        lengths = np.clip(middle * drawn, 64, longest).astype(np.int64)
        low, high = (middle, high) if lengths.mean() < mean else (low, middle)
    keys = [f"{n:016x}" for n in np.random.default_rng(1).integers(0, 2**63, samples)]
    made = make_plan(
        np.ones(samples), keys, lengths, lengths * 7 // 10, row_tokens=ROW, row_anchors=ANCHORS, rows_per_step=8,
        seed=0, epochs=1,
    )  # fmt: skip
    cut = np.minimum(lengths, ROW).sum()
    return cut / made.epochs[0].rows / ROW, cut / lengths.sum()


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Markdown; numbers as they are given."""
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def codecs(
    job: Job, disks: Sequence[float], memory: float, bus: float, speeds: Sequence[dict[str, Any]], trained_on: str
) -> str:
    """By codec: bytes, what the disk must write and read, hours where it writes less, copies, threads.

    `trained_on`: the codec of `decode_s`.
    """
    decode = {label(s["codec"], {"delta": s["delta"]} if "delta" in s else {}): s for s in speeds}
    usual = decode[trained_on]["entropy decode"]["of CPU time"]
    sizes, moves = [], []
    for choice in CHOICES:
        name, values = label(*choice), LAYERS * HIDDEN
        each = nominal_bits(*choice) * values / 8 + SIDE_BYTES
        hours = [f"{job.extraction_hours(each, 1e9 * disk):.1f}" for disk in disks]
        share = memory / (job.tokens * each)
        sizes.append(
            [name, f"{each:,.0f}", f"{job.tokens * each / 1e12:.1f}", *hours, f"{share:.0%}"],
        )
        copied = COPIED[choice[0]] * (0.5 if choice[1].get("delta", 0) >= 0.7 else 1) * values * ROW * job.fill
        speed = decode[name]
        writing = job.made / speed["entropy encode"]["of CPU time"]
        reading = job.decode_s * job.read / (ROW * job.fill) * usual / speed["entropy decode"]["of CPU time"]
        moves.append(
            [
                name,
                f"{job.made * each / 1e9:.2f}",
                f"{job.read * each / 1e9:.2f}",
                f"{copied / 1e6:.0f}",
                f"{1e3 * copied / bus:.1f}",
                f"{writing:.1f}",
                f"{reading:.1f}",
            ]
        )
    head = ["codec", "bytes a token", "TB", *(f"hours, disk {disk:g} GB/s" for disk in disks)]
    return (
        table([*head, f"in {memory / 1e12:g} TB of memory"], sizes)
        + "\n"
        + table(
            ["codec", "written GB/s", "read GB/s", "MB a row to the GPU", "ms of it", "threads encoding", "reading"],
            moves,
        )
    )


def trained(job: Job, packed: tuple[float, float], held_out: float) -> str:
    """Steps and hours: rows as full as where a step was timed, and as the trainer packs so many samples."""
    lines = []
    for name, fill, kept in (("as full as the benchmark's, nothing cut", job.fill, 1.0), ("packed", *packed)):
        one = Job(**(vars(job) | {"fill": fill, "kept": kept * (1 - held_out)}))
        # A sample that is cut is read whole.
        facts = [f"{one.steps:,}", f"{one.training_hours:.1f}", f"{one.read:,.0f}", f"{one.read / kept:,.0f}"]
        lines.append([name, f"{fill:.1%}", f"{1 - kept:.1%}", *facts])
    return table(["rows", "full", "cut", "steps", "hours", "tokens/s", "from the disk"], lines)


def sums(size: float, steps: Mapping[int, float], link: float, network: float) -> str:
    """Bytes of gradients to sum, half as many of weights to spread: on one host with its steps, and over hosts of 8.

    Either is half of a ring's all-reduce.
    """
    lines = [
        [
            f"{n} GPUs",
            *(f"{1e3 * ring(half, n, link):.1f}" for half in (size / 2, size / 4)),
            f"{1e3 * step_at(n, steps):.1f}",
            f"{steps[1] / step_at(n, steps):.3f}" + " (measured)" * (n in steps),
        ]
        for n in (2, 4, 8)
    ]
    hosts = [
        [f"{n} hosts of 8"]
        + [f"{1e3 * ring(half, 8 * n, rate):.0f}" for rate in (8 * network, network) for half in (size / 2, size / 4)]
        for n in (2, 4, 8)
    ]
    cards = f"8 x {network / 1e9:g} GB/s a host", "one such card"
    return (
        table([f"one host, {link / 1e9:g} GB/s", "ms of sums", "of weights", "of a step", "scaling"], lines)
        + "\n"
        + table(["hosts", *(f"{what}, {card}" for card in cards for what in ("ms of sums", "of weights"))], hosts)
    )


def read(name: str) -> Any:
    """A result beside this folder."""
    return json.loads((HERE / name).read_text())


def extraction(path: Path) -> tuple[float, str]:
    """A result of benchmarks/extract on one GPU: its tokens/s to shards, and the codec."""
    told = json.loads(path.read_text())
    if "1 GPU" not in told:
        sys.exit(f"{path}: no rates of 1 GPU; expected a result of benchmarks/extract/run.py on one")
    (gpu,) = told["1 GPU"].values()
    return median(gpu["tokens/s"]["shards"]), told.get("codec", "ecsq")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=902_000)
    parser.add_argument("--mean-tokens", type=float, default=2000)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--scale", type=Path, help="a result of run.py: rates of one GPU and of several")
    parser.add_argument(
        "--extract", type=Path, default=HERE / "extract/2026-11-30-flash-qla.json", help="a result of its run.py"
    )
    parser.add_argument("--extract-rate", type=float, help="tokens/s of one GPU")
    parser.add_argument("--extract-scaling", type=float, help="default: to memory, of --gpus or the most measured")
    parser.add_argument("--step-ms", type=float, help="of one row on one GPU")
    parser.add_argument("--train-scaling", type=float, help="default: measured at --gpus, else computed")
    parser.add_argument("--fill", type=float, default=0.94, help="of a row, as the trainer packs the benchmark's")
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--disks", type=float, nargs="+", default=[0.5, 1.6, 3.5, 6.8], help="GB/s of writing")
    parser.add_argument("--memory-tb", type=float, default=2)
    parser.add_argument("--bus", type=float, default=50, help="GB/s from the host to a GPU")
    parser.add_argument("--link", type=float, default=450, help="GB/s of NVLink, one way")
    parser.add_argument("--network", type=float, default=50, help="GB/s of one network card")
    parser.add_argument("--parameters", type=float, default=1.73e9, help="of the drafter")
    args = parser.parse_args()
    own = json.loads(args.scale.read_text()) if args.scale else {}
    told = read(SCALE) | {"training": read(TRAIN)["training"]} | own
    found = run.summary(told)
    places = [part for name, part in found.items() if name.startswith("extraction to")]
    if not places or len(found.get("training", ())) < 2:
        sys.exit(f"{args.scale or SCALE}: no rates of one GPU or no steps of more; expected both, of run.py --gpus 1,2")
    memory = places[-1]
    steps = {n: part["step ms"] / 1e3 for n, part in found["training"].items()}
    trained_on = [part["published"] for part in told["training"].values() if "published" in part]
    rate, codec = (memory[1]["tokens/s"], told["codec"]) if "extraction" in own else extraction(args.extract)
    most = args.gpus if args.gpus in memory else max(memory)
    job = Job(
        tokens=args.samples * args.mean_tokens,
        epochs=args.epochs,
        gpus=args.gpus,
        extract_rate=args.extract_rate or rate,
        extract_scaling=args.extract_scaling or memory[most]["efficiency"],
        step_s=args.step_ms / 1e3 if args.step_ms else steps[1],
        train_scaling=args.train_scaling or steps[1] / step_at(args.gpus, steps),
        decode_s=median(row["disk"] + row["decode"] for part in trained_on for row in part["loader"]),
        fill=args.fill,
        kept=1 - args.held_out,
    )
    print(f"{job.tokens / 1e9:.3f} G tokens, {job.epochs} epochs, {job.gpus} GPUs")
    print(f"extraction: {job.extract_rate:,.0f} tokens/s x {job.gpus} x {job.extract_scaling:.3f} = {job.made:,.0f}")
    print(f"            {job.extraction_hours():.2f} hours by the GPUs, at the rate measured with {codec}")
    print(f"training: {1e3 * job.step_s:.0f} ms a row, scaling {job.train_scaling:.3f}; {job.read:,.0f} tokens/s")
    print(f"reading and decoding a row: {job.decode_s:.3f} thread seconds\n")
    speeds = read("codecs/2026-11-29.json")["speed"]
    print(codecs(job, args.disks, 1e12 * args.memory_tb, 1e9 * args.bus, speeds, trained_on[0]["codec"]))
    print(trained(job, packing(args.samples, args.mean_tokens, args.longest), args.held_out))
    print(sums(4 * args.parameters, steps, 1e9 * args.link, 1e9 * args.network))


if __name__ == "__main__":
    main()
