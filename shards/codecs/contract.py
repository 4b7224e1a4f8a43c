"""What frames, writer and reader need of a codec: a pair of pure functions between states and byte planes.

Legend: T tokens of a frame, L layers, D hidden.

encode: bf16 [T, L, D] -> planes, each a contiguous uint8 tensor in [layer][token][channel] order.
decode: planes -> bf16 [T, L * D], the layout the drafter's `fc` reads.

Both run on the device of what they are given, with the same values on each. Entropy coding and checksums are not a
codec's business: frames.py does both for every codec.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dflash_offline.shards.errors import CorruptError


class Codec(ABC):
    """A calibrated codec."""

    name: ClassVar[str]
    version: ClassVar[int]
    compressed: ClassVar[tuple[bool, ...]]
    """Per plane: entropy coded, or stored as is."""

    @classmethod
    @abstractmethod
    def calibrate(cls, states_TLD: Tensor, parameters: Mapping[str, Any]) -> Self:
        """Measure a few thousand tokens of the target's own states."""

    @classmethod
    @abstractmethod
    def restore(
        cls, parameters: Mapping[str, Any], calibration: Mapping[str, Tensor], layers: int, hidden: int
    ) -> Self:
        """Rebuild from a manifest and codec.safetensors. Raises CorruptError when they do not fit."""

    @classmethod
    @abstractmethod
    def nominal_bits(cls, parameters: Mapping[str, Any]) -> float:
        """Bits a value to plan with, before anything is measured."""

    def parameters(self) -> dict[str, Any]:
        """Settings that decide the bytes; JSON values, written to the manifest."""
        return {}

    def calibration(self) -> dict[str, Tensor]:
        """Tensors measured on the target's own states; written to codec.safetensors."""
        return {}

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The same codec with its calibration on `device`, so that no frame has to move it."""

    @abstractmethod
    def plane_bytes(self, tokens: int) -> tuple[range, ...]:
        """The sizes in bytes each plane of a frame of `tokens` tokens may have; compared before any allocation."""

    def check(self, planes: Sequence[Tensor], tokens: int) -> None:
        """Raise CorruptError when planes of allowed sizes contradict each other; `decode` trusts what passed."""
        return

    @abstractmethod
    def encode(self, states_TLD: Tensor) -> list[Tensor]:
        """Finite bf16 [T, L, D] -> uint8 planes."""

    def cut(self, planes: Sequence[Tensor], layers: int, tokens: int, start: int, stop: int) -> list[Tensor]:
        """The planes of tokens start..stop alone, from the planes of `tokens` tokens on the CPU."""
        return [plane.view(layers, tokens, -1)[:, start:stop].reshape(-1) for plane in planes]

    @abstractmethod
    def decode(self, planes: Sequence[Tensor], tokens: int) -> Tensor:
        """uint8 planes -> bf16 [T, L * D]."""


def exactly(size: int) -> range:
    """The one size a plane may have."""
    return range(size, size + 1)


def calibrated(calibration: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Tensor `name` of codec.safetensors. Raises CorruptError when it is not there or of another type."""
    tensor = calibration.get(name)
    if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
        found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise CorruptError(f"codec.safetensors: {name} is {found}, expected {dtype} {list(shape)}")
    return tensor
