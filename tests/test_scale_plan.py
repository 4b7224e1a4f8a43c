"""The plan's arithmetic against numbers worked out by hand, and docs/scale.md against its tables and the commands."""

import json
import sys
from pathlib import Path

import pytest
import test_docs

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "scale"))
import plan

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def test_hours_and_steps() -> None:
    job = plan.Job(
        tokens=3072e3, epochs=2, gpus=4, extract_rate=100.0, extract_scaling=0.5, step_s=0.1, train_scaling=0.8,
        decode_s=0.1, fill=0.5, kept=0.5,
    )  # fmt: skip
    assert job.made == 200 and job.extraction_hours() == pytest.approx(3072e3 / 200 / 3600)
    assert job.extraction_hours(10.0, 1000.0) == pytest.approx(3072e3 / 100 / 3600)  # the disk takes 100 tokens/s
    assert job.extraction_hours(10.0, 1e6) == job.extraction_hours()
    assert job.steps == 2 * 250  # 1000 rows' worth, half of it kept, in rows half full: 1000 rows, 4 a step
    assert job.training_hours == pytest.approx(500 * 0.1 / 0.8 / 3600)
    assert job.read == pytest.approx(4 * 1536 / 0.1 * 0.8)


def test_sums_over_ranks() -> None:
    assert [plan.ring(8.0, n, 2.0) for n in (1, 2, 4, 8)] == [0, 4, 6, 7]
    assert plan.projected(100, 110, 2) == pytest.approx(100 / 110)
    assert plan.projected(100, 110, 8) == pytest.approx(100 / 117.5)
    assert plan.projected(100, 110, 1) == 1
    # 10 beside the backward pass, 8 bytes gathered at 2 a second, an optimizer of 16: of each, what n ranks leave over.
    assert [plan.sharded(100, 10, 16, 8, n, 2) for n in (1, 2, 4)] == [1, 100 / 99, 100 / 98.5]


def test_packing_is_the_trainers() -> None:
    fill, kept = plan.packing(3000, 2000, 4096)
    assert 0.94 < fill < 1
    assert 0.88 < kept < 0.95  # lognormal: a fifth of the samples is longer than a row
    assert plan.packing(500, 300, 1024)[1] == 1


def test_rates_are_those_of_the_files() -> None:
    found = plan.measured()
    assert found["extract_rate"] == pytest.approx(12632.66, abs=0.01)
    assert [found[n] for n in ("step", "one", "two")] == pytest.approx([0.2151, 0.2342, 0.2423])
    assert found["decode"] == pytest.approx((0.1081 + 0.1146) / 2, abs=1e-4)  # the middle of the twelve rows


def test_a_result_of_eight_gpus_takes_the_place_of_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = {"1": {"tokens/s": 10000}, "8": {"tokens/s": 72000, "efficiency": 0.9}}
    training = {"1": {"step ms": 200, "efficiency": 1.0}, "8": {"step ms": 250, "efficiency": 0.8}}
    told = {"goals": {}, "extraction to /nvme": disk, "extraction to /dev/shm": {}, "training": training}
    (tmp_path / "s.json").write_text(json.dumps({"summary": told}))
    monkeypatch.setattr(sys, "argv", ["plan", "--scale", str(tmp_path / "s.json"), "--samples", "1000"])
    plan.main()
    out = capsys.readouterr().out
    assert "10,000 tokens/s x 8 x 0.900 = 72,000" in out and "200 ms a row, scaling 0.800" in out


def test_the_page_has_the_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plan"])
    plan.main()
    page = PAGE.read_text()
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|") and line not in page]
    assert not missing


def test_the_pages_commands_and_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "T.toml").touch()
    test_docs.test_commands_have_only_settings_that_are_there("scale", monkeypatch, tmp_path)
    test_docs.test_what_is_named_in_passing_is_there("scale")
