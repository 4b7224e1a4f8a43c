"""`dflash-train sweep`: what it refuses, how it goes on after kills, whether its table is true."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import tomli_w
from fake_train import tau
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from train_runs import metrics

from dflash_offline.shards.command import load_toml, unstructure
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import take_lock
from dflash_offline.train import sweep, sweep_trial
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.loop import train
from dflash_offline.train.sweep_config import Method, SweepConfig

FAKE = [str(Path(__file__).with_name("fake_train.py"))]
RATE = {"optim": {"lr": {"low": 1e-4, "high": 1e-3, "log": True}}}
BASE = {
    "device": "cpu",
    "model": {"layers": 1, "block_size": 6},
    "data": {"row_tokens": 100, "row_anchors": 40, "rows_per_step": 2, "val_fraction": 0.2},
    "optim": {"max_steps": 8},
    "validate": {"samples": 4},
}


@pytest.fixture
def made(cache: Path, tmp_path: Path) -> Callable[..., SweepConfig]:
    """Settings of a sweep."""
    (tmp_path / "base.toml").write_text(tomli_w.dumps(BASE))

    def make(**changes: Any) -> SweepConfig:
        given = {"space": RATE, "base": tmp_path / "base.toml", "cache": cache, "sweep_dir": tmp_path / "sweep"}
        given |= {"trials": 4, "fraction": 1.0, "evaluations": 4, "slots": 2, "pruner": Method(name="NopPruner")}
        return SweepConfig(**{**given, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that do not train."""
    monkeypatch.setattr(sweep_trial, "TRAIN", FAKE)
    monkeypatch.setattr(sweep.Sweep, "_export", lambda *_: None)
    monkeypatch.setattr(sweep, "_LOOK_EVERY", 0.05)


def trials(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "trials.json").read_text())
    return rows


@pytest.mark.usefixtures("fake")
def test_what_does_not_fit_is_refused_before_the_first_trial(
    made: Callable[..., SweepConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.toml").write_text("[optim]\nlrr = 1")
    (tmp_path / "gpu.toml").write_text('device = "cuda"')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for changes, message in (
        ({"base": tmp_path / "none.toml"}, "no such file"),
        ({"base": tmp_path / "other.toml"}, r"other.toml: extra fields found \(lrr; did you mean lr\?\)"),
        ({"base": tmp_path / "gpu.toml"}, "no GPU is visible"),
        ({"cache": tmp_path / "none"}, "no such folder"),
        ({"sweep_dir": tmp_path / "mine"}, "mine: holds other files and no sweep.toml"),
        ({"sampler": Method(name="TPE")}, "sampler.name is TPE; expected one of Optuna's: BruteForceSampler"),
        ({"sampler": Method(name="TPESampler", arguments={"sed": 1})}, "sampler.arguments of TPESampler: .* it has: "),
        ({"pruner": Method(name="Median")}, "pruner.name is Median; expected one of Optuna's: HyperbandPruner"),
        ({"pruner": Method(name="PatientPruner")}, "pruner.arguments of PatientPruner"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            sweep.sweep(made(**changes))
        assert "\n" not in str(error.value)
    grid = Method(name="GridSampler", arguments={"search_space": {"optim.eps": [1e-8]}})
    for sampler, message in (
        (
            Method(name="BruteForceSampler"),
            r"space.optim.lr: BruteForceSampler needs a step or choices, found 0.0001 to",
        ),
        (grid, r"search_space: has no values of optim.lr, which space has"),
    ):
        with pytest.raises(UsageError, match=message):
            sweep.sweep(made(sampler=sampler, sweep_dir=tmp_path / "free"))
        assert not (tmp_path / "free" / "identity.json").exists()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"sweep needs optuna .*; pip install optuna"):
        sweep.sweep(made())
    assert not list((tmp_path / "sweep" / "trials").iterdir())


@pytest.mark.usefixtures("fake")
def test_trials_run_side_by_side_and_the_table_is_true(
    made: Callable[..., SweepConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep.sweep(made()) == 0
    folder = tmp_path / "sweep"
    rows = trials(folder)
    check_table(folder, rows)
    assert [row["state"] for row in rows] == ["complete"] * 4
    out, err = capfd.readouterr()
    best = max(rows, key=lambda row: row["tau"])
    assert out.splitlines()[1].split()[0] == str(best["number"])
    assert f"best: trial {best['number']}, tau {best['tau']:.3f}" in out
    assert err.index("trial 1 begins on cpu 1") < err.index("trial 0 complete")
    assert not any((folder / "trials" / f"{row['number']:03d}" / "checkpoints").exists() for row in rows if row != best)
    config = load_toml(TrainConfig, folder / "trials" / "002.toml")
    assert (config.validate.every, config.save.keep_last, config.data.fraction) == (2, 1, 1.0)
    # Done is done, and more trials are more.
    before = (folder / "trials" / "000" / "done").read_bytes()
    assert sweep.sweep(made(trials=5)) == 0
    assert len(trials(folder)) == 5 and (folder / "trials" / "000" / "done").read_bytes() == before


def check_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The table, recomputed from metrics.jsonl, and against the settings of the runs."""
    assert [row["number"] for row in rows] == list(range(len(rows)))
    for row in rows:
        place = folder / "trials" / f"{row['number']:03d}"
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        found = {line["step"]: line["validation"] for line in lines if "validation" in line}
        value = max(numbers["tau"] for numbers in found.values())
        step = min(step for step, numbers in found.items() if numbers["tau"] == value)
        assert (row["value"], row["tau"], row["step"]) == (value, value, step)
        assert row["tau_interval"] == found[step]["tau_interval"] and row["steps"] == len(lines)
        assert row["tokens"] == sum(line["tokens"] for line in lines)
        assert row["seconds"] == pytest.approx(sum(sum(line["seconds"].values()) for line in lines), abs=0.06)
        assert load_toml(TrainConfig, place.with_suffix(".toml")).optim.lr == row["settings"]["optim.lr"]


@pytest.mark.usefixtures("fake")
def test_changed_settings_are_refused_by_name(made: Callable[..., SweepConfig], tmp_path: Path) -> None:
    assert sweep.sweep(made(trials=1)) == 0
    wider = {"optim": {"lr": {"low": 1e-4, "high": 2e-3, "log": True}}}
    more = {**RATE, "model": {"layers": {"low": 1, "high": 2}}}
    (tmp_path / "other.toml").write_text(tomli_w.dumps({**BASE, "optim": {"max_steps": 9}}))
    for changes, message in (
        ({"space": wider}, r"sweep: was made with space.optim.lr = .*0.001.*, now .*0.002.*; set it back, or choose"),
        ({"space": more}, r"was made with space.model.layers = None, now"),
        ({"base": tmp_path / "other.toml"}, r"was made with base.optim.max_steps = 8, now 9"),
        ({"fraction": 0.5}, r"was made with base.data.fraction = 1.0, now 0.5"),
        ({"metric": "tau_uniform"}, r"was made with metric = tau, now tau_uniform"),
    ):
        with pytest.raises(UsageError, match=message):
            sweep.sweep(made(**changes))
    # What a sweep sets itself may say what it likes.
    (tmp_path / "other.toml").write_text(
        tomli_w.dumps({**BASE, "validate": {"samples": 4, "every": 20}, "save": {"every": 7}})
    )
    again = made(trials=2, slots=1, sampler=Method(name="RandomSampler"), base=tmp_path / "other.toml")
    assert sweep.sweep(again) == 0


@pytest.mark.usefixtures("fake")
def test_failed_trials_are_told_and_not_fatal(
    made: Callable[..., SweepConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "5e-4")
    sampler = Method(name="BruteForceSampler")
    space = {"optim.lr": {"choices": [2e-4, 4e-4, 8e-4]}}
    assert sweep.sweep(made(space=space, sampler=sampler, trials=9)) == 0
    rows = trials(tmp_path / "sweep")
    assert sorted((row["settings"]["optim.lr"], row["state"]) for row in rows) == [
        (2e-4, "complete"), (4e-4, "complete"), (8e-4, "failed"),
    ]  # fmt: skip
    (failed,) = [row for row in rows if row["state"] == "failed"]
    assert failed["error"][-1] == "dflash-train run: error: loss is nan" and "value" not in failed
    assert "  | dflash-train run: error: loss is nan" in (err := capfd.readouterr().err)
    assert "every combination of the space has been tried" in err
    monkeypatch.setenv("FAKE_FAILS", "0")
    with pytest.raises(RunError, match="none of 2 trials was completed; see trials"):
        sweep.sweep(made(sweep_dir=tmp_path / "none", trials=2))


@pytest.mark.usefixtures("fake")
@pytest.mark.filterwarnings("ignore:The distribution is specified by")  # a step that does not end at high
@pytest.mark.parametrize("name", ["BruteForceSampler", "GridSampler"])
def test_more_slots_than_settings_are_left_repeat_none(
    made: Callable[..., SweepConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    space = {"optim.lr": {"choices": [2e-4, 4e-4, 8e-4]}, "seed": {"low": 1, "high": 5, "step": 3}}
    arguments = {"search_space": {"optim.lr": [2e-4, 4e-4, 8e-4], "seed": [1, 4]}} if name == "GridSampler" else {}
    given = made(space=space, sampler=Method(name=name, arguments=arguments), trials=20, slots=4)
    assert sweep.sweep(given) == 0
    found = sorted((row["settings"]["optim.lr"], row["settings"]["seed"]) for row in trials(tmp_path / "sweep"))
    assert found == (every := [(lr, seed) for lr in (2e-4, 4e-4, 8e-4) for seed in (1, 4)])
    assert capfd.readouterr().err.count("every combination of the space has been tried") == 1
    # Settings that another sampler repeated count once.
    random = replace(given, sweep_dir=tmp_path / "other", sampler=Method(name="RandomSampler", arguments={"seed": 1}))
    assert sweep.sweep(replace(random, trials=5)) == 0
    before = {(row["settings"]["optim.lr"], row["settings"]["seed"]) for row in trials(random.sweep_dir)}
    assert len(before) < 5
    assert sweep.sweep(replace(given, sweep_dir=random.sweep_dir)) == 0
    after = [(row["settings"]["optim.lr"], row["settings"]["seed"]) for row in trials(random.sweep_dir)][5:]
    assert {*before, *after} == set(every)
    assert name == "GridSampler" or len(after) == 6 - len(before)  # a grid knows only trials of its own


@pytest.mark.usefixtures("fake")
def test_settings_that_do_not_go_together_fail_alone(made: Callable[..., SweepConfig], tmp_path: Path) -> None:
    space = {"loss.decay": {"choices": [0.0, 1.0]}, "loss.dpace": {"choices": [0.0, 1.0]}}
    assert sweep.sweep(made(space=space, sampler=Method(name="BruteForceSampler"), trials=4)) == 0
    rows = trials(tmp_path / "sweep")
    (failed,) = [row for row in rows if row["state"] == "failed"]
    assert failed["settings"] == {"loss.decay": 0.0, "loss.dpace": 0.0}
    assert "loss.decay and loss.dpace: expected numbers >= 0, not both 0" in failed["error"][0]


@pytest.mark.usefixtures("fake")
def test_a_bad_trial_is_pruned_by_its_measurements(made: Callable[..., SweepConfig], tmp_path: Path) -> None:
    space = {"optim.lr": {"choices": [1e-4, 9e-4]}}
    pruner = Method(name="ThresholdPruner", arguments={"lower": 1.15, "n_warmup_steps": 2})
    sampler = Method(name="BruteForceSampler")
    assert sweep.sweep(made(space=space, pruner=pruner, sampler=sampler, trials=2)) == 0
    states = {row["settings"]["optim.lr"]: row for row in trials(tmp_path / "sweep")}
    assert states[9e-4]["state"] == "complete" and states[9e-4]["value"] == tau(9e-4, 8)
    assert states[1e-4]["state"] == "pruned" and 4 <= states[1e-4]["steps"] < 8


@pytest.mark.usefixtures("fake")
def test_a_trial_that_is_killed_goes_on(
    made: Callable[..., SweepConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, killed = sweep_trial.measured, []

    def kill_once(run: Path) -> list[dict[str, Any]]:
        lines = plain(run)
        if len(lines) >= 2 and not killed and run.name == "000":
            killed.append(run)
            next(r.process for r in at_work[0].running.values() if r.place.run == run).kill()
        return lines

    at_work: list[sweep.Sweep] = []
    go = sweep.Sweep.go
    monkeypatch.setattr(sweep.Sweep, "go", lambda self, stop: (at_work.append(self), go(self, stop))[1])
    monkeypatch.setattr(sweep_trial, "measured", kill_once)
    assert sweep.sweep(made(trials=2)) == 0
    assert "trial 0 ended with code -9; it goes on from its checkpoint" in capfd.readouterr().err
    done = (tmp_path / "sweep" / "trials" / "000" / "done").read_text().split()
    assert done == [str(step) for step in range(1, 9)]
    check_table(tmp_path / "sweep", trials(tmp_path / "sweep"))


def children(pid: int) -> list[int]:
    """Processes that `pid` started, of itself or by them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except FileNotFoundError:
            continue
        if parent == pid:
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


def begin(config: SweepConfig, trial: str) -> subprocess.Popen[bytes]:
    """The sweep in a process of its own; `trial` says what trains."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("sweep_process.py")),
        trial,
        json.dumps(unstructure(config)),
    ]
    with (config.sweep_dir.parent / "out").open("ab") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)


def killed_twice(config: SweepConfig, trial: str) -> dict[str, Any]:
    """Run the sweep, kill it with and without its trials, and let it finish. What it had done before each kill."""
    folder, before = config.sweep_dir, {}
    for kill, (ended, with_trials) in enumerate([(2, True), (4, False)]):
        process = begin(config, trial)
        deadline = time.monotonic() + 120
        while not (folder / "trials.json").exists() or sum(r["state"] == "complete" for r in trials(folder)) < ended:
            assert process.poll() is None and time.monotonic() < deadline, (folder.parent / "out").read_text()
            time.sleep(0.02)
        begun = children(process.pid) if with_trials else []
        for pid in (process.pid, *begun):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        before[kill] = {row["number"]: row for row in trials(folder) if row["state"] == "complete"}
        assert len(before[kill]) < config.trials
    with pytest.raises(UsageError, match="in use by pid"), (folder / ".lock").open("a+") as lock:
        take_lock(lock, folder)
        sweep.sweep(config)
    last = begin(config, trial)
    assert last.wait(timeout=300) == 0, (folder.parent / "out").read_text()
    rows = trials(folder)
    assert len(rows) == config.trials and {row["state"] for row in rows} == {"complete"}
    check_table(folder, rows)
    for earlier in before.values():  # what was done is not done again
        assert {n: rows[n] for n in earlier} == earlier
    study = optuna.load_study(
        study_name="sweep", storage=JournalStorage(JournalFileBackend(str(folder / "study.jsonl")))
    )
    assert [t.value for t in study.trials] == [row["value"] for row in rows]
    assert len({t.params["optim.lr"] for t in study.trials}) == config.trials
    return {str(row["number"]): row for row in rows}


def test_a_sweep_that_trains_is_killed_twice_and_goes_on(made: Callable[..., SweepConfig], tmp_path: Path) -> None:
    """Eight trials on two slots; each as if it had not been disturbed, and the best one is exported."""
    config = made(trials=8, sampler=Method(name="RandomSampler", arguments={"seed": 1}))
    rows = killed_twice(config, "real")
    for row in rows.values():
        place = tmp_path / "sweep" / "trials" / f"{row['number']:03d}.toml"
        alone = replace(load_toml(TrainConfig, place), run_dir=tmp_path / "alone" / place.stem)
        assert train(alone) == 0
        both = (alone.run_dir, place.with_suffix(""))
        one, other = ([(line["loss"], line.get("validation")) for line in metrics(run)] for run in both)
        assert one == other and len(one) == 8
    best = max(rows.values(), key=lambda row: (row["tau"], -row["number"]))
    assert (tmp_path / "sweep" / f"best-{best['number']:03d}" / "model.safetensors").is_file()


def test_a_signal_stops_the_trials_and_they_go_on(made: Callable[..., SweepConfig], tmp_path: Path) -> None:
    """B96, B97: no process is left, and no trial is counted as ended."""
    config = made(trials=4)
    process = begin(config, "fake")
    while not list((tmp_path / "sweep" / "trials").glob("*/done")):
        assert process.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.02)
    begun = children(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143 and begun
    assert not [pid for pid in begun if Path(f"/proc/{pid}").exists()]
    assert "stopped; trials at work have saved their step; rerun to continue" in (tmp_path / "out").read_text()
    assert begin(config, "fake").wait(timeout=60) == 0
    check_table(tmp_path / "sweep", trials(tmp_path / "sweep"))
    assert len(trials(tmp_path / "sweep")) == 4
