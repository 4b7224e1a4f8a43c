"""index.parquet: one row a sample, so that planning and training open no shard. Rebuilt from trailers alone."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_offline.shards.errors import CorruptError
from dflash_offline.shards.files import atomic_file, file_hash
from dflash_offline.shards.layout import INDEX_SCHEMA, Trailer, read_trailer
from dflash_offline.shards.manifest import Manifest, ShardInfo

NAME = "index.parquet"
SHARDS_FOLDER = "shards"
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


def write(folder: Path, table: pa.Table) -> dict[str, object]:
    """Write index.parquet atomically. Returns what the manifest records of it."""
    with atomic_file(folder / NAME) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    return {"rows": len(table), "xxh3": file_hash(folder / NAME)}


def load(folder: Path, manifest: Manifest) -> pa.Table:
    """index.parquet checked against the manifest; for an incomplete cache, the rows of the shards finished so far."""
    if not manifest.complete:
        return build(scan(folder))
    path = folder / NAME
    hint = "rerun the same `dflash-extract run` to rebuild it"
    if not path.is_file():
        raise CorruptError(f"{path}: missing; {hint}")
    if file_hash(path) != manifest.index["xxh3"]:
        raise CorruptError(f"{path}: changed or cut ({path.stat().st_size} bytes); {hint}")
    table = pq.read_table(path, schema=SCHEMA)
    if len(table) != manifest.index["rows"]:
        raise CorruptError(f"{path}: {len(table)} rows, the manifest says {manifest.index['rows']}; {hint}")
    return table.combine_chunks()
