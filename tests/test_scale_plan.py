"""The plan's arithmetic against numbers worked out by hand, and docs/scale.md against its tables and the commands."""

import json
import sys
from collections.abc import Sequence
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
    steps = {1: 100.0, 2: 110.0}
    assert [plan.step_at(n, steps) for n in (1, 2, 4, 8)] == [100, 110, 115, 117.5]
    # The same by its parts: sums and weights cost 18 on two, and of an optimizer of 16 a rank has its share.
    assert plan.step_at(8, steps) == pytest.approx(100 - 16 * 7 / 8 + 18 * 2 * 7 / 8)
    assert plan.step_at(4, {1: 100.0, 4: 120.0, 8: 150.0}) == 120
    assert plan.step_at(2, {1: 100.0, 4: 115.0, 8: 150.0}) == pytest.approx(110)


def test_packing_is_the_trainers() -> None:
    fill, kept = plan.packing(3000, 2000, 4096)
    assert 0.94 < fill < 1
    assert 0.88 < kept < 0.95  # lognormal: a fifth of the samples is longer than a row
    assert plan.packing(500, 300, 1024)[1] == 1


def test_extraction_is_of_one_gpu(tmp_path: Path) -> None:
    rate, codec = plan.extraction(plan.HERE / "extract/2026-11-30-flash-qla.json")
    assert rate == pytest.approx(13231.04, abs=0.01) and codec == "lossless"  # the mean of the middle two turns
    assert plan.extraction(plan.HERE / "extract/2026-11-30.json")[1] == "ecsq"  # from before it was noted
    (tmp_path / "e.json").write_text(json.dumps({"codec": "ecsq", "2 GPU": {}}))
    with pytest.raises(SystemExit, match=r"e\.json: no rates of 1 GPU; expected a result of"):
        plan.extraction(tmp_path / "e.json")


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["plan", "--samples", "1000", *map(str, words)])
    plan.main()
    return capsys.readouterr().out


def scale_file(path: Path, *counts: int, parts: Sequence[str] = ("extraction", "training")) -> Path:
    """A result of run.py: extraction loses 0.0125 a GPU to memory and half to disk, training 50 ms beside one."""
    turns = [
        {"gpus": n, "to": to, "each": [rate * (1 if n == 1 else 1 - loss * n)] * n}
        for to, rate, loss in (("/nvme", 8000, 0.05), ("/dev/shm", 10000, 0.0125))
        for n in counts
    ]
    loader = [{"disk": 0.1, "cores": 9, "decode": 0.2, "copy": 9}]
    training = {
        str(n): {
            "published": {"codec": "fp8", "step ms": 200 if n == 1 else 250, "phases ms": {"data": 0}}
            | {"loader": loader}
        }
        for n in counts
    }
    told = {"extraction": {"turns": turns}, "training": training}
    path.write_text(json.dumps({"codec": "lossless", **{name: told[name] for name in parts}}))
    return path


def test_a_result_of_eight_gpus_takes_the_place_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = scale_file(tmp_path / "s.json", 1, 2, 8)
    out = printed(monkeypatch, capsys, "--scale", scale)
    assert "10,000 tokens/s x 8 x 0.900 = 72,000" in out and "200 ms a row, scaling 0.800" in out
    assert "measured with lossless" in out and "a row: 0.300 thread seconds" in out
    rows = [line.split(" | ") for line in out.splitlines() if " GPUs |" in line]
    assert [row[4].rstrip(" |") for row in rows] == ["0.800 (measured)", "0.727", "0.800 (measured)"]
    (fp8,) = [line.split(" | ") for line in out.splitlines() if line.startswith("| fp8") and " | 7" in line]
    assert fp8[-1].rstrip(" |") == "9.6"  # a row of 0.3 thread seconds in each of eight steps of 0.25
    out = printed(monkeypatch, capsys, "--scale", scale, "--extract-scaling", 0.5, "--train-scaling", 0.6)
    assert "10,000 tokens/s x 8 x 0.500 = 40,000" in out and "200 ms a row, scaling 0.600" in out


def test_of_a_count_that_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Extraction as with the most GPUs that were, training by the model."""
    scale = scale_file(tmp_path / "s.json", 1, 2)
    out = printed(monkeypatch, capsys, "--scale", scale)
    assert "x 8 x 0.975" in out and f"scaling {200 / 287.5:.3f}" in out
    assert "x 4 x 0.975" in printed(monkeypatch, capsys, "--scale", scale, "--gpus", 4)


def test_a_part_that_was_not_measured_is_of_the_projects_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = printed(monkeypatch, capsys).splitlines()
    training = printed(
        monkeypatch, capsys, "--scale", scale_file(tmp_path / "s.json", 1, 8, parts=["training"])
    ).splitlines()
    assert training[1:3] == usual[1:3] and "200 ms a row, scaling 0.800" in training[3]
    extraction = printed(
        monkeypatch, capsys, "--scale", scale_file(tmp_path / "s.json", 1, 8, parts=["extraction"])
    ).splitlines()
    assert "10,000 tokens/s x 8 x 0.900" in extraction[1] and extraction[3:5] == usual[3:5]


def test_one_gpu_is_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"s\.json: no rates of one GPU or no steps of more; expected both, of run"):
        printed(monkeypatch, capsys, "--scale", scale_file(tmp_path / "s.json", 1))


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
