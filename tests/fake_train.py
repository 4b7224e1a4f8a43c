"""`python fake_train.py run --config FILE --run-dir RUN ...`: a trial as a sweep sees it, without training.

Steps of 50 ms; held-out tau is a function of optim.lr and the step; goes on from its notes for a checkpoint. It fails
where optim.lr is above FAKE_FAILS, and notes every step that it does in RUN/done.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from dflash_offline.shards.command import load_toml
from dflash_offline.shards.files import take_lock, write_json
from dflash_offline.train.config import TrainConfig

STEPS = 8


def tau(lr: float, step: int) -> float:
    return 1 + lr * 1000 * step / STEPS


def main(argv: list[str]) -> int:
    flags = dict(zip(argv[1::2], argv[2::2], strict=True))
    config, run = load_toml(TrainConfig, Path(flags["--config"])), Path(flags["--run-dir"])
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    with (run / ".lock").open("a+") as lock, (run / "metrics.jsonl").open("a+") as metrics:
        take_lock(lock, run)
        print(f"trains with {flags}")
        lr, saved = config.optim.lr, run / "checkpoints" / "step"
        # The note of a step is one write, whole or absent when this is killed.
        notes = run / "done"
        first = len(notes.read_text().split()) if saved.exists() and notes.exists() else 0
        metrics.seek(0)
        kept = metrics.readlines()[:first]
        metrics.truncate(0)
        metrics.writelines(kept)
        if lr > float(os.environ.get("FAKE_FAILS", "inf")):
            print("dflash-train run: error: loss is nan", file=sys.stderr)
            write_json(run / "status.json", {"state": "failed", "error": "loss is nan"})
            return 1
        for step in range(first + 1, STEPS + 1):
            time.sleep(0.05)
            entry: dict[str, Any] = {"step": step, "tokens": 100, "seconds": {"forward": 0.05}, "loss": 1.0}
            if step % config.validate.every == 0 or step == STEPS:
                value = tau(lr, step)
                entry["validation"] = {"tau": value, "tau_interval": [value - 0.1, value + 0.1], "tau_uniform": value}
            metrics.write(json.dumps(entry) + "\n")
            metrics.flush()
            saved.touch()
            with notes.open("a") as done:
                done.write(f"{step}\n")
            if stops:
                write_json(run / "status.json", {"state": "stopped"})
                return 143
        write_json(run / "status.json", {"state": "finished"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
