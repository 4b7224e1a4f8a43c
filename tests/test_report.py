"""`dflash-shards report`: numbers against the files they come from, the page, the image."""

import html.parser
import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from train_runs import settings

from dflash_offline import tools
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.tools.cli import main
from dflash_offline.tools.config import Report
from dflash_offline.tools.report import collect, report, table, varied
from dflash_offline.train.loop import train


@pytest.fixture(scope="session")
def runs(cache: Path, six: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Three runs of six steps, one without held-out samples; names that are alike, and one that HTML would eat."""
    folder = tmp_path_factory.mktemp("report")
    other, blind = folder / "a<b>" / "six", folder / "blind"
    assert train(settings(cache, other, "--optim.lr", "1e-2", "--model.layers", "1")) == 0
    assert train(settings(cache, blind, "--validate.every", "0", "--optim.max-steps", "3")) == 0
    return six, other, blind


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_table_is_what_the_runs_say(runs: tuple[Path, ...]) -> None:
    header, *rows = table(found := collect(runs))
    assert header[-2:] == ["model.layers", "optim.lr"] or header[-3:] == ["model.layers", "optim.lr", "optim.max_steps"]
    assert varied(found) == ["model.layers", "optim.lr", "optim.max_steps"]
    assert [run.tau for run in found] == sorted((run.tau for run in found), reverse=True)
    for run, row in zip(found, rows, strict=True):
        cells, told = dict(zip(header, row, strict=True)), lines(run.path)
        measured = [line for line in told if "validation" in line]
        best = max(measured, key=lambda line: line["validation"]["tau"], default=None)
        assert cells["state"] == "finished" and cells["steps"] == str(len(told))
        assert cells["loss"] == f"{told[-1]['loss']:.3f}"
        assert cells["tokens"] == str(sum(line["tokens"] for line in told))
        assert cells["tau"] == (f"{best['validation']['tau']:.3f}" if best else "-")
        if best:
            low, high = best["validation"]["tau_interval"]
            assert (cells["95 %"], cells["at step"]) == (f"{low:.2f}-{high:.2f}", str(best["step"]))
    assert {run.name for run in found} == {f"{path.parent.name}/{path.name}" for path in runs}


def test_a_result_of_eval_comes_before_what_training_measured(runs: tuple[Path, ...], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs[0], tmp_path / "run"))
    (run / "eval").mkdir(exist_ok=True)
    result = {"own_held_out": True, "step": 6, "samples": 9, "tau": 3.25, "tau_interval": [3.0, 3.5]}
    (run / "eval" / "one.json").write_text(json.dumps(result))
    (run / "eval" / "two.json").write_text(json.dumps({**result, "own_held_out": False, "step": 9, "tau": 5.0}))
    header, row = table(collect((run,)))
    cells = dict(zip(header, row, strict=True))
    assert (cells["tau"], cells["95 %"], cells["at step"], cells["samples"]) == ("3.250", "3.00-3.50", "6", "9")
    assert header[-1] == "time"  # one run differs from nothing


def test_a_sweep_stands_for_its_trials(runs: tuple[Path, ...], tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for number, run in enumerate(runs):
        shutil.copytree(run, sweep / "trials" / f"{number:03d}")
    (sweep / "trials" / "003").mkdir()  # was to begin
    (sweep / "sweep.toml").touch()
    rows = [{"number": 0, "state": "complete"}, {"number": 1, "state": "pruned"}]
    (sweep / "trials.json").write_text(
        json.dumps([*rows, {"number": 2, "state": "failed", "error": ["a", "no <loss>"]}])
    )
    found = {run.name: run for run in collect((sweep,))}
    states = {name: run.state for name, run in found.items()}
    assert states == {"000": "finished", "001": "pruned", "002": "failed"} and found["002"].error == "no <loss>"


class Page(html.parser.HTMLParser):
    """Cells, images, and what a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.images, self.fetched = 0, [tag for tag in ("http://", "https://", "<script", "<link") if tag in text]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            self.images += 1
            assert (dict(attrs)["src"] or "").startswith("data:image/svg+xml;base64,")

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("td", "th") and data.strip():
            self.rows[-1][-1] += data


def test_the_page_stands_alone_and_the_image_is_one(
    runs: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, image = tmp_path / "a.html", tmp_path / "a.png"
    words = ["dflash-shards", "report", *map(str, runs), "--html", str(page), "--png", str(image)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    found = Page(page.read_text())
    assert found.rows == table(collect(runs)) and found.images == 3 and not found.fetched
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["run", "state", "tau"] and len(out) == 5
    raw = image.read_bytes()
    width, height = struct.unpack(">II", raw[16:24])
    assert raw.startswith(b"\x89PNG") and width == 1440 and height > 1000


def test_what_is_no_run_is_refused(runs: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep" / "trials").mkdir(parents=True)
    (tmp_path / "sweep" / "sweep.toml").touch()
    for paths, message in (
        ((tmp_path,), "no config.toml or sweep.toml; expected a folder of"),
        ((tmp_path / "sweep",), "no run; expected folders"),
        ((runs[0], runs[0]), "six: is given twice"),
    ):
        with pytest.raises(UsageError, match=message):
            collect(paths)
    monkeypatch.delitem(sys.modules, "dflash_offline.tools.report_page", raising=False)
    monkeypatch.delattr(tools, "report_page", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"need matplotlib .*; pip install matplotlib"):
        report(Report(runs=runs, png=tmp_path / "a.png"))


def test_a_run_without_a_step_has_a_row(runs: tuple[Path, ...], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs[0], tmp_path / "run"))
    (run / "metrics.jsonl").unlink()
    (run / "status.json").unlink()
    header, row = table(collect((run,)))
    assert row[:10] == ["run", "unknown", "-", "-", "-", "-", "-", "0", "0", "0 s"] and len(header) == 10
    report(Report(runs=(run,), html=tmp_path / "a.html"))
    assert "1 training run<" in (tmp_path / "a.html").read_text()
    with pytest.raises(UsageError, match="no run has a step yet"):
        report(Report(runs=(run,), png=tmp_path / "a.png"))


def test_trials_without_a_run_have_a_row(runs: tuple[Path, ...], tmp_path: Path) -> None:
    (tmp_path / "trials" / "notes").mkdir(parents=True)
    shutil.copytree(runs[0], tmp_path / "trials" / "000")
    for name in ("base.toml", "sweep.toml", "trials/notes/config.toml"):
        shutil.copy(runs[0] / "config.toml", tmp_path / name)
    row = {"number": 1, "state": "failed", "error": ["no layer 7"], "settings": {"optim.lr": 0.5}}
    (tmp_path / "trials.json").write_text(json.dumps([{"number": 0, "state": "complete"}, row]))
    header, *rows = table(collect((tmp_path,)))
    assert [(r[0], r[1]) for r in rows] == [("000", "finished"), ("001", "failed")]
    assert header[10:] == ["optim.lr"] and rows[1][10] == "0.5" and collect((tmp_path,))[1].error == "no layer 7"
    (tmp_path / "trials.json").write_text("[{")
    with pytest.raises(CorruptError, match=r"trials.json: is no table of a sweep; remove it"):
        collect((tmp_path,))
    with pytest.raises(UsageError, match="its folder does not exist"):
        report(Report(runs=runs, png=tmp_path / "none" / "a.png"))
