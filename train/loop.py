"""`dflash-train run`: the training loop."""

import math
import signal
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any

import torch

from dflash_offline.shards.errors import RunError
from dflash_offline.shards.files import write_json
from dflash_offline.train import checkpoint, parallel
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.evaluate import bf16_weights, load_target, measure, summary
from dflash_offline.train.export import first_drafter
from dflash_offline.train.folder import CHECKPOINTS, STATUS, claim, facts, hold
from dflash_offline.train.job import Job, prepare
from dflash_offline.train.log import Clock, Metrics, line, say
from dflash_offline.train.loss import Objective, block_loss
from dflash_offline.train.model import Drafter, Target, block_inputs
from dflash_offline.train.optim import learning_rate
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.rows import Row, ahead
from dflash_offline.train.state import State
from dflash_offline.train.stop import Stop, stop_signals
from dflash_offline.train.tally import Tally, step_metrics


def train(config: TrainConfig) -> int:
    """Train, or continue, the run at `config.run_dir`. Returns 0, or 128 + the signal that stopped it."""
    with parallel.connect(config.device) as ranks, stop_signals() as stop:
        job = prepare(config, ranks.world)
        with hold(config.run_dir) if ranks.first else nullcontext():
            if ranks.first:
                claim(config.run_dir, config, job.identity)
            ranks.wait()
            try:
                code = _train(job, ranks, stop)
            except BaseException as error:
                with suppress(OSError):  # a full disk must not hide the error itself
                    _status(job, ranks, "failed", error=str(error) or type(error).__name__)
                raise
            _status(job, ranks, "stopped" if code else "finished", code=code)
            # torchrun ends the other ranks when one leaves with a code, and one of them may still be saving.
            ranks.wait()
    return code


def _train(job: Job, ranks: Ranks, stop: Stop) -> int:
    config, spec, device = job.config, job.spec, ranks.device
    dtype = _compute_dtype(config, device)
    state = State.of(first_drafter(config.model, spec, config.seed).to(device), config.optim)
    target = load_target(job.cache, device, dtype)
    objective = Objective.of(config.loss, spec.block_size, device)
    first = _resume(job, ranks, state)
    metrics = Metrics(config.run_dir / "metrics.jsonl", first) if ranks.first else None
    if metrics:
        again = f"; all {first} steps are done" if first == job.steps else f"; continuing after step {first}"
        say(job.describe() + (again if first else ""))
    _status(job, ranks, "running", first=first)

    builder, dealt = job.builder(), job.plan.dealt(first, job.steps, ranks.rank, ranks.world)
    rows = ahead(lambda row: builder.build(*row), dealt, config.data.threads, config.data.rows_ahead)
    clock = Clock(device)
    for step in range(first + 1, job.steps + 1):
        state.gradients.flat.zero_()
        tally = Tally(spec.block_size, device)
        for row in islice(rows, config.data.rows_per_step // ranks.world):
            clock.lap("data")
            tally.add_row(row)
            if row.anchors:
                _learn(state.drafter, target, row.to(device), objective, dtype, tally, clock)
        tally.add("stops", stop.signal is not None)
        sums = tally.collect(ranks)
        ranks.sum(state.gradients.flat)
        clock.lap("reduce")
        rate, norm = learning_rate(step - 1, job.steps, config.optim), 0.0
        # Without supervision nothing is learnt; AdamW's moments would move the weights all the same.
        if sums["divisor"]:
            norm = state.gradients.normalise(sums["divisor"], config.optim.clip)
            # Both are of sums over the ranks, so all of them leave here or none.
            if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
                raise RunError(
                    f"step {step}: loss is {sums['loss'] / sums['divisor']}, gradient norm {norm}; expected finite "
                    "numbers; older checkpoints are sound: try a lower optim.lr in another --run-dir"
                )
            state.step(step, rate)
        clock.lap("optimizer")

        stopping, last = sums["stops"] > 0, step == job.steps
        entry: dict[str, Any] = {
            "step": step,
            "epoch": (step - 1) / job.plan.steps_per_epoch,
            "lr": rate,
            "grad_norm": norm,
        }
        entry |= step_metrics(sums, clock.read(), spec.block_size)
        # Also when stopping: the rerun goes on after this step and would never measure it.
        if config.validate.every and (step % config.validate.every == 0 or last):
            counts = measure(bf16_weights(state.served, device), target, job.cache, job.validation, ranks)
            entry["validation"] = summary(counts, resamples=200, seed=config.seed)
            clock.read()
        if metrics:
            metrics.write(entry)
            if step % config.log_every == 0 or step == first + 1 or last or stopping:
                say(line(entry, job.steps))
        if stopping or last or step % config.save.every == 0:
            _save(job, ranks, step, state)
            clock.read()
        if stopping:
            if metrics:
                say(f"stopped after step {step} of {job.steps}, which is saved; rerun to continue")
            rows.close()
            return 128 + (stop.signal or signal.SIGTERM)
    return 0


def _learn(
    drafter: Drafter,
    target: Target,
    row: Row,
    objective: Objective,
    dtype: torch.dtype,
    tally: Tally,
    clock: Clock,
) -> None:
    """Add the gradient of one row's loss."""
    spec = drafter.spec
    with torch.autocast(row.states_TLD.device.type, dtype, enabled=dtype != torch.float32):
        inputs = block_inputs(target.embedding_VD, row.anchor_token_A, spec.block_size, spec.mask_token_id)
        output_AKD = drafter(row.states_TLD, row.position_T, inputs, row.blocks)
        clock.lap("forward")
        teacher_AKD = None if row.last_TD is None else target.norm(row.last_TD)[row.blocks.before(len(row.last_TD))]
        loss = block_loss(
            objective, output_AKD, target.head_VD, row.label_AK, row.supervised_AK, row.supervised_samples, teacher_AKD
        )
        clock.lap("loss")
    torch.autograd.backward(loss.loss)
    tally.add_loss(row, loss)
    clock.lap("backward")


def _resume(job: Job, ranks: Ranks, state: State) -> int:
    """Restore the newest complete checkpoint; the steps it had done, 0 where there is none."""
    root = job.config.run_dir / CHECKPOINTS
    found, passed = checkpoint.newest(root)
    if ranks.first:
        checkpoint.clean(root)
        for reason in passed:
            say(f"passed over an incomplete checkpoint: {reason}")
    if found is None:
        return 0
    state.restore(found)
    return found.step


def _save(job: Job, ranks: Ranks, step: int, state: State) -> None:
    """Write a checkpoint of weights that all ranks agree on, and wait for it."""
    if not ranks.agree(state.hash()):
        raise RunError(f"step {step}: the weights of the ranks differ; the last checkpoint before it is sound")
    if name := checkpoint.not_finite(state.drafter.state_dict()):
        raise RunError(
            f"step {step}: {name} is no longer finite and was not saved; "
            "older checkpoints are sound: try a lower optim.lr in another --run-dir"
        )
    if ranks.first:
        config = job.config
        about = {**facts(config, job.identity), "world": ranks.world, "torch": torch.__version__}
        checkpoint.save(config.run_dir / CHECKPOINTS, step, state.files(), about, config.save.keep_last)


def _status(job: Job, ranks: Ranks, state: str, **facts: int | str) -> None:
    """Say how the run stands in a file: under torchrun the exit code is not ours."""
    if ranks.first:
        write_json(job.config.run_dir / STATUS, {"state": state, **facts})


def _compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    if config.precision == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.precision == "float32" else torch.bfloat16
