"""`dflash-shards diff A B`: whether two caches hold the same settings, samples and states, and how far apart."""

import torch

from dflash_offline.shards.cache import Cache
from dflash_offline.tools.config import Diff


def diff(args: Diff) -> int:
    """Print every difference, at most `limit` samples of each kind. 0 when there is none, else 3."""
    first, second, limit = args.first, args.second, args.limit
    a, b = Cache(first), Cache(second)
    differences = 0
    for name in sorted(a.manifest.settings | b.manifest.settings):
        one, two = a.manifest.settings.get(name), b.manifest.settings.get(name)
        if one != two:
            print(f"setting {name}: {one!r} and {two!r}")
            differences += 1
    rows_a, rows_b = ({key: i for i, key in enumerate(cache.keys)} for cache in (a, b))
    for here, there, path in ((rows_a, rows_b, first), (rows_b, rows_a, second)):
        only = [key for key in here if key not in there]
        differences += len(only)
        for key in only[:limit]:
            print(f"sample {key}: only in {path}")
        if len(only) > limit:
            print(f"... {len(only) - limit} more only in {path}")
    common = [key for key in rows_a if key in rows_b]
    if a.layer_ids != b.layer_ids or a.hidden_size != b.hidden_size:
        print(f"states: layers {a.layer_ids} of {a.hidden_size} and {b.layer_ids} of {b.hidden_size}, not compared")
        return 3
    other, error, power = 0, torch.zeros(len(a.layer_ids)), torch.zeros(len(a.layer_ids))
    for key in common:
        # Equal keys are equal ids and masks: `read` checks both against the key.
        x, y = a.read(rows_a[key]).states, b.read(rows_b[key]).states
        if not torch.equal(x.view(torch.int16), y.view(torch.int16)):
            other += 1
            if other <= limit:
                print(f"sample {key}: states differ by up to {(x.float() - y.float()).abs().max():.4g}")
        x_TLD, y_TLD = (s.float().view(len(s), len(a.layer_ids), -1) for s in (x, y))
        error += (x_TLD - y_TLD).square().sum(dim=(0, 2))
        power += x_TLD.square().sum(dim=(0, 2))
    if other:
        distances = ", ".join(
            f"{i}: {d:.3g}" for i, d in zip(a.layer_ids, (error / power).sqrt().tolist(), strict=True)
        )
        print(f"relative distance of the states by layer: {distances}")
    differences += other
    print(f"{len(common)} samples in both, {other} with other states; {differences} differences")
    return 3 if differences else 0
