"""A set of sample keys in 16 bytes each: a Python set takes 130, and a million of them would be most of the memory."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

_FRESH = 1 << 15


class KeySet:
    """128-bit keys, given as bytes or hex."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._sorted = np.empty(0, "S16")
        self._fresh: set[bytes] = set()
        for key in keys:
            self.add(bytes.fromhex(key))

    def add(self, key: bytes) -> None:
        """Add a key that is not in the set."""
        self._fresh.add(key)
        if len(self._fresh) >= _FRESH:
            self._merge()

    def __contains__(self, key: bytes) -> bool:
        if key in self._fresh:
            return True
        at = np.searchsorted(self._sorted, np.array([key], "S16"))[0]
        # As bytes: numpy drops trailing zeros of an S16 item.
        return self._sorted[at : at + 1].tobytes() == key

    def __len__(self) -> int:
        return len(self._sorted) + len(self._fresh)

    def _merge(self) -> None:
        fresh = np.frombuffer(b"".join(self._fresh), "S16")
        self._sorted = np.sort(np.concatenate([self._sorted, fresh]))
        self._fresh.clear()

    def missing_in(self, other: "KeySet") -> int:
        """How many of these keys `other` has not."""
        self._merge()
        other._merge()
        return int((~np.isin(self._sorted, other._sorted)).sum())

    def hash(self) -> str:
        """`shards.keys.keys_hash` of the keys."""
        self._merge()
        digest = blake2b(digest_size=16)
        for at in range(0, len(self._sorted), 1 << 12):
            digest.update(self._sorted[at : at + (1 << 12)].tobytes().hex().encode())
        return digest.hexdigest()
