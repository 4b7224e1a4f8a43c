"""`dflash-shards stats`: what samples and states of a cache look like, and what about them is suspicious."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.codecs import EXACT
from dflash_offline.shards.errors import UsageError
from dflash_offline.tools.config import Stats
from dflash_offline.tools.estimate import label
from dflash_offline.tools.stats_states import OUTLIER, States, choose, measure_states

TOP = 4
"""Channels named in a layer."""
MOST_ESCAPES = 1e-3
"""Of all values. More says that the states are no longer what was calibrated on."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is printed and put on the page: the first column is text, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that `stats` found."""

    cache: Cache
    states: States | None
    facts: dict[str, str]
    tables: list[Table] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def stats(args: Stats) -> int:
    """Print the report, and write it as a page where asked to."""
    cache = Cache(args.cache, allow_incomplete=True)
    if args.codecs and cache.manifest.codec.name not in EXACT:
        raise UsageError(
            f"{args.cache}: codec {cache.manifest.codec.name} is lossy; --codecs compares with exact states "
            f"({' or '.join(EXACT)})"
        )
    if args.html is not None:
        if args.html.is_dir() or not args.html.parent.is_dir():
            raise UsageError(f"--html {args.html}: expected the name of a file in a folder that exists")
        from dflash_offline.tools import stats_page  # says at once when matplotlib is missing
    report = examine(cache, args)
    for name, value in report.facts.items():
        print(f"{name:10} {value}")
    for table in report.tables:
        print("\n" + as_text(table))
    print()
    for warning in report.warnings:
        print(f"WARNING {warning}")
    print(f"{len(report.warnings)} warnings")
    if args.html is not None:
        stats_page.write(report, args.html)
        print(f"wrote {args.html}")
    return 0


def examine(cache: Cache, args: Stats) -> Report:
    """Everything there is to know, index first."""
    m, count, tokens = cache.manifest, len(cache), int(cache.tokens.sum())
    facts = {
        "cache": f"{cache.path} ({'complete' if m.complete else 'being written; only finished shards are seen'})",
        "target": m.target.get("path") or "not recorded",
        "codec": label(m.codec.name, m.codec.parameters),
        "samples": f"{count:,} in {len(cache.index.column('shard').unique()):,} shards",
    }
    if count == 0:
        return Report(cache=cache, states=None, facts=facts)
    supervised, anchors = int(cache.supervised.sum()), int(cache.anchors.sum())
    facts["tokens"] = f"{tokens:,}, {supervised:,} supervised ({supervised / tokens:.1%}), {anchors:,} anchors"
    tables = [_lengths(cache), _histogram(cache.tokens), _origins(cache)]
    states = measure_states(cache, choose(count, args.samples, args.seed), args.codecs) if args.samples else None
    if states is not None:
        facts["measured"] = f"{states.samples:,} samples (seed {args.seed}), {states.tokens:,} tokens"
        tables += [_layers(cache, states)] + ([_others(cache, states)] if states.others else [])
    warnings = list(_supervision_warnings(supervised / tokens))
    if states is not None:
        warnings += state_warnings(cache, states)
    return Report(cache=cache, states=states, facts=facts, tables=tables, warnings=warnings)


def histogram(lengths: NDArray[np.int64], most: int = 16) -> list[tuple[int, int, int]]:
    """(first, last, count) of at most `most` equal whole-number stretches from the shortest to the longest."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // most)
    counts = np.bincount((lengths - low) // width)
    return [(low + i * width, low + (i + 1) * width - 1, int(n)) for i, n in enumerate(counts)]


def _lengths(cache: Cache) -> Table:
    at = {"least": 0, "10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "most": 1}
    share = cache.supervised / cache.tokens
    kinds = {"tokens": cache.tokens, "supervised": cache.supervised, "anchors": cache.anchors}
    rows = [
        [name, *(f"{x:,.0f}" for x in np.quantile(values, list(at.values()))), f"{values.mean():,.1f}"]
        for name, values in kinds.items()
    ]
    rows.append(
        ["supervised share", *(f"{x:.3f}" for x in np.quantile(share, list(at.values()))), f"{share.mean():.3f}"]
    )
    return Table(title="A sample", header=["", *at, "mean"], rows=rows)


def _histogram(lengths: NDArray[np.int64]) -> Table:
    bins = histogram(lengths)
    most = max(n for *_, n in bins)
    rows = [[f"{a:,} to {b:,}", f"{n:,}", f"{n / len(lengths):.1%}", "#" * -(-30 * n // most)] for a, b, n in bins]
    return Table(title="Lengths in tokens", header=["", "samples", "share", ""], rows=rows)


def _origins(cache: Cache, most: int = 8) -> Table:
    rows = []
    for column in ("source", "finish_reason", "response"):
        found = cache.index.column(column).value_counts().to_pylist()
        found.sort(key=lambda entry: (-entry["counts"], entry["values"]))
        if len(found) > most:
            rest = sum(entry["counts"] for entry in found[most - 1 :])
            found = [*found[: most - 1], {"values": f"{len(found) - most + 1:,} others", "counts": rest}]
        for entry in found:
            n = entry["counts"]
            rows.append(
                [f"{column.replace('_', ' ')}: {entry['values'] or 'not given'}", f"{n:,}", f"{n / len(cache):.1%}"]
            )
    return Table(title="Where samples come from", header=["", "samples", "share"], rows=rows)


def _layers(cache: Cache, states: States) -> Table:
    quality, values = cache.codec.quality, states.tokens * cache.hidden_size
    rms_L, share_LD, dead_L, constant_L = states.rms_L, states.share_LD, states.dead_L, states.constant_L
    rows = []
    for i, layer in enumerate(cache.layer_ids):
        top = np.argsort(-share_LD[i], kind="stable")[:TOP]
        rows.append(
            [
                str(layer),
                f"{rms_L[i]:.4g}",
                f"{states.largest_L[i]:.4g}",
                f"{states.outliers_L[i] / values:.1e}",
                f"{dead_L[i]} + {constant_L[i]}",
                f"{states.bits_L[i]:.3f}",
                "-" if states.escapes_L is None else f"{states.escapes_L[i] / values:.1e}",
                _decibel(cache, quality, "snr", i),
                _decibel(cache, quality, "chan_snr", i),
                ", ".join(f"{c} ({share_LD[i, c]:.1%})" for c in top),
            ]
        )
    blank = [""] * 4
    rows.append(["all", *blank, f"{states.bits:.3f}", *blank])
    if states.last_bits is not None:
        fidelity = [_decibel(cache, quality.get("last", {}), kind, 0) for kind in ("snr", "chan_snr")]
        rows.append(["last hidden", *blank, f"{states.last_bits:.3f}", "", *fidelity, ""])
    measured = f" on {quality['tokens']:,} tokens" if quality else "; this cache does not record them"
    return Table(
        title="States by layer",
        header=[
            "layer",
            "rms",
            "largest",
            "outliers",
            "dead + constant",
            "bits",
            "escapes",
            "SNR",
            "chanSNR",
            "top channels",
        ],
        rows=rows,
        note=f"Outliers lie more than {OUTLIER:g} spreads from their channel's mean. Dead channels are zero in every "
        "token, constant ones of one other value. Bits are those of all frames of the cache, headers included, divided "
        f"between layers as in the samples. SNR and chanSNR (dB) were measured at calibration{measured}. Top channels: "
        "number (share of the layer's energy).",
    )


def _others(cache: Cache, states: States) -> Table:
    rows = []
    for name, found in states.others:
        row = [name, f"{found['bits']:.3f}", f"{found['bits'] * len(cache.layer_ids) * cache.hidden_size / 8:,.0f}"]
        for kind in ("snr", "chan_snr"):
            values = found[kind]
            row.append("exact" if None in values else f"{np.mean(values):.1f} ({min(values):.1f})")
        rows.append(row)
    return Table(
        title="Other codecs on these states",
        header=["codec", "bits", "bytes a token", "SNR", "chanSNR"],
        rows=rows,
        note=f"Calibrated on one half of {2 * states.others[0][1]['tokens']:,} tokens and measured on the other. dB: "
        "mean of the layers (worst layer). A few channels hold most of the energy, so SNR hides the others; chanSNR "
        "does not.",
    )


def _decibel(cache: Cache, quality: dict[str, Any], kind: str, layer: int) -> str:
    if kind not in quality:
        return "exact" if cache.manifest.codec.name in EXACT else "-"
    value = quality[kind][layer]
    return "exact" if value is None else f"{value:.1f}"


def _supervision_warnings(share: float) -> Iterator[str]:
    if not 0.01 <= share <= 0.99:
        yield f"supervision: {share:.2%} of the tokens are supervised; expected 1 to 99 %: look at samples with `show`"


def state_warnings(cache: Cache, states: States) -> Iterator[str]:
    """Zero layers, layers that are another one, lost fidelity and escapes, by name."""
    ids, zero_L, name = cache.layer_ids, states.energy_LD.sum(axis=1) == 0, cache.manifest.codec.name
    quality = cache.codec.quality.get("chan_snr", [None] * len(ids))
    # Two copies of a layer may each carry the codec's noise; beyond 17 dB even real neighbours could be that close.
    noise = [0.0 if q is None else min(10 ** (-q / 10), 0.02) for q in quality]
    for i, layer in enumerate(ids):
        if zero_L[i]:
            yield f"zero-layer: layer {layer} is zero in every token"
        if (found := quality[i]) is not None:
            if name in EXACT:
                yield f"noise: layer {layer} had {found:.1f} dB chanSNR at calibration, but {name} is exact"
            elif states.promised_L is not None and found < states.promised_L[i] - 1:
                promise = f"its step promises {states.promised_L[i]:.1f}"
                yield f"noise: layer {layer} had {found:.1f} dB chanSNR at calibration, {promise}"
    for i in range(len(ids)):
        for j in range(i + 1, len(ids)):
            near = [s for s in (0, 1, -1) if states.distance_SLL[1 + s, i, j] <= noise[i] + noise[j]]
            if near and not zero_L[i] and not zero_L[j]:
                if near[0] == 0:
                    yield f"equal-layers: layers {ids[i]} and {ids[j]} are equal"
                else:
                    late, early = (ids[j], ids[i]) if near[0] == 1 else (ids[i], ids[j])
                    yield f"shifted-layer: layer {late} is layer {early} one token later"
    if states.escapes_L is not None:
        rate = states.escapes_L.sum() / (states.tokens * states.energy_LD.size)
        if rate > MOST_ESCAPES:
            yield f"escapes: {rate:.1e} of the values, expected at most {MOST_ESCAPES:g}: not what was calibrated on"


def as_text(table: Table) -> str:
    """Columns of equal width: numbers to the right, the first column and words to the left."""
    lines = [table.header, *table.rows]
    widths = [max(len(row[c]) for row in lines) for c in range(len(table.header))]
    last = len(widths) - 1
    out = [table.title]
    for row in lines:
        cells = [v.ljust(w) if c in (0, last) else v.rjust(w) for c, (v, w) in enumerate(zip(row, widths, strict=True))]
        out.append("  " + "  ".join(cells).rstrip())
    return "\n".join(out)
