"""The plan: the immutable list of tasks that every worker shares. One task becomes one shard.

    plan/plan.json            settings, dataset identity, tasks
    plan/tokens-00000.arrow   Arrow IPC file, one record batch a task: identity columns, input_ids, loss_mask

A plan follows from the dataset and the settings alone, never from the number of workers. New samples of a grown dataset
become new tasks in a new tokens file; tasks that exist are never touched.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dflash_offline.extract.dataset import Skip
from dflash_offline.extract.keyset import KeySet
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
    selection: dict[str, Any] = field(default_factory=dict)
    """What decides which rows of the files are samples, where it is not the default."""
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
        selection=info.dataset.get("selection", {}),
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
    path: Path | None, batches: Iterable[pa.RecordBatch], settings: dict[str, Any], task_tokens: int, by_length: bool
) -> tuple[list[Task], str]:
    """Write tokens file `path`, one batch a task of about `task_tokens` tokens. Returns tasks and the file's hash.

    Without a path the tasks are only counted.
    """
    tasks: list[Task] = []
    with _writer(path) as writer:
        for group in _groups(batches, task_tokens):
            order = list(range(len(group)))
            if by_length:
                lengths = pc.list_value_length(group.column("input_ids")).to_pylist()
                keys = group.column("key").to_pylist()
                order.sort(key=lambda i: (lengths[i], keys[i]))
            # Taken even in order: the same rows then have the same bytes, whatever they were slices of.
            group = group.take(pa.array(order))
            if writer is not None:
                writer.write_batch(group)
            tasks.append(
                Task(
                    hash=task_hash(settings, group.column("key").to_pylist()),
                    file=path.name if path else "",
                    batch=len(tasks),
                    samples=len(group),
                    tokens=len(group.column("input_ids").flatten()),
                )
            )
    return tasks, file_hash(path) if path else ""


@contextmanager
def _writer(path: Path | None) -> Iterator[Any]:
    if path is None:
        yield None
        return
    with atomic_file(path) as file, pa.ipc.new_file(file, SCHEMA) as writer:
        yield writer


def _groups(batches: Iterable[pa.RecordBatch], task_tokens: int) -> Iterator[pa.RecordBatch]:
    """Rows in order, as many as keep each group within `task_tokens`."""
    parts: list[pa.RecordBatch] = []
    tokens = 0
    for batch in batches:
        start = 0
        for at, length in enumerate(pc.list_value_length(batch.column("input_ids")).to_pylist()):
            if tokens and tokens + length > task_tokens:
                yield _joined([*parts, batch.slice(start, at - start)])
                parts, start, tokens = [], at, 0
            tokens += length
        parts.append(batch.slice(start))
    if tokens:
        yield _joined(parts)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_batches(parts, SCHEMA).combine_chunks().to_batches()
    return batch


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


class Samples:
    """Every planned sample by number, mapped from disk: a microsecond-scale look, whatever the size of the plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._starts = np.cumsum([0, *(task.samples for task in plan.tasks)])
        self._files = {name: pa.ipc.open_file(pa.memory_map(str(folder / FOLDER / name))) for name in plan.tokens_files}
        self._tasks = plan.tasks
        self._open: dict[int, tuple[pa.RecordBatch, list[NDArray[Any]]]] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """input_ids [T] and loss_mask [T] of sample `number`, views of the file."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        at, row = self._find(number)
        offsets, ids, mask = (self._open.get(at) or self._load(at))[1]
        return ids[offsets[row] : offsets[row + 1]], mask[offsets[row] : offsets[row + 1]]

    def identity(self, number: int) -> Identity:
        """What sample `number` is."""
        at, row = self._find(number)
        batch = (self._open.get(at) or self._load(at))[0]
        return Identity(**{f.name: batch.column(f.name)[row].as_py() for f in IDENTITY})

    def _find(self, number: int) -> tuple[int, int]:
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        return at, number - int(self._starts[at])

    def _load(self, at: int) -> tuple[pa.RecordBatch, list[NDArray[Any]]]:
        task = self._tasks[at]
        batch = self._files[task.file].get_batch(task.batch)
        ids, mask = batch.column("input_ids"), batch.column("loss_mask")
        self._open[at] = batch, [a.to_numpy() for a in (ids.offsets, ids.values, mask.values)]
        return self._open[at]


def all_keys(folder: Path, plan: Plan) -> KeySet:
    """The keys of every planned sample; of those whose tokens file is gone, from the index."""
    keys = KeySet()
    if any(not task.file for task in plan.tasks):
        keys = KeySet(index.load(folder, manifest.read(folder)).column("key").to_pylist())
    for name in plan.tokens_files:
        with pa.memory_map(str(folder / FOLDER / name)) as source:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                for key in map(bytes.fromhex, reader.get_batch(i).column("key").to_pylist()):
                    if key not in keys:
                        keys.add(key)
    return keys


def skip_line(skip: Skip) -> dict[str, Any]:
    """A line of skipped.jsonl."""
    return {"file": skip.source, "line": skip.number + 1, "id": skip.id, "reason": skip.reason, "detail": skip.detail}
