"""`dflash-shards import`: a cache from the hidden states that another project has stored.

The first pass reads ids and masks and every header, so what is missing or damaged is said before anything is written.
The second reads and encodes the states, shard by shard; the same command finishes what was interrupted.
Legend: T tokens, L layers, D hidden, N tokens whose last hidden state is stored.
"""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from dflash_offline.extract import plan as plans
from dflash_offline.extract.dataset import Skip, SkipRow
from dflash_offline.extract.target import full_hashes, identity, open_target, tokenizer_facts
from dflash_offline.extract.task import CALIBRATION_TOKENS
from dflash_offline.extract.weights import write_target_folder
from dflash_offline.shards import calibration, codecs, index, manifest
from dflash_offline.shards.build import SKIPPED, Entry, Part, build, claim
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import eligible_anchors, keys_hash, last_positions, prompt_key, sample_key
from dflash_offline.shards.writer import Identity
from dflash_offline.tools.browse import open_tokenizer
from dflash_offline.tools.config import Import, codec_parameters
from dflash_offline.tools.peers.contract import PeerCache, PeerSample, Shape

OPENERS = {
    "specforge": ("specforge", "open_cache"),
    "speculators": ("speculators", "open_cache"),
    "modelopt-hf": ("modelopt", "open_hf"),
    "modelopt-vllm": ("modelopt", "open_vllm"),
    "deepspec": ("deepspec", "open_cache"),
}
_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Found:
    """A usable sample of the first pass."""

    number: int
    place: str
    key: str
    tokens: int


def run(args: Import) -> int:
    """Import `args.source` into `args.out`. Returns 3 when samples were lost to states that are not finite."""
    torch.set_num_threads(1)  # the shards are what is parallel
    target = open_target(args.target, None)
    tokenizer = open_tokenizer(target.folder)
    module, opener = OPENERS[args.format]
    shape = Shape(layers=args.layers, hidden=target.config.hidden_size, depth=target.config.num_hidden_layers)
    peer: PeerCache = getattr(import_module(f"dflash_offline.tools.peers.{module}"), opener)(args.source, shape)
    if (
        not peer.layers
        or len(set(peer.layers)) < len(peer.layers)
        or not all(0 <= i < shape.depth for i in peer.layers)
    ):
        raise UsageError(
            f"layers: {list(peer.layers)} as outputs of layers 0 to {shape.depth - 1}; expected distinct ones"
        )
    threads = args.threads or len(os.sched_getaffinity(0))
    settings = {
        "imported": args.format,
        "target.weights": identity(target),
        "target.layers": list(peer.layers),
        "data.generation": args.generation,
        "data.trim": args.trim,
        "codec": args.codec,
        **{f"{args.codec}.{name}": value for name, value in codec_parameters(args.codec, args.delta).items()},
        "last_hidden": args.last_hidden,
        "shard_mib": args.shard_mib,
    }
    with claim(args.out, (index.SHARDS_FOLDER, plans.FOLDER)):
        found, skips = _survey(peer, args, target.config.vocab_size, threads)
        # Ids and settings do not tell two extractions of one dataset apart.
        states_TLD, _ = _read(_load(peer, found[0].number, args.trim), args)
        settings["data.states"] = xxhash.xxh3_64_hexdigest(states_TLD.contiguous().view(torch.int16).numpy().data)
        groups = list(_groups(found, args, len(peer.layers) * shape.hidden))
        plan = _plan(args, settings, groups, peer.count, skips)
        _check_plan(args.out, plan)
        plans.write(args.out, plan)
        _write_skips(args.out, skips)
        codec, info = _calibrate(peer, args, found, len(peer.layers), shape.hidden)
        draft = manifest.Manifest(
            complete=False,
            layer_ids=list(peer.layers),
            hidden_size=shape.hidden,
            codec=info,
            last_hidden=args.last_hidden,
            settings=settings,
            target={
                "path": target.name,
                "revision": target.revision,
                "model_type": target.model_type,
                "copied": write_target_folder(target, tokenizer, args.out / TARGET_FOLDER),
                "files": full_hashes(target),
            },
            tokenizer=tokenizer_facts(tokenizer, target.config),
            generation=args.generation,
            dataset={"files": plan.files, "rows": plan.rows, "skipped": plan.skipped, "lost": 0},
            versions={name: version(name) for name in ("dflash-offline", "torch", "zstandard")},
            kernels=f"imported from {args.format}",
        )
        parts = [
            Part(task=task.hash, samples=partial(_entries, peer, args, codec, group))
            for task, group in zip(plan.tasks, groups, strict=True)
        ]
        done = build(args.out, draft, parts, threads)
        lost = _count_lost(args, peer, done, found, skips)
    print(
        f"{args.out}: complete, {len(found) - lost} samples of layers {list(peer.layers)}"
        + (f"; {lost} lost, their states are not finite ({SKIPPED})" if lost else "")
    )
    return 3 if lost else 0


def _load(peer: PeerCache, number: int, trim: bool) -> PeerSample:
    """Sample `number`, without what follows its last supervised token when that is asked for: states are causal."""
    sample = peer.sample(number)
    supervised = sample.loss_mask.nonzero()[0]
    if not trim or not len(supervised):
        return sample
    stop = int(supervised[-1]) + 1
    last = sample.last_hidden
    return replace(
        sample,
        input_ids=sample.input_ids[:stop],
        loss_mask=sample.loss_mask[:stop],
        states=lambda: sample.states()[:stop],
        last_hidden=None if last is None else lambda: last()[:stop],
    )


def _survey(peer: PeerCache, args: Import, vocabulary: int, threads: int) -> tuple[list[Found], list[Skip]]:
    """The first pass: what will be written, and what will not. Rows read == found + skipped."""

    def look(number: int) -> Found | Skip:
        def skip(reason: str, detail: str, place: str = args.format, name: str = "") -> Skip:
            return Skip(source=place, number=number, id=name, reason=reason, detail=detail)

        try:
            sample = _load(peer, number, args.trim)
        except SkipRow as why:
            return skip(why.reason, why.detail)
        if sample.input_ids.max() >= vocabulary:
            raise UsageError(
                f"{args.source / sample.place}: input_ids has {sample.input_ids.max()}, but the target's vocabulary is "
                f"{vocabulary}; give the target that this cache was made with"
            )
        if args.last_hidden and sample.last_hidden is None:
            raise UsageError(f"last_hidden: {args.format} does not hold it before the final norm; leave it out")
        if len(eligible_anchors(sample.loss_mask)) == 0:
            detail = f"{int(sample.loss_mask.sum())} supervised tokens of {len(sample.input_ids)}, and no two in a row"
            return skip("no_trainable_anchor", detail, sample.place, sample.id)
        key = sample_key(sample.input_ids, sample.loss_mask)
        return Found(number=number, place=sample.place, key=key, tokens=len(sample.input_ids))

    found, skips, seen = list[Found](), list[Skip](), set[str]()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, peer.count, _AT_ONCE):
            for outcome in pool.map(look, range(start, min(start + _AT_ONCE, peer.count))):
                if isinstance(outcome, Skip):
                    skips.append(outcome)
                elif outcome.key in seen:
                    detail = f"same ids and mask as another sample, key {outcome.key}"
                    skips.append(
                        Skip(source=outcome.place, number=outcome.number, id="", reason="duplicate", detail=detail)
                    )
                else:
                    seen.add(outcome.key)
                    found.append(outcome)
    counts = ", ".join(f"{n} {reason}" for reason, n in _counts(skips).items()) or "none"
    print(f"read {peer.count} samples: {len(found)} to import, skipped {len(skips)} ({counts})", flush=True)
    if not found:
        raise UsageError(f"{args.source}: 0 usable samples of {peer.count} ({counts}); first: {skips[0].detail}")
    return found, skips


def _counts(skips: Sequence[Skip]) -> dict[str, int]:
    reasons = [skip.reason for skip in skips]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def _groups(found: Sequence[Found], args: Import, values: int) -> Iterator[list[Found]]:
    """The samples of every shard: as many as fill shard_mib at the codec's usual rate."""
    size = args.shard_mib * 2**23 / (codecs.nominal_bits(args.codec, codec_parameters(args.codec, args.delta)) * values)
    group, tokens = list[Found](), 0
    for sample in found:
        if group and tokens + sample.tokens > size:
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += sample.tokens
    yield group


def _plan(
    args: Import, settings: dict[str, Any], groups: Sequence[Sequence[Found]], rows: int, skips: Sequence[Skip]
) -> plans.Plan:
    return plans.Plan(
        settings=settings,
        files=[{"name": str(args.source)}],
        rows=rows,
        skipped=_counts(skips),
        keys=keys_hash([sample.key for group in groups for sample in group]),
        tokens_files={},
        tasks=[
            plans.Task(
                hash=plans.task_hash(settings, [sample.key for sample in group]),
                file="",
                batch=0,
                samples=len(group),
                tokens=sum(sample.tokens for sample in group),
            )
            for group in groups
        ],
    )


def _check_plan(cache: Path, plan: plans.Plan) -> None:
    """Raises UsageError when the cache was begun with other settings or samples."""
    old = plans.read(cache) or plans.from_manifest(cache)
    if old is None:
        return
    pairs = {name: (old.settings.get(name), plan.settings.get(name)) for name in sorted(old.settings | plan.settings)}
    if changes := [f"{name} was {was!r}, now {now!r}" for name, (was, now) in pairs.items() if was != now]:
        raise UsageError(f"{cache}: {'; '.join(changes)}; use it as before, or another cache folder")
    if [task.hash for task in old.tasks] != [task.hash for task in plan.tasks]:
        raise UsageError(f"{cache}: begun with other samples than the source holds now; use another cache folder")


def _write_skips(cache: Path, skips: Sequence[Skip]) -> None:
    with atomic_file(cache / SKIPPED) as file:
        for skip in skips:
            file.write(json.dumps(plans.skip_line(skip)).encode() + b"\n")


def _calibrate(
    peer: PeerCache, args: Import, found: Sequence[Found], layers: int, hidden: int
) -> tuple[Calibrated, manifest.CodecInfo]:
    """The codec, measured on the first tokens with finite states, as an extraction measures it."""
    states, last, tokens = list[Tensor](), list[Tensor](), 0
    for sample in found:
        states_TLD, last_ND = _read(_load(peer, sample.number, args.trim), args)
        if bool(torch.isfinite(states_TLD).all()) and bool(torch.isfinite(last_ND).all()):
            states.append(states_TLD)
            last.append(last_ND)
            tokens += len(states_TLD)
        if tokens >= CALIBRATION_TOKENS:
            break
    if not states:
        raise RunError(f"{args.source}: no sample has finite states throughout; extract them again")
    measured = torch.cat(states)[:CALIBRATION_TOKENS]
    measured_last = torch.cat(last)[:CALIBRATION_TOKENS] if args.last_hidden else None
    info = calibration.write(args.out, args.codec, codec_parameters(args.codec, args.delta), measured, measured_last)
    return calibration.read(args.out, info, layers, hidden, args.last_hidden), info


def _read(sample: PeerSample, args: Import) -> tuple[Tensor, Tensor]:
    """States [T, L, D], and the last hidden state [N, D], empty when it is not stored."""
    if not args.last_hidden or sample.last_hidden is None:
        return sample.states(), torch.empty(0)
    return sample.states(), sample.last_hidden()[torch.from_numpy(last_positions(sample.loss_mask))]


def _entries(peer: PeerCache, args: Import, codec: Calibrated, group: Sequence[Found]) -> Iterator[Entry]:
    """The group's samples with finite states."""
    for found in group:
        sample = _load(peer, found.number, args.trim)
        if sample_key(sample.input_ids, sample.loss_mask) != found.key:
            raise RunError(f"{args.source / sample.place}: changed while it was imported; rerun")
        states_TLD, last_ND = _read(sample, args)
        try:
            frames = encode_frames(codec.states, states_TLD)
            last_frames = encode_frames(codec.last, last_ND[:, None]) if codec.last is not None else []
        except ValueError:  # not finite; _count_lost finds it missing
            continue
        yield Entry(
            identity=Identity(
                key=found.key,
                prompt_key=prompt_key(sample.input_ids, sample.loss_mask),
                id=sample.id,
                source=sample.place,
                source_row=found.number,
                finish_reason="unknown",
                response=args.generation,
            ),
            input_ids=sample.input_ids,
            loss_mask=sample.loss_mask,
            frames=frames,
            last_frames=last_frames,
        )


def _count_lost(
    args: Import, peer: PeerCache, done: manifest.Manifest, found: Sequence[Found], skips: Sequence[Skip]
) -> int:
    """Planned samples that no shard holds; skipped.jsonl and the manifest then say so."""
    table = index.load(args.out, done, ranges=True)
    there = set(table.column("key").to_pylist())
    lost = [
        Skip(source=s.place, number=f.number, id=s.id, reason="not_finite", detail=f"key {f.key}")
        for f in found
        if f.key not in there
        for s in [peer.sample(f.number)]
    ]
    if lost:
        _write_skips(args.out, [*skips, *lost])
        index.publish(args.out, replace(done, dataset={**done.dataset, "lost": len(lost)}), table)
    return len(lost)
