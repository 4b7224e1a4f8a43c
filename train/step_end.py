"""What follows a computed step: held-out numbers, its line in metrics.jsonl, a checkpoint."""

from dataclasses import dataclass
from typing import Any

import torch

from dflash_offline.shards.errors import RunError
from dflash_offline.train import checkpoint
from dflash_offline.train.evaluate import bf16_weights, measure, summary
from dflash_offline.train.folder import facts
from dflash_offline.train.job import Job
from dflash_offline.train.log import Metrics, line, say
from dflash_offline.train.model import Target
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.saver import Saver
from dflash_offline.train.state import State
from dflash_offline.train.stop import Stop


@dataclass(kw_only=True)
class StepEnd:
    """Closes the steps of a run."""

    job: Job
    ranks: Ranks
    stop: Stop
    state: State
    target: Target
    saver: Saver
    metrics: Metrics | None
    """Only the first rank writes them."""
    best: dict[str, Any] | None = None
    """Step and tau of the checkpoint that is kept as the best."""

    def close(self, entry: dict[str, Any], stopping: bool, show: bool) -> bool:
        """Finish the step of `entry`; whether the run stops with it. Every rank must call it."""
        config, step, last = self.job.config, entry["step"], entry["step"] == self.job.steps
        better, unmeasured = False, None
        if config.validate.every and (step % config.validate.every == 0 or last):
            found = self._measure()
            if found is None:
                stopping, unmeasured = True, entry
            else:
                entry = {**entry, "validation": found}
                better = config.save.keep_best and (self.best is None or found["tau"] > self.best["tau"])
                self.best = {"step": step, "tau": found["tau"]} if better else self.best
        if self.metrics and unmeasured is None:
            self.metrics.write(entry)
            if show or last or stopping:
                say(line(entry, self.job.steps))
        if stopping or last or better or step % config.save.every == 0:
            self._save(step, unmeasured)
        self.saver.check()
        return stopping

    def _measure(self) -> dict[str, Any] | None:
        """Held-out numbers; None where a signal came first. The rerun measures then, from the checkpoint."""
        job, device = self.job, self.ranks.device
        self.state.gather()
        drafter = bf16_weights(self.state.served, device)
        counts = measure(drafter, self.target, job.cache, job.validation, self.ranks, self.stop)
        return None if counts is None else summary(counts, resamples=200, seed=job.config.seed)

    def _save(self, step: int, unmeasured: dict[str, Any] | None) -> None:
        """Start writing a checkpoint of weights that all ranks agree on."""
        if not self.ranks.agree(self.state.hash()):
            raise RunError(f"step {step}: the weights of the ranks differ; the last checkpoint before it is sound")
        self.state.gather()
        if name := checkpoint.not_finite(self.state.drafter.state_dict()):
            raise RunError(
                f"step {step}: {name} is no longer finite and was not saved; "
                "older checkpoints are sound: try a lower optim.lr in another --run-dir"
            )
        if self.ranks.first:
            about = {
                **facts(self.job.config, self.job.identity),
                "world": self.ranks.world,
                "torch": torch.__version__,
                "best": self.best,
                "unmeasured": unmeasured,
            }
            self.saver.start(step, self.state.items(), about, self.best["step"] if self.best else None)
        else:
            for _ in self.state.items():  # has a part in gathering them
                pass
