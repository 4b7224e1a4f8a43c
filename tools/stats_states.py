"""What the states of a cache look like, measured on some of its samples in flat memory.

Legend: T tokens, L layers, D hidden, M measuring tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_offline.shards import codecs
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.calibration import measure
from dflash_offline.shards.codecs import Codec
from dflash_offline.shards.codecs.channels import statistics
from dflash_offline.shards.codecs.ecsq import Ecsq
from dflash_offline.shards.frames import pack
from dflash_offline.tools.estimate import CHOICES, label, stored_bits

Counts = NDArray[np.int64]
Reals = NDArray[np.float64]
MEASURING_TOKENS = 2048
"""Tokens kept to tell what is ordinary, and to try other codecs on: 100 MB at 5 layers of 5,120."""
OUTLIER = 20.0
"""A value further than this from its channel's mean, in the channel's spreads."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Measured on the chosen samples."""

    samples: int
    tokens: int
    energy_LD: Reals
    """Mean square of every channel."""
    largest_L: Reals
    """Largest |x|."""
    low_LD: Reals
    high_LD: Reals
    outliers_L: Counts
    """Values more than OUTLIER spreads from their channel's mean."""
    escapes_L: Counts | None
    """Values kept exactly; None for a codec that has no escapes."""
    promised_L: Reals | None
    """The chanSNR in dB that ecsq's step gives at the token scales found; None for other codecs. A token of massive
    values has a coarser step, so many of them cost every channel some dB."""
    bits: float
    """Bits a value of all frames of the cache."""
    last_bits: float | None
    """Those of the last hidden states; None where they are not stored."""
    bits_L: Reals
    """`bits` divided between layers as in the samples' middle frames."""
    distance_SLL: Reals
    """[1 + s, i, j]: mean square of (layer i at t) - (layer j at t + s) in spreads of i, for s = -1, 0, 1."""
    others: list[tuple[str, dict[str, Any]]]
    """`calibration.measure` of other codecs, calibrated on every second measuring token and measured on the rest."""

    @property
    def rms_L(self) -> Reals:
        """Root mean square."""
        return np.sqrt(self.energy_LD.mean(axis=1))

    @property
    def share_LD(self) -> Reals:
        """Every channel's share of its layer's energy."""
        return self.energy_LD / np.maximum(self.energy_LD.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)

    @property
    def dead_L(self) -> Counts:
        """Channels that are zero in every token."""
        return ((self.low_LD == 0) & (self.high_LD == 0)).sum(axis=1)

    @property
    def constant_L(self) -> Counts:
        """Channels of one value other than zero."""
        return ((self.low_LD == self.high_LD) & (self.low_LD != 0)).sum(axis=1)


def choose(count: int, samples: int, seed: int) -> list[int]:
    """`samples` of `count` numbers, one at random from each of as many equal stretches: spread over the shards."""
    edges = np.linspace(0, count, min(samples, count) + 1).astype(np.int64)
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:]).tolist()


def measure_states(cache: Cache, chosen: list[int], try_codecs: bool) -> States:
    """Read the chosen samples twice: first for what is ordinary, then for everything else. `chosen` is not empty."""
    layers, hidden, codec = len(cache.layer_ids), cache.hidden_size, cache.codec.states
    ordinary_MLD = _measuring_set(cache, chosen)
    pairs = [statistics(layer_MD) for layer_MD in ordinary_MLD.unbind(1)]
    mean_LD, spread_LD = (torch.stack(part) for part in zip(*pairs, strict=True))
    tokens, middles = 0, 0
    square_LD = torch.zeros(layers, hidden, dtype=torch.float64)
    low_LD, high_LD = torch.full((layers, hidden), torch.inf), torch.full((layers, hidden), -torch.inf)
    outliers_L, escapes_L = torch.zeros(layers, dtype=torch.int64), torch.zeros(layers, dtype=torch.int64)
    scales_L = torch.zeros(layers, dtype=torch.float64)
    weight_L, distance_SLL = torch.zeros(layers), torch.zeros(3, layers, layers, dtype=torch.float64)
    for number in chosen:
        for planes, states_TLD, middle in _frames(cache, number):
            tokens += len(states_TLD)
            for i, layer_TD in enumerate(states_TLD.unbind(1)):  # by layer: fp32 takes memory
                x_TD = layer_TD.float()
                square_LD[i] += x_TD.square().sum(dim=0, dtype=torch.float64)
                low_D, high_D = x_TD.aminmax(dim=0)
                low_LD[i], high_LD[i] = torch.minimum(low_LD[i], low_D), torch.maximum(high_LD[i], high_D)
                outliers_L[i] += ((x_TD - mean_LD[i]).abs_() > OUTLIER * spread_LD[i]).sum()
            if isinstance(codec, Ecsq):
                row = planes[2].view(torch.int32).long() // hidden
                escapes_L += torch.bincount(row // len(states_TLD), minlength=layers)
                scale_LT = planes[1].view(torch.bfloat16).view(layers, -1)
                scales_L += scale_LT.double().square().sum(dim=1)
            if middle:
                weight_L += torch.tensor([float(size) for size in _layer_sizes(codec, planes, len(states_TLD), layers)])
                if len(states_TLD) > 1:
                    distance_SLL += _distances(states_TLD, spread_LD)
                    middles += 1
    bits, last_bits = stored_bits(cache)
    escapes, promised = None, None
    if isinstance(codec, Ecsq):
        escapes, promised = escapes_L.numpy(), (10 * torch.log10(12 * tokens / (codec.delta**2 * scales_L))).numpy()
    return States(
        samples=len(chosen),
        tokens=tokens,
        energy_LD=(square_LD / tokens).numpy(),
        largest_L=torch.maximum(high_LD, -low_LD).amax(dim=1).abs().double().numpy(),
        low_LD=low_LD.double().numpy(),
        high_LD=high_LD.double().numpy(),
        outliers_L=outliers_L.numpy(),
        escapes_L=escapes,
        promised_L=promised,
        bits=bits,
        last_bits=last_bits,
        bits_L=(bits * layers * weight_L / weight_L.sum()).double().numpy(),
        distance_SLL=(distance_SLL / middles if middles else distance_SLL + torch.inf).numpy(),
        others=list(_others(ordinary_MLD, codec.name)) if try_codecs else [],
    )


def _frames(cache: Cache, number: int) -> Iterator[tuple[list[Tensor], Tensor, bool]]:
    """Planes, states bf16 [T, L, D] and whether it is the middle one, of every frame of a sample, one at a time."""
    encoded, codec = cache.read_encoded(number), cache.codec.states
    for i, frame in enumerate(encoded.frames):
        planes = [encoded.buffer[plane] for plane in frame.planes]
        states = codec.decode(planes, frame.tokens).view(frame.tokens, len(cache.layer_ids), cache.hidden_size)
        # The first frame holds what all samples share, the last may be short.
        yield planes, states, i == (len(encoded.frames) - 1) // 2


def _measuring_set(cache: Cache, chosen: list[int]) -> Tensor:
    """bf16 [M, L, D]: tokens at even distances over the chosen samples."""
    step = max(1, -(-int(cache.tokens[chosen].sum()) // MEASURING_TOKENS))
    kept, at = [], 0
    for number in chosen:
        for _, states_TLD, _ in _frames(cache, number):
            kept.append(states_TLD[-at % step :: step].clone())
            at += len(states_TLD)
    return torch.cat(kept)


def _layer_sizes(codec: Codec, planes: list[Tensor], tokens: int, layers: int) -> list[int]:
    """Bytes of a frame that held one layer only, for each layer: zstd's blocks do not end where a layer does."""
    fixed = [p.view(layers, -1) for p, sizes in zip(planes, codec.plane_bytes(tokens), strict=True) if len(sizes) == 1]
    found = []
    for layer in range(layers):
        alone = [plane[layer] for plane in fixed]
        if isinstance(codec, Ecsq):
            index = planes[2].view(torch.int32)
            here = index.long() // (tokens * codec.mean_LD.shape[1]) == layer
            alone += [index[here].view(torch.uint8), planes[3].view(torch.int16)[here].view(torch.uint8)]
        found.append(len(pack(codec, alone, tokens)))
    return found


def _distances(states_TLD: Tensor, spread_LD: Tensor) -> Tensor:
    """[3, L, L], see States.distance_SLL; infinite for i >= j. T is at least 2."""
    layers = states_TLD.shape[1]
    out_SLL = torch.full((3, layers, layers), torch.inf, dtype=torch.float64)
    x_LTD = states_TLD.transpose(0, 1).float()
    late, early, every = slice(1, None), slice(None, -1), slice(None)
    for i in range(layers):
        for j in range(i + 1, layers):
            for s, (here, there) in enumerate(((late, early), (every, every), (early, late))):
                gap_TD = (x_LTD[i, here] - x_LTD[j, there]) / spread_LD[i]
                out_SLL[s, i, j] = gap_TD.square_().mean(dtype=torch.float64)
    return out_SLL


def _others(states_MLD: Tensor, own: str) -> Iterator[tuple[str, dict[str, Any]]]:
    half, rest = states_MLD[::2], states_MLD[1::2]
    for name, parameters in CHOICES:
        if name not in (own, "bf16") and len(rest):
            yield label(name, parameters), measure(codecs.calibrate(name, half, parameters), rest)
