"""`dflash-extract audit CACHE`: a random draw of samples again through the target, compared with what is stored.

Allowed, per layer, is twice the noise of computing (between a sample alone and among others, and what the probe found)
and twice the noise that the codec measured of itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_offline.extract import kernels
from dflash_offline.extract.checks import ROUNDING, relative
from dflash_offline.extract.config import AuditConfig, ExtractConfig, GuardConfig, TargetConfig
from dflash_offline.extract.runner import start_runner
from dflash_offline.extract.target import identity, open_target
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.device import chosen_device
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.keys import last_positions
from dflash_offline.shards.sample import Sample


@dataclass(frozen=True, kw_only=True)
class _Again:
    """A sample's states: as stored and recomputed, and recomputed among others; bf16 [T, L, D]."""

    sample: Sample
    alone: Tensor
    among: Tensor


def audit(config: AuditConfig) -> int:
    """Print what differs. 0 when nothing does, else 3. Raises UsageError when the target is another one."""
    cache = Cache(config.cache)
    info, settings = cache.manifest, cache.manifest.settings
    if "target.weights" not in settings:
        raise UsageError(f"{config.cache}: was not extracted here, so its target is not known; nothing to compare with")
    target = open_target(config.target or info.target["path"], None if config.target else info.target.get("revision"))
    if (found := identity(target)) != settings["target.weights"]:
        raise UsageError(
            f"{target.folder}: identity {found}, the cache was made with {settings['target.weights']}; give the same "
            f"checkpoint with --target"
        )
    device = torch.device(chosen_device(config.device))
    kernels.check_packages(target.model_type, device.type, config.allow_slow)
    run = ExtractConfig(
        target=TargetConfig(
            path=str(target.folder), dtype=settings["target.dtype"], fp8=settings.get("target.fp8", "dequantise")
        ),
        batching=settings["batching"],
        last_hidden=info.last_hidden,
        allow_slow=config.allow_slow,
        guard=GuardConfig(),
    )
    runner = start_runner(run, cache.layer_ids, device)
    numbers = _draw(cache, info.audit.get("reforward", []), config.samples)
    again = [_recompute(cache.read(n), runner.capture) for n in numbers]
    noise = relative(*(torch.cat([getattr(a, how) for a in again]) for how in ("alone", "among")))
    codec = _noise(cache.codec.quality)
    if info.last_hidden:
        codec += _noise(cache.codec.quality["last"])
    limits = [
        2 * max(near, probed) + ROUNDING + 2 * lossy
        for near, probed, lossy in zip(noise, runner.probe["noise"], codec, strict=True)
    ]
    bad, furthest = 0, [0.0] * len(limits)
    for a in again:
        distance = _distances(a, len(cache.layer_ids))
        furthest = [max(pair) for pair in zip(furthest, distance, strict=True)]
        wrong = [n for n, (far, limit) in enumerate(zip(distance, limits, strict=True)) if not far <= limit]
        bad += bool(wrong)
        for n in wrong:
            print(
                f"sample {a.sample.key}: layer {runner.captured[n]}: stored and recomputed states are "
                f"{distance[n]:.2%} apart, at most {limits[n]:.2%} expected"
            )
    for layer, far, limit in zip(runner.captured, furthest, limits, strict=True):
        print(f"layer {layer}: at most {far:.3%} apart; {limit:.3%} allowed")
    print(f"{len(again)} samples recomputed, {bad} differ")
    return 3 if bad else 0


def _draw(cache: Cache, stored: list[str], most: int) -> list[int]:
    """Numbers of the samples to recompute: those that extraction drew, or those of smallest keys, a draw as well."""
    place = {key: n for n, key in enumerate(cache.keys)}
    keys = [key for key in stored if key in place] or sorted(place)[:16]
    return [place[key] for key in keys[: most or None]]


def _recompute(sample: Sample, capture: Any) -> _Again:
    ids = torch.from_numpy(sample.input_ids)
    alone = capture([ids]).cpu()
    other = ids.flip(0)
    return _Again(sample=sample, alone=alone, among=capture([other, ids, other]).cpu()[len(ids) : 2 * len(ids)])


def _distances(a: _Again, layers: int) -> list[float]:
    """Of every layer, and of the last hidden state where it is stored."""
    stored = a.sample.states.view(len(a.alone), layers, -1)
    out = relative(a.alone[:, :layers], stored)
    if a.sample.last_hidden is not None:
        at = torch.from_numpy(last_positions(a.sample.loss_mask))
        out += relative(a.alone[at, -1:], a.sample.last_hidden[:, None])
    return out


def _noise(quality: dict[str, Any]) -> list[float]:
    """Relative distance that a codec's SNR means, by layer."""
    return [0.0 if db is None else 10 ** (-db / 20) for db in quality["snr"]]
