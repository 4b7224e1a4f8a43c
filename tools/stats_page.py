"""The report of `dflash-shards stats` as one HTML file: tables and plots in it, no server and no network to read it."""

import base64
import io
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.tools.stats import Report, Table, histogram
from dflash_offline.tools.stats_states import States

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError as error:
    raise UsageError(f"--html needs matplotlib ({error}); pip install matplotlib, or leave --html out") from None

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; font-weight: 600 } h2 { font-size: 1.05rem; font-weight: 600; margin: 2.2rem 0 .5rem }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums }
th { font-weight: 500; color: #666; border-bottom: 1px solid #bbb } td { border-bottom: 1px solid #eee }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
.words td:last-child, .words th:last-child { text-align: left; white-space: normal }
img { max-width: 100%; display: block } p { max-width: 48rem } .note { color: #666; font-size: .85rem }
.warning { border-left: 3px solid #c60; padding: .1rem .8rem; background: #fdf6ee }
"""
LOOK = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "dflash",
}
BLUE, ORANGE = "#4a7fb5", "#d08a3e"


def write(report: Report, path: Path) -> None:
    """Write the page, whole or not at all."""
    with atomic_file(path) as file:
        file.write(page(report).encode())


def page(report: Report) -> str:
    """The whole page."""
    title = f"Cache {report.cache.path.resolve().name}"
    facts = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in report.facts.items())
    warnings = "".join(f'<p class="warning">{escape(w)}</p>' for w in report.warnings) or "<p>No warnings.</p>"
    with matplotlib.rc_context(LOOK):
        plots = {name: image(figure, name) for name, figure in _figures(report)}
    body = "".join(
        _section(table, plots.pop(table.title, "")) for table in report.tables if table.title != "Lengths in tokens"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>\n'
        f'<h1>{escape(title)}</h1><table class="words">{facts}</table><h2>Warnings</h2>{warnings}\n{body}</html>\n'
    )


def _section(table: Table, plot: str) -> str:
    words = ' class="words"' if table.title == "States by layer" else ""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<h2>{escape(table.title)}</h2>{plot}<table{words}><tr>{head}</tr>\n{rows}</table>{note}\n"


def image(figure: Figure, name: str) -> str:
    """A figure as an element of a page, with everything in it."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    data = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{escape(name)}" src="data:image/svg+xml;base64,{data}">'


def _figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Plots by the title of the table they stand above."""
    if report.tables:
        yield "A sample", _lengths(report)
    if report.states is not None:
        yield "States by layer", _layers(report, report.states)
        if report.states.others:
            yield "Other codecs on these states", _codecs(report.states)


def _axes(count: int) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(9.2, 2.9), layout="constrained")
    axes = figure.subplots(1, count)
    return figure, list(np.atleast_1d(axes))


def _lengths(report: Report) -> Figure:
    cache = report.cache
    figure, (left, right) = _axes(2)
    bins = histogram(cache.tokens, 40)
    left.bar([a for a, _, _ in bins], [n for *_, n in bins], bins[0][1] - bins[0][0] + 1, align="edge", color=BLUE)
    left.set(title="Length", xlabel="tokens", ylabel="samples")
    right.hist(cache.supervised / cache.tokens, bins=25, range=(0, 1), color=BLUE)
    for axes in (left, right):
        axes.yaxis.get_major_locator().set_params(integer=True)
    right.set(title="Supervised share of a sample", xlabel="share", ylabel="samples", xlim=(0, 1))
    return figure


def _layers(report: Report, states: States) -> Figure:
    cache = report.cache
    names = [str(layer) for layer in cache.layer_ids]
    quality = [q for q in cache.codec.quality.get("chan_snr", []) if q is not None and np.isfinite(q)]
    lossy = len(quality) == len(names)
    figure, (channels, bits, *rest) = _axes(3 if lossy else 2)
    # The ranks are thinned out: nobody sees more points, and the page stays small.
    rank = np.unique(np.geomspace(1, cache.hidden_size, 200).astype(int))
    for i, (name, energy_D) in enumerate(zip(names, states.energy_LD, strict=True)):
        color = matplotlib.colormaps["viridis"](0.9 * i / max(len(names) - 1, 1))
        channels.loglog(rank, np.sort(np.sqrt(energy_D))[::-1][rank - 1], color=color, linewidth=1, label=name)
    channels.set(title="Channels from largest to smallest", xlabel="rank", ylabel="rms")
    channels.legend(title="layer", fontsize=8, ncols=1 + len(names) // 8)
    bits.bar(names, states.bits_L, color=BLUE)
    bits.set(title="Bits a value", xlabel="layer")
    for axes in rest:
        axes.plot(names, quality, "o-", color=BLUE, linewidth=1, label="measured")
        if states.promised_L is not None:
            axes.plot(names, states.promised_L, "--", color=ORANGE, linewidth=1, label="promised by the step")
        axes.set(title="chanSNR at calibration", xlabel="layer", ylabel="dB")
        axes.margins(y=0.5)
        axes.legend(loc="upper left", fontsize=8)
    return figure


def _codecs(states: States) -> Figure:
    figure, (axes,) = _axes(1)
    for name, found in states.others:
        if None not in found["chan_snr"] and np.isfinite(worst := min(found["chan_snr"])):
            axes.plot(found["bits"], worst, "o", color=ORANGE if name.startswith("fp8") else BLUE)
            axes.annotate(name, (found["bits"], worst), (6, -10), textcoords="offset points", fontsize=8)
    axes.set(title="Size and fidelity", xlabel="bits a value", ylabel="chanSNR, worst layer (dB)")
    axes.margins(0.12)
    return figure
