"""From samples to the tensors of a row, and rows prepared ahead of the step that needs them.

Shapes: T row tokens, A anchor slots, K block, L captured layers, D hidden.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_offline.shards.keys import eligible_anchors, last_positions
from dflash_offline.shards.sample import Sample
from dflash_offline.train.masks import Attends, Blocks
from dflash_offline.train.plan import Ints
from dflash_offline.train.spec import DrafterSpec

T = TypeVar("T")
J = TypeVar("J")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One micro-batch. Free tokens and anchor slots are zeros that nothing sees and nothing counts."""

    states_TLD: Tensor
    position_T: Tensor
    """Position of each token in its document."""
    blocks: Blocks
    anchor_token_A: Tensor
    label_AK: Tensor
    supervised_AK: Tensor
    """Slots that carry loss: from 1 on, up to the first unsupervised token of the document."""
    keys: tuple[str, ...]
    """Samples of the row."""
    tokens: int
    anchors: int
    supervised_samples: int
    last_TD: Tensor | None
    """The target's last hidden state where the next token is supervised; None where it is not asked for."""
    mask_token_samples: int
    """Samples that contain the mask token, which in a text stands for something else."""
    supervised_N: Tensor
    """Places of the supervised slots in [A * K]."""
    views: Mapping[int | None, Attends] | None = None
    """What the blocks see, by window, where it was worked out beforehand."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What the row cost the threads that made it: the disk, waiting for a core, decoding, copying to the device."""


class Source(Protocol):
    """A sample that was read and not yet de-quantised."""

    @property
    def key(self) -> str: ...  # noqa: D102

    @property
    def input_ids(self) -> NDArray[np.int32]: ...  # noqa: D102

    @property
    def loss_mask(self) -> NDArray[np.uint8]: ...  # noqa: D102

    def decode(self, device: torch.device) -> Sample: ...  # noqa: D102


class Samples(Protocol):
    """What a row needs of a cache."""

    def open(self, number: int, pinned: bool) -> Source: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A row whose states are still in the planes of their codec."""

    sources: list[tuple[Source, slice, Tensor | None]]
    """Samples, where their tokens stand in the row, and noise for their states."""
    fields: dict[str, Any]
    """Of the row, but for the states."""


def column_index(cached_layer_ids: tuple[int, ...], layer_ids: tuple[int, ...]) -> list[int] | None:
    """Where `layer_ids` stand among the cached layers; None when they are the same."""
    return None if layer_ids == cached_layer_ids else [cached_layer_ids.index(i) for i in layer_ids]


def select_layers(states_TLD: Tensor, layers: list[int] | None, hidden_size: int) -> Tensor:
    """The chosen layers' states, side by side."""
    if layers is None:
        return states_TLD
    return states_TLD.view(len(states_TLD), -1, hidden_size)[:, layers].flatten(1)


def draw_anchors(eligible: Ints, count: int, seed: int, visit: int, key: str) -> Ints:
    """`count` of the eligible positions without replacement, sorted; a function of (seed, visit, key).

    `visit` is how often the sample was seen before: the epoch, where each epoch sees it once.
    """
    # Raw bits of a counter-based generator stay the same in every version of numpy; `choice` may not.
    digest = blake2b(f"{seed} {visit} {key}".encode(), digest_size=16).digest()
    bits = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(len(eligible))
    return np.sort(eligible[np.argsort(bits, kind="stable")[:count]])


def unit_noise(shape: torch.Size, seed: int, visit: int, key: str) -> Tensor:
    """Uniform noise in [-1, 1] in 256 steps, as fine as bf16; a function of (seed, visit, key)."""
    digest = blake2b(f"noise {seed} {visit} {key}".encode(), digest_size=16).digest()
    bits = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(-(-shape.numel() // 8))
    bytes_ = torch.from_numpy(bits.astype("<u8").view(np.uint8)[: shape.numel()]).view(shape)
    return (bytes_ - 127.5) / 127.5


def supervised_slots(loss_mask: NDArray[np.uint8], anchors: Ints, size: int) -> NDArray[np.bool_]:
    """[A, K]: slots whose token is supervised, as are all before it in the block; never slot 0, the given token."""
    padded = np.concatenate([loss_mask != 0, np.zeros(size, dtype=bool)])
    supervised = np.logical_and.accumulate(padded[anchors[:, None] + np.arange(size)], axis=1)
    supervised[:, 0] = False
    return supervised


@dataclass(frozen=True, kw_only=True)
class RowBuilder:
    """Everything that is the same for all rows of a run."""

    samples: Samples
    slots: Ints
    """Anchors of every sample of the cache."""
    spec: DrafterSpec
    layers: list[int] | None
    row_tokens: int
    row_anchors: int
    seed: int
    noise: float = 0.0
    """Largest size of the noise on the states."""
    last_hidden: bool = False
    """Whether rows hold the target's last hidden state."""

    def read(self, members: Ints, visits: Ints, pinned: bool = False) -> Packed:
        """Read `members` and lay them side by side; `visits` says how often each was seen before."""
        size = self.spec.block_size
        position = np.zeros(self.row_tokens, dtype=np.int64)
        anchor, start, token = (np.zeros(self.row_anchors, dtype=np.int64) for _ in range(3))
        label = np.zeros((self.row_anchors, size), dtype=np.int64)
        supervised = np.zeros((self.row_anchors, size), dtype=bool)
        at = used = supervised_samples = mask_token_samples = 0
        sources: list[tuple[Source, slice, Tensor | None]] = []
        begun = clocks()
        for number, visit in zip(members.tolist(), visits.tolist(), strict=True):
            source = self.samples.open(number, pinned)
            # Cutting is exact: the states of a causal target do not depend on what follows.
            ids, mask = source.input_ids[: self.row_tokens], source.loss_mask[: self.row_tokens]
            drawn = draw_anchors(eligible_anchors(mask), int(self.slots[number]), self.seed, visit, source.key)
            here, to = slice(at, at + len(ids)), slice(used, used + len(drawn))
            noise = None
            if self.noise:
                shape = torch.Size([len(ids), len(self.spec.layer_ids) * self.spec.hidden_size])
                noise = unit_noise(shape, self.seed, visit, source.key)
            position[here] = np.arange(len(ids))
            anchor[to], start[to], token[to] = drawn + at, at, ids[drawn]
            label[to] = np.pad(ids, (0, size))[drawn[:, None] + np.arange(size)]
            supervised[to] = supervised_slots(mask, drawn, size)
            supervised_samples += bool(supervised[to].any())
            mask_token_samples += bool((ids == self.spec.mask_token_id).any())
            sources.append((source, here, noise))
            at, used = here.stop, to.stop
        wall, worked, queued = (now - then for now, then in zip(clocks(), begun, strict=True))
        fields = {
            "position_T": torch.from_numpy(position),
            "blocks": Blocks(torch.from_numpy(anchor), torch.from_numpy(start), size),
            "anchor_token_A": torch.from_numpy(token),
            "label_AK": torch.from_numpy(label),
            "supervised_AK": torch.from_numpy(supervised),
            "supervised_N": torch.from_numpy(np.flatnonzero(supervised)),
            "keys": tuple(source.key for source, *_ in sources),
            "tokens": at,
            "anchors": used,
            "supervised_samples": supervised_samples,
            "mask_token_samples": mask_token_samples,
            # The rest of the time a thread sleeps: until the disk answers, or another thread lets go of the interpreter
            # lock. Nothing tells these two apart.
            "seconds": {"disk": max(wall - worked - queued, 0.0), "cores": queued, "decode": worked},
        }
        return Packed(sources=sources, fields=fields)

    def unpack(self, packed: Packed, device: torch.device) -> Row:
        """De-quantise the states on `device`, where the whole row is then."""
        spec = self.spec
        options: Any = {"dtype": torch.bfloat16, "device": device}
        states_TLD = torch.zeros(self.row_tokens, len(spec.layer_ids) * spec.hidden_size, **options)
        last_TD = torch.zeros(self.row_tokens, spec.hidden_size, **options) if self.last_hidden else None
        for source, here, noise in packed.sources:
            sample, length = source.decode(device), here.stop - here.start
            states_TLD[here] = select_layers(sample.states[:length], self.layers, spec.hidden_size)
            if noise is not None:
                states_TLD[here] += self.noise * noise.to(device)
            if last_TD is not None:
                assert sample.last_hidden is not None  # so says the manifest
                before = last_positions(sample.loss_mask)
                before = before[before < length]
                last_TD[torch.from_numpy(here.start + before).to(device)] = sample.last_hidden[: len(before)]
        moved: dict[str, Any] = {
            n: v.to(device) if isinstance(v, Tensor | Blocks) else v for n, v in packed.fields.items()
        }
        return Row(states_TLD=states_TLD, last_TD=last_TD, **moved)

    def build(self, members: Ints, visits: Ints) -> Row:
        """Both on the CPU."""
        return self.unpack(self.read(members, visits), torch.device("cpu"))


def clocks() -> tuple[float, float, float]:
    """Seconds by now: of the wall, that this thread worked, that it was ready and had no core (0 where none tells)."""
    try:
        queued = int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return time.perf_counter(), time.thread_time(), queued


def ahead(make: Callable[[J], T], jobs: Iterable[J], threads: int, depth: int) -> Generator[T, None, None]:
    """`map(make, jobs)` with up to `depth` results prepared in threads. Reading and decoding release the GIL."""
    pool = ThreadPoolExecutor(threads)
    pending: deque[Future[T]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(make, job))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
