"""How hidden states become bytes: the codecs by name. contract.py says what a codec is."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dflash_offline.shards.codecs.bf16 import Bf16
from dflash_offline.shards.codecs.contract import Codec
from dflash_offline.shards.codecs.ecsq import Ecsq
from dflash_offline.shards.codecs.fp8 import Fp8
from dflash_offline.shards.codecs.lossless import Lossless
from dflash_offline.shards.errors import CorruptError, UsageError

__all__ = ["CODECS", "EXACT", "Codec", "calibrate", "nominal_bits", "restore"]

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Bf16, Lossless, Ecsq, Fp8)}
EXACT = (Bf16.name, Lossless.name)


def calibrate(name: str, states_TLD: Tensor, parameters: Mapping[str, Any] | None = None) -> Codec:
    """Build codec `name` from a few thousand tokens of the target's own states, bf16 [T, L, D]."""
    return _class(name).calibrate(states_TLD, parameters or {})


def restore(
    name: str,
    version: int,
    parameters: Mapping[str, Any],
    calibration: Mapping[str, Tensor],
    layers: int,
    hidden: int,
) -> Codec:
    """Rebuild the codec a cache was written with.

    Raises UsageError for one this build does not know, CorruptError when its calibration does not fit.
    """
    cls = _class(name)
    if version != cls.version:
        raise UsageError(f"codec {name} is version {version}, this build reads {cls.version}; use the newer release")
    try:
        return cls.restore(parameters, calibration, layers, hidden)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"codec {name} of {dict(parameters)}: {error}; not what this build writes") from None


def nominal_bits(name: str, parameters: Mapping[str, Any] | None = None) -> float:
    """Bits a value to plan with, scales and escapes included; within 3 % on real states."""
    return _class(name).nominal_bits(parameters or {})


def _class(name: str) -> type[Codec]:
    if name not in CODECS:
        raise UsageError(f"codec {name!r} is not known; expected one of: {', '.join(CODECS)}")
    return CODECS[name]
