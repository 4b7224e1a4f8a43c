"""Checkpoints in block-quantised FP8, as Qwen and DeepSeek publish them, read as exactly what they say.

`X.weight` is float8_e4m3 and `X.weight_scale_inv` has one scale for each block of it, 128 x 128 as a rule; the weight
is their product. Dequantised it is formed in fp32 and rounded once to the compute type. Native, FP8 is multiplied by
FP8: of the activations every token and group of 128 has its own scale, as in servers (DeepSeek-V3, section 3.3).

Legend: P tokens, I and O input and output width, G groups of an input.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_offline.shards.errors import UsageError

SCALE = "_scale_inv"
"""After the weight's name."""
LARGEST = 448.0
"""Of float8_e4m3fn."""
TINY = 1e-10
"""A group whose values are all smaller is scaled as if it held this."""
_rounding = True


@contextmanager
def unrounded() -> Iterator[None]:
    """Within the block products leave activations as they are: where a value falls on the other side of one of FP8's
    steps, that would hide how two models differ otherwise."""
    global _rounding
    _rounding = False
    try:
        yield
    finally:
        _rounding = True


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
    return _times(weight_OI, checked(name, weight_OI, scale), block)


def checked(name: str, weight_OI: Tensor, scale: Tensor) -> Tensor:
    """The scales in fp32. Raises UsageError for scales that are no scales and for values that are no numbers."""
    scale = scale.float()
    bad = scale[~((scale > 0) & torch.isfinite(scale * LARGEST))]
    if len(bad):
        raise UsageError(f"{name}{SCALE}: holds {float(bad[0])}; expected finite scales above 0; fetch it again")
    if bool((weight_OI.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise UsageError(f"{name}: holds NaN; fetch it again")
    return scale


def is_whole(shape: Sequence[int], block: tuple[int, int]) -> bool:
    """Whether a weight is made of whole blocks; others are small, and never multiplied in FP8."""
    return shape[0] % block[0] == 0 and shape[1] % block[1] == 0


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight that is multiplied as it is."""

    values_OI: Tensor
    scale: Tensor
    """fp32 [O / rows, I / columns]"""
    block: tuple[int, int]


class Linear(nn.Module):
    """In the place of a stock linear layer: its state has the checkpoint's names."""

    def __init__(self, shape: tuple[int, int], block: tuple[int, int]) -> None:
        super().__init__()
        values_OI = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        self.weight = nn.Parameter(values_OI, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.empty(scale_shape(shape, block), device="meta"), requires_grad=False)
        self._block = block

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return product(x.flatten(0, -2), self.matrix()).view(*x.shape[:-1], -1)

    def matrix(self) -> Matrix:
        """What it multiplies by."""
        return Matrix(values_OI=self.weight, scale=self.weight_scale_inv, block=self._block)


def kernel(device: torch.device, block: tuple[int, int]) -> str:
    """What multiplies FP8 there. Raises UsageError where nothing does."""
    if device.type == "cpu":
        return "torch reference in fp8"
    found = torch.cuda.get_device_capability(device)
    if found != (9, 0) or block != (128, 128):
        raise UsageError(
            f"target.fp8 is native, which is for Hopper GPUs (sm_90) and blocks of 128 x 128; found sm_{found[0]}"
            f"{found[1]} and {block[0]} x {block[1]}; use --target.fp8 dequantise"
        )
    return "torch scaled_mm in fp8"


def join(parts: Sequence[Matrix]) -> Matrix:
    """Matrices that read the same input as one."""
    values_OI = torch.cat([part.values_OI for part in parts])
    return Matrix(values_OI=values_OI, scale=torch.cat([part.scale for part in parts]), block=parts[0].block)


def product(x_PI: Tensor, matrix: Matrix) -> Tensor:
    """[P, O] in x's type: x, quantised by groups of the block's columns, times the matrix. Sums are fp32."""
    if not _rounding:
        return F.linear(x_PI, _times(matrix.values_OI, matrix.scale, matrix.block).to(x_PI.dtype))
    if not x_PI.is_cuda:
        rounded_PI = _times(*quantise(x_PI, matrix.block[1]), (1, matrix.block[1]))
        return (rounded_PI @ _times(matrix.values_OI, matrix.scale, matrix.block).t()).to(x_PI.dtype)
    from dflash_offline.extract import fp8_kernels

    values_PI, scale_PG = fp8_kernels.quantise(x_PI)
    # cuBLAS wants the weight's scales in columns of a multiple of four, and tokens as well: the kernel adds them.
    scale_GO = F.pad(matrix.scale, (0, -matrix.scale.shape[1] % 4)).t()
    recipe = F.ScalingType
    out_PO = F.scaled_mm(
        values_PI,
        matrix.values_OI.t(),
        scale_PG,
        recipe.BlockWise1x128,
        scale_GO,
        recipe.BlockWise128x128,
        output_dtype=x_PI.dtype,
    )
    return out_PO[: len(x_PI)]


def quantise(x_PI: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """float8 [P, I] and its fp32 scales [P, G]."""
    x_PGc = x_PI.float().view(len(x_PI), x_PI.shape[1] // columns, columns)
    # By a tensor: divided by a number, a GPU multiplies by its reciprocal, which for 448 is not exact.
    scale_PG = x_PGc.abs().amax(dim=2).clamp(min=TINY) / x_PGc.new_tensor(LARGEST)
    return (x_PGc / scale_PG[..., None]).flatten(1).to(torch.float8_e4m3fn), scale_PG


def _times(values_OI: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = values_OI.shape
    wide_OI = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return values_OI.float() * wide_OI
