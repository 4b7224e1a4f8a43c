"""Checkpoints in block-quantised FP8, as Qwen and DeepSeek publish them, read as exactly what they say.

`X.weight` is float8_e4m3 and `X.weight_scale_inv` has one scale for each block of it, 128 x 128 as a rule; the weight
is their product. It is formed in fp32 and rounded once to the compute type. A server that multiplies FP8 activations
gives somewhat other states: these are of the weights alone, and the manifest says so.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_offline.shards.errors import UsageError

SCALE = "_scale_inv"
"""After the weight's name."""


def block_of(folder: object, whole: Any) -> tuple[int, int] | None:
    """Rows and columns that share a scale, by the checkpoint's configuration; None where it is not quantised.

    Raises UsageError naming any other quantisation.
    """
    settings = getattr(whole, "quantization_config", None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        settings = settings.to_dict()
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, (list, tuple)) and len(block) == 2 and min(block) > 0):
        raise UsageError(
            f"{folder}/config.json: quantised by {method}, weight_block_size {block}; expected fp8 with blocks such as "
            f"[128, 128]; use the unquantised checkpoint"
        )
    return int(block[0]), int(block[1])


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a weight; the last block of a row or column may be cut."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def dequantise(name: str, weight_OI: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """fp32 [O, I]. Raises UsageError for scales that are no scales and for values that are no numbers."""
    scale = scale.float()
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise UsageError(f"{name}{SCALE}: holds {float(scale.min())}; expected finite scales above 0; fetch it again")
    rows, columns = weight_OI.shape
    wide_OI = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    product_OI = weight_OI.float() * wide_OI
    if not bool(torch.isfinite(product_OI).all()):
        raise UsageError(f"{name}: holds NaN; fetch it again")
    return product_OI
