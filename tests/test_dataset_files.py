"""Where a dataset's rows are: containers, folders, globs and splits, names of every kind."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from qwen import take
from targets import write_rows
from test_dataset import chat, tiny

from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.sources import find_files, read_chunks
from dflash_offline.shards.errors import UsageError


def write_all(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """The same rows in every container."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()
    half, table = len(lines) // 2, pa.Table.from_pylist(rows)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    pack = zstandard.ZstdCompressor().compress
    (folder / "c.jsonl.zst").write_bytes(pack(lines[:half]) + pack(lines[half:]))
    (folder / "d.json").write_text(json.dumps(rows, indent=2))
    pq.write_table(table, folder / "e.parquet", row_group_size=100)
    with pa.ipc.new_stream(folder / "f.arrow", table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.new_file(folder / "g.arrow", table.schema) as file:
        file.write_table(table)
    return sorted(folder.iterdir())


def values(files: list[Path], limit: int = 0, seed: int | None = None) -> list[Any]:
    return [v for chunk in read_chunks(files, limit, seed) for v in chunk.values()]


def test_containers_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [chat(n) for n in range(600)]
    files = write_all(tmp_path / "d", rows)
    picked = values(files[:1], 5, 1)
    assert len(picked) == 5 and picked != rows[:5] and picked == values(files[:1], 5, 1) != values(files[:1], 5, 2)
    for file in files:
        assert values([file]) == rows, file
        assert values([file], 300) == rows[:300] and values([file], 5, 1) == picked and values([file], 10**6, 1) == rows
    assert values(files[:2], 601) == [*rows, rows[0]]
    for file in files[1:]:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) * 2 // 3])
        with pytest.raises(UsageError, match=file.name):
            values([file])


def test_folders_globs_and_splits(tmp_path: Path) -> None:
    def found(*files: Path | str, split: str = "") -> list[str]:
        paths = find_files(DataConfig(files=tuple(map(Path, files)), split=split))
        return [str(p.relative_to(tmp_path)) for p in paths]

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{\n"splits": {}}')
    (tmp_path / "data" / "state.json").write_text("{}")
    for name in ("data/train-00000.jsonl", "data/train-00001.jsonl", "data/test.jsonl", "data/note.txt"):
        write_rows(tmp_path / name, chat())
    assert found(tmp_path / "data", split="train") == ["data/train-00000.jsonl", "data/train-00001.jsonl"]
    assert found(tmp_path / "data" / "t*.jsonl") == found(tmp_path / "data") == found(tmp_path)
    for names, split, said in (
        (["data/none*.jsonl"], "", "no such file"),
        (["data"], "dev", "no files of split 'dev'"),
        (["data/test.jsonl"], "test", "single files have no splits"),
        ([], "", "expected exactly one of them"),
    ):
        with pytest.raises(UsageError, match=said):
            found(*(tmp_path / n for n in names), split=split)


@pytest.mark.parametrize("name", ["w [v1] x", "dätä 数据", ".hidden", "~"])
def test_b20_names_are_no_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """B20: brackets, spaces, other alphabets, hidden folders and a tilde: the same rows as from a plain path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ("x" if name == "~" else name)
    jsonl, parquet = (p for p in write_all(folder, [chat(1), chat(2)]) if p.suffix in (".jsonl", ".parquet"))
    given = Path("~/x") if name == "~" else folder
    for file in (jsonl, parquet):
        assert (
            len(
                take(
                    tmp_path / f"out {file.suffix}", tiny(), *find_files(DataConfig(files=(given / file.name,)))
                ).samples
            )
            == 2
        )
    with pytest.raises(UsageError, match="no such file"):
        find_files(DataConfig(files=(given / "other",)))


def test_b25_long_rows_of_parquet(tmp_path: Path) -> None:
    """B25: the same from Parquet, where rows come in batches."""
    long = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "red stone " * 600_000}]}
    pq.write_table(pa.Table.from_pylist([chat(1), *[long] * 3, chat(2)]), tmp_path / "d.parquet")
    taken = take(tmp_path, tiny(), tmp_path / "d.parquet")
    assert taken.lines == [1, 5] and [s["reason"] for s in taken.skips] == ["too_long"] * 3
