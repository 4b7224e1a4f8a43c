"""How hidden states become bytes. A codec is a pair of pure functions between states and byte planes.

Legend: T tokens of a frame, L layers, D hidden.

encode: bf16 [T, L, D] -> planes, each a contiguous uint8 tensor in [layer][token][channel] order, on the same device.
decode: planes -> bf16 [T, L * D], the layout the drafter's `fc` reads.

Entropy coding and checksums are not a codec's business: frames.py does both for every codec.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from dflash_offline.shards.codecs.bf16 import Bf16
from dflash_offline.shards.codecs.lossless import Lossless
from dflash_offline.shards.errors import UsageError


class Codec(Protocol):
    """What frames, writer and reader need of a codec."""

    name: str
    version: int
    compressed: tuple[bool, ...]
    """Per plane: entropy coded, or stored as is."""

    def parameters(self) -> dict[str, Any]:
        """Settings that decide the bytes; JSON values, written to the manifest."""

    def calibration(self) -> dict[str, Tensor]:
        """Tensors measured on the target's own states; written to codec.safetensors."""

    def plane_bytes(self, tokens: int) -> tuple[int, ...]:
        """Size in bytes of each plane of a frame of `tokens` tokens."""

    def encode(self, states_TLD: Tensor) -> list[Tensor]:
        """bf16 [T, L, D] -> uint8 planes."""

    def decode(self, planes: Sequence[Tensor], tokens: int) -> Tensor:
        """uint8 planes -> bf16 [T, L * D]."""


CODECS: dict[str, Any] = {"bf16": Bf16, "lossless": Lossless}


def calibrate(name: str, states_TLD: Tensor) -> Codec:
    """Build codec `name` from a few thousand tokens of the target's own states, bf16 [T, L, D]."""
    return _class(name).calibrate(states_TLD)


def restore(
    name: str, version: int, parameters: dict[str, Any], calibration: dict[str, Tensor], layers: int, hidden: int
) -> Codec:
    """Rebuild the codec a cache was written with. Raises UsageError for one this build does not know."""
    cls = _class(name)
    if version != cls.version:
        raise UsageError(f"codec {name} is version {version}, this build reads {cls.version}; use the newer release")
    return cls.restore(parameters, calibration, layers, hidden)


def _class(name: str) -> Any:
    if name not in CODECS:
        raise UsageError(f"codec {name!r} is not known; expected one of: {', '.join(CODECS)}")
    return CODECS[name]
