"""codec.safetensors: what a codec measured on the target's own states, and how close it came to them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dflash_offline.shards import codecs
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.manifest import CodecInfo
from dflash_offline.shards.quality import chan_snr, snr

CODEC_FILE = "codec.safetensors"
_LAST = "last."
"""Prefix of the tensors that belong to the last hidden state, which has statistics of its own."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The codecs of a cache."""

    states: codecs.Codec
    last: codecs.Codec | None
    """For the last hidden state, one layer wide; None where it is not stored."""
    layers: int
    hidden: int
    quality: dict[str, Any]
    """`measure` of the states (and under "last" of the last hidden state) when the codec was calibrated."""
    device: torch.device

    def to(self, device: torch.device) -> "Calibrated":
        """The same codecs with their tensors on `device`."""
        last = None if self.last is None else self.last.to(device)
        return replace(self, states=self.states.to(device), last=last, device=device)


def measure(codec: codecs.Codec, states_TLD: Tensor) -> dict[str, Any]:
    """Bits a value, and per layer SNR and chanSNR in dB (None: exact) of `codec` on finite bf16 states."""
    stored = sum(map(len, encode_frames(codec, states_TLD)))
    lossy_TLD = codec.decode(codec.encode(states_TLD), len(states_TLD)).view_as(states_TLD)
    pairs = list(zip(states_TLD.unbind(1), lossy_TLD.unbind(1), strict=True))  # by layer: double takes memory

    def decibels(distance: Any) -> list[float | None]:
        return [None if torch.equal(x, y) else round(float(distance(x[:, None], y[:, None])), 2) for x, y in pairs]

    return {
        "tokens": len(states_TLD),
        "bits": round(8 * stored / states_TLD.numel(), 3),
        "snr": decibels(snr),
        "chan_snr": decibels(chan_snr),
    }


def write(
    folder: Path, name: str, parameters: dict[str, Any], states_TLD: Tensor, last_ND: Tensor | None = None
) -> CodecInfo:
    """Calibrate codec `name` on finite bf16 states (and last hidden states) and write codec.safetensors atomically."""
    states = codecs.calibrate(name, states_TLD, parameters)
    tensors, quality = dict(states.calibration()), measure(states, states_TLD)
    if last_ND is not None:
        last = codecs.calibrate(name, last_ND[:, None], parameters)
        tensors |= {_LAST + key: value for key, value in last.calibration().items()}
        quality["last"] = measure(last, last_ND[:, None])
    with atomic_file(folder / CODEC_FILE) as file:
        tensors = {key: value.cpu().contiguous() for key, value in tensors.items()}
        file.write(save(tensors, {"quality": json.dumps(quality)}))
    return info(folder, name, states.parameters())


def info(folder: Path, name: str, parameters: dict[str, Any]) -> CodecInfo:
    """What a manifest says of the codec whose calibration lies in `folder`."""
    version = codecs.CODECS[name].version
    return CodecInfo(name=name, version=version, parameters=parameters, calibration=file_hash(folder / CODEC_FILE))


def read(folder: Path, codec: CodecInfo, layers: int, hidden: int, last_hidden: bool) -> Calibrated:
    """The codecs a cache was written with. Raises CorruptError when the file is missing, changed or does not fit."""
    path = folder / CODEC_FILE
    if not path.is_file() or (found := file_hash(path)) != codec.calibration:
        state = f"changed (xxh3 {found})" if path.is_file() else "missing"
        raise CorruptError(f"{path}: {state}, expected xxh3 {codec.calibration}; restore it, or extract again")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            quality = json.loads((file.metadata() or {}).get("quality", "{}"))
    except (SafetensorError, ValueError) as error:
        raise CorruptError(f"{path}: no calibration: {error}; extract again") from None
    last = {name.removeprefix(_LAST): tensor for name, tensor in tensors.items() if name.startswith(_LAST)}
    name, version, parameters = codec.name, codec.version, codec.parameters
    return Calibrated(
        states=codecs.restore(name, version, parameters, tensors, layers, hidden),
        last=codecs.restore(name, version, parameters, last, 1, hidden) if last_hidden else None,
        layers=layers,
        hidden=hidden,
        quality=quality,
        device=torch.device("cpu"),
    )
