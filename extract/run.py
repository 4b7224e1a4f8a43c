"""`dflash-extract run`: read -> render -> mask -> key -> plan -> [forward -> encode -> write] -> index -> complete."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from dflash_offline.extract import kernels, pool, preflight, ray_engine, roots
from dflash_offline.extract import plan as plans
from dflash_offline.extract.checks import is_drawn
from dflash_offline.extract.config import DataConfig, ExtractConfig
from dflash_offline.extract.events import Events
from dflash_offline.extract.forecast import dry_run
from dflash_offline.extract.intake import make_plan
from dflash_offline.extract.layers import choose_layers
from dflash_offline.extract.progress import Progress
from dflash_offline.extract.render import MASK_RULE, Renderer, open_renderer
from dflash_offline.extract.runner import compute_dtype
from dflash_offline.extract.sources import with_files
from dflash_offline.extract.target import Target, full_hashes, identity, open_target, tokenizer_facts
from dflash_offline.extract.task import codec_info, skips_path
from dflash_offline.extract.weights import check, write_target_folder
from dflash_offline.shards import codecs, index, manifest
from dflash_offline.shards.build import SKIPPED, claim, finish, is_done
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.calibration import CODEC_FILE
from dflash_offline.shards.command import say
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.manifest import CodecInfo


def run(config: ExtractConfig) -> int:
    """`extract` with workers of its own."""
    with pool.workers(config) as workers:
        return extract(config, workers)


def extract(config: ExtractConfig, workers: pool.Workers | ray_engine.Workers) -> int:
    """Extract the dataset into `config.cache`, or finish what an earlier run began. Returns the exit code."""
    if config.cache == Path():
        raise UsageError("cache is not set; expected the output folder")
    share = config.share()
    if not share:
        config = replace(config, data=with_files(config.data))
    devices = preflight.choose_devices(config)
    target = open_target(config.target.path, config.target.revision, config.target.fp8)
    layers = choose_layers(config.target.layers, config.target.features, target.config.num_hidden_layers)
    check(target, max(layers), config.batching == "packed")
    renderer = open_renderer(target.folder, target.config.vocab_size, config.data)
    settings = _settings(config, target, layers, renderer, torch.device(devices[0]))
    task_tokens = _task_tokens(config, len(layers) * target.config.hidden_size)
    kernels.check_packages(target.model_type, devices[0], config.allow_slow)
    preflight.check_rows(config, devices, target, len(layers))
    if config.dry_run:
        return dry_run(config, target, renderer, task_tokens, len(layers), len(devices))
    devices = preflight.check_devices(config, devices, target, layers)
    with claim(config.cache, (index.SHARDS_FOLDER, plans.FOLDER), f"-{share[0]}-of-{share[1]}" if share else ""):
        old = manifest.read(config.cache) if (config.cache / manifest.NAME).is_file() else None
        _clean(config)
        if old is None or not old.complete:
            workers.begin(_without_data(config), layers, devices)
        try:
            return _extract(config, settings, target, renderer, layers, devices, task_tokens, old, workers)
        finally:
            workers.end()
            _clean(config)


def _extract(
    config: ExtractConfig,
    settings: dict[str, Any],
    target: Target,
    renderer: Renderer,
    layers: tuple[int, ...],
    devices: Sequence[str],
    task_tokens: int,
    old: manifest.Manifest | None,
    workers: pool.Workers | ray_engine.Workers,
) -> int:
    """Plan, run, finish; the cache is ours."""
    share = config.share()
    if share:
        plan = _prepared(config.cache, settings, old)
    else:
        plan = make_plan(config.cache, config.data, settings, renderer, task_tokens, config.batching == "padded")
    ours = [n for n in range(len(plan.tasks)) if not share or n % share[1] == share[0]]
    todo = [n for n in ours if not is_done(config.cache / index.shard_name(n), plan.tasks[n].hash)]
    if not todo and not share and old is not None and _is_whole(config.cache, old, plan):
        say(f"{config.cache}: nothing to do, all {sum(t.samples for t in plan.tasks)} samples are there")
        return 0
    if old is not None and old.complete:
        workers.begin(_without_data(config), layers, devices)
    preflight.check_disk(config, target, len(layers), sum(t.tokens for t in plan.tasks))
    if share and old is not None:
        draft = old
    else:
        known = old.target["copied"].get("target.safetensors", "") if old else ""
        copied = write_target_folder(target, renderer.tokenizer, config.cache / TARGET_FOLDER, known)
        draft = _draft(config, settings, target, renderer, layers, plan, copied, old.kernels if old else "")
    if config.task_slice == "prepare":
        todo = []
    calibrate = not _is_calibrated(config.cache, old)
    with closing(Events(config.cache, share)) as events:
        events("start", tasks=len(todo), of=len(plan.tasks), devices=devices, versions=draft.versions)
        progress = Progress(config.cache, plan, todo, draft, events, alone=not share)
        try:
            if todo or calibrate:
                _all_done(workers.run(plan.tasks, todo, calibrate, progress.note, events), len(plan.tasks))
                workers.end()  # what follows needs no device
                _clean(config)
            lost = progress.lost if config.task_slice else _finish(config, progress.draft, plan, target, old)
        except pool.Interrupted as signal:
            (number,) = signal.args
            events("stop", error=f"signal {number}")
            print(f"stopped by signal {number}: finished shards are kept; rerun to continue", file=sys.stderr)
            return 128 + int(number)
        except BaseException as error:
            events("stop", error=f"{type(error).__name__}: {error}")
            raise
        what = f"slice {config.task_slice} is done" if share else config.task_slice and "prepared"
        events("part done" if what else "complete", lost=lost)
    what = what or f"complete, {sum(t.samples for t in plan.tasks)} samples"
    say(f"{config.cache}: {what}; this run: {progress.summary()}")
    return 3 if lost else 0


def _without_data(config: ExtractConfig) -> ExtractConfig:
    """For workers, which read the plan: the names of thousands of files would fill a pipe."""
    return replace(config, data=DataConfig())


def _all_done(failed: dict[int, str], of: int) -> None:
    """Raises RunError naming the tasks that failed."""
    if failed:
        first, error = next(iter(failed.items()))
        raise RunError(
            f"{len(failed)} of {of} tasks failed: {', '.join(map(str, failed))}; task {first}: {error}; rerun to retry"
        )


def _prepared(cache: Path, settings: dict[str, Any], old: manifest.Manifest | None) -> plans.Plan:
    """The plan that slices share. Raises UsageError when it is not there, or made with other settings."""
    plan = plans.read(cache)
    if plan is None or not _is_calibrated(cache, old):
        raise UsageError(f"{cache}: not prepared; run the same command with --task-slice prepare first, once")
    if changes := [n for n in sorted(plan.settings | settings) if plan.settings.get(n) != settings.get(n)]:
        name = changes[0]
        raise UsageError(
            f"{cache}: {name} was {plan.settings.get(name)!r}, now {settings.get(name)!r}; use the same settings in "
            f"every slice"
        )
    return plan


def _clean(config: ExtractConfig) -> None:
    """Remove what dead workers of this slice left half-written."""
    share = config.share()

    def ours(path: Path) -> bool:
        number = path.name.partition(".")[0]
        return share is None or (number.isdecimal() and int(number) % share[1] == share[0])

    roots.prepare(config.roots, config.cache, ours)
    shards, side = (config.cache / index.SHARDS_FOLDER).glob("*.tmp"), config.cache.glob("*.tmp")
    for leftover in filter(ours, (*shards, *side)):
        leftover.unlink()


def _task_tokens(config: ExtractConfig, values: int) -> int:
    """Tokens of a shard: as many as fill shard_mib at the codec's usual rate."""
    bits = codecs.nominal_bits(config.codec, config.codec_parameters())
    return max(1, int(config.shard_mib * 2**23 / (bits * values)))


def _is_whole(cache: Path, info: manifest.Manifest, plan: plans.Plan) -> bool:
    """The cache is complete, of this very plan, and nothing beside its shards is lost or damaged."""
    copied = {f"{TARGET_FOLDER}/{name}": digest for name, digest in info.target["copied"].items()}
    files = {CODEC_FILE: info.codec.calibration, index.NAME: info.index.get("xxh3"), **copied}
    return (
        info.complete
        and (info.dataset["rows"], info.dataset["skipped"]) == (plan.rows, plan.skipped)
        and all((cache / name).is_file() and file_hash(cache / name) == digest for name, digest in files.items())
    )


def _is_calibrated(cache: Path, old: manifest.Manifest | None) -> bool:
    """True when codec.safetensors is the one the manifest knows; else it is measured again, to the same end."""
    path = cache / CODEC_FILE
    return old is not None and path.is_file() and old.codec.calibration == file_hash(path)


def _settings(
    config: ExtractConfig, target: Target, layers: tuple[int, ...], renderer: Renderer, device: torch.device
) -> dict[str, Any]:
    """Every value that decides the bytes. A rerun compares these one by one."""
    return {
        "target.weights": identity(target),
        "target.layers": list(layers),
        "target.dtype": str(compute_dtype(config, device)).removeprefix("torch."),
        **({"target.fp8": "native"} if target.native else {}),
        "tokenizer": xxhash.xxh3_64_hexdigest(renderer.tokenizer.backend_tokenizer.to_str().encode()),
        "chat_template": xxhash.xxh3_64_hexdigest(str(renderer.tokenizer.chat_template).encode()),
        "chat_template.args": renderer.template_args,
        "mask_rule": MASK_RULE,
        "data.max_length": config.data.max_length,
        "data.generation": config.data.generation,
        **({"data.supervise": "last"} if config.data.supervise == "last" else {}),
        "codec": config.codec,
        "last_hidden": config.last_hidden,
        **{f"{config.codec}.{name}": value for name, value in config.codec_parameters().items()},
        "batching": config.batching,
        "token_budget": config.token_budget,
        "shard_mib": config.shard_mib,
    }


def _draft(
    config: ExtractConfig,
    settings: dict[str, Any],
    target: Target,
    renderer: Renderer,
    layers: tuple[int, ...],
    plan: plans.Plan,
    copied: dict[str, str],
    kernels: str,
) -> manifest.Manifest:
    """The manifest as far as it is known before the first shard."""
    return manifest.Manifest(
        complete=False,
        layer_ids=list(layers),
        hidden_size=target.config.hidden_size,
        codec=CodecInfo(
            name=config.codec,
            version=codecs.CODECS[config.codec].version,
            parameters=config.codec_parameters(),
            calibration="",
        ),
        last_hidden=config.last_hidden,
        settings=settings,
        target={
            "path": target.name,
            "revision": target.revision,
            "model_type": target.model_type,
            **({"quantised": {"method": "fp8", "block": list(target.block)}} if target.block else {}),
            "copied": copied,
        },
        tokenizer=tokenizer_facts(renderer.tokenizer, target.config),
        generation=config.data.generation,
        dataset={
            "files": plan.files,
            "rows": plan.rows,
            "skipped": plan.skipped,
            "keys": plan.keys,
            "selection": plan.selection,
        },
        versions=preflight.versions(),
        kernels=kernels,
    )


def _finish(
    config: ExtractConfig, draft: manifest.Manifest, plan: plans.Plan, target: Target, old: manifest.Manifest | None
) -> int:
    """Index, skipped.jsonl, and the manifest that says complete. Returns how many samples were lost while running.

    Raises RunError when shards, calibration or weights are not all of one making.
    """
    cache = config.cache
    files = full_hashes(target)
    if old is not None and old.target.get("files", files) != files:
        raise RunError(f"{target.folder}: other weights than the cache was begun with; restore them, or start anew")
    tasks = {index.shard_name(n): t.hash for n, t in enumerate(plan.tasks)}
    lost = [line for name in tasks if (p := skips_path(cache / name)).is_file() for line in p.read_text().splitlines()]
    if lost:
        kept = [line for line in (cache / SKIPPED).read_text().splitlines() if line not in set(lost)]
        with atomic_file(cache / SKIPPED) as file:
            file.write("".join(line + "\n" for line in [*kept, *lost]).encode())
    draft = replace(draft, codec=codec_info(config, cache), target={**draft.target, "files": files})
    finish(cache, draft, tasks, {"lost": len(lost)}, partial(_audit, config))
    return len(lost)


def _audit(config: ExtractConfig, keys: list[str]) -> dict[str, Any]:
    """What the manifest says of it: one of how many was checked, how many these were, which to recompute later."""
    every = config.guard.audit_every
    checked = sum(is_drawn(key, every) for key in keys)
    return {"every": every, "checked": checked, "reforward": sorted(keys)[: config.guard.reforward]}
