"""Checkpoints written by a thread while training goes on with copies of what is written.

At 27B a checkpoint is 21 GB: seconds to copy to the host and tens of seconds to write.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_offline.train import checkpoint
from dflash_offline.train.config import SaveConfig


@dataclass(kw_only=True)
class Saver:
    """One write at a time; what it raises comes out of the next call, at the latest after the next step."""

    root: Path
    config: SaveConfig
    pool: ThreadPoolExecutor
    pending: Future[Path] | None = None
    host: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Kept between saves: fresh memory costs more than the copy."""

    def start(
        self, step: int, items: Iterable[tuple[str, str, Tensor]], facts: dict[str, Any], best: int | None = None
    ) -> None:
        """Write the checkpoint of `step` after the one before it. Of older ones the newest and `best` are kept.

        `items`: file, name, tensor. A tensor may be given up when the next is asked for.
        """
        self.finish()
        files = self._copied(items)
        keep = self.config.keep_last
        self.pending = self.pool.submit(checkpoint.save, self.root, step, files, facts, keep, best)
        if not self.config.asynchronous:
            self.finish()

    def check(self) -> None:
        """Raise what a write that is over has raised."""
        if self.pending is not None and self.pending.done():
            self.finish()

    def finish(self) -> None:
        """Until nothing is being written."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _copied(self, items: Iterable[tuple[str, str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """On the host; where nothing goes on meanwhile, what is there already is not copied."""
        out: dict[str, dict[str, Tensor]] = {checkpoint.MODEL: {}, checkpoint.OPTIMIZER: {}}
        for file, name, tensor in items:
            if self.config.asynchronous:
                if (file, name) not in self.host:
                    self.host[file, name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                copy = self.host[file, name].copy_(tensor.detach(), non_blocking=True)
            else:
                copy = tensor.detach().cpu()
            out.setdefault(file, {})[name] = copy
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return out


@contextmanager
def saver(root: Path, config: SaveConfig) -> Iterator[Saver]:
    """A saver that is done at the end of the block, also when the block fails."""
    with ThreadPoolExecutor(1, thread_name_prefix="save") as pool:
        made = Saver(root=root, config=config, pool=pool)
        yield made
        made.finish()
