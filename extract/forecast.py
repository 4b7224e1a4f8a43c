"""What a run would take: tokens, bytes, hours, and whether its disks have room. Nothing is written."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from dflash_offline.extract import plan as plans
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.intake import Intake
from dflash_offline.extract.render import Renderer
from dflash_offline.extract.target import Target
from dflash_offline.extract.weights import head_bytes
from dflash_offline.shards import codecs, index
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.errors import UsageError

_SIDE_BYTES, _PLAN_BYTES = 7, 5
"""A token's share beside its states: ids, mask, index and checksums in shard and index; ids and mask in the plan."""
Disks = dict[int, tuple[Path, int]]
"""Device number -> a configured folder on that disk, and its free bytes."""


def dry_run(
    config: ExtractConfig, target: Target, renderer: Renderer, task_tokens: int, layers: int, devices: int
) -> int:
    """Print the forecast of a run over `config.data`. Raises UsageError when it does not fit."""
    intake = Intake(data=config.data, renderer=renderer)
    tasks, _ = plans.write_tasks(None, intake.samples(), {}, task_tokens, config.batching == "padded")
    bits = codecs.nominal_bits(config.codec, config.codec_parameters())
    need = shard_bytes(config, layers, target.config.hidden_size, intake.tokens, intake.supervised)
    rows = {
        "shards": f"{len(tasks):,}",
        f"bytes, {config.codec} at {bits:.1f} bits a value": f"{need:,}",
        "bytes of the plan": f"{_PLAN_BYTES * intake.tokens:,}",
        "bytes of embedding and head": f"{head_bytes(target):,}",
        f"hours on {devices} devices": "state --rate (tokens a second and device)",
    }
    if config.rate:
        rows[f"hours on {devices} devices"] = f"{intake.tokens / config.rate / devices / 3600:,.2f}"
    print(intake.summary())
    for name, value in rows.items():
        print(f"  {name:<46} {value:>15}")
    for place, free in shard_disks(config).values():
        print(f"  {f'free on {place}':<46} {free:>15,}")
    if found := shortage(config, target, need, _PLAN_BYTES * intake.tokens):
        raise UsageError(found)
    return 0


def shard_bytes(config: ExtractConfig, layers: int, hidden: int, tokens: int, supervised: int) -> int:
    """Bytes on disk of so many tokens; `layers` states of `hidden` values each, and the last one where it is stored."""
    values = tokens * layers * hidden + supervised * hidden * config.last_hidden
    return int(values * codecs.nominal_bits(config.codec, config.codec_parameters()) / 8) + _SIDE_BYTES * tokens


def stored_bytes(config: ExtractConfig) -> int:
    """Bytes of the shards that are there; a link to a disk that is not counts for none."""
    return sum(path.stat().st_size for path in (config.cache / index.SHARDS_FOLDER).glob("*.arrow") if path.exists())


def shard_disks(config: ExtractConfig) -> Disks:
    """Those that shards go to."""
    return _disks(config.roots or (config.cache,))


def listed(disks: Disks) -> str:
    """As progress and errors have them."""
    return ", ".join(f"{free:,} free on {place}" for place, free in disks.values())


def shortage(config: ExtractConfig, target: Target, shards: int, plan: int = 0) -> str:
    """What is missing for so many bytes of shards, the stored ones among them, and of the plan; "" if nothing is.

    The plan, embedding and head go to the cache's own disk, which with roots may be another.
    """
    copied = (config.cache / TARGET_FOLDER / "target.safetensors").exists()
    more, beside = shards - stored_bytes(config), plan + (0 if copied else head_bytes(target))
    disks, own = shard_disks(config), _disks((config.cache,))
    if own.keys() <= disks.keys():
        more += beside
    elif beside > sum(free for _, free in own.values()):
        return f"needs {beside:,} bytes more: {listed(own)}; put the cache on another disk"
    if more > sum(free for _, free in disks.values()):
        advice = "add --roots on other disks, or take a smaller codec or dataset"
        return f"needs {more:,} bytes more: {listed(disks)}; {advice}"
    return ""


def _disks(folders: Sequence[Path]) -> Disks:
    disks: Disks = {}
    for given in folders:
        there = next(p for p in (given.expanduser().absolute(), *given.expanduser().absolute().parents) if p.exists())
        disks.setdefault(there.stat().st_dev, (given, shutil.disk_usage(there).free))
    return disks
