"""`dflash-train sweep`: trials of a search side by side on one cache, chosen by Optuna.

SWEEP/.lock          held by the process that sweeps
SWEEP/sweep.toml     its settings; base.toml: those that every trial starts from
SWEEP/study.jsonl    Optuna's journal: which trials there are, their values and outcomes
SWEEP/trials/        007.toml, 007.log and the run folder 007 of trial 7
SWEEP/trials.json    the table: outcome, measured numbers, settings
SWEEP/best-007/      the best trial's drafter, exported

The study knows which trials have begun and ended, a run folder how far a trial is. So after any kill the same command
goes on: trials that had not ended continue from their checkpoints with their settings.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from dflash_offline.shards.command import unstructure
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.train import sweep_trial
from dflash_offline.train.folder import CHECKPOINTS
from dflash_offline.train.job import prepare
from dflash_offline.train.log import say
from dflash_offline.train.stop import Stop, stop_signals
from dflash_offline.train.sweep_config import SweepConfig
from dflash_offline.train.sweep_setup import Setup, hold, prepare_sweep
from dflash_offline.train.sweep_space import settings, suggest
from dflash_offline.train.sweep_trial import Place

if TYPE_CHECKING:
    import optuna

ATTEMPTS = 3
"""Starts of a trial whose process dies without a word, in one sweep."""
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
_LOOK_EVERY = 0.5
_PATIENCE = 150.0
"""Seconds that a trial has to save when the sweep is stopped; torchrun ends its ranks after 120."""


@dataclass(kw_only=True)
class Running:
    """A trial at work."""

    trial: "optuna.Trial"
    place: Place
    process: subprocess.Popen[bytes]
    reported: int
    """Measurements that the study has."""
    pruned: bool = False


def sweep(config: SweepConfig) -> int:
    """The command. Returns 0, or 128 + the signal that stopped it."""
    with hold(config.sweep_dir), stop_signals() as stop:
        setup = prepare_sweep(config)
        work = Sweep(config, setup)
        code = work.go(stop)
        if code:
            say("stopped; trials at work have saved their step; rerun to continue")
            return code
        return work.end()


class Sweep:
    """The trials of one start of a sweep."""

    def __init__(self, config: SweepConfig, setup: Setup) -> None:
        self.config, self.setup, self.study = config, setup, setup.study
        self.trials = config.sweep_dir / "trials"
        self.free = deque(setup.slots)
        self.running: dict[str, Running] = {}
        self.attempts: dict[int, int] = {}
        self.ended: dict[int, dict[str, Any]] = {}
        """Rows of the table that will not change."""
        self.waiting = deque(t.number for t in self.study.trials if not t.state.is_finished())
        if done := len(self.study.trials) - len(self.waiting):
            say(f"{config.sweep_dir}: {done} of {config.trials} trials are done, {len(self.waiting)} go on")

    def go(self, stop: Stop) -> int:
        """Until every trial has ended, or a signal came: then 128 + its number."""
        try:
            while stop.signal is None:
                for slot, running in list(self.running.items()):
                    self._look(slot, running)
                self._fill()
                if not self.running and not self.waiting:
                    return 0
                time.sleep(_LOOK_EVERY)
            number, stop.signal = stop.signal, None
            return 128 + number
        finally:
            self._stop(stop)

    def end(self) -> int:
        """Table and export."""
        rows = self.write_table()
        for line in table(rows, list(self.setup.space)):
            print(line)
        done = [row for row in rows if row["state"] == "complete"]
        if not done:
            raise RunError(f"{self.config.sweep_dir}: none of {len(rows)} trials was completed; see trials/*.log")
        best = self.study.best_trial.number
        out = self.config.sweep_dir / f"best-{best:03d}"
        if not out.exists():
            self._export(Place(trials=self.trials, number=best).run, out)
        print(f"best: trial {best}, {self.config.metric} {self.study.best_value:.3f}, in {out}")
        return 0

    def _export(self, run: Path, out: Path) -> None:
        export = ["export", "--run-dir", str(run), "--best", "True", "--out", str(out)]
        left = subprocess.run([sys.executable, *sweep_trial.TRAIN, *export], check=False)
        if left.returncode:
            raise RunError(f"{out}: the export of {run} left with code {left.returncode}; rerun to try again")

    def write_table(self) -> list[dict[str, Any]]:
        """trials.json, from the study and the metrics of the runs."""
        rows = []
        for trial in self.study.trials:
            if (row := self.ended.get(trial.number)) is None:
                place = Place(trials=self.trials, number=trial.number)
                row = {"number": trial.number, "state": STATES[trial.state.name]}
                row |= sweep_trial.row(place, self.config.metric)
                row |= {"settings": trial.user_attrs.get("settings", {}), **_error(trial)}
            if trial.state.is_finished():
                self.ended[trial.number] = row
            rows.append(row)
        with atomic_file(self.config.sweep_dir / "trials.json") as file:
            file.write(json.dumps(rows, indent=1).encode())
        return rows

    def _fill(self) -> None:
        """Give free slots the trials of a sweep that was killed, then new ones."""
        for _ in range(len(self.free)):
            if self.waiting:
                number = self.waiting.popleft()
                if Place(trials=self.trials, number=number).busy():
                    self.waiting.append(number)  # its process of before is still saving
                    continue
            elif self._wants_more():
                number = self.study.ask().number
            else:
                return
            self._start(self.free[0], number)

    def _wants_more(self) -> bool:
        trials = self.study.trials
        if len(trials) >= self.config.trials or self.study.user_attrs.get("exhausted"):
            return False
        begun = {json.dumps(trial.user_attrs.get("settings")) for trial in trials}
        return self.setup.settings is None or len(begun) < self.setup.settings

    def _start(self, slot: str, number: int) -> None:
        import optuna

        frozen = self.study.trials[number]
        trial = optuna.Trial(self.study, frozen._trial_id)
        values = suggest(trial, self.setup.space)
        trial.set_user_attr("settings", values)
        place = Place(trials=self.trials, number=number)
        try:
            if not place.config.exists():
                self._write_config(place, values)
        except UsageError as error:
            self._end(trial, place, failed=[str(error)])
            return
        environment = {} if slot.startswith("cpu") else {"CUDA_VISIBLE_DEVICES": slot}
        if slot.startswith("cpu") and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(self.setup.slots)))
        cache = None if "cache" in values else self.config.cache
        process = sweep_trial.start(place, cache, self.config.ranks, environment)
        self.free.popleft()
        again = "goes on" if place.run.exists() else "begins"
        say(f"trial {number} {again} on {slot}: " + ", ".join(f"{n} = {_short(v)}" for n, v in values.items()))
        self.running[slot] = Running(
            trial=trial, place=place, process=process, reported=len(frozen.intermediate_values)
        )

    def _write_config(self, place: Place, values: dict[str, Any]) -> None:
        config = settings(self.setup.base, values)
        steps = prepare(config, self.config.ranks).steps
        every = -(-steps // self.config.evaluations)
        config = replace(
            config,
            run_dir=place.run,
            validate=replace(config.validate, every=every),
            save=replace(config.save, every=min(config.save.every, every), keep_last=1, keep_best=True),
        )
        with atomic_file(place.config) as file:
            file.write(tomli_w.dumps(unstructure(config)).encode())

    def _look(self, slot: str, running: Running) -> None:
        """Tell the study what was measured, end what it wants ended, and settle what has left."""
        code = running.process.poll()
        lines = sweep_trial.measured(running.place.run)
        new = lines[running.reported :]
        for at, line in enumerate(new, running.reported + 1):
            running.trial.report(line["validation"][self.config.metric], at)
        running.reported = max(running.reported, len(lines))  # a run that goes on cuts them back to its checkpoint
        if code is None:
            if new and not running.pruned and running.trial.should_prune():
                running.pruned = True
                running.process.terminate()
            return
        del self.running[slot]
        self.free.append(slot)
        state = sweep_trial.status(running.place)
        number = running.place.number
        if running.pruned and state != "finished":
            self._end(running.trial, running.place, pruned=True)
        elif state == "finished" and lines:
            self._end(running.trial, running.place)
        elif state == "failed" or code == 2 or self.attempts.get(number, 1) == ATTEMPTS:
            words = sweep_trial.last_words(running.place.log)
            self._end(running.trial, running.place, failed=words or [f"left with code {code}"])
        else:
            self.attempts[number] = self.attempts.get(number, 1) + 1
            say(f"trial {number} ended with code {code}; it goes on from its checkpoint")
            self.waiting.append(number)

    def _end(
        self, trial: "optuna.Trial", place: Place, *, pruned: bool = False, failed: list[str] | None = None
    ) -> None:
        """Tell the study how a trial ended, then everyone."""
        from optuna.trial import TrialState

        row = sweep_trial.row(place, self.config.metric)
        state = TrialState.PRUNED if pruned else TrialState.FAIL if failed else TrialState.COMPLETE
        if failed:
            trial.set_user_attr("error", failed)
        try:
            self.study.tell(trial, row["value"] if state is TrialState.COMPLETE else None, state=state)
        except RuntimeError as error:  # how samplers over finite spaces say that there is nothing left
            if "Study.stop" not in str(error):
                raise
            if not self.study.user_attrs.get("exhausted"):
                say("every combination of the space has been tried")
            self.study.set_user_attr("exhausted", True)
        say(f"trial {place.number} {_words(row, STATES[state.name])}")
        for text in failed or ():
            say(f"  | {text}")
        self._tidy()
        self.write_table()

    def _tidy(self) -> None:
        """Checkpoints of a 27B drafter are 21 GB each."""
        if self.config.keep_checkpoints:
            return
        ended = {t.number: t for t in self.study.trials if t.state.is_finished()}
        done = [n for n, t in ended.items() if t.state.name == "COMPLETE"]
        best = self.study.best_trial.number if done else None
        for number in ended:
            if number != best:
                shutil.rmtree(Place(trials=self.trials, number=number).run / CHECKPOINTS, ignore_errors=True)

    def _stop(self, stop: Stop) -> None:
        """Ask trials at work to save and leave; a second signal, or patience at its end, kills them."""
        for running in self.running.values():
            running.process.terminate()
        deadline = time.monotonic() + _PATIENCE
        for running in self.running.values():
            while running.process.poll() is None:
                if stop.signal is not None or time.monotonic() > deadline:
                    running.process.kill()
                time.sleep(0.05)


def table(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Trials for people, the best first."""
    ranked = sorted(rows, key=lambda row: (row["state"] != "complete", -row.get("value", 0.0)))
    cells = [["trial", "state", "tau", "95 %", "at step", "seconds", *names]]
    for row in ranked:
        low, high = row.get("tau_interval", (None, None))
        between = f"{low:.2f}-{high:.2f}" if low is not None else ""
        tau = f"{row['tau']:.3f}" if "tau" in row else ""
        facts = [str(row["number"]), row["state"], tau, between, str(row.get("step", "")), f"{row['seconds']:.0f}"]
        cells.append([*facts, *(_short(row["settings"].get(name, "")) for name in names)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) for line in cells]


def _words(row: dict[str, Any], state: str) -> str:
    if "tau" not in row:
        return state
    low, high = row["tau_interval"]
    return f"{state}: tau {row['tau']:.3f} [{low:.3f}, {high:.3f}] at step {row['step']}, {row['seconds']:.0f} s"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _error(trial: "optuna.trial.FrozenTrial") -> dict[str, Any]:
    return {"error": trial.user_attrs["error"]} if "error" in trial.user_attrs else {}
