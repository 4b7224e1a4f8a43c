"""index.parquet: one row a sample, so that planning and training open no shard. Rebuilt from trailers alone."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash_offline.shards import manifest
from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.layout import INDEX_SCHEMA, Trailer, read_schema, read_trailer
from dflash_offline.shards.manifest import Manifest, ShardInfo

NAME = "index.parquet"
SHARDS_FOLDER = "shards"
MANIFEST_KEY = b"manifest"
SCHEMA = INDEX_SCHEMA.insert(0, pa.field("shard", pa.string(), nullable=False))


def shard_name(task: int) -> str:
    """Path of task number `task`'s shard, relative to the cache folder."""
    return f"{SHARDS_FOLDER}/{task:08d}.arrow"


def scan(folder: Path) -> list[tuple[ShardInfo, Trailer]]:
    """Every finished shard with its trailer, by name. Temporary files are not shards; a damaged one raises."""
    found = []
    for path in sorted((folder / SHARDS_FOLDER).glob("*.arrow")):
        name = f"{SHARDS_FOLDER}/{path.name}"
        with path.open("rb") as file:
            trailer = read_trailer(file, str(path))
        found.append(
            (ShardInfo(name=name, task=trailer.task, rows=len(trailer.index), bytes=path.stat().st_size), trailer)
        )
    return found


def build(shards: list[tuple[ShardInfo, Trailer]]) -> pa.Table:
    """The index table from trailers, ordered by shard name and row."""
    parts = [t.index.add_column(0, SCHEMA.field(0), pa.array([s.name] * len(t.index), pa.string())) for s, t in shards]
    return pa.concat_tables([SCHEMA.empty_table(), *parts]).combine_chunks()


def publish(folder: Path, info: Manifest, table: pa.Table) -> Manifest:
    """Write index.parquet and then the manifest that says complete, both atomically. Returns that manifest.

    The index carries the manifest as metadata, so that either of the two can be rebuilt when it is lost.
    """
    info = replace(info, complete=True, index={})
    with atomic_file(folder / NAME) as file:
        table = table.replace_schema_metadata({MANIFEST_KEY: manifest.dumps(info)})
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    info = replace(info, index={"rows": len(table), "xxh3": file_hash(folder / NAME)})
    manifest.write(folder, info)
    return info


def _check_making(folder: Path, info: Manifest, shards: list[tuple[ShardInfo, Trailer]]) -> None:
    """Raises CorruptError for a shard whose frames were not made with this calibration."""
    metadata = manifest.stored_metadata(info)
    for shard, trailer in shards:
        path = folder / shard.name
        with path.open("rb") as file:
            if read_schema(file, trailer, str(path)).metadata != metadata:
                raise CorruptError(f"{path}: written with another codec, calibration or layers than the manifest says")


def load(folder: Path, info: Manifest, ranges: bool = False) -> pa.Table:
    """index.parquet checked against the manifest; for an incomplete cache, the rows of the shards finished so far.

    Frame ranges are half of the index and only needed to compare it with the trailers: `ranges` asks for them.
    """
    if not info.complete:
        shards = scan(folder)
        _check_making(folder, info, shards)
        return build(shards)
    path = folder / NAME
    hint = "rerun the same `dflash-extract run` to rebuild it"
    if not path.is_file():
        raise CorruptError(f"{path}: missing; {hint}")
    if file_hash(path) != info.index.get("xxh3"):
        raise CorruptError(f"{path}: changed or cut ({path.stat().st_size} bytes); {hint}")
    try:
        table = pq.read_table(path, columns=None if ranges else [n for n in SCHEMA.names if not n.startswith("frame_")])
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:  # its hash is right, so it was written so
        raise CorruptError(f"{path}: not an index: {str(error).splitlines()[0]}; {hint}") from None
    table = table.replace_schema_metadata()
    if not table.schema.equals(pa.schema([SCHEMA.field(name) for name in table.schema.names])):
        raise CorruptError(f"{path}: columns are {table.schema.names}, expected {SCHEMA.names}; {hint}")
    if len(table) != info.index.get("rows"):
        raise CorruptError(f"{path}: {len(table)} rows, the manifest says {info.index.get('rows')}; {hint}")
    numbers = [name for name in table.schema.names if table.schema.field(name).type in (pa.int32(), pa.int64())]
    if len(table) and any(table.column(name).null_count or pc.min(table.column(name)).as_py() < 0 for name in numbers):
        raise CorruptError(f"{path}: a negative number or none in one of {', '.join(numbers)}; {hint}")
    return table.combine_chunks()
