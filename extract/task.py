"""One task -> one shard: an idempotent function that any worker, machine or engine may run.

A finished shard whose trailer carries the task's hash is left alone, so running a task twice is waste, never damage.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_offline.extract import kernels, roots
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dataset import Skip
from dflash_offline.extract.forward import Capture, batches
from dflash_offline.extract.plan import Planned, Task, load_task, skip_line
from dflash_offline.extract.target import Target, load_decoder
from dflash_offline.shards import calibration
from dflash_offline.shards.build import is_done
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import atomic_file
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.index import shard_name
from dflash_offline.shards.keys import last_positions
from dflash_offline.shards.manifest import CodecInfo, shard_metadata
from dflash_offline.shards.writer import ShardWriter

CALIBRATION_TOKENS = 4096
_ENCODERS = 2
_AHEAD = 16
"""Samples encoded but not yet written; bounds the memory of a worker."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a finished task reports."""

    samples: int
    tokens: int
    bytes: int
    skipped: int


class Captured(NamedTuple):
    """What is kept of one sample, bf16 on the target's device."""

    states_TLD: Tensor
    last_ND: Tensor
    """After the last layer, where the next token is supervised."""


Frames = tuple[list[bytes], list[bytes]]
"""Of the states, and of the last hidden state."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A loaded target and what its states become."""

    config: ExtractConfig
    layers: tuple[int, ...]
    captured: tuple[int, ...]
    """`layers`, and the target's last one when the last hidden state is stored."""
    capture: Capture
    kernels: str
    device: torch.device


def make_runner(config: ExtractConfig, target: Target, layers: Sequence[int], device: torch.device) -> Runner:
    """Load the target onto `device`; the slow part of a worker's start."""
    used = kernels.install(target.model_type, device, config.allow_slow)
    attention = kernels.PACKED_ATTENTION if config.batching == "packed" else "sdpa"
    captured = (*layers, target.config.num_hidden_layers - 1) if config.last_hidden else tuple(layers)
    model = load_decoder(target, max(captured), device, compute_dtype(config, device), attention)
    capture = Capture(model, captured, config.batching, device)
    return Runner(config=config, layers=tuple(layers), captured=captured, capture=capture, kernels=used, device=device)


def compute_dtype(config: ExtractConfig, device: torch.device) -> torch.dtype:
    """The compute type of the target on `device`."""
    if config.target.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.target.dtype)


def calibrate(runner: Runner, cache: Path, task: Task) -> None:
    """Measure the codec on the first tokens of the plan and write codec.safetensors."""
    samples, tokens = [], 0
    for sample in load_task(cache, task):
        samples.append(sample)
        tokens += len(sample.input_ids)
        if tokens >= CALIBRATION_TOKENS:
            break
    found = [(sample, s) for sample, s in _forward(runner, samples) if isinstance(s, Captured)]
    if not found:
        raise CorruptError(f"{runner.config.target.path}: no finite states in the first {len(samples)} samples")
    states = torch.cat([s.states_TLD for _, s in found])[:CALIBRATION_TOKENS]
    last = torch.cat([s.last_ND for _, s in found])[:CALIBRATION_TOKENS] if runner.config.last_hidden else None
    calibration.write(cache, runner.config.codec, runner.config.codec_parameters(), states, last)


def run_task(runner: Runner, cache: Path, number: int, task: Task) -> Done:
    """Extract task `number` into its shard, unless that shard is already there."""
    path = cache / shard_name(number)
    if is_done(path, task.hash):
        return Done(samples=0, tokens=0, bytes=0, skipped=0)
    info = codec_info(runner.config, cache)
    codec = calibration.read(cache, info, len(runner.layers), runner.capture.hidden_size, runner.config.last_hidden).to(
        runner.device
    )
    metadata, skipped = shard_metadata(info, runner.layers), list[Skip]()
    samples = tokens = 0
    with (
        ThreadPoolExecutor(_ENCODERS) as pool,
        ShardWriter(
            path,
            task=task.hash,
            metadata=metadata,
            last_hidden=runner.config.last_hidden,
            body=roots.choose(runner.config.roots, cache, path.name),
        ) as writer,
    ):
        pending: deque[tuple[Planned, Future[Frames]]] = deque()
        for sample, states in _forward(runner, load_task(cache, task)):
            if isinstance(states, Skip):
                skipped.append(states)
                continue
            pending.append((sample, pool.submit(_encode, codec, states)))
            samples, tokens = samples + 1, tokens + len(sample.input_ids)
            if len(pending) > _AHEAD:
                _append(writer, pending)
        while pending:
            _append(writer, pending)
        if skipped:
            # Before the shard: once the shard is there, the task is never run again.
            with atomic_file(skips_path(path)) as file:
                file.write("".join(json.dumps(skip_line(s)) + "\n" for s in skipped).encode())
    return Done(samples=samples, tokens=tokens, bytes=path.stat().st_size, skipped=len(skipped))


def _encode(codec: Calibrated, states: Captured) -> Frames:
    last = [] if codec.last is None else encode_frames(codec.last, states.last_ND[:, None])
    return encode_frames(codec.states, states.states_TLD), last


def _append(writer: ShardWriter, pending: deque[tuple[Planned, Future[Frames]]]) -> None:
    sample, frames = pending.popleft()
    writer.append(sample.identity, sample.input_ids, sample.loss_mask, *frames.result())


def skips_path(shard: Path) -> Path:
    """Where a task leaves the samples it could not write."""
    return shard.with_suffix(".skipped.jsonl")


def codec_info(config: ExtractConfig, cache: Path) -> CodecInfo:
    """The configured codec as the manifest has it."""
    return calibration.info(cache, config.codec, config.codec_parameters())


def _forward(runner: Runner, samples: Sequence[Planned]) -> Iterator[tuple[Planned, Captured | Skip]]:
    """The states of every sample in order, or why there are none."""
    ids = [torch.from_numpy(s.input_ids) for s in samples]
    for group in batches([len(i) for i in ids], runner.config.token_budget, runner.config.batching == "padded"):
        for n, states in zip(group, _states(runner, [ids[n] for n in group]), strict=True):
            yield samples[n], _checked(runner, samples[n], states)


def _states(runner: Runner, ids: list[Tensor]) -> list[Tensor | None]:
    """The captured states of one batch; a batch that does not fit is halved, a sample that does not fit is None."""
    try:
        return list(runner.capture(ids))
    except torch.OutOfMemoryError:
        if len(ids) == 1:
            return [None]
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
    half = len(ids) // 2
    return _states(runner, ids[:half]) + _states(runner, ids[half:])


def _checked(runner: Runner, sample: Planned, states: Tensor | None) -> Captured | Skip:
    def skip(reason: str, detail: str) -> Skip:
        who: Any = sample.identity
        return Skip(source=who.source, number=who.source_row, id=who.id, reason=reason, detail=detail)

    if states is None:
        return skip("oom", f"{len(sample.input_ids)} tokens do not fit into memory")
    bad = ~torch.isfinite(states).all(dim=2)
    if bad.any():
        at, layer = (int(i) for i in bad.nonzero()[0])
        return skip("nonfinite_hidden", f"layer {runner.captured[layer]}, token {at}")
    if not runner.config.last_hidden:
        return Captured(states, states[:, 0, :0])
    at_N = torch.from_numpy(last_positions(sample.loss_mask)).to(states.device)
    return Captured(states[:, : len(runner.layers)], states[at_N, -1])
