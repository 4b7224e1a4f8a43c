"""Plots of `dflash-shards report`. Each draws into a figure, or into a part of one.

Up to MANY runs have a colour each; of more, the best few, and the others are grey.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dflash_offline.shards.errors import UsageError
from dflash_offline.tools.report import Run, varied

MANY, BEST, BARS, PANELS, CASES = 8, 5, 24, 6, 20
GREY = "#c4c4c4"
PHASES = ("data", "forward", "loss", "backward", "reduce", "optimizer")
_WIDTH = 9.6
"""Inches."""


class Section(NamedTuple):
    """A part of the report."""

    title: str
    note: str
    height: float
    """Inches."""
    draw: Callable[[FigureBase], None]


def sections(runs: list[Run]) -> Iterator[Section]:
    """What these runs have to show."""
    measured, trained = [run for run in runs if run.shown], [run for run in runs if run.lines]
    if trained:
        note = "Loss: running mean over a fiftieth of the longest run. Held-out tau with its 95 % interval."
        yield Section("Training", note, 3.4, lambda figure: _training(figure, runs))
    if measured:
        note = f"At the step of the table. If asked: where all slots before were accepted, in {CASES} cases or more."
        yield Section("Acceptance per slot", note, 3.4, lambda figure: _acceptance(figure, measured))
    names = [name for name in varied(measured) if _points(measured, name)][:PANELS]
    if len(measured) > 3 and names:
        height = 2.7 * -(-len(names) // 3)
        yield Section("Held-out tau by setting", "A point a run.", height, lambda f: _settings(f, measured, names))
    if bars := trained[:BARS]:
        of = f" Of the best {BARS} runs." if len(trained) > BARS else ""
        note = f"Mean over the steps, by phase; measuring and saving are not part of it.{of}"
        yield Section("Time of a step", note, 1.2 + 0.24 * len(bars), lambda figure: _time(figure, bars))


def one_figure(section: Section) -> Figure:
    """A section as a figure of its own."""
    figure = Figure(figsize=(_WIDTH, section.height), layout="constrained")
    section.draw(figure)
    return figure


def whole_figure(runs: list[Run]) -> Figure:
    """All sections below each other."""
    parts = list(sections(runs))
    if not parts:
        raise UsageError("no run has a step yet; expected one to draw")
    heights = [part.height + 0.3 for part in parts]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    places = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, place in zip(parts, places, strict=True):
        place.suptitle(part.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        part.draw(place)
    return figure


def _looks(runs: list[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Worst first, so that the best lie on top."""
    few = len(runs) <= MANY
    for i, run in reversed(list(enumerate(runs))):
        coloured = few or i < BEST
        color = matplotlib.colormaps["tab10"](i) if coloured else GREY
        yield run, {"color": color, "linewidth": 1.3 if coloured else 0.7, "label": run.name if coloured else "_"}


def _legend(figure: FigureBase, axes: Any, runs: list[Run]) -> None:
    handles, names = axes.get_legend_handles_labels()
    order = {run.name: i for i, run in enumerate(runs)}
    pairs = sorted(zip(handles, names, strict=True), key=lambda pair: order.get(pair[1], len(order)))
    if not pairs:
        return
    rest = len(runs) - len(pairs)
    if rest:
        pairs.append((matplotlib.lines.Line2D([], [], color=GREY), f"{rest} others"))
    longest = max(len(name) for _, name in pairs)
    figure.legend(
        [h for h, _ in pairs], [n for _, n in pairs], loc="outside lower center", fontsize=8,
        ncols=max(1, min(len(pairs), 120 // (longest + 8))),
    )  # fmt: skip


def _training(figure: FigureBase, runs: list[Run]) -> None:
    loss, tau = figure.subplots(1, 2)
    width = max(1, max(len(run.lines) for run in runs) // 50)
    for run, look in _looks(runs):
        found = np.array([(line["step"], line["loss"]) for line in run.lines if line["loss"] is not None])
        if len(found):
            loss.plot(found[:, 0], _smooth(found[:, 1], width), **look)
        lines = [line for line in run.lines if "validation" in line]
        if lines:
            steps = [line["step"] for line in lines]
            values = [line["validation"]["tau"] for line in lines]
            low, high = zip(*(line["validation"]["tau_interval"] for line in lines), strict=True)
            tau.plot(steps, values, marker=".", markersize=4, **look)
            if len(runs) <= MANY:
                tau.fill_between(steps, low, high, color=look["color"], alpha=0.12, linewidth=0)
    loss.set(title="Loss", xlabel="step")
    tau.set(title="Held-out tau", xlabel="step")
    for axes in (loss, tau):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _legend(figure, loss, runs)
    if not tau.has_data():
        tau.text(0.5, 0.5, "not measured while training", transform=tau.transAxes, ha="center", color="#888")


def _acceptance(figure: FigureBase, runs: list[Run]) -> None:
    both = figure.subplots(1, 2, sharey=True)
    kinds = (("acceptance_conditional", "Accepted, if asked"), ("acceptance_marginal", "Right, of all"))
    for axes, (kind, title) in zip(both, kinds, strict=True):
        for run, look in _looks(runs):
            values = np.array(run.shown[kind])
            if kind == "acceptance_conditional":
                # How often a slot was asked, about: the anchors are the tokens but the last ones of a response.
                asked = run.shown["tokens"] * np.cumprod([1.0, *values[:-1]])
                values[asked < CASES] = np.nan
            axes.plot(np.arange(1, len(values) + 1), values, marker=".", markersize=4, **look)
        axes.set(title=title, xlabel="slot", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    _legend(figure, both[0], runs)


def _time(figure: FigureBase, runs: list[Run]) -> None:
    axes = figure.subplots()
    left, at = np.zeros(len(runs)), range(len(runs))
    phases = [*PHASES, *sorted({name for run in runs for line in run.lines for name in line["seconds"]} - {*PHASES})]
    for i, phase in enumerate(phases):
        each = [float(np.mean([line["seconds"].get(phase, 0.0) for line in run.lines])) * 1e3 for run in runs]
        if any(each):
            axes.barh(at, each, left=left, height=0.68, color=matplotlib.colormaps["Set2"](i % 8), label=phase)
            left += each
    axes.set_yticks(list(at), [run.name for run in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="milliseconds")
    figure.legend(loc="outside lower center", ncols=len(phases), fontsize=8)


def _settings(figure: FigureBase, runs: list[Run], names: list[str]) -> None:
    panels = figure.subplots(-(-len(names) // 3), 3, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        points = _points(runs, name)
        values = [value for value, _ in points]
        axes.plot(values, [run.tau for _, run in points], "o", markersize=4, color="#4a7fb5")
        axes.set(title=name, ylabel="tau")
        if min(values) > 0 and max(values) / min(values) > 8:
            axes.set_xscale("log")
            decades = math.log10(max(values) / min(values))
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if decades < 2 else (1,), numticks=5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=all(isinstance(value, int) for value in values)))
        axes.margins(0.1)
    for axes in panels[len(names) :]:
        axes.set_visible(False)


def _points(runs: list[Run], name: str) -> list[tuple[float, Run]]:
    """Number and run, where all runs have a number and two differ."""
    numbers = [run.settings.get(name) for run in runs]
    plain = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
    return list(zip(numbers, runs, strict=True)) if plain and len({*numbers}) > 1 else []  # type: ignore[arg-type]


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values, of fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
