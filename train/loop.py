"""`dflash-train run`: the training loop."""

import math
import signal
from collections import Counter
from contextlib import closing, nullcontext, suppress
from typing import Any

import torch

from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import write_json
from dflash_offline.train import checkpoint, parallel
from dflash_offline.train.checkpoint import Checkpoint
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.evaluate import load_target
from dflash_offline.train.export import first_drafter
from dflash_offline.train.feed import compiles, feed, slow_shape
from dflash_offline.train.flops import work_done
from dflash_offline.train.folder import CHECKPOINTS, STATUS, claim, facts, hold
from dflash_offline.train.job import Job, prepare
from dflash_offline.train.log import Clock, Metrics, say
from dflash_offline.train.loss import Objective, block_loss
from dflash_offline.train.memory import Place, fits
from dflash_offline.train.model import Drafter, Edges, Target, block_inputs
from dflash_offline.train.optim import learning_rate
from dflash_offline.train.parallel import Ranks, Sums
from dflash_offline.train.rows import Row
from dflash_offline.train.saver import saver
from dflash_offline.train.state import State
from dflash_offline.train.step_end import StepEnd
from dflash_offline.train.stop import Stop, stop_signals
from dflash_offline.train.tally import Tally, step_metrics
from dflash_offline.train.trackers import Trackers, check_trackers
from dflash_offline.train.waits import Waits


def train(config: TrainConfig) -> int:
    """Train, or continue, the run at `config.run_dir`. Returns 0, or 128 + the signal that stopped it."""
    check_trackers(config)
    with parallel.connect(config.device) as ranks, stop_signals() as stop:
        job = prepare(config, ranks.world)
        with hold(config.run_dir) if ranks.first else nullcontext():
            if ranks.first:
                claim(config.run_dir, config, job.identity)
                checkpoint.clean(config.run_dir / CHECKPOINTS)
            ranks.wait()
            try:
                with fits(ranks, _smaller(config)) as place:
                    code = _train(job, ranks, stop, place)
            except BaseException as error:
                with suppress(OSError):  # a full disk must not hide the error itself
                    _status(job, ranks, "failed", error=str(error) or type(error).__name__)
                raise
            _status(job, ranks, "stopped" if code else "finished", code=code)
            # torchrun ends the other ranks when one leaves with a code, and one of them may still be saving.
            ranks.wait()
    return code


def _train(job: Job, ranks: Ranks, stop: Stop, place: Place) -> int:
    config, spec, device = job.config, job.spec, ranks.device
    dtype = _compute_dtype(config, device)
    state = State.of(first_drafter(config.model, spec, config.seed).to(device), config.optim, dtype, ranks)
    target = load_target(job.cache, device, dtype)
    objective = Objective.of(config.loss, spec.block_size, device)
    found = _resume(job, ranks, state)
    about = found.state if found else {}
    first = about.get("step", 0)
    unmeasured = about.get("unmeasured")  # the line of the checkpoint's step, still to be written
    told = first - 1 if unmeasured else first
    metrics = Metrics(config.run_dir, told, Trackers(config)) if ranks.first else None
    if metrics:
        again = f"; all {first} steps are done" if first == job.steps else f"; continuing after step {first}"
        say(job.describe() + (again if first else ""))
    _status(job, ranks, "running", first=first)

    builder, dealt = job.builder(), job.plan.dealt(first, job.steps, ranks.rank, ranks.world)
    if metrics and first < job.steps:
        for note in filter(None, (slow_shape(builder, device, dtype), compiles(device))):
            say(note)
    rows = feed(builder, dealt, device, dtype, config.data.threads, config.data.rows_ahead)
    reduced = Sums(ranks, state.sums())
    waits = Waits(ranks, config.data)
    own_rows, clock = config.data.rows_per_step // ranks.world, Clock(device)
    shown = closing(metrics) if metrics else nullcontext()
    with shown, saver(config.run_dir / CHECKPOINTS, config.save) as writer, closing(rows):
        end = StepEnd(
            job=job, ranks=ranks, stop=stop, state=state, target=target, saver=writer, metrics=metrics,
            best=about.get("best"),
        )  # fmt: skip
        done, stopping = first, False
        if unmeasured:
            stopping = end.close(unmeasured, stopping=False, show=True)
        if first < job.steps:
            upcoming = next(rows)
            clock.lap("data")
        for step in range(first + 1, job.steps + 1):
            if stopping:
                break
            place.now = f"step {step}"
            tally, loading = Tally(spec.block_size, device), Counter[str]()
            for number in range(1, own_rows + 1):
                row = upcoming
                tally.add_row(row)
                loading.update(row.seconds)
                if row.anchors:
                    edges = (
                        Edges(state.arrive, reduced.ready if number == own_rows else None) if ranks.world > 1 else None
                    )
                    _learn(state.working, target, row, objective, tally, clock, edges, config.recompute)
                # Before anything waits for the device: it is busy while the next row is taken over.
                upcoming = next(rows, row)
                clock.lap("data")
            tally.add("stops", stop.signal is not None)
            state.settle()
            reduced.finish()
            sums = tally.collect(ranks, waits.last)
            clock.lap("reduce")
            rate, norm = learning_rate(step - 1, job.steps, config.optim), 0.0
            # Without supervision nothing is learnt; AdamW's moments would move the weights all the same.
            if sums["divisor"]:
                norm, scale = state.scale(sums["divisor"])
                # Both are of sums over the ranks, so all of them leave here or none.
                if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
                    raise RunError(
                        f"step {step}: loss is {sums['loss'] / sums['divisor']}, gradient norm {norm}; expected finite "
                        "numbers; older checkpoints are sound: try a lower optim.lr in another --run-dir"
                    )
                state.step(step, rate, scale)
            state.clear()
            clock.lap("optimizer")
            entry: dict[str, Any] = {
                "step": step,
                "epoch": job.plan.progress(step - 1),
                "lr": rate,
                "grad_norm": norm,
                **step_metrics(sums, seconds := clock.read(), spec.block_size),
                **work_done(spec, config.data, sums, sum(seconds.values()), ranks),
                "loader_seconds": {name: round(value, 4) for name, value in loading.items()},
            }
            waits.add(entry, sums["waited"], warm=step > first + 1)
            show = step % config.log_every == 0 or step == first + 1
            stopping = end.close(entry, sums["stops"] > 0, show)
            if show and (told_wait := waits.report()):
                say(told_wait)
            done = step
            clock.read()
    if stopping:
        if metrics:
            say(f"stopped after step {done} of {job.steps}, which is saved; rerun to continue")
        return 128 + (stop.signal or signal.SIGTERM)
    return 0


def _learn(
    drafter: Drafter,
    target: Target,
    row: Row,
    objective: Objective,
    tally: Tally,
    clock: Clock,
    edges: Edges | None,
    recompute: bool,
) -> None:
    """Add the gradient of one row's loss."""
    spec = drafter.spec
    inputs = block_inputs(target.embedding_VD, row.anchor_token_A, spec.block_size, spec.mask_token_id)
    output_AKD = drafter(row.states_TLD, row.position_T, inputs, row.blocks, row.views, edges, recompute)
    clock.lap("forward")
    teacher_AKD = None
    if row.last_TD is not None:
        teacher_AKD = target.norm(row.last_TD.to(target.head_VD.dtype))[row.blocks.before(len(row.last_TD))]
    loss = block_loss(
        objective, output_AKD, target.head_VD, row.label_AK, row.supervised_AK, row.supervised_samples, teacher_AKD,
        row.supervised_N,
    )  # fmt: skip
    clock.lap("loss")
    torch.autograd.backward(loss.loss)
    tally.add_loss(row, loss)
    clock.lap("backward")


def _resume(job: Job, ranks: Ranks, state: State) -> Checkpoint | None:
    """Restore the newest complete checkpoint and return it."""
    found, passed = checkpoint.newest(job.config.run_dir / CHECKPOINTS)
    if ranks.first:
        for reason in passed:
            say(f"passed over an incomplete checkpoint: {reason}")
    first, cache = found.step if found else 0, job.cache.fingerprint
    if not ranks.same([facts(job.config, job.identity), job.steps, first]):
        raise UsageError(
            f"rank {ranks.rank}: differs from the other ranks: its newest checkpoint is of step {first} of "
            f"{job.steps}, its cache {cache}; expected the same caches, settings and run folder on every host"
        )
    if found is not None:
        state.restore(found)
    return found


def _status(job: Job, ranks: Ranks, state: str, **facts: int | str) -> None:
    """Say how the run stands in a file: under torchrun the exit code is not ours."""
    if ranks.first:
        write_json(job.config.run_dir / STATUS, {"state": state, **facts})


def _smaller(config: TrainConfig) -> str:
    """What takes less memory than `config`, in words."""
    data = config.data
    return ("" if config.recompute else "--recompute True, which this run may go on with, or ") + (
        f"in another --run-dir --loss.chunk below {config.loss.chunk}, --data.row-tokens below {data.row_tokens} and "
        f"--data.row-anchors below {data.row_anchors}"
    )


def _compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    if config.precision == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.precision == "float32" else torch.bfloat16
