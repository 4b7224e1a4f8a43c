"""The loss of drafted blocks, its logits in chunks.

A slot's weight says how much it counts, its loss what it should say; both may be mixtures:

    weight = decay * exp(-(k - 1) / gamma) + dpace * (D-PACE's weight)
    loss   = (1 - kd) * cross entropy with the recorded token + kd * divergence from the target's distribution

Nothing is divided here: sums of any number of rows and ranks add up, and the trainer divides once by the divisor of the
whole step. A mean a row would weigh a row with one supervised slot like one with thousands.

Shapes: T tokens, A anchors, K block, D hidden, V vocabulary, N supervised slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_offline.train.config import LossConfig


class BlockLoss(NamedTuple):
    """Sums over the supervised slots of a row."""

    loss: Tensor
    """Weighted; the only one with a gradient."""
    divisor: Tensor
    """What the sum of all rows' losses is divided by is the sum of these."""
    hit_AK: Tensor
    """Supervised slots whose most likely token is the label."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised, for blocks of one size."""

    config: LossConfig
    decay_K: Tensor

    @classmethod
    def of(cls, config: LossConfig, block_size: int, device: torch.device) -> "Objective":
        """The objective that `config` describes."""
        weights = decay_weights(block_size, config.gamma or default_gamma(block_size))
        return cls(config=config, decay_K=weights.to(device))


def default_gamma(block_size: int) -> float:
    """7 for blocks of 16, 5 for 10, 4 for 8 (published), straight lines between and beyond."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) for slots k >= 1; nothing for slot 0, the anchor, which is given. [K]"""
    slot = torch.arange(block_size, dtype=torch.float32)
    return torch.where(slot > 0, torch.exp(-(slot - 1) / gamma), 0.0)


def dpace_weights(nll_AK: Tensor, supervised_AK: Tensor, alpha: float) -> Tensor:
    """What a slot adds to the expected accepted length: the sum over m >= k of prod over i <= m of q_i. [A, K]

    q = (1 - alpha) * exp(-nll) + alpha, smoothed so that one bad slot does not silence all after it (arXiv 2605.18810).
    Slots without supervision count as 1 in the product and as 0 in the sum.
    """
    smooth_AK = torch.where(supervised_AK, (1 - alpha) * torch.exp(-nll_AK) + alpha, 1.0)
    reached_AK = smooth_AK.cumprod(dim=1) * supervised_AK
    return reached_AK.flip(1).cumsum(dim=1).flip(1) * supervised_AK


def block_loss(
    objective: Objective,
    output_AKD: Tensor,
    head_VD: Tensor,
    label_AK: Tensor,
    supervised_AK: Tensor,
    samples: int,
    teacher_AKD: Tensor | None = None,
) -> BlockLoss:
    """Weighted loss of a row with `samples` supervised samples.

    `teacher_AKD`, needed for distillation: what the target's own head would be given for the same tokens, its last
    hidden state after its final norm, one position before each slot.
    """
    config = objective.config
    at = supervised_AK.flatten().nonzero()[:, 0]
    label_N = label_AK.flatten()[at]
    teacher_ND = None if teacher_AKD is None or not config.kd else teacher_AKD.flatten(0, 1)[at]
    nll_N, divergence_N, best_N = _slot_losses(output_AKD.flatten(0, 1)[at], head_VD, label_N, teacher_ND, config.chunk)

    loss_N = nll_N if teacher_ND is None else (1 - config.kd) * nll_N + config.kd * divergence_N
    weight_AK = config.decay * objective.decay_K * supervised_AK
    divisor = weight_AK.sum()
    if config.dpace:
        nll_AK = torch.zeros(supervised_AK.numel(), device=nll_N.device)
        nll_AK[at] = nll_N.detach()
        pace_AK = dpace_weights(nll_AK.view_as(supervised_AK), supervised_AK, config.dpace_alpha)
        weight_AK = weight_AK + config.dpace * pace_AK
        sums = {"weights": pace_AK.sum(), "blocks": supervised_AK.any(dim=1).sum(), "samples": torch.tensor(samples)}
        divisor = divisor + config.dpace * sums[config.dpace_divisor]

    hit = torch.zeros_like(supervised_AK).flatten()
    hit[at] = best_N == label_N
    return BlockLoss(
        loss=(loss_N * weight_AK.flatten()[at]).sum(),
        divisor=divisor,
        hit_AK=hit.view_as(supervised_AK),
    )


def _slot_losses(
    hidden_ND: Tensor, head_VD: Tensor, label_N: Tensor, teacher_ND: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, divergence from the teacher (both fp32) and most likely token of every slot.

    At most `chunk` rows of logits exist at a time.
    """
    teachers: Iterable[Tensor | None] = repeat(None) if teacher_ND is None else torch.split(teacher_ND, chunk)
    pieces = [
        # The backward pass computes a chunk's logits again instead of keeping them.
        checkpoint(_chunk_losses, hidden, head_VD, label, teacher, use_reentrant=False)
        for hidden, label, teacher in zip(
            torch.split(hidden_ND, chunk), torch.split(label_N, chunk), teachers, strict=False
        )
    ]
    nll, divergence, best = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return nll, divergence, best


def _chunk_losses(
    hidden_ND: Tensor, head_VD: Tensor, label_N: Tensor, teacher_ND: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    logits_NV = F.linear(hidden_ND, head_VD).float()
    nll_N, best_N = F.cross_entropy(logits_NV, label_N, reduction="none"), logits_NV.argmax(dim=-1)
    if teacher_ND is None:
        return nll_N, torch.zeros_like(nll_N), best_N
    target_NV = F.log_softmax(F.linear(teacher_ND, head_VD).float(), dim=-1)
    draft_NV = F.log_softmax(logits_NV, dim=-1)
    return nll_N, (target_NV.exp() * (target_NV - draft_NV)).sum(dim=-1), best_N
