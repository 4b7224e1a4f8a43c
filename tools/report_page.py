"""The report as one HTML file, which needs no server and no network, and its plots as a PNG."""

import io
from html import escape
from pathlib import Path

from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.tools.report import Run, table

try:
    import matplotlib
except ImportError as error:
    raise UsageError(f"--html and --png need matplotlib ({error}); pip install matplotlib, or leave them out") from None

from dflash_offline.tools.report_plots import one_figure, sections, whole_figure
from dflash_offline.tools.stats_page import LOOK, STYLE, image

EXTRA = "body { max-width: 80rem } .wide { overflow-x: auto }"
NOTE = (
    "The best first. tau, the mean accepted length on held-out samples, is of dflash-train eval where it was run, else "
    "the highest measured while training; 95 %: of resampled sets of those samples. Loss: mean of the last tenth of "
    "the steps. Time and tokens: of training steps. The last columns are the settings that differ."
)


def write_html(runs: list[Run], path: Path) -> None:
    """Write the page, whole or not at all."""
    with atomic_file(path) as file:
        file.write(page(runs).encode())


def write_png(runs: list[Run], path: Path) -> None:
    """Write the plots, whole or not at all."""
    out = io.BytesIO()
    with matplotlib.rc_context(LOOK):
        whole_figure(runs).savefig(out, format="png", dpi=150)
    with atomic_file(path) as file:
        file.write(out.getvalue())


def page(runs: list[Run]) -> str:
    """The whole page."""
    header, *rows = table(runs)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    failed = "".join(
        f'<p class="warning">{escape(run.name)}: {escape(run.error)}</p>\n' for run in runs if run.state == "failed"
    )
    plots = ""
    with matplotlib.rc_context(LOOK):
        for part in sections(runs):
            plot = image(one_figure(part), part.title)
            plots += f'<h2>{escape(part.title)}</h2><p class="note">{escape(part.note)}</p>{plot}\n'
    title = f"{len(runs)} training run{'s' if len(runs) > 1 else ''}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}{EXTRA}</style>\n'
        f'<h1>{title}</h1><div class="wide"><table><tr>{head}</tr>\n{body}</table></div><p class="note">{NOTE}</p>\n'
        f"{failed}{plots}</html>\n"
    )
