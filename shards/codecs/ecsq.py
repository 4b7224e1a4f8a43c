"""ecsq: a uniform quantiser with one knob, the step; 5.6 bits a value at the default step.

Every channel is brought to mean 0 and spread 1, every token and layer to scale 1, and rounded to multiples of `delta`.
An entropy coder then spends on a symbol what it is worth, which beats any fixed-width format by 2.8 dB and needs no
rotation. What lies outside the alphabet is kept exactly, since massive activations carry the model's attention sinks.

    u = (x - mean) * (1 / spread)                    fp32, mean and spread [L, D] from codec.safetensors
    s = bf16(1.2533 / D * sum(min(|u|, 64)))         bf16 [L][T], stored; at least 2^-16
    r = round(u * (1 / (s * delta)))                 half to even
    q = clamp(r, -limit, limit) + limit + 1          uint8 [L][T][D], entropy coded; limit 127, or 7 for 4-bit symbols
    y = bf16((q - limit - 1) * (s * delta) * spread + mean)

    where |r| > limit: index in [L][T][D] (uint32, increasing) and x (bf16) are stored, and y is x.

From delta 0.7 on the alphabet is 4 bits and a byte holds two channels: channel c in the low half, c + ceil(D / 2) in
the high half, of a row of ceil(D / 2) bytes: a Huffman code of single symbols wastes much where one is worth two bits.

|u| is cut at 64 in the token scale, so that a channel that was dead when measured cannot stretch a whole token's step.
It is rounded to multiples of 2^-16 there, which makes the sum exact: every device and order finds the same scale.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dflash_offline.shards.codecs.channels import statistics
from dflash_offline.shards.codecs.contract import Codec, calibrated, exactly
from dflash_offline.shards.codecs.operations import operations
from dflash_offline.shards.errors import CorruptError

DEFAULT_DELTA = 2.0**-3.5
PACK_FROM = 0.7
"""The step from which symbols are packed in pairs; measured in benchmarks/codecs."""
L1_TO_SPREAD = 1.2533
"""sqrt(pi / 2): the standard deviation of a Gaussian over its mean absolute value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ecsq(Codec):
    """Entropy-coded scalar quantiser."""

    delta: float
    """The step, in spreads of a channel and scales of a token."""
    mean_LD: Tensor
    spread_LD: Tensor
    inverse_LD: Tensor
    """1 / spread."""
    name = "ecsq"
    version = 1
    compressed = (True, False, False, False)

    def __post_init__(self) -> None:
        if not 0.01 <= self.delta <= 2:
            raise ValueError(f"ecsq.delta is {self.delta}, expected 0.01 to 2")

    @classmethod
    def calibrate(cls, states_TLD: Tensor, parameters: Mapping[str, Any]) -> Self:
        """Mean and spread of every channel over the ordinary tokens of its layer."""
        if len(states_TLD) == 0 or not bool(torch.isfinite(states_TLD).all()):
            raise ValueError(f"ecsq needs finite states to measure, found {len(states_TLD)} tokens")
        layers = [statistics(layer_TD) for layer_TD in states_TLD.unbind(1)]
        mean_LD, spread_LD = (torch.stack(tensors) for tensors in zip(*layers, strict=True))
        return cls._of(parameters.get("delta", DEFAULT_DELTA), mean_LD, spread_LD)

    @classmethod
    def restore(
        cls, parameters: Mapping[str, Any], calibration: Mapping[str, Tensor], layers: int, hidden: int
    ) -> Self:
        """Rebuild from a manifest and codec.safetensors."""
        mean_LD, spread_LD = (calibrated(calibration, n, torch.float32, (layers, hidden)) for n in ("mean", "spread"))
        return cls._of(parameters["delta"], mean_LD, spread_LD)

    @classmethod
    def _of(cls, delta: float, mean_LD: Tensor, spread_LD: Tensor) -> Self:
        return cls(delta=delta, mean_LD=mean_LD, spread_LD=spread_LD, inverse_LD=1 / spread_LD)

    @property
    def limit(self) -> int:
        """The largest |r| with a symbol of its own."""
        return 7 if self.delta >= PACK_FROM else 127

    def parameters(self) -> dict[str, Any]:
        """The step."""
        return {"delta": self.delta}

    def calibration(self) -> dict[str, Tensor]:
        """Mean and spread of the channels."""
        return {"mean": self.mean_LD, "spread": self.spread_LD}

    @classmethod
    def nominal_bits(cls, parameters: Mapping[str, Any]) -> float:
        """A Gaussian's entropy at this step, and what Huffman coding loses."""
        return max(1.2, 2.1 - math.log2(parameters.get("delta", DEFAULT_DELTA)))

    def to(self, device: torch.device | str) -> Self:
        """Mean and spread on `device`."""
        names = ("mean_LD", "spread_LD", "inverse_LD")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def plane_bytes(self, tokens: int) -> tuple[range, ...]:
        """Symbols and scales are as many as there are; at most every value is an escape."""
        layers, hidden = self.mean_LD.shape
        values = layers * tokens * hidden
        row = hidden if self.limit == 127 else -(-hidden // 2)
        escapes = (range(0, size * values + 1, size) for size in (4, 2))
        return exactly(layers * tokens * row), exactly(2 * layers * tokens), *escapes

    def check(self, planes: Sequence[Tensor], tokens: int) -> None:
        """Scales are positive and finite; as many indices as values, increasing and within the frame."""
        scales, index = planes[1].view(torch.bfloat16), planes[2].view(torch.int32)
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise CorruptError("a token scale is not a positive number")
        if 2 * len(index) != len(planes[3]):
            raise CorruptError(f"{len(index)} escape indices for {len(planes[3]) // 2} escaped values")
        # Read as int32 an index of 2^31 or more is negative, so it cannot follow a first one that is not.
        if len(index) and not (
            index[0] >= 0 and index[-1] < tokens * self.mean_LD.numel() and bool((index[1:] > index[:-1]).all())
        ):
            raise CorruptError("escape indices do not increase within the frame")

    def encode(self, states_TLD: Tensor) -> list[Tensor]:
        """bf16 [T, L, D] -> symbols, scales, escape indices, escaped values."""
        codec, factor = self.to(states_TLD.device), L1_TO_SPREAD / states_TLD.shape[2]
        symbols_LTD, *others = operations(states_TLD).quantise(
            states_TLD, codec.mean_LD, codec.inverse_LD, self.delta, factor, self.limit
        )
        if self.limit == 7:
            symbols_LTD = _pair(symbols_LTD)
        return [plane.reshape(-1).view(torch.uint8) for plane in (symbols_LTD, *others)]

    def cut(self, planes: Sequence[Tensor], layers: int, tokens: int, start: int, stop: int) -> list[Tensor]:
        """Symbols and scales of the tokens, and the escapes among them at their places in the shorter piece."""
        # Of frames they are below 2^31, of a whole row of samples not.
        index, values = planes[2].view(torch.int32).long() & 0xFFFFFFFF, planes[3].view(torch.bfloat16)
        row, channel = index // (hidden := self.mean_LD.shape[1]), index % hidden
        layer, token = row // tokens, row % tokens
        own = (token >= start) & (token < stop)
        index = ((layer * (stop - start) + token - start) * hidden + channel)[own].int()
        dense = super().cut(planes[:2], layers, tokens, start, stop)
        return [*dense, index.view(torch.uint8), values[own].view(torch.uint8)]

    def decode(self, planes: Sequence[Tensor], tokens: int) -> Tensor:
        """Symbols, scales, escape indices, escaped values -> bf16 [T, L * D]."""
        codec = self.to(planes[0].device)
        layers, hidden = self.mean_LD.shape
        symbols_LTD, scale_LT = planes[0].view(layers, tokens, -1), planes[1].view(torch.bfloat16).view(layers, tokens)
        if self.limit == 7:
            symbols_LTD = _unpair(symbols_LTD, hidden)
        out_TLD: Tensor = operations(symbols_LTD).restore(
            symbols_LTD, scale_LT, codec.mean_LD, codec.spread_LD, self.delta, self.limit
        )
        if len(planes[2]):
            row, channel = (at := planes[2].view(torch.int32).long()) // hidden, at % hidden
            out_TLD[row % tokens, row // tokens, channel] = planes[3].view(torch.bfloat16)
        return out_TLD.view(tokens, layers * hidden)


def _pair(symbols_LTD: Tensor) -> Tensor:
    """4-bit symbols [L, T, D] -> bytes [L, T, ceil(D / 2)]; an odd row's last high half is the symbol of zero."""
    half = -(-symbols_LTD.shape[2] // 2)
    low, high = symbols_LTD[..., :half], symbols_LTD[..., half:]
    return low | torch.nn.functional.pad(high, (0, half - high.shape[2]), value=8) << 4


def _unpair(bytes_LTH: Tensor, hidden: int) -> Tensor:
    return torch.cat([bytes_LTH & 15, bytes_LTH >> 4], dim=2)[..., :hidden].contiguous()
