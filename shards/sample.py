"""A sample as it is read: first verified and entropy-decoded planes in one buffer, then bf16 states.

The first step is for threads (zstd and xxh3 run outside the interpreter lock) and may fill pinned memory; the second
runs on any device, after a single copy of the buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.codecs import Codec
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.frames import Layout, inflate, inspect, spans
from dflash_offline.shards.keys import last_positions

_ALIGN = 16
"""Planes start at multiples of this, so that they can be viewed as wider types."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as the target saw it."""

    key: str
    input_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T], 1 where the token is supervised."""
    states: Tensor
    """bf16 [T, L * D], private memory."""
    last_hidden: Tensor | None = None
    """bf16 [N, D]: the residual stream after the target's last layer, before its norm, at `keys.last_positions`; None
    where the cache does not store it."""


class Frame(NamedTuple):
    """Planes of a frame, as ranges of the buffer."""

    tokens: int
    planes: list[slice]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One sample whose bytes are verified and entropy-decoded, and not yet de-quantised."""

    key: str
    input_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T]"""
    buffer: Tensor
    """uint8, all planes of all frames."""
    frames: list[Frame]
    last_frames: list[Frame]

    def decode(self, codec: Calibrated) -> Sample:
        """De-quantise on the device of `codec`. From pinned memory the copy to a GPU is asynchronous."""
        buffer = self.buffer.to(codec.device, non_blocking=True)
        last = None if codec.last is None else _decode(codec.last, buffer, self.last_frames, codec.hidden)
        return Sample(
            key=self.key,
            input_ids=self.input_ids,
            loss_mask=self.loss_mask,
            states=_decode(codec.states, buffer, self.frames, codec.layers * codec.hidden),
            last_hidden=last,
        )


def unpack_sample(
    key: str,
    input_ids: NDArray[np.int32],
    loss_mask: NDArray[np.uint8],
    frames: Sequence[memoryview],
    last_frames: Sequence[memoryview],
    codec: Calibrated,
    allocate: Callable[[int], Tensor],
) -> Encoded:
    """Verify and entropy-decode a sample's frames into one buffer of `allocate(bytes)`.

    Raises CorruptError naming the frame; the caller adds shard and sample.
    """
    parts = [(codec.states, frames, len(input_ids), "frame")]
    if codec.last is not None:
        parts.append((codec.last, last_frames, len(last_positions(loss_mask)), "last-hidden frame"))
    # Every size is checked before the one allocation.
    plans = [_plan(*part) for part in parts]
    sizes = [raw for plan in plans for *_, layout in plan for raw, _ in layout.sizes]
    buffer = allocate(sum(_aligned(size) for size in sizes))
    at = 0

    def place(size: int) -> Tensor:
        nonlocal at
        at += _aligned(size)
        return buffer[at - _aligned(size) : at - _aligned(size) + size]

    made: list[list[Frame]] = [[], []]
    for (coder, _, _, name), plan, out in zip(parts, plans, made, strict=False):
        for i, (data, tokens, layout) in enumerate(plan):
            begin, planes = at, []
            for raw, _ in layout.sizes:
                planes.append(slice(begin, begin + raw))
                begin += _aligned(raw)
            try:
                inflate(coder, data, tokens, layout, place)
            except CorruptError as error:
                raise CorruptError(f"{name} {i}: {error}") from None
            out.append(Frame(tokens, planes))
    return Encoded(
        key=key, input_ids=input_ids, loss_mask=loss_mask, buffer=buffer, frames=made[0], last_frames=made[1]
    )


def _plan(codec: Codec, frames: Sequence[memoryview], rows: int, name: str) -> list[tuple[memoryview, int, Layout]]:
    pieces = list(spans(rows))
    if len(pieces) != len(frames):
        raise CorruptError(f"{len(frames)} {name}s, expected {len(pieces)} for {rows} tokens")
    out = []
    for i, (frame, (start, stop)) in enumerate(zip(frames, pieces, strict=True)):
        try:
            out.append((frame, stop - start, inspect(codec, frame, stop - start)))
        except CorruptError as error:
            raise CorruptError(f"{name} {i}: {error}") from None
    return out


def _decode(codec: Codec, buffer: Tensor, frames: Sequence[Frame], width: int) -> Tensor:
    """bf16 [T, width]."""
    pieces = [codec.decode([buffer[plane] for plane in frame.planes], frame.tokens) for frame in frames]
    return torch.cat(pieces) if pieces else torch.empty(0, width, dtype=torch.bfloat16, device=buffer.device)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
