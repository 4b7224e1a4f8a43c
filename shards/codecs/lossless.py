"""lossless: bit-exact, about 10.7 bits a value.

A bf16 value is sign (1), exponent (8), mantissa (7). Sign and mantissa of hidden states are noise and stored as they
are. Exponents of one channel cluster around that channel's own magnitude: minus the channel's most frequent exponent
they cost 2.7 bits under a Huffman coder instead of 8.

    E = exponent - mode[layer][channel]  (mod 256)     entropy coded
    M = sign << 7 | mantissa                           stored
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Lossless:
    """Exponent minus per-channel mode, and sign with mantissa."""

    mode_LD: Tensor
    """uint8 [L, D]: the most frequent biased exponent of each channel."""
    name = "lossless"
    version = 1
    compressed = (True, False)

    @classmethod
    def calibrate(cls, states_TLD: Tensor) -> Self:
        """Count exponents per layer and channel; ties go to the smaller exponent, so the result is deterministic."""
        exponents_TLD, _ = _split(states_TLD)
        tokens, layers, hidden = states_TLD.shape
        counts = torch.zeros(layers, hidden, 256, dtype=torch.int32, device=states_TLD.device)
        ones = torch.ones(1, dtype=torch.int32, device=states_TLD.device).expand(layers, hidden, tokens)
        counts.scatter_add_(2, exponents_TLD.permute(1, 2, 0).long(), ones)
        return cls(mode_LD=counts.argmax(dim=2).to(torch.uint8))

    @classmethod
    def restore(cls, parameters: dict[str, Any], calibration: dict[str, Tensor], layers: int, hidden: int) -> Self:
        """Rebuild from a manifest and codec.safetensors."""
        mode_LD = calibration["mode"]
        if mode_LD.shape != (layers, hidden) or mode_LD.dtype != torch.uint8:
            raise ValueError(f"mode is {mode_LD.dtype} {list(mode_LD.shape)}, expected uint8 [{layers}, {hidden}]")
        return cls(mode_LD=mode_LD)

    def parameters(self) -> dict[str, Any]:
        """None."""
        return {}

    def calibration(self) -> dict[str, Tensor]:
        """The modes."""
        return {"mode": self.mode_LD}

    def plane_bytes(self, tokens: int) -> tuple[int, ...]:
        """Two planes, one byte a value each."""
        values = tokens * self.mode_LD.numel()
        return (values, values)

    def encode(self, states_TLD: Tensor) -> list[Tensor]:
        """bf16 [T, L, D] -> exponent plane, sign-mantissa plane."""
        exponents_LTD, rest_LTD = _split(states_TLD.transpose(0, 1))
        # uint8 arithmetic wraps, which is the mod 256 of the format.
        shifted_LTD = exponents_LTD - self.mode_LD.to(states_TLD.device)[:, None, :]
        return [shifted_LTD.view(-1), rest_LTD.view(-1)]

    def decode(self, planes: Sequence[Tensor], tokens: int) -> Tensor:
        """Exponent plane, sign-mantissa plane -> bf16 [T, L * D]."""
        layers, hidden = self.mode_LD.shape
        shifted_LTD, rest_LTD = (plane.view(layers, tokens, hidden) for plane in planes)
        exponents_LTD = shifted_LTD + self.mode_LD.to(shifted_LTD.device)[:, None, :]
        out_TLD2 = torch.empty(tokens, layers, hidden, 2, dtype=torch.uint8, device=shifted_LTD.device)
        out_TLD2[..., 0] = ((exponents_LTD << 7) | (rest_LTD & 127)).transpose(0, 1)
        out_TLD2[..., 1] = ((rest_LTD & 128) | (exponents_LTD >> 1)).transpose(0, 1)
        return out_TLD2.view(torch.bfloat16).view(tokens, layers * hidden)


def _split(states: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 -> exponent uint8, sign << 7 | mantissa uint8, same shape, contiguous."""
    low, high = states.contiguous().unsqueeze(-1).view(torch.uint8).unbind(-1)
    return (high << 1) | (low >> 7), (high & 128) | (low & 127)
