"""Datasets that other tools wrote: saved by HF datasets, from a hub cache; and public shapes end to end."""

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from qwen import VOCAB, spans, take
from runs import arguments, extract
from targets import tokenizer, write_rows

from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.render import make_renderer
from dflash_offline.extract.sources import find_files, read_chunks
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def chat(n: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"next {n}"}, {"role": "assistant", "content": "stone river"}]
    return {"id": f"c{n}", "messages": messages}


def count(cache: Path, **data: Any) -> int:
    using = make_renderer(tokenizer(), VOCAB, DataConfig())
    return len(take(cache, using, *find_files(DataConfig(**data))).samples)


def test_folders_saved_by_datasets(tmp_path: Path) -> None:
    """Read without the package: one dataset in several shards, a shuffled and cut one, and one with splits."""
    whole = Dataset.from_list([chat(n) for n in range(20)])
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    whole.shuffle(seed=1).select(range(7)).save_to_disk(tmp_path / "few")
    DatasetDict(train=whole, test=whole.select(range(5))).save_to_disk(tmp_path / "splits")
    DatasetDict(train=whole).save_to_disk(tmp_path / "train")
    assert count(tmp_path / "a", files=(tmp_path / "one",)) == 20
    assert count(tmp_path / "b", files=(tmp_path / "few",)) == 7
    assert count(tmp_path / "c", files=(tmp_path / "splits",), split="test") == 5
    assert count(tmp_path / "d", files=(tmp_path / "train",)) == 20
    for split in ("", "dev"):
        with pytest.raises(UsageError, match=f"data.split is '{split}'; expected one of train, test"):
            find_files(DataConfig(files=(tmp_path / "splits",), split=split))


def test_a_hub_dataset_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: which files belong to a split is what the dataset's card says."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "datasets--org--chats"
    snapshot = folder / "snapshots" / COMMIT
    (snapshot / "data").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    card = [{"split": "train_sft", "path": "data/part-0*"}, {"split": "test_sft", "path": "data/held.parquet"}]
    configs = [{"config_name": "default", "data_files": card}]
    (snapshot / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\nChats.\n")
    for name, rows in (("part-00", range(9)), ("part-01", range(9, 12)), ("held", range(12, 14))):
        pq.write_table(pa.Table.from_pylist([chat(n) for n in rows]), snapshot / "data" / f"{name}.parquet")
    assert count(tmp_path / "a", hub="org/chats", split="train_sft") == 12
    assert count(tmp_path / "b", hub="org/chats", split="test_sft", hub_revision="main") == 2
    for data, said in (
        ({}, "data.split is ''; expected one of train_sft, test_sft"),
        ({"hub_config": "other"}, "data.hub_config is 'other'; expected one of default"),
        ({"hub": "org/none", "split": "x"}, "data.hub org/none: "),
    ):
        with pytest.raises(UsageError, match=said):
            find_files(DataConfig(**{"hub": "org/chats", **data}))


LIST = "red stone the river and cloud"
SHAPES: dict[str, list[dict[str, Any]]] = {
    # HuggingFaceH4/ultrachat_200k: prompt, prompt_id, messages
    "ultrachat": [
        {
            "prompt": f"what is {n}",
            "prompt_id": f"{n:064x}",
            "messages": [
                {"content": f"what is {n}", "role": "user"},
                {"content": f"<think>\nred\n</think>\n\n{LIST}", "role": "assistant"},
                {"content": "next", "role": "user"},
                {"content": "<think>\nblue\n</think>\n\nseven eight nine", "role": "assistant"},
            ],
        }
        for n in range(6)
    ],
    # anon8231489123/ShareGPT_Vicuna_unfiltered: id, conversations of from and value, one JSON array
    "sharegpt": [
        {
            "id": f"QWJhYvA_{n}",
            "conversations": [
                {"from": "human", "value": f"copy {n}"},
                {"from": "gpt", "value": f"<think>\n\n</think>\n\n{LIST}"},
                {"from": "human", "value": "next"},
                {"from": "gpt", "value": "day and day"},
            ],
        }
        for n in range(6)
    ],
    # nvidia/Llama-Nemotron-Post-Training-Dataset: input (messages), output with thinking, and what it is about
    "nemotron": [
        {
            "input": [{"role": "user", "content": f"list {n}"}],
            "output": f"<think>\nthe stone {n}\n</think>\n\n{LIST}",
            "category": "math",
            "license": "cc-by-4.0",
            "reasoning": "on",
            "generator": "R1",
            "used_in_training": "no",
            "system_prompt": "detailed thinking on",
        }
        for n in range(6)
    ],
}


def test_public_shapes_end_to_end(site: Path, tmp_path: Path) -> None:
    """Rows of three published schemas, in the container they are published in, to a cache of the tiny target."""
    pq.write_table(pa.Table.from_pylist(SHAPES["ultrachat"]), tmp_path / "ultrachat.parquet")
    (tmp_path / "sharegpt.json").write_text(json.dumps(SHAPES["sharegpt"], indent=2))
    write_rows(tmp_path / "nemotron.jsonl", *SHAPES["nemotron"])
    done = extract(*arguments(site, tmp_path / "c", **{"data.files": tmp_path}))
    assert done.returncode == 0, done.stderr
    cache, using = Cache(tmp_path / "c"), make_renderer(tokenizer(), VOCAB, DataConfig())
    assert len(cache) == 18 and cache.manifest.dataset["skipped"] == {}
    for n in range(18):
        sample, row = cache.read(n), cache.row(n)
        nemotron = row["source"] == "nemotron.jsonl"
        found = spans(using, sample.input_ids, sample.loss_mask)
        assert len(found) == 2 - nemotron and found[0].endswith(f"</think>\n\n{LIST}<|im_end|>")
        assert found[-1].endswith("<|im_end|>") and np.isfinite(sample.states.float().numpy()).all()
        assert ("detailed thinking on" in using.tokenizer.decode(sample.input_ids)) == nemotron
        ids = {"ultrachat.parquet": f"{row['source_row']:064x}", "sharegpt.json": f"QWJhYvA_{row['source_row']}"}
        assert row["id"] == ids.get(row["source"], "")


def test_what_no_row_can_be_made_of_is_named(tmp_path: Path) -> None:
    """Nothing after an array is lost unsaid, and no file of another encoding ends in a traceback."""
    row = json.dumps(chat(1))
    torn = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    pq.write_table(pa.table({"prompt": torn, "response": ["x"]}), tmp_path / "torn.parquet")
    for name, data, said in (
        ("two.json", f"[{row}]\n[{row}]\n".encode(), "after the array; expected one array"),
        ("latin.json", b'[{"x": "\xe9"}]', "expected UTF-8"),
        ("late.json", b"[" + f"{row},".encode() * 20_000 + b'{"x": "\xe9"}]', "expected UTF-8"),
        ("deep.json", f"[{row}, {'[' * 9000}1{']' * 9000}]".encode(), "element 1: nested too deeply"),
        ("torn.parquet", None, "rows 1 to 1: .*expected text in UTF-8"),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=f"{name}.*{said}"):
            [list(chunk.values()) for chunk in read_chunks([tmp_path / name], 0, None)]


def test_dates_that_python_has_not(tmp_path: Path) -> None:
    """A column that nobody asked for does not stop the dataset."""
    table = pa.Table.from_pylist([chat(1)]).append_column("when", pa.array([2**62], pa.timestamp("us")))
    pq.write_table(table, tmp_path / "d.parquet")
    assert count(tmp_path / "a", files=(tmp_path / "d.parquet",)) == 1


def test_a_pattern_of_folders(tmp_path: Path) -> None:
    """Folders alone are read as if they were given; beside files they are not, as `**` matches both."""
    for name in ("d-1/a.jsonl", "d-2/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        write_rows(tmp_path / name, chat(len(name)))
    files = [tmp_path / "d-1" / "a.jsonl", tmp_path / "d-2" / "b.jsonl"]
    assert find_files(DataConfig(files=(tmp_path / "d-*",))) == files
    assert find_files(DataConfig(files=(tmp_path / "**",))) == files
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: neither a file nor a folder"):
        find_files(DataConfig(files=(tmp_path / "pipe",)))
