"""`python sweep_process.py fake|real SETTINGS`: a sweep with these settings (JSON); fake trials do not train."""

import json
import sys
from pathlib import Path

from dflash_offline.shards.command import structure
from dflash_offline.train import sweep, sweep_trial
from dflash_offline.train.sweep_config import SweepConfig

if __name__ == "__main__":
    sweep._LOOK_EVERY = 0.05
    if sys.argv[1] == "fake":
        sweep_trial.TRAIN = [str(Path(__file__).with_name("fake_train.py"))]
        sweep.Sweep._export = lambda *_: None  # type: ignore[method-assign]
    sys.exit(sweep.sweep(structure(SweepConfig, json.loads(sys.argv[2]), "settings")))
