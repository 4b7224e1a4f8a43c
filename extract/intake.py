"""From dataset rows to the plan: drop duplicates, count what is skipped and why, before anything is loaded."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from dflash_offline.extract import plan as plans
from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.dataset import Skip
from dflash_offline.extract.keyset import KeySet
from dflash_offline.extract.render import NOTES, Renderer
from dflash_offline.extract.sources import read_chunks
from dflash_offline.extract.tokenise import Done, render_chunks
from dflash_offline.shards.build import SKIPPED
from dflash_offline.shards.command import say
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, file_hash

ROWS = "rows"
"""Folder in plan/ of rendered rows; may be deleted at any time."""
_SELECTING = ("limit", "shuffle_seed", "too_long", "min_supervised", "duplicates")
"""Settings that decide which rows are samples. The bytes of a sample do not depend on them."""
_SAY_EVERY = 30.0


@dataclass(kw_only=True)
class Intake:
    """Rows in, planned samples out. Rows read == samples seen + rows skipped, by reason."""

    data: DataConfig
    renderer: Renderer
    skips: BinaryIO | None = None
    """Where a line of skipped.jsonl goes for every row left out."""
    store: Path | None = None
    """Where rendered rows are kept."""
    planned: KeySet = field(default_factory=KeySet)
    """Keys that existing tasks have already."""
    seen: KeySet = field(default_factory=KeySet)
    prompts: KeySet = field(default_factory=KeySet)
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    cut: int = 0
    longest: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """The first skipped row of each reason."""

    def samples(self) -> Iterator[pa.RecordBatch]:
        """Every sample that no task has yet, in dataset order, some at a time."""
        said = time.monotonic()
        size = sum(path.stat().st_size for path in self.data.files)
        chunks = read_chunks(self.data.files, self.data.limit, self.data.shuffle_seed)
        for done in render_chunks(self.renderer, self.data, chunks, size, self.store):
            new = self._take(done)
            if len(new):
                yield new
            if time.monotonic() - said > _SAY_EVERY:
                said = time.monotonic()
                say(f"reading: {self.rows:,} rows, {self.tokens:,} tokens")
        if self.data.strict and self.skipped:
            raise UsageError(f"{self.data.files[0]}: data.strict, and {self._skips()}; first: {self.first_skip()}")
        if len(self.seen) == 0:
            first = f"; first: {self.first_skip()}" if self.skipped else ""
            template = xxhash.xxh3_64_hexdigest(str(self.renderer.tokenizer.chat_template).encode())
            raise UsageError(
                f"{self.data.files[0]}: 0 usable samples of {self.rows} rows ({self._reasons() or 'no rows'}){first}; "
                f"chat template {template}"
            )

    def _take(self, done: Done) -> pa.RecordBatch:
        batch, chosen = done.batch, []
        columns = (batch.column(n).to_pylist() for n in ("reason", "key", "prompt_key"))
        for at, (reason, key, prompt) in enumerate(zip(*columns, strict=True)):
            self.rows += 1
            if reason or (reason := self._repeats(bytes.fromhex(key), bytes.fromhex(prompt))):
                detail = batch.column("detail")[at].as_py() or f"as another row, key {key}"
                who = {
                    "source": done.chunk.source,
                    "number": done.chunk.numbers[at],
                    "id": batch.column("id")[at].as_py(),
                }
                self._skip(Skip(**who, reason=reason, detail=detail))
            else:
                chosen.append(at)
        kept = batch.take(pa.array(chosen, pa.int32()))
        self._count(kept)
        new = [n for n, key in enumerate(kept.column("key").to_pylist()) if bytes.fromhex(key) not in self.planned]
        places = [done.chunk.numbers[chosen[n]] for n in new]
        kept = kept.take(pa.array(new, pa.int32()))
        extra = {"source": pa.array([done.chunk.source] * len(new)), "source_row": pa.array(places, pa.int64())}
        columns = (extra[f.name] if f.name in extra else kept.column(f.name) for f in plans.SCHEMA)
        return pa.record_batch(list(columns), schema=plans.SCHEMA)

    def _repeats(self, key: bytes, prompt: bytes) -> str:
        if key in self.seen:
            return "duplicate"
        if self.data.duplicates == "prompt":
            if prompt in self.prompts:
                return "duplicate_prompt"
            self.prompts.add(prompt)
        self.seen.add(key)
        return ""

    def _count(self, kept: pa.RecordBatch) -> None:
        lengths = pc.list_value_length(kept.column("input_ids")).to_numpy()
        whole, notes = kept.column("whole").to_numpy(), kept.column("notes").to_numpy()
        self.tokens += int(lengths.sum())
        self.supervised += int(kept.column("loss_mask").flatten().to_numpy().sum(dtype=np.int64))
        self.cut += int((whole > lengths).sum())
        self.longest = max(self.longest, *whole.tolist(), 0)
        for bit, name in enumerate(NOTES):
            if count := int(((notes >> bit) & 1).sum()):
                self.notes[name] += count

    def _skip(self, skip: Skip) -> None:
        self.skipped[skip.reason] += 1
        self.examples.setdefault(skip.reason, f"{skip.source} line {skip.number + 1}: {skip.detail or skip.reason}")
        if self.skips is not None:
            self.skips.write(json.dumps(plans.skip_line(skip)).encode() + b"\n")

    def first_skip(self) -> str:
        """Where the first skipped row is, and why."""
        return next(iter(self.examples.values()))

    def _reasons(self) -> str:
        return ", ".join(f"{n} {reason}" for reason, n in self.skipped.most_common())

    def _skips(self) -> str:
        return f"skipped {self.skipped.total()} of {self.rows} rows ({self._reasons()})"

    def summary(self) -> str:
        """What came in and what became of it, a line each."""
        samples = len(self.seen)
        lines = [
            f"read {self.rows} rows: {samples} samples, skipped {self.skipped.total()} ({self._reasons() or 'none'})",
            f"  {'tokens':<46} {self.tokens:>15,}",
            f"  {'supervised':<46} {self.supervised:>15,}",
            f"  {'a sample on average':<46} {self.tokens / max(1, samples):>15,.1f}",
            f"  {'longest before cutting':<46} {self.longest:>15,}",
            f"  {f'cut at {self.data.max_length} tokens':<46} {self.cut:>15,}",
            *(f"  {name:<46} {count:>15,}" for name, count in self.notes.items()),
        ]
        if self.notes[NOTES[2]] and self.data.enable_thinking is not False:
            lines.append(
                "  note: were responses without thinking made with enable_thinking = false? Then set it here too"
            )
        return "\n".join(lines)


def selection(data: DataConfig) -> dict[str, Any]:
    """The settings that choose samples, as far as they are not the default."""
    default = DataConfig()
    chosen = {name: getattr(data, name) for name in _SELECTING if getattr(data, name) != getattr(default, name)}
    return {**chosen, **{f"fields.{name}": value for name, value in asdict(data.fields).items() if value}}


def make_plan(
    cache: Path, data: DataConfig, settings: dict[str, Any], renderer: Renderer, task_tokens: int, by_length: bool
) -> plans.Plan:
    """The existing plan if the dataset is the same, extended if it has grown, or a new one.

    Raises UsageError when a setting differs (naming field, old, new), when planned samples are gone from the dataset,
    or when nothing is usable.
    """
    old = plans.read(cache) or plans.from_manifest(cache)
    if old is not None:
        pairs = {name: (old.settings.get(name), settings.get(name)) for name in sorted(settings | old.settings)}
        if changes := [f"{name} was {was!r}, now {now!r}" for name, (was, now) in pairs.items() if was != now]:
            raise UsageError(f"{cache}: {'; '.join(changes)}; use it as before, or another cache folder")
    files = [{"name": p.name, "bytes": p.stat().st_size, "xxh3": file_hash(p)} for p in data.files]
    if old is not None and (old.files, old.selection) == (files, selection(data)):
        if data.strict and old.skipped:
            raise UsageError(f"{cache}: data.strict, and rows were skipped: {old.skipped}; see {cache / SKIPPED}")
        return old
    known = plans.all_keys(cache, old) if old else KeySet()
    name = f"tokens-{len(old.tasks) if old else 0:05d}.arrow"
    tokens_path = cache / plans.FOLDER / name
    with atomic_file(cache / SKIPPED) as skips:
        store = cache / plans.FOLDER / ROWS
        for leftover in store.glob("*.tmp"):
            leftover.unlink()
        intake = Intake(data=data, renderer=renderer, planned=known, skips=skips, store=store)
        try:
            tasks, tokens_hash = plans.write_tasks(tokens_path, intake.samples(), settings, task_tokens, by_length)
            if gone := known.missing_in(intake.seen):
                raise UsageError(
                    f"{cache}: {gone} of its {len(known)} samples are not in the dataset any more "
                    f"({intake.seen.missing_in(known)} are new); give the old files too, or another cache folder"
                )
        except UsageError:
            tokens_path.unlink(missing_ok=True)
            raise
    if not tasks:
        tokens_path.unlink()
    plan = plans.Plan(
        settings=settings,
        files=files,
        selection=selection(data),
        rows=intake.rows,
        skipped=dict(intake.skipped),
        keys=intake.seen.hash(),
        tokens_files={**(old.tokens_files if old else {}), **({name: tokens_hash} if tasks else {})},
        tasks=[*(old.tasks if old else []), *tasks],
    )
    plans.write(cache, plan)
    say(intake.summary())
    return plan
