"""`dflash-shards report`: training runs, or the trials of a sweep, beside each other."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_offline.shards.command import load_toml
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.files import read_json
from dflash_offline.tools.config import Report
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.folder import CONFIG, FREE, STATUS, read_config, settings
from dflash_offline.train.log import read_metrics
from dflash_offline.train.sweep_trial import best

SILENT = tuple(name for name in FREE if name not in ("cache", "data.caches", "model.init"))
"""Settings that do not change what comes out."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder tells."""

    name: str
    path: Path
    settings: dict[str, Any]
    state: str
    error: str
    lines: list[dict[str, Any]]
    """Of metrics.jsonl."""
    shown: dict[str, Any]
    """Held-out numbers with their step, and who measured them; empty where nobody has."""

    @property
    def tau(self) -> float:
        """For sorting; 0 where none was measured."""
        return float(self.shown.get("tau", 0.0))

    @property
    def loss(self) -> float | None:
        """Mean of the last tenth of the steps that had supervision."""
        losses = [line["loss"] for line in self.lines if line["loss"] is not None]
        last = losses[-max(1, len(losses) // 10) :]
        return sum(last) / len(last) if last else None

    @property
    def tokens(self) -> int:
        """Context tokens seen."""
        return sum(line["tokens"] for line in self.lines)

    @property
    def seconds(self) -> float:
        """Of steps; measuring and saving not counted."""
        return sum(sum(line["seconds"].values()) for line in self.lines)


def report(args: Report) -> int:
    """The command."""
    for path in (args.html, args.png):
        if path and not path.parent.is_dir():
            raise UsageError(f"{path}: its folder does not exist; choose another name")
    runs = collect(args.runs)
    if args.html or args.png:
        from dflash_offline.tools import report_page

        if args.html:
            report_page.write_html(runs, args.html)
        if args.png:
            report_page.write_png(runs, args.png)
    header, *rows = table(runs)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for first, *others in (header, *rows):
        print(f"{first:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(others, widths[1:], strict=True)), sep="  ")
    if written := [str(path) for path in (args.html, args.png) if path]:
        print(f"written to {' and '.join(written)}")
    return 0


def collect(paths: tuple[Path, ...]) -> list[Run]:
    """Runs, and the trials of sweeps, the best first. Raises UsageError for other folders and where there is no run."""
    found = [run for path in paths for run in _runs(path)]
    if not found:
        raise UsageError("no run; expected folders made by `dflash-train run` or `dflash-train sweep`")
    for depth in range(1, 9):  # names as short as they may be
        names = ["/".join(run.path.resolve().parts[-depth:]) for run in found]
        if len({*names}) == len(names):
            break
    else:
        raise UsageError(f"{found[0].path}: is given twice; expected each run once")
    named = [replace(run, name=name) for run, name in zip(found, names, strict=True)]
    return sorted(named, key=lambda run: (-run.tau, run.name))


def varied(runs: list[Run]) -> list[str]:
    """Settings that are not the same in all runs."""
    names = sorted({name for run in runs for name in run.settings})
    return [name for name in names if len({json.dumps(run.settings.get(name)) for run in runs}) > 1]


def table(runs: list[Run]) -> list[list[str]]:
    """Header and a row a run."""
    names = varied(runs)
    out = [["run", "state", "tau", "95 %", "at step", "samples", "loss", "steps", "tokens", "time", *names]]
    for run in runs:
        low, high = run.shown.get("tau_interval", (None, None))
        out.append([
            run.name,
            run.state,
            f"{run.tau:.3f}" if run.shown else "-",
            f"{low:.2f}-{high:.2f}" if low is not None else "-",
            str(run.shown.get("step", "-")),
            str(run.shown.get("samples", "-")),
            "-" if run.loss is None else f"{run.loss:.3f}",
            str(run.lines[-1]["step"] if run.lines else 0),
            _count(run.tokens),
            _time(run.seconds),
            *(_setting(run.settings.get(name)) for name in names),
        ])  # fmt: skip
    return out


def _runs(path: Path) -> Iterator[Run]:
    if (path / "sweep.toml").is_file():
        trials = _trials(path / "trials.json")
        for folder in sorted((path / "trials").glob("*/")):
            if folder.name.isdigit() and (folder / CONFIG).is_file():
                yield _run(folder, trials.pop(int(folder.name), {}))
        # What is left has no run: most often its settings were refused.
        base = settings(load_toml(TrainConfig, path / "base.toml"), SILENT) if trials else {}
        for number, trial in sorted(trials.items()):
            yield Run(
                name="",
                path=path / "trials" / f"{number:03d}",
                settings=base | trial["settings"],
                state=trial["state"],
                error=(trial.get("error") or [""])[-1],
                lines=[],
                shown={},
            )
    elif (path / CONFIG).is_file():
        yield _run(path, {})
    else:
        raise UsageError(f"{path}: no {CONFIG} or sweep.toml; expected a folder of `dflash-train run` or `sweep`")


def _trials(path: Path) -> dict[int, dict[str, Any]]:
    """Rows of a sweep's table by number."""
    try:
        return {row["number"]: row for row in json.loads(path.read_text())}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise CorruptError(f"{path}: is no table of a sweep; remove it, and rerun the sweep to have it again") from None


def _run(path: Path, trial: dict[str, Any]) -> Run:
    """`trial` is the sweep's row of it."""
    status: dict[str, Any] = {}
    try:
        status = read_json(path / STATUS)
    except (FileNotFoundError, CorruptError):
        status = {"state": "unknown"}
    lines = read_metrics(path)
    ended = {"complete": "finished"}.get(trial.get("state", ""), trial.get("state"))
    return Run(
        name="",
        path=path,
        settings=settings(read_config(path), SILENT),
        state=str(ended or status["state"]),
        error=(trial.get("error") or [str(status.get("error", ""))])[-1],
        lines=lines,
        shown=_evaluated(path) or _measured(lines),
    )


def _measured(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of the measurements while training: the checkpoint that `--best` takes."""
    found = best([line for line in lines if "validation" in line])
    return {**found["validation"], "step": found["step"], "by": "training"} if found else {}


def _evaluated(path: Path) -> dict[str, Any]:
    """What `dflash-train eval` has found of the newest step it was given, on held-out samples."""
    results = []
    for file in (path / "eval").glob("*.json"):
        try:
            result = json.loads(file.read_text())
            if result["own_held_out"]:  # not of another cache, or of another part
                results.append((result["step"], result["samples"], {**result, "by": "eval"}))
        except (ValueError, KeyError, TypeError):
            raise CorruptError(f"{file}: is no result of `dflash-train eval`; remove it") from None
    return max(results, key=lambda r: r[:2])[2] if results else {}


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_setting, value)) or "none"
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _time(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"
