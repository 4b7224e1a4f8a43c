"""What speculative sampling would accept on a recorded response, in expectation, without running the target.

At temperature T the server draws draft d_k from the drafter's q_k, keeps it with probability min(1, p_k(d) / q_k(d)),
and otherwise draws from the rest of the target's p_k. What comes out is distributed as p, so a response that the target
sampled at T is one that this server could have written. Given the response x, the draft of slot k was kept with
probability r_k = min(1, q_k(x_k) / p_k(x_k)), each slot by itself; so the steps between which it was written are a
Markov chain over its positions, and the number of steps expected of it is a sum without any noise of sampling.

- tau is tokens / expected steps over the responses: what serving records, in which a miss makes the next anchor.
- tau_uniform is over all anchors: 1 + mean of the sum over k of (product over i < k of r_i) * (sum over v of
  min(p_k(v), q_k(v))); the last factor is the chance that slot k is kept, whatever x_k is.

Both are right only for responses sampled by this target at T, from its whole distribution (no top-k or top-p).

Shapes: A anchors, K block, V vocabulary, D hidden; slots 1 .. K - 1 in the columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_offline.shards.keys import last_positions
from dflash_offline.shards.sample import Sample
from dflash_offline.train.model import Target
from dflash_offline.train.plan import Ints

Floats = NDArray[np.float64]
_BLOCKS = 16
"""Blocks whose fp32 distributions exist at one time."""


@dataclass(frozen=True)
class Chances:
    """Of every slot; 0 outside the anchor's span."""

    recorded_AK: Floats
    """That the recorded token came from the draft: min(1, q / p) of it."""
    any_AK: Floats
    """That a draft is kept, over all tokens: sum of min(p, q)."""

    @classmethod
    def joined(cls, parts: Sequence[Tensor], inside_AK: NDArray[np.bool_]) -> "Chances":
        """From the [A, K - 1, 2] of `Teacher.chances`."""
        found = torch.cat(list(parts)).double().cpu().numpy() if parts else np.zeros((*inside_AK.shape, 2))
        return cls(found[..., 0] * inside_AK, found[..., 1] * inside_AK)

    def accepted_A(self) -> Floats:
        """Drafts kept from each anchor, in expectation."""
        before = np.pad(np.cumprod(self.recorded_AK, axis=1), ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        return (before * self.any_AK).sum(axis=1)


class Teacher:
    """The target's own distribution at a temperature, on the positions of one sample."""

    def __init__(self, target: Target, sample: Sample, temperature: float) -> None:
        assert sample.last_hidden is not None  # so says the manifest
        device = target.head_VD.device
        self.temperature, self.head_VD = temperature, target.head_VD
        self.hidden_ND = target.norm(sample.last_hidden.to(device).float()).to(target.head_VD.dtype)
        self.row = np.zeros(len(sample.input_ids) + 1, np.int64)
        at = last_positions(sample.loss_mask)
        self.row[at] = np.arange(len(at))

    def chances(self, logits_AKV: Tensor, anchor_A: Ints, label_AK: Ints) -> Tensor:
        """fp32 [A, K - 1, 2]: the two numbers of `Chances`; without meaning outside the anchor's span."""
        device = self.head_VD.device
        before = np.minimum(anchor_A[:, None] + np.arange(label_AK.shape[1]), len(self.row) - 1)
        # Neighbouring blocks ask for the same positions: each is multiplied with the head once.
        rows, inverse = np.unique(self.row[before], return_inverse=True)
        scores = F.linear(self.hidden_ND[torch.from_numpy(rows).to(device)], self.head_VD).float() / self.temperature
        target_NV = scores.log_softmax(dim=-1)
        which_AK = torch.from_numpy(inverse.reshape(before.shape)).to(device)
        token_AK1 = torch.from_numpy(label_AK).to(device)[..., None]
        out = []
        # A few blocks at a time: fp32 of a whole chunk would be many GB.
        for logits, which, token in zip(
            *(torch.split(x, _BLOCKS) for x in (logits_AKV, which_AK, token_AK1)), strict=True
        ):
            q_AKV, p_AKV = (logits.float() / self.temperature).log_softmax(dim=-1), target_NV[which]
            recorded = (q_AKV.gather(2, token) - p_AKV.gather(2, token)).clamp(max=0).exp()[..., 0]
            out.append(torch.stack([recorded, torch.minimum(q_AKV, p_AKV).exp().sum(dim=-1)], dim=-1))
        return torch.cat(out)


def expected_steps(recorded_AK: Floats, room_A: Ints) -> float:
    """Steps over a sample in expectation of the server's draws, given what it wrote.

    The anchors of a span are consecutive and spans follow each other, so a step that gains n tokens leads n rows on,
    and every walk passes each span's first row.
    """
    anchors, slots = recorded_AK.shape
    arrive = np.zeros(anchors + slots + 1)
    arrive[0] = 1.0
    for a, room in enumerate(room_A.tolist()):
        kept = np.cumprod(recorded_AK[a, :room])
        chance = np.append(1.0, kept) - np.append(kept, 0.0)  # exactly 0, 1, ... drafts kept: one token more is gained
        if len(chance) > room:  # clipped at the span's end
            chance = np.append(chance[: room - 1], chance[room - 1 :].sum())
        arrive[a + 1 : a + 1 + len(chance)] += arrive[a] * chance
    return float(arrive[:anchors].sum())
