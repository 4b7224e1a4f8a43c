"""From the states of a row of samples to their frames: planes on the device, bytes in threads.

On a GPU the planes of a whole row are made in a few kernels, because a small kernel beside a running forward waits for
the end of each of its large products. They and the copy to pinned memory run beside the next row's forward, in a queue
of their own. Cutting into frames, zstd and checksums run in threads outside the interpreter lock. The bytes are those
of encoding every frame alone.

Legend: P tokens of the row, L layers, D hidden, N positions of the last hidden state.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from dflash_offline.extract import kernels
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.codecs import Codec
from dflash_offline.shards.frames import pack, spans

Frames = tuple[list[bytes], list[bytes]]
"""Of the states, and of the last hidden state."""
THREADS = 4
"""A GPU's worth of zstd: about 26k tokens a second each at 25,600 values, where the target makes 13k."""


class Encoder:
    """Encodes rows for one device."""

    def __init__(self, codec: Calibrated, device: torch.device) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        # Copied beside the forwards as well: in their queue it would wait for all that were begun.
        with self.beside():
            self._codec = codec.to(device)
        self._pool = ThreadPoolExecutor(THREADS if on_gpu else 1, initializer=kernels.own, initargs=(device,))

    def beside(self) -> AbstractContextManager[Any]:
        """Within it the device's work is queued beside the forwards; its states must be there already."""
        return torch.cuda.stream(_queue(self._device)) if self._device.type == "cuda" else nullcontext()

    def __call__(
        self, states_PLD: Tensor, lengths: Sequence[int], last_ND: Tensor | None, counts: Sequence[int]
    ) -> list[Future[Frames]]:
        """Finite bf16 states of samples side by side -> the frames of each."""
        row = self._planes(self._codec.states, states_PLD)
        last = None
        if self._codec.last is not None and last_ND is not None:
            last = self._planes(self._codec.last, last_ND[:, None])
        places = zip(pairwise(accumulate(lengths, initial=0)), pairwise(accumulate(counts, initial=0)), strict=True)
        return [self._pool.submit(_cut, row, own, last, own_last) for own, own_last in places]

    def _planes(self, codec: Codec, states_PLD: Tensor) -> "_Planes":
        planes, layers = codec.encode(states_PLD), states_PLD.shape[1]
        if not states_PLD.is_cuda:
            return _Planes(codec, planes, layers, len(states_PLD), None)
        # Pinned memory must not be read before the copy is there, nor given up: the allocator knows the queue.
        copied = [torch.empty(p.shape, dtype=p.dtype, pin_memory=True).copy_(p, non_blocking=True) for p in planes]
        arrived: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record()
        return _Planes(codec, copied, layers, len(states_PLD), arrived)

    def close(self) -> None:
        """No more rows; what was submitted goes on, and the next task need not wait for it."""
        self._pool.shutdown(wait=False)


@cache
def _queue(device: torch.device) -> Any:
    """One a process: the allocator keeps memory for every queue. A kernel of it is next when a product ends."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _Planes:
    """Planes of a row on the CPU, once `arrived`."""

    def __init__(self, codec: Codec, planes: list[Tensor], layers: int, tokens: int, arrived: Any) -> None:
        self._codec, self._planes, self._layers, self._tokens = codec, planes, layers, tokens
        self._arrived = arrived

    def frames(self, begin: int, end: int) -> list[bytes]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [
            pack(self._codec, self._codec.cut(self._planes, self._layers, self._tokens, begin + a, begin + b), b - a)
            for a, b in spans(end - begin)
        ]


def _cut(row: _Planes, own: tuple[int, int], last: _Planes | None, own_last: tuple[int, int]) -> Frames:
    return row.frames(*own), [] if last is None else last.frames(*own_last)
