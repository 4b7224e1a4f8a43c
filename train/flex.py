"""The same mask as masks.View, for flex attention on a GPU: which tiles are met is written down, not searched for.

Making a block mask by evaluating the mask everywhere takes minutes to compile and a kernel over all of it a step. The
structure is known: the context that a tile of queries sees is one range, and its own slots are those of its blocks.

Shapes: T context tokens, A anchors, K block, Q = A * K slots, N = T + Q keys, tiles M of the queries and J of the keys.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_offline.train.fused import compiled
from dflash_offline.train.masks import TILE, Blocks, KeyValue


class FlexView:
    """The mask of a row for layers of one window. T and Q are multiples of TILE."""

    def __init__(self, blocks: Blocks, context: int, window: int | None) -> None:
        self.mask = block_mask(blocks, context, window)

    def attend(self, query_HQE: Tensor, context: KeyValue, own: KeyValue) -> Tensor:
        """As masks.View.attend."""
        key, value = (torch.cat(pair, dim=1)[None] for pair in zip(context, own, strict=True))
        attend = compiled(flex_attention, whole=False)
        return attend(query_HQE[None], key, value, block_mask=self.mask, enable_gqa=True)[0]


def block_mask(blocks: Blocks, context: int, window: int | None) -> BlockMask:
    """The mask and the tiles that it leaves anything of."""
    some_MJ, all_MJ = tiles(blocks, context, window)
    partial, full = (_listed(x) for x in (some_MJ & ~all_MJ, all_MJ))
    size, slots = blocks.size, len(blocks.anchor_A) * blocks.size
    # Slots outside the row are asked about too where the compiler pads.
    anchor_A, start_A = blocks.anchor_A, blocks.start_A
    last = len(anchor_A) - 1

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = (query // size).clamp(max=last), query % size
        anchor = anchor_A[block]
        sees_context = (key >= start_A[block]) & (key < anchor)
        own = key - context
        sees_slot = (own >= 0) & (own // size == block)
        if window is not None:
            sees_context = sees_context & (key >= anchor + slot - (window - 1))
            sees_slot = sees_slot & (own % size <= slot) & (own % size > slot - window)
        return torch.where(key < context, sees_context, sees_slot)

    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(slots, context + slots)
    )


def tiles(blocks: Blocks, context: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Whether a query of a tile sees any key of another, and whether all see all of it; bool [M, J] each.

    The first may say yes too often, the second no; never the other way round.
    """
    device, size = blocks.anchor_A.device, blocks.size
    slots = len(blocks.anchor_A) * size
    if context % TILE or slots % TILE:
        raise ValueError(f"{context} tokens and {slots} slots; expected multiples of {TILE}")
    first_M = torch.arange(0, slots, TILE, device=device)
    # The blocks that have a slot in each tile.
    member_MA = first_M[:, None] // size + torch.arange(-(-TILE // size) + 1, device=device)
    here_MA = member_MA <= ((first_M + TILE - 1) // size)[:, None]
    member_MA = member_MA.clamp(max=len(blocks.anchor_A) - 1)
    anchor_MA, start_MA = blocks.anchor_A[member_MA], blocks.start_A[member_MA]
    real_MA = here_MA & (anchor_MA > start_MA)
    dummy_M = (here_MA & (anchor_MA == start_MA)).any(dim=1)

    def lowest(slot: int) -> Tensor:
        return start_MA if window is None else torch.maximum(start_MA, anchor_MA + slot - (window - 1))

    low_M = torch.where(real_MA, lowest(0), context).amin(dim=1)
    high_M = torch.where(real_MA, anchor_MA, 0).amax(dim=1)
    all_low_M = torch.where(real_MA, lowest(size - 1), 0).amax(dim=1)
    all_high_M = torch.where(dummy_M, 0, torch.where(real_MA, anchor_MA, context).amin(dim=1))
    begin_J = torch.arange(0, context + slots, TILE, device=device)
    end_J, in_context_J = begin_J + TILE, begin_J < context
    some_MJ = in_context_J & (begin_J < high_M[:, None]) & (end_J > low_M[:, None])
    all_MJ = in_context_J & (begin_J >= all_low_M[:, None]) & (end_J <= all_high_M[:, None])
    # Own slots: the blocks of a tile may begin before it and end behind it.
    own_low_M = context + first_M // size * size
    own_high_M = context + ((first_M + TILE - 1) // size + 1) * size
    some_MJ = some_MJ | (~in_context_J & (begin_J < own_high_M[:, None]) & (end_J > own_low_M[:, None]))
    return some_MJ, all_MJ


def _listed(chosen_MJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each tile of queries meets, int32 [1, 1, M], and which, in order, int32 [1, 1, M, J]."""
    order_MJ = torch.argsort((~chosen_MJ).int(), dim=1, stable=True)
    return chosen_MJ.sum(dim=1).int()[None, None], order_MJ.int()[None, None]
