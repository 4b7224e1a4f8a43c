"""The serving walk: what speculative decoding would accept on a recorded response, from the cache alone.

Every supervised token but a span's last is drafted from as an anchor, with the mask of training. The walk then takes
the anchors that serving would land on: from the first token of a span, each step as far as the drafts agree and one
token more, clipped at the span's end. With greedy data this is what the live loop records.

At a temperature the chances of rejection sampling are worked out too, from the target's last hidden state (sampled.py).

Shapes: T tokens, A anchors, K block, D hidden, V vocabulary, L captured layers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_offline.shards.sample import Sample
from dflash_offline.train.masks import Blocks
from dflash_offline.train.model import Drafter, Target, block_inputs
from dflash_offline.train.plan import Ints
from dflash_offline.train.rows import select_layers
from dflash_offline.train.sampled import Chances, Teacher

_LOGITS = 1 << 29
"""Logits that exist at one time: blocks enough to keep a GPU busy at 248,320 tokens, 1 GB in bf16."""
_BLOCKS = 256
"""Blocks that go through the layers at one time, where their logits allow it."""


@dataclass(frozen=True)
class Step:
    """One step of the walk: drafted from `anchor` (a position in the sample), `recorded` tokens gained."""

    anchor: int
    recorded: int
    drafts: tuple[int, ...]
    """All K - 1 drafted tokens, those past the span's end included."""


@dataclass(frozen=True)
class Drafts:
    """Drafts from every anchor of a sample."""

    anchor_A: Ints
    room_A: Ints
    """Tokens of the span after the anchor."""
    token_AK: Ints
    """Drafted tokens of slots 1 .. K - 1, [A, K - 1]."""
    inside_AK: NDArray[np.bool_]
    """Whether the slot's position lies in the anchor's span."""
    hit_AK: NDArray[np.bool_]
    """Whether it does and the draft is the recorded token."""
    chances: Chances | None = None
    """Of the recorded tokens, where a temperature was given."""

    @property
    def accepted_A(self) -> Ints:
        """Leading hits of each anchor."""
        return np.logical_and.accumulate(self.hit_AK, axis=1).sum(axis=1)


def supervised_spans(loss_mask: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Contiguous supervised runs [start, stop)."""
    edges = np.flatnonzero(np.diff(np.pad((loss_mask != 0).astype(np.int8), 1)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


@torch.inference_mode()
def draft_sample(
    drafter: Drafter,
    target: Target,
    sample: Sample,
    layers: list[int] | None = None,
    chunk: int | None = None,
    temperature: float = 0.0,
) -> Drafts:
    """Draft from every anchor of `sample`, `chunk` blocks at a time (None: as many as memory should bear).

    `layers`: see rows.column_index. With a temperature above 0 the sample must hold the last hidden state.
    """
    size, device = drafter.spec.block_size, target.head_VD.device
    chunk = chunk or max(1, min(_BLOCKS, _LOGITS // ((size - 1) * len(target.head_VD))))
    spans = [np.arange(start, stop) for start, stop in supervised_spans(sample.loss_mask)]
    nothing = np.empty(0, np.int64)
    anchor_A = np.concatenate([nothing, *(span[:-1] for span in spans)])
    room_A = np.concatenate([nothing, *(span[-1] - span[:-1] for span in spans)])
    slot_K = np.arange(1, size)
    ids = np.pad(sample.input_ids.astype(np.int64), (0, size))
    label_AK = ids[anchor_A[:, None] + slot_K]
    teacher = Teacher(target, sample, temperature) if temperature else None
    states = select_layers(sample.states, layers, drafter.spec.hidden_size).to(device)
    context = drafter.context(states, torch.arange(len(states), device=device))
    drafted, chances = [torch.empty(0, size - 1, dtype=torch.int64, device=device)], []
    for at in range(0, len(anchor_A), chunk):
        part = torch.from_numpy(anchor_A[at : at + chunk])
        blocks = Blocks(part, torch.zeros_like(part), size).to(device)
        token = torch.from_numpy(ids[anchor_A[at : at + chunk]]).to(device)
        inputs = block_inputs(target.embedding_VD, token, size, drafter.spec.mask_token_id)
        # Blocks keep their full size at the span's end: a shorter one would draft other tokens in full layers.
        output_AKD = drafter.draft(inputs, context, blocks)
        # As one product of two matrices: as a batch of blocks it would read the whole head for each.
        hidden_QD = output_AKD[:, 1:].to(target.head_VD.dtype).flatten(0, 1)
        logits_AKV = (hidden_QD @ target.head_VD.T).view(len(part), size - 1, -1)
        drafted.append(logits_AKV.argmax(dim=-1))  # stays on the device: a copy would wait for it, a chunk at a time
        if teacher is not None:
            chances.append(teacher.chances(logits_AKV, anchor_A[at : at + chunk], label_AK[at : at + chunk]))
    token_AK = torch.cat(drafted).cpu().numpy()
    inside_AK = slot_K <= room_A[:, None]
    known = Chances.joined(chances, inside_AK) if teacher is not None else None
    return Drafts(anchor_A, room_A, token_AK, inside_AK, inside_AK & (token_AK == label_AK), known)


def walk(drafts: Drafts) -> list[Step]:
    """The steps serving would take."""
    steps, at, accepted_A = [], 0, drafts.accepted_A
    while at < len(accepted_A):
        recorded = min(int(accepted_A[at]) + 1, int(drafts.room_A[at]))
        steps.append(Step(int(drafts.anchor_A[at]), recorded, tuple(drafts.token_AK[at].tolist())))
        # A span has as many anchors as room, so a clipped step ends at the next span's first anchor.
        at += recorded
    return steps


def walk_sample(
    drafter: Drafter, target: Target, sample: Sample, layers: list[int] | None = None, chunk: int | None = None
) -> list[Step]:
    """Draft and walk one sample."""
    return walk(draft_sample(drafter, target, sample, layers, chunk))
