"""The loss of drafted blocks, its logits in chunks.

A slot's weight says how much it counts, its loss what it should say; both may be mixtures:

    weight = decay * exp(-(k - 1) / gamma) + dpace * (D-PACE's weight)
    loss   = (1 - kd) * cross entropy with the recorded token + kd * divergence from the target's distribution

Nothing is divided here: sums of any number of rows and ranks add up, and the trainer divides once by the divisor of the
whole step. A mean a row would weigh a row with one supervised slot like one with thousands.

Shapes: T tokens, A anchors, K block, D hidden, V vocabulary, N supervised slots.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
    at_N: Tensor | None = None,
) -> BlockLoss:
    """Weighted loss of a row with `samples` supervised samples.

    `teacher_AKD`, needed for distillation: what the target's own head would be given for the same tokens, its last
    hidden state after its final norm, one position before each slot. `at_N`, where known: the supervised slots, which a
    GPU would have to be asked for.
    """
    config = objective.config
    at = supervised_AK.flatten().nonzero()[:, 0] if at_N is None else at_N
    label_N = label_AK.flatten()[at]
    teacher_ND = None if teacher_AKD is None or not config.kd else teacher_AKD.flatten(0, 1)[at]
    loss_N, nll_N, best_N = _SlotLosses.apply(  # type: ignore[no-untyped-call]
        output_AKD.flatten(0, 1), head_VD, at, label_N, teacher_ND, config.kd, config.chunk
    )

    weight_AK = config.decay * objective.decay_K * supervised_AK
    divisor = weight_AK.sum()
    if config.dpace:
        nll_AK = torch.zeros(supervised_AK.numel(), device=nll_N.device)
        nll_AK[at] = nll_N
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


class _SlotLosses(torch.autograd.Function):
    """Loss, cross entropy (both fp32) and most likely token of the slots at `at_N` of Q outputs.

    At most `chunk` rows of logits exist at a time. A slot's loss hangs on its own output alone, so its gradient is
    worked out while the logits are there: two products with the head instead of three, and nothing to compute again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output_QD: Tensor,
        head_VD: Tensor,
        at_N: Tensor,
        label_N: Tensor,
        teacher_ND: Tensor | None,
        kd: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_ND = output_QD[at_N]
        gradient_ND, pieces = torch.empty_like(hidden_ND), []
        for begin in range(0, max(len(at_N), 1), chunk):
            here = slice(begin, begin + chunk)
            logits_NV = hidden_ND[here] @ head_VD.T
            teacher_NV = None if teacher_ND is None else teacher_ND[here] @ head_VD.T
            pieces.append(_losses(logits_NV)(logits_NV, label_N[here], teacher_NV, kd))
            torch.mm(logits_NV, head_VD, out=gradient_ND[here])
        ctx.save_for_backward(gradient_ND, at_N)
        ctx.outputs = len(output_QD)
        loss_N, nll_N, best_N = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ctx.mark_non_differentiable(nll_N, best_N)
        return loss_N, nll_N, best_N

    @staticmethod
    def backward(ctx: Any, weight_N: Tensor, *_: Any) -> Any:
        gradient_ND, at_N = ctx.saved_tensors
        gradient_QD = gradient_ND.new_zeros(ctx.outputs, gradient_ND.shape[1])
        gradient_QD[at_N] = gradient_ND.mul_(weight_N[:, None])
        return gradient_QD, None, None, None, None, None, None


def _losses(logits: Tensor) -> Any:
    """`plain_losses`, or where there is a GPU its kernel."""
    if logits.is_cuda:
        from dflash_offline.train.loss_kernel import losses

        return losses
    return plain_losses


def plain_losses(
    logits_NV: Tensor, label_N: Tensor, teacher_NV: Tensor | None, kd: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cross entropy and most likely token of every row. Puts the loss's gradient in the place of the logits."""
    draft_NV = F.log_softmax(logits_NV.float(), dim=-1)
    best_N = draft_NV.argmax(dim=-1)
    nll_N = loss_N = F.nll_loss(draft_NV, label_N, reduction="none")
    gradient_NV = draft_NV.exp()
    hard = 1.0 if teacher_NV is None else 1 - kd
    if teacher_NV is not None:
        target_NV = F.log_softmax(teacher_NV.float(), dim=-1)
        gradient_NV -= kd * target_NV.exp()
        loss_N = hard * nll_N + kd * (target_NV.exp() * (target_NV - draft_NV)).sum(dim=-1)
    gradient_NV[torch.arange(len(label_N), device=label_N.device), label_N] -= hard
    logits_NV.copy_(gradient_NV)
    return loss_N, nll_N.clone(), best_N
