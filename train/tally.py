"""Counts of one optimizer step, summed over rows and ranks as one vector, and the metrics made of them.

Shapes: A anchors, K block, W ranks.
"""

from typing import Any

import torch

from dflash_offline.train.loss import BlockLoss
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.rows import Row

_SCALARS = ("loss", "divisor", "accepted", "anchors", "tokens", "samples", "empty_rows", "mask_token_samples", "stops")


class Tally:
    """Sums of a step. Everything stays on the device until `collect`, the step's one read-back."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._scalars = dict.fromkeys(_SCALARS, torch.zeros((), dtype=torch.float64, device=device))
        self._supervised_K = torch.zeros(block_size, dtype=torch.float64, device=device)
        self._hits_K = torch.zeros_like(self._supervised_K)

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """Add to one of the scalars."""
        self._scalars[name] = self._scalars[name] + value

    def add_row(self, row: Row) -> None:
        """Count what a row holds."""
        for name, value in (("tokens", row.tokens), ("anchors", row.anchors), ("samples", len(row.keys))):
            self.add(name, value)
        self.add("empty_rows", row.anchors == 0)
        self.add("mask_token_samples", row.mask_token_samples)

    def add_loss(self, row: Row, loss: BlockLoss) -> None:
        """Count what the drafts of a row came to."""
        self.add("loss", loss.loss.detach())
        self.add("divisor", loss.divisor)
        self.add("accepted", loss.hit_AK[:, 1:].cumprod(dim=1).sum())
        self._supervised_K += row.supervised_AK.sum(dim=0)
        self._hits_K += loss.hit_AK.sum(dim=0)

    def collect(self, ranks: Ranks, waited: float) -> dict[str, Any]:
        """Sums over all ranks: the scalars, and per slot from 1 on; and what each of the ranks `waited`."""
        waited_W = self._hits_K.new_zeros(ranks.world)
        waited_W[ranks.rank] = waited
        parts = torch.stack(list(self._scalars.values())), self._supervised_K[1:], self._hits_K[1:], waited_W
        found = torch.split(ranks.sum(torch.cat(parts)).cpu(), [len(part) for part in parts])
        scalars, supervised, hits, each = (part.tolist() for part in found)
        return {**dict(zip(_SCALARS, scalars, strict=True)), "supervised": supervised, "hits": hits, "waited": each}


def step_metrics(sums: dict[str, Any], seconds: dict[str, float], block_size: int) -> dict[str, Any]:
    """What metrics.jsonl says of a step. `tau` is over uniform anchors in training, below what serving sees."""
    wall = max(sum(seconds.values()), 1e-9)
    return {
        "loss": sums["loss"] / sums["divisor"] if sums["divisor"] else None,
        "accuracy": sum(sums["hits"]) / max(sum(sums["supervised"]), 1),
        "tau_uniform": 1 + sums["accepted"] / max(sums["anchors"], 1),
        "slot_accuracy": [round(h / max(n, 1), 4) for h, n in zip(sums["hits"], sums["supervised"], strict=True)],
        "divisor": sums["divisor"],
        **{name: int(sums[name]) for name in ("anchors", "tokens", "samples", "empty_rows", "mask_token_samples")},
        "tokens_per_s": round(sums["tokens"] / wall, 1),
        "block_tokens_per_s": round(sums["anchors"] * block_size / wall, 1),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
    }
