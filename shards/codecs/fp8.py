"""fp8: e4m3fn with one scale per token and layer, for comparison with what others store.

    scale = max |x| / 448 over the channels          fp32 [L][T], stored
    q     = e4m3fn(x / scale)                        [L][T][D], entropy coded
    y     = bf16(q * scale)

The scale is fp32: it costs 0.006 bits a value at 5,120 channels, and a bf16 one that was rounded down would push the
largest value over 448, which e4m3fn turns into NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dflash_offline.shards.codecs.contract import Codec, exactly
from dflash_offline.shards.errors import CorruptError

LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32: an all-zero token gives zeros, not 0 / 0, also where subnormals are flushed."""


@dataclass(frozen=True, kw_only=True)
class Fp8(Codec):
    """e4m3fn per token and layer."""

    layers: int
    hidden: int
    name = "fp8"
    version = 1
    compressed = (True, False)

    @classmethod
    def calibrate(cls, states_TLD: Tensor, parameters: Mapping[str, Any]) -> Self:
        """Nothing to measure but the shape."""
        return cls(layers=states_TLD.shape[1], hidden=states_TLD.shape[2])

    @classmethod
    def restore(
        cls, parameters: Mapping[str, Any], calibration: Mapping[str, Tensor], layers: int, hidden: int
    ) -> Self:
        """Rebuild from a manifest."""
        return cls(layers=layers, hidden=hidden)

    @classmethod
    def nominal_bits(cls, parameters: Mapping[str, Any]) -> float:
        """An e4m3 symbol after entropy coding."""
        return 6.9

    def to(self, device: torch.device | str) -> Self:
        """Nothing to move."""
        return self

    def plane_bytes(self, tokens: int) -> tuple[range, ...]:
        """One byte a value; four a token and layer."""
        rows = self.layers * tokens
        return exactly(rows * self.hidden), exactly(4 * rows)

    def check(self, planes: Sequence[Tensor], tokens: int) -> None:
        """Scales are positive and finite."""
        scales = planes[1].view(torch.float32)
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise CorruptError("a scale is not a positive number")

    def encode(self, states_TLD: Tensor) -> list[Tensor]:
        """bf16 [T, L, D] -> values, scales."""
        x_LTD = states_TLD.transpose(0, 1).contiguous().float()
        scale_LT1 = (x_LTD.abs().amax(dim=2, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
        q_LTD = (x_LTD / scale_LT1).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return [q_LTD.view(-1).view(torch.uint8), scale_LT1.view(-1).view(torch.uint8)]

    def decode(self, planes: Sequence[Tensor], tokens: int) -> Tensor:
        """Values, scales -> bf16 [T, L * D]."""
        q_LTD = planes[0].view(torch.float8_e4m3fn).view(self.layers, tokens, self.hidden).float()
        y_LTD = q_LTD * planes[1].view(torch.float32).view(self.layers, tokens, 1)
        return y_LTD.to(torch.bfloat16).transpose(0, 1).reshape(tokens, self.layers * self.hidden)
