"""From dataset rows to the plan: render, mask, key, drop duplicates and what could never be trained on, and count."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dflash_offline.extract import plan as plans
from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.dataset import Row, Skip, SkipRow, read_rows
from dflash_offline.extract.render import Renderer, render
from dflash_offline.shards.build import SKIPPED
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.keys import eligible_anchors, keys_hash, prompt_key, sample_key
from dflash_offline.shards.writer import Identity


@dataclass(kw_only=True)
class Intake:
    """Turns rows into planned samples. Rows read == samples seen + rows skipped, by reason."""

    data: DataConfig
    renderer: Renderer
    planned: set[str]
    """Keys that existing tasks have already."""
    skips: BinaryIO
    """Where a line of skipped.jsonl goes for every row left out."""
    seen: set[str] = field(default_factory=set)
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_skip: str = ""

    def samples(self) -> Iterator[plans.Planned]:
        """Every sample that no task has yet, in dataset order."""
        for row in read_rows(self.data.files):
            self.rows += 1
            if isinstance(row, Skip):
                self._skip(row)
                continue
            try:
                sample = self._sample(row)
            except SkipRow as why:
                self._skip(Skip(source=row.source, number=row.number, id=row.id, reason=why.reason, detail=why.detail))
                continue
            self.seen.add(sample.identity.key)
            if sample.identity.key not in self.planned:
                yield sample

    def _sample(self, row: Row) -> plans.Planned:
        whole_ids, whole_mask = render(self.renderer, row)
        ids, mask = whole_ids[: self.data.max_length], whole_mask[: self.data.max_length]
        if len(eligible_anchors(mask)) == 0:
            cut = len(eligible_anchors(whole_mask)) > 0
            detail = f"{int(mask.sum())} supervised tokens of {len(ids)}, and no two in a row"
            raise SkipRow("no_supervised_tokens_after_truncation" if cut else "no_trainable_anchor", detail)
        key = sample_key(ids, mask)
        if key in self.seen:
            raise SkipRow("duplicate", f"same ids and mask as another row, key {key}")
        who = Identity(
            key=key,
            prompt_key=prompt_key(ids, mask),
            id=row.id,
            source=row.source,
            source_row=row.number,
            finish_reason=row.finish_reason,
            response=row.response or self.data.generation,
        )
        return plans.Planned(identity=who, input_ids=ids, loss_mask=mask)

    def _skip(self, skip: Skip) -> None:
        self.skipped[skip.reason] += 1
        self.first_skip = self.first_skip or f"{skip.source} line {skip.number + 1}: {skip.detail or skip.reason}"
        self.skips.write(json.dumps(plans.skip_line(skip)).encode() + b"\n")


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
    if old is not None and old.files == files:
        return old
    known = set(plans.all_keys(cache, old)) if old else set()
    name = f"tokens-{len(old.tasks) if old else 0:05d}.arrow"
    tokens_path = cache / plans.FOLDER / name
    with atomic_file(cache / SKIPPED) as skips:
        intake = Intake(data=data, renderer=renderer, planned=known, skips=skips)
        try:
            tasks, tokens_hash = plans.write_tasks(tokens_path, intake.samples(), settings, task_tokens, by_length)
            _check(cache, data, intake, known)
        except UsageError:
            tokens_path.unlink(missing_ok=True)
            raise
    if not tasks:
        tokens_path.unlink()
    plan = plans.Plan(
        settings=settings,
        files=files,
        rows=intake.rows,
        skipped=dict(intake.skipped),
        keys=keys_hash(list(intake.seen)),
        tokens_files={**(old.tokens_files if old else {}), **({name: tokens_hash} if tasks else {})},
        tasks=[*(old.tasks if old else []), *tasks],
    )
    plans.write(cache, plan)
    reasons = ", ".join(f"{n} {reason}" for reason, n in intake.skipped.most_common())
    print(
        f"read {intake.rows} rows: {len(intake.seen)} samples, skipped {intake.skipped.total()} ({reasons or 'none'})"
    )
    return plan


def _check(cache: Path, data: DataConfig, intake: Intake, known: set[str]) -> None:
    if gone := known - intake.seen:
        raise UsageError(
            f"{cache}: {len(gone)} of its {len(known)} samples are not in the dataset any more "
            f"({len(intake.seen - known)} are new); give the old files too, or another cache folder"
        )
    if not intake.seen:
        reasons = ", ".join(f"{n} {reason}" for reason, n in intake.skipped.most_common()) or "no rows"
        first = f"; first: {intake.first_skip}" if intake.first_skip else ""
        raise UsageError(f"{data.files[0]}: 0 usable samples of {intake.rows} rows ({reasons}){first}")
