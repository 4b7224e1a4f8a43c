"""`dflash-extract status CACHE`: how far a run is, from any shell. Reads only."""

import time
from pathlib import Path
from typing import Any

from dflash_offline.extract import events, plan
from dflash_offline.extract.config import StatusConfig
from dflash_offline.shards import index, manifest
from dflash_offline.shards.cache import LOCK
from dflash_offline.shards.files import is_locked


def status(config: StatusConfig) -> int:
    """Print the state of a cache. Raises UsageError when the folder is none."""
    cache = config.cache
    if not ((cache / LOCK).is_file() or (cache / manifest.NAME).is_file()):
        manifest.read(cache)  # says what it is instead
    happened = events.read(cache)
    holders = _holders(cache)
    complete = (cache / manifest.NAME).is_file() and manifest.read(cache).complete
    print(f"{cache}: {'complete' if complete else 'running' if holders else 'not complete, nobody is at work'}")
    for holder in holders:
        print(f"  held by {holder}")
    planned = plan.read(cache) or plan.from_manifest(cache)
    if planned is None:
        print("  no plan yet: the dataset is being read" if holders else "  no plan: rerun the same command")
    else:
        _progress(cache, planned, happened, 60 * config.minutes, bool(holders))
    if holders or complete:
        pass
    elif happened and happened[-1]["event"] == "stop":
        print(f"  stopped: {happened[-1].get('error')}; rerun the same command to continue")
    else:
        print("  it was killed, or ended before its first event; rerun the same command to continue")
    for event in happened[-config.events :] if config.events else []:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "event") and v not in ({}, []))
        print(f"  {when} {event['event']}: {rest}")
    return 0


def _holders(cache: Path) -> list[str]:
    """Who holds the cache, on this machine as far as its disk passes locks on."""
    return [
        f"{path.read_text().strip() or 'a process'}{path.name.removeprefix(LOCK)}"
        for path in sorted(cache.glob(f"{LOCK}*"))
        if is_locked(path)
    ]


def _progress(cache: Path, planned: plan.Plan, happened: list[dict[str, Any]], seconds: float, running: bool) -> None:
    there = {path.name for path in (cache / index.SHARDS_FOLDER).glob("*.arrow") if path.exists()}
    done = [t for n, t in enumerate(planned.tasks) if Path(index.shard_name(n)).name in there]
    for what, some, every in (
        ("shards", len(done), len(planned.tasks)),
        ("samples", sum(t.samples for t in done), sum(t.samples for t in planned.tasks)),
        ("tokens", sum(t.tokens for t in done), sum(t.tokens for t in planned.tasks)),
    ):
        print(f"  {what:<8} {some:>15,} of {every:>15,}" + (f"  {some / every:7.2%}" if every else ""))
    now = time.time()
    recent = [e for e in happened if e["event"] == "done" and e["time"] > now - seconds]
    if running and recent:
        # From when the first of them began: a run may be younger than the window.
        begun = max(now - seconds, min(e["time"] - e.get("seconds", 0) for e in recent))
        rate = sum(e.get("tokens", 0) for e in recent) / max(1e-3, now - begun)
        left = sum(t.tokens for t in planned.tasks) - sum(t.tokens for t in done)
        print(f"  {rate:,.0f} tokens/s in the last {(now - begun) / 60:.1f} min; {_hours(left / max(rate, 1e-3))} left")


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:,.1f} min"
