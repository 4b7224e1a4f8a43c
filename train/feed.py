"""Rows on the device, ahead of the step that needs them.

Threads read and decode samples. For a GPU one more thread copies and de-quantises them, in a queue beside the step's.
"""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from dflash_offline.train.masks import TILE, Attends
from dflash_offline.train.plan import Ints
from dflash_offline.train.rows import Packed, Row, RowBuilder, ahead

NARROWEST = 16
"""Width of a head, below which flex attention has no kernel for a GPU."""


def feed(
    builder: RowBuilder,
    jobs: Iterable[tuple[Ints, Ints]],
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    depth: int,
) -> Generator[Row, None, None]:
    """The rows of `jobs` in order, up to `depth` of them read ahead. On a GPU one more is there already."""
    if device.type == "cpu":
        yield from ahead(lambda job: builder.unpack(builder.read(*job), device), jobs, threads, depth)
        return
    # Its small kernels are next when a product of the step ends, not behind all that are queued.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    flex = dtype == torch.bfloat16 and tiled(builder)

    def place(packed: Packed) -> Row:
        begun = time.perf_counter()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            row = builder.unpack(packed, device)
            views = flex_views(row, builder) if flex else None
            stream.synchronize()
        return replace(row, views=views, seconds={**row.seconds, "copy": time.perf_counter() - begun})

    packed = ahead(lambda job: builder.read(*job, pinned=True), jobs, threads, depth)
    with closing(packed), closing(ahead(place, packed, 1, 1)) as rows:
        for row in rows:
            for tensor in tensors(row):
                # Its memory is of the other queue, which must not use it again while the step does.
                tensor.record_stream(torch.cuda.current_stream(device))
            yield row


def flex_views(row: Row, builder: RowBuilder) -> dict[int | None, Attends]:
    """What the blocks of a row see, by window, for attention in tiles."""
    from dflash_offline.train.flex import FlexView  # takes seconds to import

    return {window: FlexView(row.blocks, builder.row_tokens, window) for window in {*builder.spec.windows}}


def tensors(row: Row) -> Iterator[Tensor]:
    """All memory of a row."""
    masks = [value for view in (row.views or {}).values() for value in view.mask.as_tuple()]  # type: ignore[attr-defined]
    for value in (*vars(row).values(), *vars(row.blocks).values(), *masks):
        if isinstance(value, Tensor):
            yield value


def tiled(builder: RowBuilder) -> bool:
    """Whether rows have the shape that the fast attention needs."""
    spec = builder.spec
    return builder.row_tokens % TILE == builder.row_anchors * spec.block_size % TILE == 0 and spec.head_dim >= NARROWEST


def compiles(device: torch.device) -> str:
    """What there is to say before the first step on a device; "" where nothing."""
    if device.type != "cuda":
        return ""
    return "compiling in the first step: 20 to 40 s, unless these shapes are in the compile cache on disk"


def slow_shape(builder: RowBuilder, device: torch.device, dtype: torch.dtype) -> str:
    """What keeps rows on a GPU from the fast attention, in words; "" where nothing does."""
    if device.type != "cuda" or (dtype == torch.bfloat16 and tiled(builder)):
        return ""
    slots = builder.row_anchors * builder.spec.block_size
    return (
        f"attention is many times slower than it could be: computing in {str(dtype).removeprefix('torch.')}, "
        f"data.row_tokens {builder.row_tokens}, data.row_anchors x model.block_size {slots}, "
        f"model.head_dim {builder.spec.head_dim}; expected bfloat16, multiples of {TILE}, heads of {NARROWEST} or more"
    )
