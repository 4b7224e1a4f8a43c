"""From samples to the tensors of a row, and rows prepared ahead of the step that needs them.

Shapes: T row tokens, A anchor slots, K block, L captured layers, D hidden.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_offline.shards.keys import eligible_anchors, last_positions
from dflash_offline.shards.sample import Sample
from dflash_offline.train.masks import Blocks
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

    def to(self, device: torch.device) -> "Row":
        """The same row on another device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, blocks=self.blocks.to(device), **moved)


class Samples(Protocol):
    """What a row needs of a cache."""

    def read(self, number: int) -> Sample: ...  # noqa: D102


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

    def build(self, members: Ints, visits: Ints) -> Row:
        """Read `members` and lay them side by side; `visits` says how often each was seen before."""
        spec, size = self.spec, self.spec.block_size
        states = torch.zeros(self.row_tokens, len(spec.layer_ids) * spec.hidden_size, dtype=torch.bfloat16)
        position = np.zeros(self.row_tokens, dtype=np.int64)
        anchor, start, token = (np.zeros(self.row_anchors, dtype=np.int64) for _ in range(3))
        label = np.zeros((self.row_anchors, size), dtype=np.int64)
        supervised = np.zeros((self.row_anchors, size), dtype=bool)
        last = torch.zeros(self.row_tokens, spec.hidden_size, dtype=torch.bfloat16) if self.last_hidden else None
        at = used = supervised_samples = mask_token_samples = 0
        keys = []
        for number, visit in zip(members.tolist(), visits.tolist(), strict=True):
            sample = self.samples.read(number)
            # Cutting is exact: the states of a causal target do not depend on what follows.
            ids, mask = sample.input_ids[: self.row_tokens], sample.loss_mask[: self.row_tokens]
            drawn = draw_anchors(eligible_anchors(mask), int(self.slots[number]), self.seed, visit, sample.key)
            here, to = slice(at, at + len(ids)), slice(used, used + len(drawn))
            states[here] = select_layers(sample.states[: len(ids)], self.layers, spec.hidden_size)
            if self.noise:
                states[here] += self.noise * unit_noise(states[here].shape, self.seed, visit, sample.key)
            position[here] = np.arange(len(ids))
            anchor[to], start[to], token[to] = drawn + at, at, ids[drawn]
            label[to] = np.pad(ids, (0, size))[drawn[:, None] + np.arange(size)]
            supervised[to] = supervised_slots(mask, drawn, size)
            if last is not None:
                assert sample.last_hidden is not None  # so says the manifest
                before = last_positions(sample.loss_mask)
                before = before[before < len(ids)]
                last[at + before] = sample.last_hidden[: len(before)]
            supervised_samples += bool(supervised[to].any())
            mask_token_samples += bool((ids == spec.mask_token_id).any())
            keys.append(sample.key)
            at, used = here.stop, to.stop
        return Row(
            states_TLD=states,
            position_T=torch.from_numpy(position),
            blocks=Blocks(torch.from_numpy(anchor), torch.from_numpy(start), size),
            anchor_token_A=torch.from_numpy(token),
            label_AK=torch.from_numpy(label),
            supervised_AK=torch.from_numpy(supervised),
            keys=tuple(keys),
            tokens=at,
            anchors=used,
            supervised_samples=supervised_samples,
            last_TD=last,
            mask_token_samples=mask_token_samples,
        )


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
