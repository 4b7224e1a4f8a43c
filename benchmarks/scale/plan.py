"""The whole job from measured rates: hours, terabytes, and what disk, bus, network and cores must give.

    python benchmarks/scale/plan.py [--gpus 8] [--scale FILE.json] [--extract FILE.json] [--extract-rate N] ...

Rates not given are read: of one GPU from benchmarks/extract (--extract) and train, of coders from benchmarks/codecs;
scaling from two GPUs, or from --scale, a result of run.py here. Extraction was timed with one codec, and a GPU's rate
is taken for all of them: writing cost 2.4 % with ecsq. The tables are those of docs/scale.md.
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

from dflash_offline.shards.codecs import nominal_bits
from dflash_offline.tools.estimate import CHOICES, SIDE_BYTES, label
from dflash_offline.train.plan import make_plan

HERE = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, ROW, ANCHORS = 5, 5120, 3072, 512
GOAL = 0.97
"""Of extraction's scaling, until it is measured."""
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
    """Thread seconds of reading and decoding a row, with ecsq."""
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


def projected(one: float, two: float, ranks: int) -> float:
    """Scaling at `ranks`, if what two cost over one grows as the bytes that a ring moves."""
    return one / (one + (two - one) * 2 * (ranks - 1) / ranks)


def sharded(step: float, cost: float, optimizer: float, gathered: float, ranks: int, bytes_s: float) -> float:
    """Scaling at `ranks` where each steps a share: half of a ring's bytes beside the backward pass, then a gather.

    `cost`: of summing everything everywhere on two. `optimizer`: of one GPU. `gathered`: bytes of all rounded weights.
    """
    part = (ranks - 1) / ranks
    return step / (step + cost * part + gathered * part / bytes_s - optimizer * part)


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


def codecs(job: Job, disks: Sequence[float], memory: float, bus: float, speeds: Sequence[dict[str, Any]]) -> str:
    """By codec: bytes, what the disk must write and read, hours where it writes less, copies, threads."""
    decode = {label(s["codec"], {"delta": s["delta"]} if "delta" in s else {}): s for s in speeds}
    usual = decode["ecsq 0.08839"]["entropy decode"]["of CPU time"]
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
        reading = job.gpus * job.decode_s / job.step_s * usual / speed["entropy decode"]["of CPU time"]
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


def sums(size: float, found: dict[str, float], link: float, network: float, known: Mapping[int, float]) -> str:
    """Gradients: an all-reduce on one host and over hosts of eight, and scaling to expect; in shares, or `known`."""
    one, two = found["one"], found["two"]
    lines = [
        [
            f"{n} GPUs",
            f"{1e3 * ring(size, n, link):.1f}",
            f"{projected(one, two, n):.3f}" + (" (measured)" * (n == 2)),
            f"{known[n]:.3f} (measured)" if n in known else f"{shares(found, size, n, link):.3f}",
        ]
        for n in (2, 4, 8)
    ]
    hosts = [
        [f"{n} hosts of 8", f"{1e3 * ring(size, 8 * n, 8 * network):.1f}", f"{1e3 * ring(size, 8 * n, network):.0f}"]
        for n in (2, 4, 8)
    ]
    head = [f"one host, {link / 1e9:g} GB/s", "ms of an all-reduce", "scaling with it", "scaling in shares"]
    return (
        table(head, lines)
        + "\n"
        + table(["hosts", f"ms, 8 x {network / 1e9:g} GB/s a host", "ms, one such card"], hosts)
    )


def shares(found: dict[str, float], size: float, ranks: int, link: float) -> float:
    """Scaling of the trainer as it is, if a gather reaches 0.8 of the link."""
    cost = found["two"] - found["one"]
    return sharded(found["step"], cost, found["optimizer"], size / 2, ranks, 0.8 * link)


def read(name: str) -> Any:
    """A result beside this folder."""
    return json.loads((HERE / name).read_text())


def measured() -> dict[str, float]:
    """Rates of training on one and two GPUs, from the files of 2026-11-30."""
    train, pair = read("train/2026-11-30.json"), read("train/2026-11-30-x2.json")
    parts = train["full"], train["published"], pair["published"], pair["2 GPUs"]["published"]
    rows = [row for part in parts for row in part["loader"]]
    return {
        "step": train["published"]["step ms"] / 1e3,
        "one": pair["published"]["step ms"] / 1e3,
        "two": pair["2 GPUs"]["published"]["step ms"] / 1e3,
        "optimizer": train["published"]["phases ms"]["optimizer"] / 1e3,
        "decode": median(row["disk"] + row["decode"] for row in rows),  # the copy also waits for the step's products
    }


def extraction(path: Path) -> tuple[float, float | None, str]:
    """A result of benchmarks/extract: tokens/s of one GPU to shards, scaling at two where it was measured, the codec.

    Two are compared with one of them while the other was idle, in the same processes.
    """
    told = json.loads(path.read_text())
    one, two = ([gpu["tokens/s"] for gpu in told.get(name, {}).values()] for name in ("1 GPU", "2 GPU"))
    alone = [rate for turns in two for rate in turns.get("shards, the others idle", ())]
    rates = one[0]["shards"] if one else alone
    if not rates:
        found = ", ".join(name for name in told if name.endswith("GPU")) or "none"
        sys.exit(f"{path}: rates of {found}; expected 1 GPU, or 2 GPU with one alone, of benchmarks/extract/run.py")
    scaling = None
    if two:
        together = [sum(rates) for rates in zip(*(turns["shards"] for turns in two), strict=True)]
        scaling = median(together) / 2 / median(alone or rates)
    return median(rates), scaling, told.get("codec", "ecsq")


def at(part: Mapping[str, Any], gpus: int, path: Path, flag: str) -> float:
    """Efficiency at a count in a part of --scale's summary."""
    if str(gpus) not in part:
        sys.exit(f"{path}: has {', '.join(part)} GPUs, --gpus is {gpus}; expected one of these, or {flag}")
    return part[str(gpus)]["efficiency"]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=902_000)
    parser.add_argument("--mean-tokens", type=float, default=2000)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--scale", type=Path, help="a result of run.py: rates of one GPU and scaling at --gpus")
    parser.add_argument("--extract", type=Path, default=HERE / "extract/2026-11-30.json", help="a result of its run.py")
    parser.add_argument("--extract-rate", type=float, help="tokens/s of one GPU")
    parser.add_argument("--extract-scaling", type=float, help=f"default: measured, else {GOAL}, the goal")
    parser.add_argument("--step-ms", type=float, help="of one row on one GPU")
    parser.add_argument("--train-scaling", type=float, help="default: computed, for a sharded optimizer")
    parser.add_argument("--fill", type=float, default=0.92, help="of a row, as the trainer packs the benchmark's")
    parser.add_argument("--held-out", type=float, default=0.02)
    parser.add_argument("--disks", type=float, nargs="+", default=[0.5, 1.6, 3.5, 6.8], help="GB/s of writing")
    parser.add_argument("--memory-tb", type=float, default=2)
    parser.add_argument("--bus", type=float, default=50, help="GB/s from the host to a GPU")
    parser.add_argument("--link", type=float, default=450, help="GB/s of NVLink, one way")
    parser.add_argument("--network", type=float, default=50, help="GB/s of one network card")
    parser.add_argument("--parameters", type=float, default=1.73e9, help="of the drafter")
    args = parser.parse_args()
    found, known = measured(), dict[int, float]()
    step = found["step"]
    rate, two, codec = extraction(args.extract)
    extract_scaling, train_scaling = args.extract_scaling or two or GOAL, args.train_scaling
    if args.scale:
        told = json.loads(args.scale.read_text())
        disk = next((part for name, part in told["summary"].items() if name.startswith("extraction to")), None)
        if disk:
            rate, codec = disk["1"]["tokens/s"], told.get("codec", "ecsq")
            extract_scaling = args.extract_scaling or at(disk, args.gpus, args.scale, "--extract-scaling")
        if part := told["summary"].get("training"):
            step = part["1"]["step ms"] / 1e3
            known = {int(n): value["efficiency"] for n, value in part.items()}
            train_scaling = train_scaling or at(part, args.gpus, args.scale, "--train-scaling")
    job = Job(
        tokens=args.samples * args.mean_tokens,
        epochs=args.epochs,
        gpus=args.gpus,
        extract_rate=args.extract_rate or rate,
        extract_scaling=extract_scaling,
        step_s=args.step_ms / 1e3 if args.step_ms else step,
        train_scaling=train_scaling or shares(found, 4 * args.parameters, args.gpus, 1e9 * args.link),
        decode_s=found["decode"],
        fill=args.fill,
        kept=1 - args.held_out,
    )
    print(f"{job.tokens / 1e9:.3f} G tokens, {job.epochs} epochs, {job.gpus} GPUs")
    print(f"extraction: {job.extract_rate:,.0f} tokens/s x {job.gpus} x {job.extract_scaling:.3f} = {job.made:,.0f}")
    print(f"            {job.extraction_hours():.2f} hours by the GPUs, at the rate measured with {codec}")
    print(f"training: {1e3 * job.step_s:.0f} ms a row, scaling {job.train_scaling:.3f}; {job.read:,.0f} tokens/s")
    print(f"reading and decoding a row: {job.decode_s:.3f} thread seconds\n")
    speeds = read("codecs/2026-11-29.json")["speed"]
    print(codecs(job, args.disks, 1e12 * args.memory_tb, 1e9 * args.bus, speeds))
    print(trained(job, packing(args.samples, args.mean_tokens, args.longest), args.held_out))
    print(sums(4 * args.parameters, found, 1e9 * args.link, 1e9 * args.network, known))


if __name__ == "__main__":
    main()
