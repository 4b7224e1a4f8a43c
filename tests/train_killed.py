"""`python train_killed.py KILLS SEED OUT ARGUMENTS...`: train, killed KILLS times, and again from the start when done.

Every attempt is a fork of this process, which has imported torch and computed nothing. It dies by SIGKILL, either at a
random moment or at a named point of its code, with half of what it writes there on disk. OUT says, line by line, where
it died or that it finished; finished runs are moved to OUT.1, OUT.2, ...
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_offline.shards import files
from dflash_offline.shards.command import parse
from dflash_offline.train import checkpoint, folder, log
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.loop import train

POINTS: dict[str, tuple[Any, str]] = {
    "before tensors are written": (checkpoint, "write_tensors"),
    "in the middle of writing tensors": (checkpoint, "save_file"),
    "before state.json": (checkpoint, "write_json"),
    "between fsync and rename": (checkpoint, "publish"),
    "between rename and fsync of the folder": (files, "fsync_folder"),
    "while an old checkpoint is removed": (checkpoint.shutil, "rmtree"),  # type: ignore[attr-defined]
    "in the middle of a line of metrics": (log.Metrics, "write"),
    "while the run folder is claimed": (folder, "write_json"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, count: int, run: Path) -> None:
    """Die at the `count`-th time that `point` is reached."""
    module, name = POINTS[point]
    plain: Callable[..., Any] = getattr(module, name)
    calls = 0

    def reached(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < count:
            return plain(*args, **kwargs)
        if name == "save_file":
            plain(*args, **kwargs)
            os.truncate(args[1], os.path.getsize(args[1]) // 2)  # noqa: PTH202
        elif name == "rmtree":
            for path in [p for p in Path(args[0]).glob("*") if p.is_file()][:1]:
                path.unlink()
        elif name == "write":
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(args[1])[:40])
        die()

    setattr(module, name, reached)


def main(kills: int, seed: int, out: Path, arguments: list[str]) -> None:
    run, rng = Path(arguments[arguments.index("--run-dir") + 1]), random.Random(seed)
    longest, done, finished = 3.0, 0, 0
    while done < kills:
        point, count, wait = rng.choice(["at a random moment", *POINTS]), rng.randint(1, 8), rng.uniform(0.0, 1.0)
        begun = time.monotonic()
        if (child := os.fork()) == 0:
            try:
                if point in POINTS:
                    arm(point, 1 if "claimed" in point else count, run)
                os._exit(train(parse(TrainConfig, arguments, "", "")))
            finally:
                os._exit(99)
        if point not in POINTS:
            time.sleep(wait * longest)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), f"{point}: left with {code}"
        done += code != 0
        with out.open("a") as file:
            file.write(f"{point if code else 'finished'}\n")
        if code == 0:
            longest, finished = time.monotonic() - begun, finished + 1
            shutil.move(run, f"{out}.{finished}")
    assert train(parse(TrainConfig, arguments, "", "")) == 0
    shutil.move(run, f"{out}.{finished + 1}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
