"""`dflash-shards diff A B`: whether two caches hold the same settings, samples and states, and how far apart."""

import torch
from torch import Tensor

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.sample import Sample
from dflash_offline.tools.config import Diff


def diff(args: Diff) -> int:
    """Print every difference, at most `limit` samples of each kind. 0 when there is none, else 3."""
    a, b = (Cache(path, allow_incomplete=True) for path in (args.first, args.second))
    for cache in (a, b):
        if not cache.manifest.complete:
            print(f"note: {cache.path} is being written; it has {len(cache)} samples so far")
    differences = _settings(a, b) + _only_in_one(a, b, args.limit)
    if a.layer_ids != b.layer_ids or a.hidden_size != b.hidden_size:
        print(f"states: layers {a.layer_ids} of {a.hidden_size} and {b.layer_ids} of {b.hidden_size}, not compared")
        return 3
    if a.manifest.last_hidden != b.manifest.last_hidden:
        print(f"last hidden state: only in {a.path if a.manifest.last_hidden else b.path}")
        differences += 1
    common, other = _states(a, b, args.limit)
    differences += other
    print(f"{common} samples in both, {other} with other states; {differences} differences")
    return 3 if differences else 0


def _settings(a: Cache, b: Cache) -> int:
    pairs = {
        n: (a.manifest.settings.get(n), b.manifest.settings.get(n)) for n in a.manifest.settings | b.manifest.settings
    }
    different = {name: pair for name, pair in sorted(pairs.items()) if pair[0] != pair[1]}
    for name, (one, two) in different.items():
        print(f"setting {name}: {one!r} and {two!r}")
    return len(different)


def _only_in_one(a: Cache, b: Cache, limit: int) -> int:
    count = 0
    for here, there in ((a, b), (b, a)):
        known = set(there.keys)
        only = [key for key in here.keys if key not in known]
        for key in only[:limit]:
            print(f"sample {key}: only in {here.path}")
        if len(only) > limit:
            print(f"... {len(only) - limit} more only in {here.path}")
        count += len(only)
    return count


def _states(a: Cache, b: Cache, limit: int) -> tuple[int, int]:
    """How many samples both have, and how many of these differ in a state, the last hidden one included."""
    names = [*map(str, a.layer_ids), *(["last"] if a.manifest.last_hidden and b.manifest.last_hidden else [])]
    rows_b = {key: i for i, key in enumerate(b.keys)}
    common = [(i, rows_b[key]) for i, key in enumerate(a.keys) if key in rows_b]
    error, power = torch.zeros(2, len(names), dtype=torch.float64)
    other = 0
    for i, j in common:
        # Equal keys are equal ids and masks: `read` checks both against the key.
        pairs = list(zip(_by_layer(a.read(i), a), _by_layer(b.read(j), b), strict=False))
        if not all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs):
            other += 1
            if other <= limit:
                most = max(float((x.float() - y.float()).abs().amax()) for x, y in pairs if x.numel())
                print(f"sample {a.keys[i]}: states differ by up to {most:.4g}")
        for layer, (x, y) in enumerate(pairs):
            error[layer] += (x.float() - y.float()).square().sum()
            power[layer] += x.float().square().sum()
    if other:
        distances = (error / power.clamp(min=1e-30)).sqrt().tolist()
        text = ", ".join(f"{name}: {distance:.3g}" for name, distance in zip(names, distances, strict=True))
        print(f"relative distance of the states by layer: {text}")
    return len(common), other


def _by_layer(sample: Sample, cache: Cache) -> list[Tensor]:
    """bf16 [T, D] of every layer, then [N, D] of the last hidden state if there is one."""
    last = [] if sample.last_hidden is None else [sample.last_hidden]
    return [*sample.states.view(-1, len(cache.layer_ids), cache.hidden_size).unbind(1), *last]
