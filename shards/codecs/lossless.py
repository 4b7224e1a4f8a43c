"""lossless: bit-exact, about 10.7 bits a value.

A bf16 value is sign (1), exponent (8), mantissa (7). Sign and mantissa of hidden states are noise and stored as they
are. Exponents of one channel cluster around that channel's own magnitude: minus the channel's most frequent exponent
they cost 2.7 bits under a Huffman coder instead of 8.

    E = exponent - mode[layer][channel]  (mod 256)     entropy coded
    M = sign << 7 | mantissa                           stored
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dflash_offline.shards.codecs.contract import Codec, calibrated, exactly
from dflash_offline.shards.codecs.operations import operations


@dataclass(frozen=True, kw_only=True, eq=False)
class Lossless(Codec):
    """Exponent minus per-channel mode, and sign with mantissa."""

    mode_LD: Tensor
    """uint8 [L, D]: the most frequent biased exponent of each channel."""
    name = "lossless"
    version = 1
    compressed = (True, False)

    @classmethod
    def calibrate(cls, states_TLD: Tensor, parameters: Mapping[str, Any]) -> Self:
        """Count exponents per layer and channel; ties go to the smaller exponent, so the result is deterministic."""
        tokens, layers, hidden = states_TLD.shape
        exponent_TLD = (states_TLD.contiguous().view(torch.int16) >> 7) & 255
        counts = torch.zeros(layers, hidden, 256, dtype=torch.int32, device=states_TLD.device)
        ones = torch.ones(1, dtype=torch.int32, device=states_TLD.device).expand(layers, hidden, tokens)
        counts.scatter_add_(2, exponent_TLD.permute(1, 2, 0).long(), ones)
        return cls(mode_LD=counts.argmax(dim=2).to(torch.uint8))

    @classmethod
    def restore(
        cls, parameters: Mapping[str, Any], calibration: Mapping[str, Tensor], layers: int, hidden: int
    ) -> Self:
        """Rebuild from codec.safetensors."""
        return cls(mode_LD=calibrated(calibration, "mode", torch.uint8, (layers, hidden)))

    def calibration(self) -> dict[str, Tensor]:
        """The modes."""
        return {"mode": self.mode_LD}

    @classmethod
    def nominal_bits(cls, parameters: Mapping[str, Any]) -> float:
        """Sign and mantissa as they are, and about 2.7 bits of exponent."""
        return 10.72

    def to(self, device: torch.device | str) -> Self:
        """The modes on `device`."""
        return type(self)(mode_LD=self.mode_LD.to(device))

    def plane_bytes(self, tokens: int) -> tuple[range, ...]:
        """Two planes, one byte a value each."""
        values = tokens * self.mode_LD.numel()
        return exactly(values), exactly(values)

    def encode(self, states_TLD: Tensor) -> list[Tensor]:
        """bf16 [T, L, D] -> exponent plane, sign-mantissa plane."""
        planes = operations(states_TLD).split(states_TLD, self.mode_LD.to(states_TLD.device))
        return [plane.view(-1) for plane in planes]

    def decode(self, planes: Sequence[Tensor], tokens: int) -> Tensor:
        """Exponent plane, sign-mantissa plane -> bf16 [T, L * D]."""
        layers, hidden = self.mode_LD.shape
        exponent_LTD, rest_LTD = (plane.view(layers, tokens, hidden) for plane in planes)
        states_TLD = operations(exponent_LTD).merge(exponent_LTD, rest_LTD, self.mode_LD.to(exponent_LTD.device))
        return states_TLD.view(tokens, layers * hidden)
