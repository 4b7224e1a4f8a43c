"""Data parallelism under torchrun: the only module that imports torch.distributed.

A step's rows are dealt to the ranks, each of which sums the gradients of its own. In the backward pass of its last row
the parts of the gradients that are complete are added up over the ranks while the rest is computed; one more collective
adds up the counts. A rank whose rows hold nothing simply adds zeros. Where the optimizer is sharded (sharded.py), a
part is added up in shares, and the stepped weights are gathered.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_offline.shards.device import chosen_device
from dflash_offline.shards.errors import RunError, UsageError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""For another rank, which may be waiting for a slow disk. NCCL's own would be 10 minutes."""

# The last collective lives to the end of the process. Otherwise gloo's thread may be the last to let go of it; it needs
# the interpreter for that, and aborts the process when that is already ending.
_last: list[dist.Work] = []


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of `items`."""
        return items[self.rank :: self.world]

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks, in place. Every rank must call it."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def gather(self, whole: Tensor, share: Tensor) -> Callable[[], None]:
        """Begin to fill `whole` with the shares of all ranks in order; the own one may lie in it.

        Every rank must call it. Returns what waits for it: on a GPU its queue, not the process.
        """
        with self._lost():
            work = dist.all_gather_into_tensor(whole, share, async_op=True)
        _last[:] = [work]

        def wait() -> None:
            with self._lost():
                work.wait()

        return wait

    def agree(self, tensor: Tensor) -> bool:
        """Whether all ranks have the same integers. Every rank must call it."""
        # Equal where the largest is the smallest; ~x orders the other way round without overflow.
        high, low = self._reduce(torch.stack([tensor, ~tensor]), dist.ReduceOp.MAX)
        return bool((high == ~low).all())

    def same(self, value: Any) -> bool:
        """Whether all ranks have the same value, as JSON. Every rank must call it."""
        digest = blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
        return self.agree(torch.frombuffer(bytearray(digest), dtype=torch.int64).to(self.device))

    def wait(self) -> None:
        """Until every rank is here. torchrun ends the others when one leaves with a code, so they leave together."""
        self.sum(torch.zeros(1, device=self.device)).item()  # on a GPU only asking for it waits

    def _reduce(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world > 1:
            with self._lost():
                _last[:] = [dist.all_reduce(tensor, how, async_op=True)]
                _last[0].wait()
        return tensor

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RunError(f"rank {self.rank}: lost another rank, which says why: {error}") from None


class Wanted(NamedTuple):
    """A part of the gradients, and the place in it where this rank wants the sum: all of it, or its share."""

    part: Tensor
    place: Tensor


class Sums:
    """Adds up parts of the gradients over the ranks, in one order on all of them, each from when it is ready here."""

    def __init__(self, ranks: Ranks, parts: Sequence[Sequence[Wanted]]) -> None:
        self._ranks, self._parts = ranks, parts
        self._begun = 0
        self._works: list[dist.Work] = []

    def ready(self) -> None:
        """The next part is complete: its sum begins, beside what this process goes on with."""
        if self._ranks.world > 1:
            with self._ranks._lost():
                for part, place in self._parts[self._begun]:
                    whole = len(part) == len(place)
                    work = (
                        dist.all_reduce(part, async_op=True)
                        if whole
                        else dist.reduce_scatter_tensor(place, part, async_op=True)
                    )
                    self._works.append(work)
        self._begun += 1

    def finish(self) -> None:
        """Begin what was not, and wait for all: on a GPU its queue waits, not the process. Every rank must call it."""
        while self._begun < len(self._parts):
            self.ready()
        with self._ranks._lost():
            for work in self._works:
                work.wait()
        _last[:], self._works, self._begun = self._works[-1:] or _last, [], 0


@contextmanager
def connect(device: str) -> Iterator[Ranks]:
    """Join the peers that torchrun started; a process started by hand is alone and opens no port."""
    device = chosen_device(device)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Ranks(0, 1, torch.device(device))
        return
    here, options = torch.device("cpu"), None
    if device == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        # A product holds every SM: a collective of no priority begins when those that were queued before it are done.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = PATIENCE  # it warns where this is not what it is given besides
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE, pg_options=options)
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UsageError(
            f"rank {os.environ.get('RANK')}: cannot meet the other ranks at {where}: {' '.join(str(error).split())}; "
            "expected a free port: torchrun --standalone finds one"
        ) from None
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), here)
    except BaseException:
        if here.type == "cpu":
            dist.destroy_process_group()
        raise  # NCCL would wait for the others, and what went wrong here would be said after minutes, or never
    dist.destroy_process_group()
