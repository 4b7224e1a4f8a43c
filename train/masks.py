"""Which keys a drafted block sees, and the attention over them.

A row holds T context tokens of one or more documents and A blocks of K slots. Block a's query at slot o sees
- context t with start_a <= t < anchor_a: the anchor's own state does not exist yet when the block is drafted;
- the slots of its own block, and of no other.
In a layer with window W both ends are bounded per query: t >= anchor_a + o - (W - 1), and slots o' <= o, o - o' < W.

Shapes: T context tokens, A anchors, K block, Q = A * K slots, H heads, G key-value heads, E head width.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_GROUP = 16
TILE = 128
"""Multiple of a row's tokens and slots that attention in tiles (flex.py) needs."""


class KeyValue(NamedTuple):
    """Keys (normed and rotated) and values of one layer, [G, N, E]."""

    key: Tensor
    value: Tensor


class Attends(Protocol):
    """Attention of the blocks of a row."""

    def attend(self, query_HQE: Tensor, context: KeyValue, own: KeyValue) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a row stand. A dummy block has anchor == start: it sees no context, only itself."""

    anchor_A: Tensor
    """Row index of each anchor."""
    start_A: Tensor
    """Row index of the first token of the anchor's document."""
    size: int
    """Slots of a block, K."""

    def positions(self) -> Tensor:
        """Position of every slot in its document, [Q]."""
        slots = torch.arange(self.size, device=self.anchor_A.device)
        return ((self.anchor_A - self.start_A)[:, None] + slots).flatten()

    def before(self, context: int) -> Tensor:
        """Row index of the token before every slot, whose state in the target predicts the slot; [A, K]."""
        slots = torch.arange(self.size, device=self.anchor_A.device)
        return (self.anchor_A[:, None] + slots - 1).clamp(0, context - 1)  # slots outside the row are unsupervised

    def to(self, device: torch.device) -> "Blocks":
        """The same blocks on another device."""
        return Blocks(self.anchor_A.to(device), self.start_A.to(device), self.size)


def visible(blocks: Blocks, context: int, window: int | None) -> Tensor:
    """The mask as booleans, [Q, context + Q]: which of the context tokens and slots each slot sees."""
    device = blocks.anchor_A.device
    slot = torch.arange(blocks.size, device=device).repeat(len(blocks.anchor_A))  # of each query, and of each block key
    block = torch.arange(len(blocks.anchor_A), device=device).repeat_interleave(blocks.size)
    anchor, start = blocks.anchor_A[block], blocks.start_A[block]
    token = torch.arange(context, device=device)
    sees_context = (token >= start[:, None]) & (token < anchor[:, None])
    sees_slot = block[:, None] == block
    if window is not None:
        sees_context &= token >= (anchor + slot - (window - 1))[:, None]
        sees_slot &= (slot <= slot[:, None]) & (slot > slot[:, None] - window)
    return torch.cat([sees_context, sees_slot], dim=1)


class View:
    """The mask of a row for layers of one window, cut into groups of blocks.

    A group meets the part of the context that one of its blocks can see, and its own slots; as blocks follow the
    documents, that is a small part of all T + Q keys. The mask within a group is dense.
    """

    def __init__(self, blocks: Blocks, window: int | None) -> None:
        self.slots = _GROUP * blocks.size
        self.groups: list[tuple[slice, Tensor]] = []
        for anchor, start in zip(
            torch.split(blocks.anchor_A, _GROUP), torch.split(blocks.start_A, _GROUP), strict=True
        ):
            real = anchor > start
            low, high = (int(start[real].min()), int(anchor[real].max())) if real.any() else (0, 0)
            near = Blocks(anchor - low, start - low, blocks.size)
            self.groups.append((slice(low, high), visible(near, high - low, window)))

    def attend(self, query_HQE: Tensor, context: KeyValue, own: KeyValue) -> Tensor:
        """Masked attention with grouped heads, scaled by 1 / sqrt(E). [H, Q, E]"""
        pieces = (torch.split(x, self.slots, dim=1) for x in (query_HQE, own.key, own.value))
        parts = []
        for (tokens, mask), query, key, value in zip(self.groups, *pieces, strict=True):
            key = torch.cat([context.key[:, tokens], key], dim=1)
            value = torch.cat([context.value[:, tokens], value], dim=1)
            # The batch dimension selects the fused kernels.
            parts.append(
                F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, enable_gqa=True)[0]
            )
        return torch.cat(parts, dim=1)
