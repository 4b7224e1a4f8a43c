"""Chunks of rows -> ids, masks and keys, in as many processes as there are cores, each chunk kept by its content.

A dataset of a few MB is done in this process. Results come in the order of the rows, whoever made them.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.dataset import Row, SkipRow, field_names, read_row, row_id
from dflash_offline.extract.plan import SCHEMA
from dflash_offline.extract.render import MASK_RULE, Rendered, Renderer, render_all
from dflash_offline.extract.sources import Chunk
from dflash_offline.extract.worker import end_with_parent
from dflash_offline.shards.errors import RunError
from dflash_offline.shards.files import atomic_file
from dflash_offline.shards.keys import eligible_anchors, prompt_key, sample_key

RENDERED = pa.schema(
    [
        *(SCHEMA.field(n) for n in ("key", "prompt_key", "id", "finish_reason", "response", "input_ids", "loss_mask")),
        pa.field("whole", pa.int64()),
        pa.field("notes", pa.uint8()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
"""A row of a chunk: a sample with its length before it was cut, or the reason why it is none."""
_LARGE = 32 << 20
"""Bytes of a dataset from which starting processes, which takes seconds, pays."""
_VERSION = "rendered rows 2"


class Done(NamedTuple):
    """A chunk and its rows, as RENDERED."""

    chunk: Chunk
    batch: pa.RecordBatch


def render_chunks(
    renderer: Renderer, data: DataConfig, chunks: Iterable[Chunk], size: int, folder: Path | None
) -> Iterator[Done]:
    """Every chunk rendered, in order. `size` is the dataset's in bytes, `folder` the place for finished chunks."""
    workers = data.workers or (len(os.sched_getaffinity(0)) if size >= _LARGE else 1)
    store = data.rows_cache or (folder if size >= _LARGE else None)
    salt = b""
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
        salt = repr([_VERSION, MASK_RULE, _settings(renderer, data)]).encode()
    pool: Executor
    if workers == 1:
        # Two threads: one renders, under the interpreter lock, while the tokenizer works for the other without it.
        pool, work = ThreadPoolExecutor(2), partial(_rendered, renderer, data, store, salt)
    else:
        # Spawned: a fork would copy the locks of threads that only this process has.
        context = multiprocessing.get_context("spawn")
        pool, work = ProcessPoolExecutor(workers, context, _start, (renderer, data, store, salt)), partial(_work)
    waiting: deque[tuple[Chunk, Future[pa.RecordBatch]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(work, chunk)))
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield Done(first, future.result())
        yield from (Done(chunk, future.result()) for chunk, future in waiting)
    except BrokenProcessPool:
        raise RunError("a process that tokenises died (out of memory?); rerun, or set data.workers lower") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _settings(renderer: Renderer, data: DataConfig) -> list[Any]:
    """Everything that decides what becomes of a row."""
    tokenizer = renderer.tokenizer
    named = ("fields", "supervise", "max_length", "too_long", "min_supervised", "generation")
    return [
        xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode()),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        renderer.template_args,
        renderer.vocab_size,
        *(getattr(data, name) for name in named),
    ]


_state: tuple[Renderer, DataConfig, Path | None, bytes]


def _start(*state: Any) -> None:
    """A process's first steps. Ctrl-C reaches the whole group, and the parent decides."""
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _state = state


def _work(chunk: Chunk) -> pa.RecordBatch:
    return _rendered(*_state, chunk)


def _rendered(renderer: Renderer, data: DataConfig, store: Path | None, salt: bytes, chunk: Chunk) -> pa.RecordBatch:
    """From the store, or made and stored."""
    if store is None:
        return render_chunk(renderer, data, chunk)
    digest = blake2b(salt, digest_size=16)
    for row in chunk.rows:
        digest.update(len(row).to_bytes(8, "little") + row)
    path = store / f"{digest.hexdigest()}.arrow"
    if (batch := _load(path)) is None:
        batch = render_chunk(renderer, data, chunk)
        body = pa.BufferOutputStream()
        with pa.ipc.new_stream(body, RENDERED) as writer:
            writer.write_batch(batch)
        stream = body.getvalue().to_pybytes()
        with atomic_file(path) as file:
            file.write(xxhash.xxh3_64_digest(stream) + stream)
    return batch


def _load(path: Path) -> pa.RecordBatch | None:
    """A stored chunk; None when there is none, or it is not what was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
        return None
    return pa.ipc.open_stream(pa.py_buffer(data)[8:]).read_next_batch()


def render_chunk(renderer: Renderer, data: DataConfig, chunk: Chunk) -> pa.RecordBatch:
    """The rows of a chunk as RENDERED. Raises UsageError for a line that is not JSON."""
    names = field_names(data.fields)
    rows: list[Row | SkipRow] = []
    ids: list[str] = []
    for values in chunk.values():
        ids.append(row_id(values, names))
        try:
            if isinstance(values, RecursionError):
                raise values
            rows.append(read_row(values, names))
        except SkipRow as why:
            rows.append(why)
        except RecursionError:
            rows.append(SkipRow("invalid_row", "nested too deeply"))
    samples = render_all(renderer, rows)
    table = [_row(row, sample, data) for row, sample in zip(rows, samples, strict=True)]
    columns: dict[str, Any] = {name: [r.get(name, "") for r in table] for name in RENDERED.names}
    for name, kind in (("input_ids", np.int32), ("loss_mask", np.uint8)):
        lists = [r.get(name, np.empty(0, kind)) for r in table]
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        columns[name] = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(np.concatenate(lists)), type=RENDERED.field(name).type
        )
    columns |= {"id": ids, **{name: [r.get(name, 0) for r in table] for name in ("whole", "notes")}}
    return pa.record_batch([pa.array(columns[f.name], f.type) for f in RENDERED], schema=RENDERED)


def _row(row: Row | SkipRow, sample: Rendered | SkipRow, data: DataConfig) -> dict[str, Any]:
    """One row's columns, as far as it has them."""
    if isinstance(sample, SkipRow) or isinstance(row, SkipRow):
        why = sample
        return {"reason": why.reason, "detail": why.detail.encode(errors="replace").decode()}  # type: ignore[union-attr]
    whole = len(sample.input_ids)
    ids, mask = sample.input_ids[: data.max_length], sample.loss_mask[: data.max_length]
    supervised = int(mask.sum())
    if whole > data.max_length and data.too_long == "skip":
        return {"reason": "too_long", "detail": f"{whole} tokens; data.max_length is {data.max_length}"}
    if len(eligible_anchors(mask)) == 0:
        cut = len(eligible_anchors(sample.loss_mask)) > 0
        detail = f"{supervised} supervised tokens of {len(ids)}, and no two in a row"
        return {"reason": "no_supervised_tokens_after_truncation" if cut else "no_trainable_anchor", "detail": detail}
    if supervised < data.min_supervised:
        detail = f"{supervised} supervised tokens of {len(ids)}; data.min_supervised is {data.min_supervised}"
        return {"reason": "too_few_supervised", "detail": detail}
    return {
        "key": sample_key(ids, mask),
        "prompt_key": prompt_key(ids, mask),
        "finish_reason": row.finish_reason,
        "response": row.response or data.generation,
        "input_ids": ids,
        "loss_mask": mask,
        "whole": whole,
        "notes": sample.notes,
    }
