"""The loss of drafted blocks, its logits in chunks.

Nothing is divided here: sums of any number of rows and ranks add up, and the trainer divides once by the weight of the
whole step. A mean a row would weigh a row with one supervised slot like one with thousands.

Shapes: A anchors, K block, D hidden, V vocabulary, N supervised slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class BlockLoss(NamedTuple):
    """Sums over the supervised slots of a row."""

    loss: Tensor
    """Weighted; the only one with a gradient."""
    weight: Tensor
    hit_AK: Tensor
    """Supervised slots whose most likely token is the label."""


def default_gamma(block_size: int) -> float:
    """7 for blocks of 16, 5 for 10, 4 for 8 (published), straight lines between and beyond."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for slots k >= 1; nothing for slot 0, the anchor, which is given. [K]"""
    slot = torch.arange(block_size, dtype=torch.float32)
    return torch.where(slot > 0, torch.exp(-(slot - 1) / gamma), 0.0)


def block_loss(
    output_AKD: Tensor, head_VD: Tensor, label_AK: Tensor, supervised_AK: Tensor, weight_K: Tensor, chunk: int
) -> BlockLoss:
    """Cross entropy with the labels, weighted by slot."""
    at = supervised_AK.flatten().nonzero()[:, 0]
    label_N = label_AK.flatten()[at]
    nll_N, best_N = _cross_entropy(output_AKD.flatten(0, 1)[at], head_VD, label_N, chunk)
    weight_N = weight_K.expand_as(supervised_AK).flatten()[at]
    hit = torch.zeros_like(supervised_AK).flatten()
    hit[at] = best_N == label_N
    return BlockLoss((nll_N * weight_N).sum(), weight_N.sum(), hit.view_as(supervised_AK))


def _cross_entropy(hidden_ND: Tensor, head_VD: Tensor, label_N: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Cross entropy (fp32) and most likely token of every slot; at most `chunk` rows of logits exist at a time."""
    pieces = [
        # The backward pass computes a chunk's logits again instead of keeping them.
        checkpoint(_chunk_cross_entropy, hidden, head_VD, label, use_reentrant=False)
        for hidden, label in zip(torch.split(hidden_ND, chunk), torch.split(label_N, chunk), strict=True)
    ]
    nll, best = zip(*pieces, strict=True)
    return torch.cat(nll), torch.cat(best)


def _chunk_cross_entropy(hidden_ND: Tensor, head_VD: Tensor, label_N: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = F.linear(hidden_ND, head_VD).float()
    return F.cross_entropy(logits_NV, label_N, reduction="none"), logits_NV.argmax(dim=-1)
