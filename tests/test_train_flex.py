"""The mask written down for flex attention against the plain one."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_offline.train.feed import slow_shape
from dflash_offline.train.flex import TILE, block_mask, tiles
from dflash_offline.train.masks import Blocks, visible


def row(size: int, context: int, slots: int, seed: int) -> Blocks:
    """Sorted anchors of three documents and some dummies, as many as `slots` make."""
    generator = torch.Generator().manual_seed(seed)
    edges = [0, context // 3 + 7, context // 2 + 11, context]
    count = slots // size
    anchors, starts = [], []
    for begin, end in pairwise(edges):
        found = torch.randint(begin + 1, end, (count // 4,), generator=generator).sort().values
        anchors.append(found)
        starts.append(torch.full_like(found, begin))
    spare = torch.zeros(count - 3 * (count // 4), dtype=torch.int64)
    return Blocks(torch.cat([*anchors, spare]), torch.cat([*starts, spare]), size)


@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize(("size", "slots"), [(16, 4096), (8, 2048), (10, 2560), (32, 4096)])
def test_tiles_and_mask_are_those_of_the_plain_mask(size: int, slots: int, window: int | None) -> None:
    context = 768
    for seed in range(3):
        blocks = row(size, context, slots, seed)
        plain = visible(blocks, context, window)
        made = block_mask(blocks, context, window)
        q, k = torch.arange(slots)[:, None], torch.arange(context + slots)[None, :]
        zero = torch.tensor(0)
        assert torch.equal(made.mask_mod(zero, zero, q, k), plain)
        some, full = tiles(blocks, context, window)
        by_tile = plain.view(slots // TILE, TILE, -1, TILE)
        assert not (by_tile.any(dim=3).any(dim=1) & ~some).any()  # nothing visible is left out
        assert not (full & ~by_tile.all(dim=3).all(dim=1)).any()  # nothing hidden is let through
        assert not (full & ~some).any()
        assert full.any() or window is not None
        if window != 1:  # few tiles are met in vain
            assert some.sum() <= 1.3 * by_tile.any(dim=3).any(dim=1).sum()
        # The lists say the same.
        listed = torch.zeros_like(some)
        for counts, indices in (
            (made.kv_num_blocks, made.kv_indices),
            (made.full_kv_num_blocks, made.full_kv_indices),
        ):
            assert counts is not None and indices is not None
            for tile in range(len(some)):
                listed[tile, indices[0, 0, tile, : counts[0, 0, tile]].long()] = True
        assert torch.equal(listed, some)


def test_sizes_that_are_no_multiples_are_refused() -> None:
    with pytest.raises(ValueError, match="700 tokens and 1024 slots"):
        tiles(row(16, 700, 1024, 0), 700, None)


def test_rows_that_do_not_fit_the_tiles_are_told() -> None:
    def said(tokens: int, anchors: int, device: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 16) -> str:
        spec = SimpleNamespace(block_size=16, head_dim=head_dim)
        builder: Any = SimpleNamespace(row_tokens=tokens, row_anchors=anchors, spec=spec)
        return slow_shape(builder, torch.device(device), dtype)

    assert said(3072, 512, "cuda") == said(3000, 500, "cpu") == ""
    assert "data.row_tokens 3000, data.row_anchors x model.block_size 8000" in said(3000, 500, "cuda")
    assert "computing in float32" in said(3072, 512, "cuda", torch.float32)
    assert "model.head_dim 8; expected" in said(3072, 512, "cuda", head_dim=8)
