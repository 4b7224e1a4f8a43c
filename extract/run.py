"""`dflash-extract run`: read -> render -> mask -> key -> plan -> [forward -> encode -> write] -> index -> complete."""

import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import xxhash

from dflash_offline.extract import plan as plans
from dflash_offline.extract import pool, roots
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.forecast import dry_run
from dflash_offline.extract.intake import make_plan
from dflash_offline.extract.layers import choose_layers
from dflash_offline.extract.render import MASK_RULE, Renderer, open_renderer
from dflash_offline.extract.runner import compute_dtype
from dflash_offline.extract.sources import with_files
from dflash_offline.extract.target import (
    Target,
    check,
    full_hashes,
    identity,
    open_target,
    tokenizer_facts,
    write_target_folder,
)
from dflash_offline.extract.task import codec_info, skips_path
from dflash_offline.shards import calibration, codecs, index, manifest
from dflash_offline.shards.build import SKIPPED, claim, finish, is_done
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.calibration import CODEC_FILE
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.manifest import CodecInfo

VERSIONS = ("dflash-offline", "torch", "transformers", "pyarrow", "zstandard", "fla-core", "triton")


def run(config: ExtractConfig) -> int:
    """Extract the dataset into `config.cache`, or finish what an earlier run began. Returns the exit code."""
    if config.cache == Path():
        raise UsageError("cache is not set; expected the output folder")
    config = replace(config, data=with_files(config.data))
    devices = choose_devices(config)
    target = open_target(config.target.path, config.target.revision)
    layers = choose_layers(config.target.layers, config.target.features, target.config.num_hidden_layers)
    check(target, max(layers), config.batching == "packed")
    renderer = open_renderer(target.folder, target.config.vocab_size, config.data)
    settings = _settings(config, target, layers, renderer, torch.device(devices[0]))
    task_tokens = _task_tokens(config, len(layers) * target.config.hidden_size)
    if config.dry_run:
        return dry_run(config, renderer, task_tokens, len(layers), target.config.hidden_size, len(devices))
    with claim(config.cache, (index.SHARDS_FOLDER, plans.FOLDER)):
        roots.prepare(config.roots, config.cache)
        plan = make_plan(config.cache, config.data, settings, renderer, task_tokens, config.batching == "padded")
        todo = [n for n, t in enumerate(plan.tasks) if not is_done(config.cache / index.shard_name(n), t.hash)]
        old = manifest.read(config.cache) if (config.cache / manifest.NAME).is_file() else None
        if not todo and old is not None and _is_whole(config.cache, old, plan):
            print(f"{config.cache}: nothing to do, all {sum(t.samples for t in plan.tasks)} samples are there")
            return 0
        copied = write_target_folder(target, renderer.tokenizer, config.cache / TARGET_FOLDER)
        draft = _draft(config, settings, target, renderer, layers, plan, copied, old.kernels if old else "")
        progress = Progress(config.cache, plan, todo, draft)
        job = pool.Job(config=config, cache=config.cache, layers=layers, plan=plan)
        calibrate = not _is_calibrated(config.cache, old)
        try:
            failed = pool.run(job, devices, todo, calibrate, progress.note) if todo or calibrate else {}
        except pool.Interrupted as signal:
            (number,) = signal.args
            print(f"stopped by signal {number}: finished shards are kept; rerun to continue", file=sys.stderr)
            return 128 + int(number)
        if failed:
            number, error = next(iter(failed.items()))
            raise RunError(f"{len(failed)} of {len(plan.tasks)} tasks failed; task {number}: {error}; rerun to retry")
        lost = _finish(config, progress.draft, plan, target, old)
    print(f"{config.cache}: complete, {sum(t.samples for t in plan.tasks)} samples; this run: {progress.summary()}")
    return 3 if lost else 0


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


def choose_devices(config: ExtractConfig) -> list[str]:
    """One device a worker."""
    names = [] if config.devices == "auto" else config.devices.split(",")
    if not names:
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise UsageError(f"devices: {name!r} is no device; expected cpu or cuda:N") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"devices: {name} is not there; {torch.cuda.device_count()} GPUs are visible")
    return names * config.workers if names == ["cpu"] else names


def _settings(
    config: ExtractConfig, target: Target, layers: tuple[int, ...], renderer: Renderer, device: torch.device
) -> dict[str, Any]:
    """Every value that decides the bytes. A rerun compares these one by one."""
    return {
        "target.weights": identity(target),
        "target.layers": list(layers),
        "target.dtype": str(compute_dtype(config, device)).removeprefix("torch."),
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
        versions={name: _version(name) for name in VERSIONS},
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
    finish(cache, draft, tasks, {"lost": len(lost)})
    return len(lost)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # running from a source tree, or an optional package
        return "not installed"


class Progress:
    """A line per finished shard, with the rate and the time left; and the manifest of a cache being written."""

    def __init__(self, cache: Path, plan: plans.Plan, todo: list[int], draft: manifest.Manifest) -> None:
        self._cache, self._plan, self.draft = cache, plan, draft
        self._left = sum(plan.tasks[n].tokens for n in todo)
        self._start = time.monotonic()
        self._first = True
        self._samples = self._tokens = self._bytes = self._skipped = 0
        if len(todo) < len(plan.tasks):
            print(f"resuming: {len(plan.tasks) - len(todo)} of {len(plan.tasks)} shards are done")

    def note(self, report: pool.Report) -> None:
        """Count a finished task and say so."""
        if self._first:
            print(f"kernels: {report.kernels}")
            codec = self.draft.codec
            codec = calibration.info(self._cache, codec.name, codec.parameters)
            self.draft = replace(self.draft, kernels=report.kernels, codec=codec)
            manifest.write(self._cache, self.draft)
        self._first = False
        if report.done is None:
            self._start = time.monotonic()  # loading and calibration are no part of the rate
            return
        self._samples += report.done.samples
        self._tokens += report.done.tokens
        self._bytes += report.done.bytes
        self._skipped += report.done.skipped
        self._left -= self._plan.tasks[report.number].tokens
        rate = self._tokens / max(1e-3, self._seconds())
        print(f"shard {report.number}: {rate:,.0f} tok/s, {self._left / max(rate, 1e-3):,.0f} s left", flush=True)

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def summary(self) -> str:
        """What this run did."""
        lost = f", {self._skipped} samples lost (skipped.jsonl)" if self._skipped else ""
        return f"{self._samples} samples, {self._tokens} tokens, {self._bytes} bytes in {self._seconds():.1f} s{lost}"
