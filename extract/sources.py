"""Where rows come from: files, globs, folders and the hub, read in chunks with flat memory.

A chunk holds the rows as they lie in the file, so that it can be hashed, sent to another process and parsed there.
"""

import glob
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_offline.extract.config import DataConfig
from dflash_offline.shards.errors import UsageError

_ROWS, _BYTES = 256, 2 << 20
"""A chunk ends at either."""
_BLOCK = 1 << 20
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
_PACKED = (".gz", ".zst", ".bz2")
_ABOUT = ("dataset_info.json", "dataset_infos.json", "state.json")
"""Files of a dataset folder that hold no rows."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows of one file."""

    source: str
    """What the file is called in the cache: its name; with its folder where two files share a name."""
    path: str
    numbers: list[int]
    """0-based row or line of each."""
    rows: list[bytes]
    """JSON; or one Arrow stream of all of them."""
    columns: bool = False

    def values(self) -> Iterator[Any]:
        """The rows, parsed; what is nested too deeply is a RecursionError. Raises UsageError for other faults."""
        if self.columns:
            table = pa.ipc.open_stream(self.rows[0]).read_all()
            try:
                for at, kind in enumerate(table.schema.types):
                    if pa.types.is_timestamp(kind):  # as JSON would have it: Python's own type has not every date
                        table = table.set_column(at, table.schema.names[at], table.column(at).cast(pa.string()))
                yield from table.to_pylist()
            except (ValueError, OverflowError) as error:
                where = f"{self.path} rows {self.numbers[0] + 1} to {self.numbers[-1] + 1}"
                raise UsageError(f"{where}: {error}; expected text in UTF-8 and plain values") from None
            return
        for number, line in zip(self.numbers, self.rows, strict=True):
            try:
                yield json.loads(line.decode())
            except ValueError as error:
                where = f"{self.path} line {number + 1}"
                raise UsageError(f"{where}: invalid JSON ({error}); mend or remove the line") from None
            except RecursionError as error:
                yield error


def with_files(data: DataConfig) -> DataConfig:
    """`data` with folders, globs and hub datasets resolved into files. Raises UsageError for whatever is not there."""
    return replace(data, files=tuple(find_files(data)), hub="", hub_config="", hub_revision="", split="")


def find_files(data: DataConfig) -> list[Path]:
    """The dataset's files, in order. Raises UsageError for whatever is not there."""
    if bool(data.files) == bool(data.hub):
        raise UsageError("data.files or data.hub: expected exactly one of them")
    if data.hub:
        return _from_hub(data)
    files: list[Path] = []
    for given in data.files:
        path = given.expanduser()
        if path.is_dir():
            files += _in_folder(path, data.split)
        elif path.is_file():  # also when its name looks like a pattern
            files.append(path)
        else:
            found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 (takes no absolute one)
            whole = [p for p in found if p.is_file()] or [q for p in found for q in _in_folder(p, data.split)]
            if not whole:
                raise UsageError(f"no such file: {given}")
            files += whole
    if data.split and not any(p.expanduser().is_dir() for p in data.files):
        raise UsageError(f"data.split is {data.split!r}: single files have no splits; leave it out")
    return files


def _in_folder(folder: Path, split: str) -> list[Path]:
    if not folder.is_dir():
        raise UsageError(f"{folder}: neither a file nor a folder; write what comes from it to a file")
    if (folder / "dataset_dict.json").is_file():
        splits = _described(folder / "dataset_dict.json").get("splits") or [""]
        if split not in splits and (split or len(splits) > 1):
            raise UsageError(f"{folder}: data.split is {split!r}; expected one of {', '.join(splits)}")
        folder, split = folder / (split or splits[0]), ""
    if (folder / "state.json").is_file() and (saved := _described(folder / "state.json").get("_data_files")):
        return [folder / file["filename"] for file in saved]  # as save_to_disk leaves it
    names = [s + p for s in _SUFFIXES for p in ("", *_PACKED)]
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name.endswith(tuple(names))]
    files = [p for p in files if p.name not in _ABOUT]
    if split:
        files = [p for p in files if split in p.relative_to(folder).parts or _is_split(p.name, split)]
    if not files:
        what = f"no files of split {split!r}" if split else "a folder without data files"
        raise UsageError(f"{folder}: {what}; expected {', '.join(_SUFFIXES)}, also compressed")
    return files


def _described(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"{path}: {error}; expected a folder as datasets saves it") from None


def _is_split(name: str, split: str) -> bool:
    return name.startswith(split) and not name[len(split) : len(split) + 1].isalnum()


def _from_hub(data: DataConfig) -> list[Path]:
    """The files of a hub dataset, downloaded or from the hub cache; which ones belong to a split `datasets` knows."""
    try:
        from datasets import get_dataset_config_names, load_dataset_builder
    except ImportError:
        raise UsageError("data.hub needs the package datasets: pip install datasets") from None
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(data.hub, repo_type="dataset", revision=data.hub_revision or None)
        names = get_dataset_config_names(folder)
        if data.hub_config not in names and (data.hub_config or len(names) > 1):
            raise UsageError(f"{data.hub}: data.hub_config is {data.hub_config!r}; expected one of {', '.join(names)}")
        found = load_dataset_builder(folder, data.hub_config or None).config.data_files or {}
    except UsageError:
        raise
    except Exception as error:  # datasets and the hub raise whatever they meet
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"data.hub {data.hub}: {type(error).__name__}: {reason}") from None
    if data.split not in found and (data.split or len(found) != 1):
        raise UsageError(f"{data.hub}: data.split is {data.split!r}; expected one of {', '.join(map(str, found))}")
    return [Path(p) for p in found[data.split or next(iter(found))]]


def read_chunks(files: Sequence[Path], limit: int, seed: int | None) -> Iterator[Chunk]:
    """All rows, or `limit` of them: the first, or with a seed a random draw. Raises UsageError naming the file."""
    names = [path.name for path in files]
    wanted = _draw(files, limit, seed) if limit and seed is not None else None
    left, base = limit, 0
    for path in files:
        source = path.name if names.count(path.name) == 1 else str(path)
        source = source.encode(errors="replace").decode()
        for chunk in _checked(path, _chunks(path, source)):
            start, base = base, base + len(chunk.numbers)
            keep: NDArray[Any] | None = None
            if wanted is not None:
                keep = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, base)] - start
            elif limit and len(chunk.numbers) > left:
                keep = np.arange(left)
            chunk = chunk if keep is None else _take(chunk, keep)
            left -= len(chunk.numbers)
            if chunk.numbers:
                yield chunk
            if limit and left == 0:
                return


def _draw(files: Sequence[Path], limit: int, seed: int) -> NDArray[np.int64] | None:
    """Sorted places of `limit` random rows of the whole dataset; None where that is all of them."""
    total = sum(len(chunk.numbers) for path in files for chunk in _checked(path, _chunks(path, "")))
    if limit >= total:
        return None
    return np.sort(np.random.default_rng(seed).choice(total, limit, replace=False))


def _take(chunk: Chunk, keep: NDArray[Any]) -> Chunk:
    if chunk.columns:
        rows = [_stream(pa.ipc.open_stream(chunk.rows[0]).read_all().take(pa.array(keep)))]
    else:
        rows = [chunk.rows[i] for i in keep]
    return replace(chunk, numbers=[chunk.numbers[i] for i in keep], rows=rows)


def _stream(table: pa.RecordBatch | pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue().to_pybytes()


def _checked(path: Path, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    try:
        yield from chunks
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: {error}; expected UTF-8") from None
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [""])[0]
        raise UsageError(f"{path}: {reason}; expected a whole file of the kind its name says") from None


def _chunks(path: Path, source: str) -> Iterator[Chunk]:
    suffix = next((s for s in reversed(path.suffixes) if s not in _PACKED), "")
    if suffix in (".parquet", ".arrow"):
        yield from _column_chunks(path, source, suffix)
        return
    with pa.input_stream(str(path), compression="detect", buffer_size=_BLOCK) as stream:
        file = io.BufferedReader(stream, _BLOCK)
        is_array = file.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        numbers: list[int] = []
        rows: list[bytes] = []
        size = 0
        for number, row in _array(path, file) if is_array else _lines(file):
            numbers.append(number)
            rows.append(row)
            size += len(row)
            if len(rows) == _ROWS or size >= _BYTES:
                yield Chunk(source=source, path=str(path), numbers=numbers, rows=rows)
                numbers, rows, size = [], [], 0
        if rows:
            yield Chunk(source=source, path=str(path), numbers=numbers, rows=rows)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """JSONL. Bytes are split, not text: text would also be split at U+2028 inside a string."""
    for number, line in enumerate(file):
        if line.strip():
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line


def _array(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The elements of a file that is one JSON array, one in memory at a time."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    decoder, buffer, number = json.JSONDecoder(), text.read(_BLOCK), 0
    at = buffer.index("[") + 1
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        try:
            if buffer[at : at + 1] == "]":
                if more := (buffer[at + 1 :] + text.read(_BLOCK)).strip():
                    raise UsageError(f"{path}: {more[:20]!r} after the array; expected one array, or an object a line")
                return
            _, end = decoder.raw_decode(buffer, at)
            yield number, buffer[at:end].encode()
            at, number = end, number + 1
        except RecursionError:
            raise UsageError(f"{path} element {number}: nested too deeply; mend or remove it") from None
        except ValueError as error:
            block = text.read(max(_BLOCK, len(buffer) - at))
            if not block:
                raise UsageError(f"{path} element {number}: invalid JSON ({error}); mend the file") from None
            buffer, at = buffer[at:] + block, 0


def _column_chunks(path: Path, source: str, suffix: str) -> Iterator[Chunk]:
    base = 0
    for whole in _batches(path, suffix):
        step = max(1, min(_ROWS, _BYTES * len(whole) // max(1, whole.nbytes)))
        for at in range(0, len(whole), step):
            part = whole.slice(at, step)
            numbers = list(range(base + at, base + at + len(part)))
            yield Chunk(source=source, path=str(path), numbers=numbers, rows=[_stream(part)], columns=True)
        base += len(whole)


def _batches(path: Path, suffix: str) -> Iterator[pa.RecordBatch]:
    if suffix == ".parquet":
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BLOCK) as parquet:
            yield from parquet.iter_batches(batch_size=_ROWS)
        return
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            yield from (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)
