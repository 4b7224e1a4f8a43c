"""How much of a GPU a step used: floating-point operations of its matrix products, beside what the maker promises.

Shapes: T row tokens, Q slots, N supervised slots, D hidden, V vocabulary.
"""

from typing import Any

import torch

from dflash_offline.train.config import DataConfig
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.spec import DrafterSpec

PEAK = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "RTX PRO 6000 Blackwell Max-Q": 438.9e12,
    "RTX PRO 6000 Blackwell": 503.8e12,
}
"""Dense bf16 operations a second, by the first of these words that the device's name holds: half of what the maker's
data sheets say with sparsity, B300 and RTX PRO 6000 as others quote them."""


def row_flops(spec: DrafterSpec, tokens: int, slots: int) -> int:
    """Of a row, forward and backward, without the head and without attention itself."""
    attention, shared = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * attention + shared + 3 * spec.intermediate_size)
    reduced = len(spec.layer_ids) * spec.hidden_size**2
    layers = len(spec.layer_types)
    # A weight's backward pass is two products; the states need no gradient.
    return 2 * (3 * layers * (slots * layer + tokens * spec.hidden_size * shared) + 2 * tokens * reduced)


def head_flops(spec: DrafterSpec, supervised: int) -> int:
    """Of the frozen head, forward and backward."""
    return 4 * supervised * spec.vocab_size * spec.hidden_size


def work_done(
    spec: DrafterSpec, data: DataConfig, sums: dict[str, Any], seconds: float, ranks: Ranks
) -> dict[str, Any]:
    """Metrics of a step of all ranks: TFLOP/s of one; on a GPU the most memory, and the part of PEAK (MFU) if known."""
    rows = data.rows_per_step - sums["empty_rows"]
    flops = rows * row_flops(spec, data.row_tokens, data.row_anchors * spec.block_size)
    flops += head_flops(spec, sum(sums["supervised"]))
    rate = flops / max(seconds, 1e-9) / ranks.world
    found = {"tflops": round(rate / 1e12, 6)}
    if ranks.device.type == "cuda":
        found["gpu_gb"] = round(torch.cuda.max_memory_allocated(ranks.device) / 1e9, 2)
        if known := peak(torch.cuda.get_device_name(ranks.device)):
            found["mfu"] = round(rate / known, 4)
    return found


def peak(name: str) -> float | None:
    """PEAK of a device by the name that the driver gives it; None of an unknown one."""
    return next((value for words, value in PEAK.items() if words in name), None)
