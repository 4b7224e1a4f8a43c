"""Which samples are trained on, how they share rows, and which rows each step takes.

All of it is a function of (seed, keys, lengths, weights): neither the order of the cache nor the number of ranks
matters, and the position in the data is the step alone.

A sample of weight w is seen w times an epoch: after e epochs floor(e w + u) times, where u in [0, 1) is a hash of seed
and key. So with w = 1 every sample is seen once every epoch, and with w = 0.3 all of them within four. The number of
times that it was seen before says which anchors are drawn. Samples are packed into rows once for each set that an epoch
may see; every epoch orders the rows anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dflash_offline.shards.errors import UsageError

Ints = NDArray[np.int64]
EMPTY = -1
"""A row without samples, which fills up the last step of an epoch."""
_OPEN_ROWS = 64


@dataclass(frozen=True)
class Packing:
    """Rows of an epoch."""

    members: Ints
    """Samples (positions in the cache) of row 0, then of row 1, ..."""
    copies: Ints
    """How many times each member stands in this epoch before."""
    first: Ints
    """Where each row's samples begin in `members`; one more entry than rows."""

    @property
    def rows(self) -> int:
        """Rows of the epoch."""
        return len(self.first) - 1

    def row(self, number: int) -> slice:
        """The part of `members` in a row, none for EMPTY."""
        return slice(0) if number == EMPTY else slice(self.first[number], self.first[number + 1])


@dataclass(frozen=True)
class Plan:
    """Rows of every epoch and their order."""

    epochs: list[Packing]
    weights: NDArray[np.float64]
    """Times that each sample of the cache is seen an epoch."""
    phase: NDArray[np.float64]
    """u of each sample."""
    seed: int
    rows_per_step: int

    @cached_property
    def ends(self) -> Ints:
        """Optimizer steps until the end of each epoch; the last of an epoch may hold empty rows."""
        return np.cumsum([-(-packing.rows // self.rows_per_step) for packing in self.epochs])

    @property
    def steps(self) -> int:
        """Optimizer steps of all epochs."""
        return int(self.ends[-1])

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch of a step, and its number in there, both counted from 0."""
        epoch = int(np.searchsorted(self.ends, step, side="right"))
        return epoch, step - int(self.ends[epoch - 1] if epoch else 0)

    def progress(self, step: int) -> float:
        """Epochs done before a step."""
        epoch, at = self.locate(step)
        return epoch + at / int(self.ends[epoch] - (self.ends[epoch - 1] if epoch else 0))

    def epoch_order(self, epoch: int) -> Ints:
        """Rows of an epoch in the order they are taken, filled up to whole steps."""
        rows = self.epochs[epoch].rows
        order = np.argsort(_mixed(np.arange(rows, dtype=np.uint64), f"rows {self.seed} {epoch}"), kind="stable")
        return np.pad(order, (0, -rows % self.rows_per_step), constant_values=EMPTY)

    def dealt(self, first: int, last: int, rank: int, world: int) -> Iterator[tuple[Ints, Ints]]:
        """Samples, and how often each was seen before, of every row that falls to `rank` in steps first .. last - 1."""
        known = -1
        for step in range(first, last):
            epoch, at = self.locate(step)
            if epoch != known:
                known, order, packing = epoch, self.epoch_order(epoch), self.epochs[epoch]
                visits = _seen(self.weights, self.phase, epoch)[packing.members] + packing.copies
            for number in order[at * self.rows_per_step : (at + 1) * self.rows_per_step][rank::world].tolist():
                row = packing.row(number)
                yield packing.members[row], visits[row]


def key_hashes(keys: Sequence[str]) -> NDArray[np.uint64]:
    """First 64 bits of hex keys, which are hashes themselves."""
    return np.frombuffer(bytes.fromhex("".join(key[:16] for key in keys)), dtype=">u8").astype(np.uint64)


def held_out(prompt_keys: Sequence[str], val_fraction: float) -> NDArray[np.bool_]:
    """Which samples are for validation. All samples of a prompt fall on the same side."""
    return _part(key_hashes(prompt_keys), "validation") < val_fraction


def chosen(keys: Sequence[str], fraction: float) -> NDArray[np.bool_]:
    """Which samples a fraction keeps; smaller fractions keep a part of what larger ones keep."""
    return _part(key_hashes(keys), "fraction") < fraction


def in_key_order(keys: Sequence[str], use: NDArray[np.bool_], limit: int | None) -> list[int]:
    """The first `limit` samples marked in `use`, in an order that depends on keys alone."""
    numbers = np.flatnonzero(use)
    return numbers[np.argsort(key_hashes(keys)[numbers], kind="stable")][:limit].tolist()


def anchor_slots(tokens: Ints, eligible: Ints, row_tokens: int, row_anchors: int) -> Ints:
    """Anchors each sample brings to its row: its share of the slots by length, as far as it has that many."""
    kept = np.minimum(tokens, row_tokens)
    return np.minimum(eligible, -(-row_anchors * kept // row_tokens))


def make_plan(
    weights: NDArray[np.float64],
    keys: Sequence[str],
    tokens: Ints,
    eligible: Ints,
    *,
    row_tokens: int,
    row_anchors: int,
    rows_per_step: int,
    seed: int,
    epochs: int,
    most_steps: int | None = None,
) -> Plan:
    """Pack `epochs` epochs, or as many as `most_steps` need, into rows of at most `row_tokens` and `row_anchors`.

    `weights`: times that each sample is seen an epoch, 0 where it is not used.
    """
    usable = np.flatnonzero((weights > 0) & (eligible > 0))
    if not len(usable):
        raise UsageError(
            f"nothing to train on: of {len(keys)} samples {int((weights > 0).sum())} are chosen, none with two "
            "supervised tokens in a row; expected a larger data.fraction, a smaller data.val_fraction or another cache"
        )
    hashes = key_hashes(keys)
    weights = np.where(eligible > 0, weights, 0.0)
    phase = (_mixed(hashes, f"phase {seed}") >> np.uint64(32)) / 2.0**32  # sums with epochs stay exact
    slots = anchor_slots(tokens, eligible, row_tokens, row_anchors)
    cut = np.minimum(tokens, row_tokens)

    def packed(times: Ints) -> Packing:
        if not times.any():
            return Packing(times[:0], times[:0], np.zeros(1, np.int64))
        members = np.repeat(np.arange(len(times)), times)
        copies = np.arange(len(members)) - np.repeat(np.cumsum(times) - times, times)
        salts = [f"samples {seed}", *(f"samples {seed} {copy}" for copy in range(1, int(times.max())))]
        order = np.argsort(np.stack([_mixed(hashes, salt) for salt in salts])[copies, members], kind="stable")
        members, copies = members[order], copies[order]
        rows = _pack(cut[members], slots[members], row_tokens, row_anchors)
        order = np.argsort(rows, kind="stable")
        return Packing(members[order], copies[order], np.searchsorted(rows[order], np.arange(rows.max() + 2)))

    if (weights == np.floor(weights)).all():  # every epoch sees the same samples
        made = [packed(weights.astype(np.int64))] * epochs
    else:
        made, steps = [], 0
        for epoch in range(epochs):
            made.append(packed(_seen(weights, phase, epoch + 1) - _seen(weights, phase, epoch)))
            steps += -(-made[-1].rows // rows_per_step)
            if most_steps is not None and steps >= most_steps:
                break
    plan = Plan(made, weights, phase, seed, rows_per_step)
    if not plan.steps:
        raise UsageError(f"data.weights: no sample is seen in {epochs} epochs; expected larger weights or more epochs")
    return plan


def _seen(weights: NDArray[np.float64], phase: NDArray[np.float64], epochs: int) -> Ints:
    """How often each sample was seen in the first `epochs` epochs."""
    return np.floor(epochs * weights + phase).astype(np.int64)


def _pack(tokens: Ints, slots: Ints, row_tokens: int, row_anchors: int) -> Ints:
    """Row of each sample: the fullest open row that has room, else a new one in place of the fullest."""
    free_tokens = np.full(_OPEN_ROWS, row_tokens)
    free_slots = np.full(_OPEN_ROWS, row_anchors)
    numbers = np.arange(_OPEN_ROWS)
    rows = np.empty(len(tokens), dtype=np.int64)
    for i, (n, a) in enumerate(zip(tokens.tolist(), slots.tolist(), strict=True)):
        left = np.where(free_slots >= a, free_tokens - n, -1)
        left[left < 0] = row_tokens
        at = int(left.argmin())
        if left[at] == row_tokens:
            at = int(free_tokens.argmin())
            free_tokens[at], free_slots[at], numbers[at] = row_tokens, row_anchors, numbers.max() + 1
        free_tokens[at] -= n
        free_slots[at] -= a
        rows[i] = numbers[at]
    # Open rows that nothing was put in have no number left over.
    return np.unique(rows, return_inverse=True)[1]


def _part(hashes: NDArray[np.uint64], purpose: str) -> NDArray[np.float64]:
    return _mixed(hashes, purpose) / 2.0**64


def _mixed(values: NDArray[np.uint64], purpose: str) -> NDArray[np.uint64]:
    """An independent 64-bit hash of each value for each purpose (the finaliser of splitmix64)."""
    salt = np.uint64(int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little"))
    x = values ^ salt
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
