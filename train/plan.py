"""Which samples are trained on, how they share rows, and which rows each step takes.

All of it is a function of (seed, keys, lengths): neither the order of the cache nor the number of ranks matters, and
the position in the data is the step alone. Samples are packed into rows once; every epoch orders the rows anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dflash_offline.shards.errors import UsageError

Ints = NDArray[np.int64]
EMPTY = -1
"""A row without samples, which fills up the last step of an epoch."""
_OPEN_ROWS = 64


@dataclass(frozen=True)
class Plan:
    """Rows of an epoch and their order."""

    members: Ints
    """Samples (positions in the cache) of row 0, then of row 1, ..."""
    first: Ints
    """Where each row's samples begin in `members`; one more entry than rows."""
    seed: int
    rows_per_step: int

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return len(self.first) - 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last may hold empty rows."""
        return -(-self.rows // self.rows_per_step)

    def samples(self, row: int) -> Ints:
        """Samples of a row, none for EMPTY."""
        return self.members[:0] if row == EMPTY else self.members[self.first[row] : self.first[row + 1]]

    def epoch_order(self, epoch: int) -> Ints:
        """Rows of an epoch in the order they are taken, filled up to whole steps."""
        order = np.argsort(_mixed(np.arange(self.rows, dtype=np.uint64), f"rows {self.seed} {epoch}"), kind="stable")
        return np.pad(order, (0, self.steps_per_epoch * self.rows_per_step - self.rows), constant_values=EMPTY)

    def dealt(self, first: int, last: int, rank: int, world: int) -> Iterator[tuple[Ints, int]]:
        """(samples, epoch) of every row that falls to `rank` in steps first .. last - 1, counted from 0."""
        order, known = self.epoch_order(0), 0
        for step in range(first, last):
            epoch, at = divmod(step, self.steps_per_epoch)
            if epoch != known:
                order, known = self.epoch_order(epoch), epoch
            for row in order[at * self.rows_per_step : (at + 1) * self.rows_per_step][rank::world].tolist():
                yield self.samples(row), epoch


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
    use: NDArray[np.bool_],
    keys: Sequence[str],
    tokens: Ints,
    eligible: Ints,
    *,
    row_tokens: int,
    row_anchors: int,
    rows_per_step: int,
    seed: int,
) -> Plan:
    """Pack the samples marked in `use` into rows of at most `row_tokens` tokens and `row_anchors` anchors."""
    samples = np.flatnonzero(use & (eligible > 0))
    if not len(samples):
        raise UsageError(
            f"nothing to train on: of {len(use)} samples {int(use.sum())} are chosen, none with two supervised tokens "
            "in a row; expected a larger data.fraction, a smaller data.val_fraction or another cache"
        )
    hashes = key_hashes(keys)[samples]
    samples = samples[np.argsort(_mixed(hashes, f"samples {seed}"), kind="stable")]
    slots = anchor_slots(tokens[samples], eligible[samples], row_tokens, row_anchors)
    rows = _pack(np.minimum(tokens[samples], row_tokens), slots, row_tokens, row_anchors)
    order = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    return Plan(samples[order], first, seed, rows_per_step)


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
