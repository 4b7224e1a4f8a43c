"""When a GPU's memory does not suffice: one line that says where, what is in use and what to try."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_offline.shards.errors import RunError
from dflash_offline.train.parallel import Ranks

_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of libraries that ask for memory past torch's allocator."""


class Place:
    """Where a process is, in words."""

    now: str = "before the first step"


@contextmanager
def fits(ranks: Ranks, advice: str) -> Iterator[Place]:
    """Raise RunError where what is done within runs out of the GPU's memory; the caller keeps the place up to date."""
    place = Place()
    try:
        yield place
    except RuntimeError as error:
        said = " ".join(str(error).split())
        if not isinstance(error, torch.OutOfMemoryError) and not any(word in said for word in _WORDS):
            raise
        who = f"rank {ranks.rank}, " if ranks.world > 1 else ""
        used = said.partition(" If reserved")[0].rstrip(".")  # the rest is advice on settings of the allocator
        raise RunError(f"{who}{place.now}: too little GPU memory: {used}; try {advice}") from error
