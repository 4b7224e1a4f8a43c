"""One task -> one shard: an idempotent function that any worker, machine or engine may run.

A finished shard whose trailer carries the task's hash is left alone, so running a task twice is waste, never damage.
"""

import json
import time
import traceback
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from dflash_offline.extract import checks, roots
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dataset import Skip
from dflash_offline.extract.encode import Encoder, Frames
from dflash_offline.extract.plan import Planned, Task, load_task, skip_line
from dflash_offline.extract.runner import Launched, Row, Runner, finished, launches, rows
from dflash_offline.shards import calibration
from dflash_offline.shards.build import is_done
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.errors import CorruptError, RunError
from dflash_offline.shards.files import atomic_file
from dflash_offline.shards.index import shard_name
from dflash_offline.shards.manifest import CodecInfo, shard_metadata
from dflash_offline.shards.writer import ShardWriter

CALIBRATION_TOKENS = 4096
ROWS_AHEAD = 3
"""Rows whose states exist at one time: computed, waiting, and being encoded. Bounds the memory of a worker."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a finished task reports."""

    samples: int
    tokens: int
    bytes: int
    skipped: int
    seconds: float = 0.0
    audited: int = 0
    """Samples whose states were checked and whose frames were decoded again."""
    weak: int = 0
    """Of these, how many are stored worse than the calibration promised."""


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """A row on its way to the disk."""

    samples: list[Planned]
    frames: list[Future[Frames]]
    skipped: list[Skip]
    drawn: dict[int, Tensor]
    """Place in the row -> the states to compare its frames with."""


def calibrate(runner: Runner, cache: Path, task: Task) -> None:
    """Measure the codec on the first tokens of the plan and write codec.safetensors."""
    samples, tokens = [], 0
    for sample in load_task(cache, task):
        samples.append(sample)
        tokens += len(sample.input_ids)
        if tokens >= CALIBRATION_TOKENS:
            break
    found = list(rows(runner, samples))
    states_PLD = torch.cat([row.states_PLD.to(runner.device) for row in found])[:CALIBRATION_TOKENS]
    if not len(states_PLD):
        raise CorruptError(f"{runner.config.target.path}: no finite states in the first {len(samples)} samples")
    last = [row.last_ND for row in found if row.last_ND is not None]
    last_ND = torch.cat(last)[:CALIBRATION_TOKENS] if last else None
    calibration.write(cache, runner.config.codec, runner.config.codec_parameters(), states_PLD, last_ND)


def run_task(runner: Runner, cache: Path, number: int, task: Task) -> Future[Done]:
    """Run the target over task `number`, unless its shard is there. The result comes when the shard is durable.

    The next task may begin before that: the target does not wait for the disk.
    """
    path = cache / shard_name(number)
    if is_done(path, task.hash):
        done: Future[Done] = Future()
        done.set_result(Done(samples=0, tokens=0, bytes=0, skipped=0))
        return done
    info = codec_info(runner.config, cache)
    width = runner.capture.hidden_size
    codec = calibration.read(cache, info, len(runner.layers), width, runner.config.last_hidden)
    inbox: SimpleQueue[Launched | BaseException | None] = SimpleQueue()
    writer = ShardWriter(
        path,
        task=task.hash,
        metadata=shard_metadata(info, runner.layers),
        last_hidden=runner.config.last_hidden,
        body=roots.choose(runner.config.roots, cache, path.name),
    )
    done = runner.writer.submit(_write, runner, codec, writer, path, inbox)
    end: BaseException | None = None
    try:
        for launched in launches(runner, load_task(cache, task)):
            inbox.put(launched)
            del launched  # whoever writes it decides how long its states are kept
            while not runner.alive.below(ROWS_AHEAD, 0.5):
                if done.done():
                    return done  # it failed; its future says why
    except BaseException as error:
        end = error
        raise
    finally:
        inbox.put(end)
        if end is not None:
            done.exception()  # an attempt that follows writes under the same name
    return done


def _encode(runner: Runner, encoder: Encoder, launched: Launched) -> _Encoded:
    """Wait for a row, look at it, and begin what makes frames of it."""
    with encoder.beside():
        row = finished(runner, launched)
        drawn = _audit(runner, row)
        frames = encoder(row.states_PLD, row.lengths, row.last_ND, row.counts) if row.samples else []
    return _Encoded(samples=row.samples, frames=frames, skipped=row.skipped, drawn=drawn)


def _audit(runner: Runner, row: Row) -> dict[int, Tensor]:
    """Check the row's states; those of samples drawn are kept for the comparison with their frames."""
    if not row.samples or not runner.config.guard.audit_every:
        return {}
    ids = [sample.input_ids for sample in row.samples]
    runner.watch.row(row.states_PLD, [sample.identity.key for sample in row.samples], ids)
    pieces = enumerate(zip(row.samples, torch.split(row.states_PLD, row.lengths), strict=True))
    return {
        n: checks.check_sample(states_TLD, sample.identity.key, sample.input_ids, runner.layers)
        for n, (sample, states_TLD) in pieces
        if checks.is_drawn(sample.identity.key, runner.config.guard.audit_every)
    }


def _write(*given: Any) -> Done:
    """`_written`, whose error keeps no rows: the next task waits for them to go."""
    try:
        return _written(*given)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        del given
        raise


def _written(
    runner: Runner,
    codec: Calibrated,
    writer: ShardWriter,
    path: Path,
    inbox: "SimpleQueue[Launched | BaseException | None]",
) -> Done:
    """Append rows as they come; an error instead of the end leaves no shard."""
    skipped: list[Skip] = []
    begun, samples, tokens, audited, weak = time.monotonic(), 0, 0, 0, 0
    with writer, closing(Encoder(codec, runner.device)) as encoder:
        while (launched := inbox.get()) is not None:
            if isinstance(launched, BaseException):
                raise RunError(f"{path}: given up: {launched}")
            row = _encode(runner, encoder, launched)
            del launched
            for n, (sample, ready) in enumerate(zip(row.samples, row.frames, strict=True)):
                frames, last_frames = ready.result()
                writer.append(sample.identity, sample.input_ids, sample.loss_mask, frames, last_frames)
                samples, tokens = samples + 1, tokens + len(sample.input_ids)
                if n in row.drawn:
                    audited += 1
                    weak += not checks.fidelity(codec, frames, row.drawn[n], sample.identity.key)
            skipped += row.skipped
            runner.beat()
        if skipped:
            # Before the shard: once the shard is there, the task is never run again.
            with atomic_file(skips_path(path)) as file:
                file.write("".join(json.dumps(skip_line(s)) + "\n" for s in skipped).encode())
    return Done(
        samples=samples,
        tokens=tokens,
        bytes=path.stat().st_size,
        skipped=len(skipped),
        seconds=round(time.monotonic() - begun, 3),
        audited=audited,
        weak=weak,
    )


def skips_path(shard: Path) -> Path:
    """Where a task leaves the samples it could not write."""
    return shard.with_suffix(".skipped.jsonl")


def codec_info(config: ExtractConfig, cache: Path) -> CodecInfo:
    """The configured codec as the manifest has it."""
    return calibration.info(cache, config.codec, config.codec_parameters())
