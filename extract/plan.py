"""The plan: the immutable list of tasks that every worker shares. One task becomes one shard.

    plan/plan.json            settings, dataset identity, tasks
    plan/tokens-00000.arrow   Arrow IPC file, one record batch a task: identity columns, input_ids, loss_mask

A plan follows from the dataset and the settings alone, never from the number of workers. New samples of a grown dataset
become new tasks in a new tokens file; tasks that exist are never touched.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_offline.extract.dataset import Skip
from dflash_offline.shards import index, manifest
from dflash_offline.shards.command import structure
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import atomic_file, file_hash, read_json, write_json
from dflash_offline.shards.keys import sample_key
from dflash_offline.shards.layout import IDENTITY, SAMPLE_SCHEMA
from dflash_offline.shards.writer import Identity

FOLDER = "plan"
SCHEMA = pa.schema([*IDENTITY, SAMPLE_SCHEMA.field("input_ids"), SAMPLE_SCHEMA.field("loss_mask")])


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A sample that will be extracted."""

    identity: Identity
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One shard's worth of samples."""

    hash: str
    """Of the settings and the sample keys, in order: a finished shard carries it."""
    file: str
    batch: int
    """Record batch in `file`."""
    samples: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """plan.json."""

    settings: dict[str, Any]
    files: list[dict[str, Any]]
    """Name, size and hash of every dataset file; equal files need not be read again."""
    rows: int
    """Dataset rows read."""
    skipped: dict[str, int]
    """Dataset rows not planned, by reason."""
    keys: str
    """Hash of the sorted sample keys."""
    tokens_files: dict[str, str]
    """Tokens file -> xxh3-64."""
    tasks: list[Task]


def read(folder: Path) -> Plan | None:
    """The plan of a cache folder, or None. Raises CorruptError when it was changed."""
    try:
        return structure(Plan, read_json(folder / FOLDER / "plan.json"), str(folder / FOLDER / "plan.json"))
    except FileNotFoundError:
        return None


def from_manifest(folder: Path) -> Plan | None:
    """The plan of a complete cache whose plan/ was deleted: its tasks are known, their tokens are in the shards."""
    if not (folder / manifest.NAME).is_file() or not (info := manifest.read(folder)).complete:
        return None
    return Plan(
        settings=info.settings,
        files=info.dataset["files"],
        rows=info.dataset["rows"],
        skipped=info.dataset["skipped"],
        keys=info.dataset["keys"],
        tokens_files={},
        tasks=[Task(hash=s.task, file="", batch=0, samples=s.rows, tokens=0) for s in info.shards],
    )


def write(folder: Path, plan: Plan) -> None:
    """Publish plan.json."""
    write_json(folder / FOLDER / "plan.json", asdict(plan))


def task_hash(settings: dict[str, Any], keys: list[str]) -> str:
    """Identity of a task: what is computed, on what, in which order."""
    text = repr(sorted(settings.items())) + "".join(keys)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def write_tasks(
    path: Path, samples: Iterator[Planned], settings: dict[str, Any], task_tokens: int, by_length: bool
) -> tuple[list[Task], str]:
    """Write tokens file `path`, one batch a task of about `task_tokens` tokens. Returns tasks and the file's hash."""
    tasks: list[Task] = []
    with atomic_file(path) as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for group in _groups(samples, task_tokens):
            if by_length:
                group.sort(key=lambda s: (len(s.input_ids), s.identity.key))
            writer.write_batch(_batch(group))
            tasks.append(
                Task(
                    hash=task_hash(settings, [s.identity.key for s in group]),
                    file=path.name,
                    batch=len(tasks),
                    samples=len(group),
                    tokens=sum(len(s.input_ids) for s in group),
                )
            )
    return tasks, file_hash(path)


def _groups(samples: Iterator[Planned], task_tokens: int) -> Iterator[list[Planned]]:
    group: list[Planned] = []
    tokens = 0
    for sample in samples:
        if group and tokens + len(sample.input_ids) > task_tokens:
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += len(sample.input_ids)
    if group:
        yield group


def _batch(group: list[Planned]) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {f.name: [asdict(s.identity)[f.name] for s in group] for f in IDENTITY}
    columns["input_ids"] = [s.input_ids for s in group]
    columns["loss_mask"] = [s.loss_mask for s in group]
    return pa.record_batch([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)


def load_task(folder: Path, task: Task) -> list[Planned]:
    """The samples of a task. Raises CorruptError when ids or mask no longer match their key."""
    path = folder / FOLDER / task.file
    if not path.is_file():
        raise CorruptError(f"{path}: missing, and its shard too; extract into another cache folder")
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(task.batch)
        out = []
        for i in range(len(batch)):
            ids = np.array(batch.column("input_ids")[i].values, dtype=np.int32)
            mask = np.array(batch.column("loss_mask")[i].values, dtype=np.uint8)
            identity = Identity(**{f.name: batch.column(f.name)[i].as_py() for f in IDENTITY})
            if sample_key(ids, mask) != identity.key:
                raise CorruptError(f"{path}: batch {task.batch} row {i} changed; delete {path.parent} and rerun")
            out.append(Planned(identity=identity, input_ids=ids, loss_mask=mask))
    return out


def all_keys(folder: Path, plan: Plan) -> list[str]:
    """The keys of every planned sample; of those whose tokens file is gone, from the index."""
    keys: list[str] = []
    if any(not task.file for task in plan.tasks):
        keys += index.load(folder, manifest.read(folder)).column("key").to_pylist()
    for name in plan.tokens_files:
        with pa.memory_map(str(folder / FOLDER / name)) as source:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                keys += reader.get_batch(i).column("key").to_pylist()
    return keys


def skip_line(skip: Skip) -> dict[str, Any]:
    """A line of skipped.jsonl."""
    return {"file": skip.source, "line": skip.number + 1, "id": skip.id, "reason": skip.reason, "detail": skip.detail}
