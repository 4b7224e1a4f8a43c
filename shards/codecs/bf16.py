"""bf16: the states as they are. One plane of 2 * L * T * D bytes, little-endian, [layer][token][channel]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dflash_offline.shards.codecs.contract import Codec, exactly


@dataclass(frozen=True, kw_only=True)
class Bf16(Codec):
    """Raw states; the yardstick for every other codec."""

    layers: int
    hidden: int
    name = "bf16"
    version = 1
    compressed = (False,)

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
        """As stored."""
        return 16.0

    def to(self, device: torch.device | str) -> Self:
        """Nothing to move."""
        return self

    def plane_bytes(self, tokens: int) -> tuple[range, ...]:
        """One plane, two bytes a value."""
        return (exactly(2 * self.layers * tokens * self.hidden),)

    def encode(self, states_TLD: Tensor) -> list[Tensor]:
        """bf16 [T, L, D] -> one uint8 plane."""
        return [states_TLD.transpose(0, 1).contiguous().view(-1).view(torch.uint8)]

    def decode(self, planes: Sequence[Tensor], tokens: int) -> Tensor:
        """One uint8 plane -> bf16 [T, L * D]."""
        states_LTD = planes[0].view(torch.bfloat16).view(self.layers, tokens, self.hidden)
        return states_LTD.transpose(0, 1).reshape(tokens, self.layers * self.hidden)
