"""A new cache from samples of existing ones, which are only read: what merge, split and convert have in common.

Frames are copied as they are where codec and calibration are the source's own; else decoded and encoded again. What a
cache says of its past stays true: files, rows, skips and skipped.jsonl are those of the sources, and every sample that
is left out is one more skipped row. plan/plan.json lists the tasks without their tokens: the same command finishes what
a kill left, and any other, an extraction too, is refused by the name of the setting that differs.
"""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_offline.extract import plan as plans
from dflash_offline.extract.task import CALIBRATION_TOKENS
from dflash_offline.shards import calibration, codecs, index, manifest
from dflash_offline.shards.build import SKIPPED, Entry, Part, build, claim, is_done
from dflash_offline.shards.cache import TARGET_FOLDER, Cache, tokens_of
from dflash_offline.shards.calibration import CODEC_FILE, Calibrated
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import keys_hash
from dflash_offline.shards.layout import IDENTITY
from dflash_offline.shards.manifest import CodecInfo, Manifest
from dflash_offline.shards.sample import Sample
from dflash_offline.shards.writer import Identity

_EVERY = 5.0
"""Seconds between two lines of progress."""
_DAMAGED = b'"reason": "damaged"', b'"reason": "damaged_before"'
"""What a repair of a source lost is another reason here: no rerun of this cache brings it back."""


class Pick(NamedTuple):
    """A sample of a source, and what its index says of it."""

    source: Cache
    number: int
    key: str
    tokens: int
    length: int
    """Bytes of its message."""
    xxh3: int
    """Hash of those bytes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A new cache, as its command describes it."""

    out: Path
    sources: Sequence[Cache]
    """Target, tokenizer and, where the codec stays, calibration are the first's."""
    picks: Sequence[Pick]
    """The samples, in their order."""
    left_out: Sequence[tuple[Pick, str]]
    """Samples that are not taken, and the reason."""
    settings: dict[str, Any]
    """Every value that decides the bytes, "made_by" among them."""
    codec: tuple[str, dict[str, Any]] | None = None
    """Name and parameters of a codec to measure on the first source's first tokens; None keeps what there is."""


def picks_of(source: Cache) -> list[Pick]:
    """Every sample of a cache, in its order."""
    columns = (source.index.column(name).to_pylist() for name in ("key", "tokens", "length", "xxh3"))
    return [Pick(source, number, *values) for number, values in enumerate(zip(*columns, strict=True))]


def rewrite(job: Job, shard_mib: int, threads: int) -> Manifest:
    """Write the new cache, or finish what an earlier call began.

    Raises UsageError before any work when the folder is of another making or its disk too full; CorruptError naming
    shard and sample when a source is damaged, and the folder then holds finished shards but does not say complete.
    """
    torch.set_num_threads(1)  # the shards are what is parallel, and sums must not depend on the machine
    out, first = job.out, job.sources[0]
    for source in job.sources:
        if source.path.resolve() in (out.resolve(), *out.resolve().parents):
            raise UsageError(f"{out}: lies in {source.path}, which is only read; choose a folder outside of it")
    job = replace(job, settings={**job.settings, "shard_mib": shard_mib})
    groups = list(_groups(job, shard_mib << 20))
    plan = _plan(job, [picks for picks, _ in groups])
    with claim(out, (index.SHARDS_FOLDER, plans.FOLDER)):
        _check_plan(out, plan)
        todo = [n for n, task in enumerate(plan.tasks) if not is_done(out / index.shard_name(n), task.hash)]
        _check_room(job, sum(groups[n][1] for n in todo))
        if len(todo) < len(plan.tasks):
            print(f"resuming: {len(plan.tasks) - len(todo)} of {len(plan.tasks)} shards are done", flush=True)
        plans.write(out, plan)
        _write_skipped(job)
        for name, digest in first.manifest.target["copied"].items():
            _copy(first.path / TARGET_FOLDER, out / TARGET_FOLDER, name, digest)
        info, codec = _codec(job)
        recode = {source: None if _keeps_frames(source, info, codec) else codec for source in job.sources}
        progress = _Progress(sum(plan.tasks[n].samples for n in todo))
        parts = [
            Part(task=task.hash, samples=partial(_entries, picks, recode, progress))
            for task, (picks, _) in zip(plan.tasks, groups, strict=True)
        ]
        return build(out, _draft(job, plan, info), parts, threads)


def _groups(job: Job, size: int) -> Iterator[tuple[list[Pick], int]]:
    """The samples of every shard, and about how many bytes they will take: up to `size`, or one sample."""
    ratio = {source: _ratio(source, job.codec) for source in job.sources}
    group, total = list[Pick](), 0
    for pick in job.picks:
        length = int(pick.length * ratio[pick.source])
        if group and total + length > size:
            yield group, total
            group, total = [], 0
        group.append(pick)
        total += length
    if group:
        yield group, total


def _ratio(source: Cache, codec: tuple[str, dict[str, Any]] | None) -> float:
    """Of a sample's bytes in `codec` to its bytes now, about."""
    now = source.manifest.codec
    return codecs.nominal_bits(*codec) / codecs.nominal_bits(now.name, now.parameters) if codec else 1.0


def _plan(job: Job, groups: Sequence[Sequence[Pick]]) -> plans.Plan:
    """The tasks. A task's hash covers every byte it will read, by the hashes in the sources' indexes."""
    facts = [source.manifest.dataset for source in job.sources]
    files = [file for known in facts for file in known.get("files", [])]
    skipped, rows = Counter(reason for _, reason in job.left_out), 0
    for source, known in zip(job.sources, facts, strict=True):
        seen = len(source) + sum(known.get("skipped", {}).values()) + known.get("lost", 0)
        rows += known.get("rows", seen)
        skipped.update({("damaged_before" if r == "damaged" else r): n for r, n in known.get("skipped", {}).items()})
        skipped["not_extracted"] += known.get("rows", seen) - seen
    return plans.Plan(
        settings=job.settings,
        files=[file for at, file in enumerate(files) if file not in files[:at]],
        rows=rows,
        skipped={reason: count for reason, count in skipped.items() if count > 0},
        keys=keys_hash([pick.key for pick in job.picks]),
        tokens_files={},
        tasks=[
            plans.Task(
                hash=plans.task_hash(
                    job.settings, [f"{p.source.manifest.codec.calibration} {p.xxh3:016x}" for p in group]
                ),
                file="",
                batch=0,
                samples=len(group),
                tokens=sum(pick.tokens for pick in group),
            )
            for group in groups
        ],
    )


def _check_plan(out: Path, plan: plans.Plan) -> None:
    """Raises UsageError unless the folder is empty or was begun by this very command."""
    old, info = plans.read(out), manifest.read(out) if (out / manifest.NAME).is_file() else None
    settings = old.settings if old else info.settings if info else plan.settings
    pairs = {name: (settings.get(name), plan.settings.get(name)) for name in sorted(settings | plan.settings)}
    if changes := [f"{name} was {was!r}, now {now!r}" for name, (was, now) in pairs.items() if was != now]:
        raise UsageError(f"{out}: {'; '.join(changes)}; use it as before, or another folder")
    if old and [task.hash for task in old.tasks] != [task.hash for task in plan.tasks]:
        raise UsageError(f"{out}: begun with other samples than the sources hold now; choose another folder")


def _check_room(job: Job, size: int) -> None:
    """Refuse what the disk cannot hold; the estimate is within some percent on real states."""
    first, out = job.sources[0].path, job.out
    if not (out / TARGET_FOLDER).is_dir():
        size += sum(p.stat().st_size for p in (first / TARGET_FOLDER).glob("*"))
    if size > (free := shutil.disk_usage(out).free):
        raise UsageError(f"{out}: needs about {size >> 20:,} MiB more, {free >> 20:,} are free; choose another disk")


def _write_skipped(job: Job) -> None:
    """Every row of the sources' datasets that is not here; the sources' own lines first."""
    with atomic_file(job.out / SKIPPED) as file:
        for source in job.sources:
            if (path := source.path / SKIPPED).is_file():
                with path.open("rb") as lines:
                    file.writelines(line.replace(*_DAMAGED) for line in lines)
        for pick, reason in job.left_out:
            row = pick.source.row(pick.number)
            line = {"file": row["source"], "line": row["source_row"] + 1, "id": row["id"], "reason": reason}
            file.write(json.dumps({**line, "detail": f"key {pick.key} of {pick.source.path}"}).encode() + b"\n")


def _copy(source: Path, folder: Path, name: str, digest: str) -> None:
    """Copy file `name` unless it is there. Raises CorruptError when it is not what the manifest says."""
    if (folder / name).is_file() and file_hash(folder / name) == digest:
        return
    folder.mkdir(exist_ok=True)
    if not (source / name).is_file() or file_hash(source / name) != digest:
        raise CorruptError(f"{source / name}: missing or changed, expected xxh3 {digest}; restore it and rerun")
    with (source / name).open("rb") as read, atomic_file(folder / name) as file:
        shutil.copyfileobj(read, file)


def _codec(job: Job) -> tuple[CodecInfo, Calibrated]:
    """The new cache's codec, its codec.safetensors in place."""
    first, out = job.sources[0], job.out
    m = first.manifest
    if job.codec is None:
        _copy(first.path, out, CODEC_FILE, m.codec.calibration)
        return m.codec, first.codec
    # The tokens that an extraction would measure, so that both store the same.
    samples, tokens = list[Sample](), 0
    while tokens < CALIBRATION_TOKENS and len(samples) < len(first):
        samples.append(first.read(len(samples)))
        tokens += len(samples[-1].input_ids)
    states_TLD = torch.cat([s.states for s in samples])[:CALIBRATION_TOKENS].view(-1, len(m.layer_ids), m.hidden_size)
    last = [s.last_hidden for s in samples if s.last_hidden is not None]
    last_ND = torch.cat(last)[:CALIBRATION_TOKENS] if last else None
    name, parameters = job.codec
    info = calibration.write(out, name, parameters, states_TLD, last_ND)
    return info, calibration.read(out, info, len(m.layer_ids), m.hidden_size, m.last_hidden)


def _keeps_frames(source: Cache, info: CodecInfo, codec: Calibrated) -> bool:
    """Whether a source's frames are those that `codec` would read. codec.safetensors may differ in what it reports."""
    return _kind(source.manifest.codec) == _kind(info) and same_calibration(source.codec, codec)


def _kind(info: CodecInfo) -> tuple[str, int, dict[str, Any]]:
    return info.name, info.version, info.parameters


def same_calibration(a: Calibrated, b: Calibrated) -> bool:
    """Whether two codecs of one kind are calibrated to the same tensors."""
    pairs = [(a.states, b.states), *([(a.last, b.last)] if a.last is not None and b.last is not None else [])]
    return all(torch.equal(tensor, y.calibration()[name]) for x, y in pairs for name, tensor in x.calibration().items())


def _draft(job: Job, plan: plans.Plan, info: CodecInfo) -> Manifest:
    """The first source's manifest with what is new."""
    manifests = [source.manifest for source in job.sources]
    first = manifests[0]
    names = dict.fromkeys(name for m in manifests for name in m.versions)
    dataset = {
        "files": plan.files,
        "rows": plan.rows,
        "skipped": plan.skipped,
        "lost": sum(m.dataset.get("lost", 0) for m in manifests),
        "keys": plan.keys,
        "sources": [str(source.path) for source in job.sources],
    }
    return replace(
        first,
        complete=False,
        codec=info,
        settings=plan.settings,
        dataset=(first.dataset if len(manifests) == 1 else {}) | dataset,
        versions={name: _joined(m.versions.get(name, "") for m in manifests) for name in names},
        kernels=_joined(m.kernels for m in manifests),
        shards=[],
        index={},
    )


def _joined(words: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(word for word in words if word))


def _entries(
    picks: Sequence[Pick], recode: Mapping[Cache, Calibrated | None], progress: "_Progress"
) -> Iterator[Entry]:
    for pick in picks:
        codec = recode[pick.source]
        entry = _copied(pick) if codec is None else _encoded(pick, codec)
        yield entry
        progress.note(sum(map(len, entry.frames)) + sum(map(len, entry.last_frames)))


def _copied(pick: Pick) -> Entry:
    """The sample with its frames as they are. Raises CorruptError naming shard and sample."""
    source, row = pick.source, pick.source.row(pick.number)
    try:
        batch = source.read_batch(row)
        ids, mask = tokens_of(row, batch)
    except CorruptError as error:
        raise CorruptError(f"{source.path / row['shard']}: row {row['row']}, sample {pick.key}: {error}") from None
    last = batch.column("last_frames").values.to_pylist() if source.manifest.last_hidden else []
    return Entry(
        identity=_identity(row),
        input_ids=ids,
        loss_mask=mask,
        frames=batch.column("frames").values.to_pylist(),
        last_frames=last,
    )


def _encoded(pick: Pick, codec: Calibrated) -> Entry:
    """The sample with its states encoded anew. Raises CorruptError naming shard, frame and sample."""
    sample = pick.source.read(pick.number)
    states_TLD = sample.states.view(-1, codec.layers, codec.hidden)
    last = (
        []
        if codec.last is None or sample.last_hidden is None
        else encode_frames(codec.last, sample.last_hidden[:, None])
    )
    return Entry(
        identity=_identity(pick.source.row(pick.number)),
        input_ids=sample.input_ids,
        loss_mask=sample.loss_mask,
        frames=encode_frames(codec.states, states_TLD),
        last_frames=last,
    )


def _identity(row: dict[str, Any]) -> Identity:
    return Identity(**{field.name: row[field.name] for field in IDENTITY})


class _Progress:
    """A line now and then: samples, rate, time left."""

    def __init__(self, samples: int) -> None:
        self._total, self._done, self._bytes = samples, 0, 0
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()

    def note(self, size: int) -> None:
        """Count a written sample of `size` bytes."""
        with self._lock:
            self._done, self._bytes = self._done + 1, self._bytes + size
            now = time.monotonic()
            if now - self._last < _EVERY and self._done < self._total:
                return
            self._last, seconds = now, max(now - self._start, 1e-3)
            left = seconds * (self._total - self._done) / self._done
            rate = self._bytes / seconds / 2**20
            print(f"{self._done:,} of {self._total:,} samples, {rate:,.0f} MiB/s, {left:,.0f} s left", flush=True)
