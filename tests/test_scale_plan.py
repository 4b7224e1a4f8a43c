"""The plan's arithmetic against numbers worked out by hand, and docs/scale.md against its tables and the commands."""

import json
import sys
from pathlib import Path
from typing import Any

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
    rate, scaling, codec = plan.extraction(plan.HERE / "extract/2026-11-30.json")
    assert rate == pytest.approx(12632.66, abs=0.01) and (scaling, codec) == (None, "ecsq")
    assert [found[n] for n in ("step", "one", "two")] == pytest.approx([0.2151, 0.2342, 0.2423])
    assert found["decode"] == pytest.approx((0.1081 + 0.1146) / 2, abs=1e-4)  # the middle of the twelve rows


TURNS = {"discard": [1], "shards": [90, 100, 95]}
TOGETHER = {
    "0": {"tokens/s": {**TURNS, "shards, the others idle": [101, 99]}},
    "1": {"tokens/s": {**TURNS, "shards, the others idle": []}},
}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"codec": "lossless", "2 GPU": TOGETHER}, (100, 0.95, "lossless")),
        ({"1 GPU": {"0": {"tokens/s": {"shards": [98]}}}, "2 GPU": TOGETHER}, (98, 0.95, "ecsq")),
        ({"codec": "fp8", "1 GPU": {"3": {"tokens/s": {"shards": [98, 97, 1]}}}}, (97, None, "fp8")),
    ],
)
def test_extraction_on_one_or_two_gpus(told: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps(told))
    assert plan.extraction(tmp_path / "e.json") == expected


def test_extraction_of_neither_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps({"codec": "ecsq", "4 GPU": TOGETHER}))
    with pytest.raises(SystemExit, match=r"e\.json: rates of 4 GPU; expected 1 GPU"):
        plan.extraction(tmp_path / "e.json")


def test_rates_of_two_gpus_are_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.json").write_text(json.dumps({"codec": "lossless", "2 GPU": TOGETHER}))
    out = printed(monkeypatch, capsys, "--extract", tmp_path / "e.json")
    assert "100 tokens/s x 8 x 0.950 = 760" in out and "measured with lossless" in out
    assert "100 tokens/s x 8 x 0.970" in printed(
        monkeypatch, capsys, "--extract", tmp_path / "e.json", "--extract-scaling", 0.97
    )


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["plan", "--samples", "1000", *map(str, words)])
    plan.main()
    return capsys.readouterr().out


def scale_file(path: Path, *counts: int) -> Path:
    """A result of run.py: extraction loses 0.0125 a GPU, training 0.025."""
    disk = {n: {"tokens/s": 10000 * n, "efficiency": 1 - 0.0125 * n} for n in counts}
    training = {n: {"step ms": 200 if n == 1 else 250, "efficiency": 1 - 0.025 * n} for n in counts}
    told = {"goals": {}, "extraction to /nvme": disk, "extraction to /dev/shm": {}, "training": training}
    path.write_text(json.dumps({"codec": "lossless", "summary": told}))
    return path


def test_a_result_of_eight_gpus_takes_the_place_of_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = scale_file(tmp_path / "s.json", 1, 2, 8)
    out = printed(monkeypatch, capsys, "--scale", scale)
    assert "10,000 tokens/s x 8 x 0.900 = 72,000" in out and "200 ms a row, scaling 0.800" in out
    assert "measured with lossless" in out
    rows = [line.split(" | ") for line in out.splitlines() if " GPUs |" in line]
    assert [row[3].rstrip(" |") for row in rows] == ["0.950 (measured)", "0.993", "0.800 (measured)"]
    out = printed(monkeypatch, capsys, "--scale", scale, "--extract-scaling", 0.5, "--train-scaling", 0.6)
    assert "10,000 tokens/s x 8 x 0.500 = 40,000" in out and "200 ms a row, scaling 0.600" in out


def test_a_count_that_was_not_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = scale_file(tmp_path / "s.json", 1, 2)
    with pytest.raises(SystemExit, match=r"s\.json: has 1, 2 GPUs, --gpus is 8; expected one of these, or --extract-"):
        printed(monkeypatch, capsys, "--scale", scale)
    assert "x 2 x 0.975" in printed(monkeypatch, capsys, "--scale", scale, "--gpus", 2)
    assert "x 8 x 0.900" in printed(
        monkeypatch, capsys, "--scale", scale, "--extract-scaling", 0.9, "--train-scaling", 0.9
    )


def test_a_result_of_training_alone_leaves_extraction_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"training": {"1": {"step ms": 200, "efficiency": 1}, "8": {"step ms": 250, "efficiency": 0.8}}}
    (tmp_path / "s.json").write_text(json.dumps({"summary": told}))
    out = printed(monkeypatch, capsys, "--scale", tmp_path / "s.json")
    assert "12,633 tokens/s x 8 x 0.970" in out and "200 ms a row, scaling 0.800" in out


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
