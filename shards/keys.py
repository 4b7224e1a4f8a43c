"""Content keys: what a sample is, independent of file names, row numbers and ids."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

VERSION = b"dflash-sample-1\0"


def sample_key(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> str:
    """blake2b-128 (hex) over a version, int32 little-endian ids [T] and the uint8 mask [T].

    ids and mask lengths are equal, so the total length alone separates the two and no length prefix is needed.
    """
    if len(input_ids) != len(loss_mask):
        raise ValueError(f"input_ids has {len(input_ids)} tokens, loss_mask {len(loss_mask)}; expected equal lengths")
    digest = blake2b(VERSION, digest_size=16)
    digest.update(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()


def prompt_key(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> str:
    """Key of the ids before the first supervised token. A split by it cannot put one prompt on both sides."""
    first = int(np.argmax(loss_mask != 0)) if np.any(loss_mask) else len(loss_mask)
    return sample_key(input_ids[:first], np.zeros(first, dtype=np.uint8))


def eligible_anchors(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions a with mask[a] = mask[a+1] = 1: a block that starts there has at least one supervised slot."""
    on = loss_mask != 0
    return np.flatnonzero(on[:-1] & on[1:])


def last_positions(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions whose next token is supervised: those of which the last hidden state is stored."""
    return np.flatnonzero(loss_mask[1:])


def keys_hash(keys: list[str]) -> str:
    """Identity of a set of samples, whatever their order."""
    return blake2b("".join(sorted(keys)).encode(), digest_size=16).hexdigest()
