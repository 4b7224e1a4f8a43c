"""One task -> one shard: an idempotent function that any worker, machine or engine may run.

A finished shard whose trailer carries the task's hash is left alone, so running a task twice is waste, never damage.
"""

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dflash_offline.extract import kernels
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dataset import Skip
from dflash_offline.extract.forward import Capture, batches
from dflash_offline.extract.plan import Planned, Task, load_task, skip_line
from dflash_offline.extract.target import Target, load_decoder
from dflash_offline.shards import codecs
from dflash_offline.shards.cache import CODEC_FILE
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.index import shard_name
from dflash_offline.shards.layout import read_trailer
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


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A loaded target and what its states become."""

    config: ExtractConfig
    layers: tuple[int, ...]
    capture: Capture
    kernels: str
    device: torch.device


def make_runner(config: ExtractConfig, target: Target, layers: Sequence[int], device: torch.device) -> Runner:
    """Load the target onto `device`; the slow part of a worker's start."""
    used = kernels.install(target.model_type, device, config.allow_slow)
    attention = kernels.PACKED_ATTENTION if config.batching == "packed" else "sdpa"
    model = load_decoder(target, max(layers), device, compute_dtype(config, device), attention)
    capture = Capture(model, layers, config.batching, device)
    return Runner(config=config, layers=tuple(layers), capture=capture, kernels=used, device=device)


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
    states = [s for _, s in _forward(runner, samples) if isinstance(s, Tensor)]
    if not states:
        raise CorruptError(f"{runner.config.target.path}: no finite states in the first {len(samples)} samples")
    measured = torch.cat(states)[:CALIBRATION_TOKENS]
    codec = codecs.calibrate(runner.config.codec, measured, runner.config.codec_parameters())
    with atomic_file(cache / CODEC_FILE) as file:
        file.write(save({name: tensor.cpu().contiguous() for name, tensor in codec.calibration().items()}))


def run_task(runner: Runner, cache: Path, number: int, task: Task) -> Done:
    """Extract task `number` into its shard, unless that shard is already there."""
    path = cache / shard_name(number)
    if is_done(path, task):
        return Done(samples=0, tokens=0, bytes=0, skipped=0)
    codec = open_codec(runner, cache)
    info = codec_info(runner.config, file_hash(cache / CODEC_FILE))
    metadata = shard_metadata(info, runner.layers)
    skipped: list[Skip] = []
    samples = tokens = 0
    with ThreadPoolExecutor(_ENCODERS) as pool, ShardWriter(path, task=task.hash, metadata=metadata) as writer:
        pending: deque[tuple[Planned, Future[list[bytes]]]] = deque()
        for sample, states in _forward(runner, load_task(cache, task)):
            if isinstance(states, Skip):
                skipped.append(states)
                continue
            pending.append((sample, pool.submit(encode_frames, codec, states)))
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


def _append(writer: ShardWriter, pending: deque[tuple[Planned, Future[list[bytes]]]]) -> None:
    sample, frames = pending.popleft()
    writer.append(sample.identity, sample.input_ids, sample.loss_mask, frames.result())


def skips_path(shard: Path) -> Path:
    """Where a task leaves the samples it could not write."""
    return shard.with_suffix(".skipped.jsonl")


def codec_info(config: ExtractConfig, calibration: str) -> CodecInfo:
    """The configured codec as the manifest has it; `calibration` is the hash of codec.safetensors."""
    version, parameters = codecs.CODECS[config.codec].version, config.codec_parameters()
    return CodecInfo(name=config.codec, version=version, parameters=parameters, calibration=calibration)


def is_done(path: Path, task: Task) -> bool:
    """True when the task's shard is finished. A torn one is set aside, to be written again.

    Raises CorruptError when a shard is there that this plan did not make.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            found = read_trailer(file, str(path)).task
        except CorruptError as error:
            print(f"{error}; moved to {path.name}.torn", file=sys.stderr)
            path.replace(path.with_name(f"{path.name}.torn"))
            return False
    if found != task.hash:
        raise CorruptError(f"{path}: written by task {found}, the plan says {task.hash}; use another cache folder")
    return True


def open_codec(runner: Runner, cache: Path) -> codecs.Codec:
    """The calibrated codec of a run."""
    config, width = runner.config, runner.capture.hidden_size
    version, calibration = codecs.CODECS[config.codec].version, load_file(cache / CODEC_FILE)
    return codecs.restore(config.codec, version, config.codec_parameters(), calibration, len(runner.layers), width)


def _forward(runner: Runner, samples: Sequence[Planned]) -> Iterator[tuple[Planned, Tensor | Skip]]:
    """bf16 [T, L, D] of every sample in order, or why there is none."""
    ids = [torch.from_numpy(s.input_ids) for s in samples]
    for group in batches([len(i) for i in ids], runner.config.token_budget, runner.config.batching == "padded"):
        for n, states in zip(group, _states(runner, [ids[n] for n in group]), strict=True):
            yield samples[n], _checked(runner, samples[n], states)


def _states(runner: Runner, ids: list[Tensor]) -> list[Tensor | None]:
    """The captured states of one batch; a batch that does not fit is halved, a sample that does not fit is None."""
    try:
        return [s.cpu() for s in runner.capture(ids)]
    except torch.OutOfMemoryError:
        if len(ids) == 1:
            return [None]
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
    half = len(ids) // 2
    return _states(runner, ids[:half]) + _states(runner, ids[half:])


def _checked(runner: Runner, sample: Planned, states: Tensor | None) -> Tensor | Skip:
    def skip(reason: str, detail: str) -> Skip:
        who: Any = sample.identity
        return Skip(source=who.source, number=who.source_row, id=who.id, reason=reason, detail=detail)

    if states is None:
        return skip("oom", f"{len(sample.input_ids)} tokens do not fit into memory")
    bad = ~torch.isfinite(states).all(dim=2)
    if bad.any():
        at, layer = (int(i) for i in bad.nonzero()[0])
        return skip("nonfinite_hidden", f"layer {runner.layers[layer]}, token {at}")
    return states
