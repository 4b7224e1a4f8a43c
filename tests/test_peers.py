"""Caches of other projects: what our readers give is what each project's own reader gave; damage is named.

The files and expected.safetensors in data/peers were made by the projects' own code: data/peers/make.py.
"""

import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_offline.extract.dataset import SkipRow
from dflash_offline.shards.errors import UsageError
from dflash_offline.tools.peers import deepspec, modelopt, specforge, speculators
from dflash_offline.tools.peers.contract import PeerCache, Shape

DATA = Path(__file__).parent / "data" / "peers"
LAYERS, HIDDEN, COUNT = (1, 2), 16, 3
Opener = Callable[[Path, Shape], PeerCache]
FORMATS: dict[str, tuple[str, Opener, tuple[int, ...]]] = {
    "specforge": ("specforge", specforge.open_cache, LAYERS),
    "specforge-gz": ("specforge-gz", specforge.open_cache, LAYERS),
    "speculators": ("speculators", speculators.open_cache, (0, 1)),
    "speculators-fp8": ("speculators-fp8", speculators.open_cache, (0, 1)),
    "modelopt-hf": ("modelopt", modelopt.open_hf, LAYERS),
    "modelopt-vllm": ("modelopt", modelopt.open_vllm, (0, 1)),
    "deepspec": ("deepspec", deepspec.open_cache, LAYERS),
}
"""Folder, opener, and ours of the layers that the project was told as LAYERS."""
HOLDS_LAST = ("speculators", "speculators-fp8", "modelopt-vllm")
SHAPE = Shape(layers=LAYERS, hidden=HIDDEN, depth=8)


@pytest.mark.parametrize("name", FORMATS)
def test_equal_to_the_projects_own_reader(name: str) -> None:
    folder, opener, layers = FORMATS[name]
    cache, expected = opener(DATA / folder, SHAPE), load_file(DATA / folder / "expected.safetensors")
    assert (cache.layers, cache.count) == (layers, COUNT)
    for i in range(COUNT):
        sample = cache.sample(i)
        assert sample.input_ids.tolist() == expected[f"ids_{i}"].tolist()
        assert sample.loss_mask.tolist() == expected[f"mask_{i}"].tolist()
        states = sample.states()
        assert states.shape == (len(sample.input_ids), len(LAYERS), HIDDEN) and states.dtype == torch.bfloat16
        assert torch.equal(states.flatten(1).view(torch.int16), expected[f"states_{i}"].view(torch.int16))
        assert (sample.last_hidden is not None) == (name in HOLDS_LAST)
        if sample.last_hidden is not None:
            assert torch.equal(sample.last_hidden(), expected[f"last_{i}"])


def test_fp8_differs_from_the_states_it_was_made_of() -> None:
    """So that the comparison above is one of de-quantised values."""
    exact, fp8 = (load_file(DATA / name / "expected.safetensors") for name in ("speculators", "speculators-fp8"))
    assert torch.equal(exact["ids_0"], fp8["ids_0"]) and not torch.equal(exact["states_0"], fp8["states_0"])


def copied(tmp_path: Path, name: str) -> tuple[Path, Opener]:
    folder, opener, _ = FORMATS[name]
    return Path(shutil.copytree(DATA / folder, tmp_path / name)), opener


def refusal(opener: Opener, folder: Path, number: int, shape: Shape = SHAPE) -> str:
    with pytest.raises(UsageError) as error:
        opener(folder, shape).sample(number)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("specforge", "rows_0-2000/data_1.ckpt"),
        ("specforge-gz", "rows_0-2000/data_1.ckpt.gz"),
        ("speculators", "hidden_states/hs_1.safetensors"),
        ("speculators-fp8", "hidden_states/hs_1.safetensors"),
        ("speculators", "data-00000-of-00001.arrow"),
        ("speculators", "state.json"),
        ("modelopt-hf", "chat-1.pt"),
        ("deepspec", "shard-00001.bin"),
        ("deepspec", "samples.idx"),
        ("deepspec", "manifest.json"),
    ],
)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_cut_files_are_named_without_reading_states(tmp_path: Path, name: str, file: str, keep: float) -> None:
    folder, opener = copied(tmp_path, name)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(keep * len(data))])
    assert str(folder / file) in refusal(opener, folder, 1)


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize(("name", "file"), [("specforge", "rows_0-2000/data_0.ckpt"), ("modelopt-hf", "chat-0.pt")])
def test_pickled_code_is_refused_and_never_runs(tmp_path: Path, name: str, file: str) -> None:
    folder, opener = copied(tmp_path, name)
    values = torch.load(folder / file, weights_only=True)
    torch.save({**values, "extra": Trap(tmp_path / "trapped")}, folder / file)
    assert f"{folder / file}: holds a Python object" in refusal(opener, folder, 0)
    (folder / file).write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    assert str(folder / file) in refusal(opener, folder, 0)
    assert not (tmp_path / "trapped").exists()
    buffer = io.BytesIO()
    torch.save([1, 2], buffer)
    (folder / file).write_bytes(buffer.getvalue())
    assert "holds a list, expected a dictionary" in refusal(opener, folder, 0)


def test_a_damaged_pickle_is_one_line(tmp_path: Path) -> None:
    folder, opener = copied(tmp_path, "specforge")
    path = folder / "rows_0-2000" / "data_0.ckpt"
    sound, rng = path.read_bytes(), random.Random(0)
    start = sound.index(b"data.pkl") + len("data.pkl")
    for _ in range(300):
        data = bytearray(sound)
        data[rng.randrange(start, start + 500)] = rng.randrange(256)
        path.write_bytes(data)
        with suppress(UsageError):
            opener(folder, SHAPE).sample(0)


def resaved(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = torch.load(path, weights_only=True)
    change(values)
    torch.save(values, path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_states", None, "no hidden_states; found input_ids, loss_mask"),
        ("hidden_states", torch.zeros(1, 6, 32), "hidden_states is float32 [6, 32], expected bfloat16 [6, 32]"),
        ("hidden_states", torch.zeros(1, 6, 48).bfloat16(), "hidden_states is bfloat16 [6, 48], expected bfloat16"),
        ("hidden_states", torch.zeros(1, 5, 32).bfloat16(), "hidden_states is bfloat16 [5, 32]"),
        ("hidden_states", torch.zeros(2, 6, 32).bfloat16(), "expected one sample"),
        ("hidden_states", [1.0], "hidden_states is a list, expected a tensor"),
        ("hidden_states", torch.zeros(6, 32).bfloat16().to_sparse(), "hidden_states is a torch.sparse_coo of cpu"),
        ("hidden_states", torch.zeros(6, 32, device="meta").bfloat16(), "hidden_states is a torch.strided of meta"),
        ("loss_mask", torch.ones(5).long(), "6 input_ids and 5 of loss_mask"),
        ("loss_mask", torch.ones(6), "loss_mask is float32 [6], expected integers"),
        ("loss_mask", torch.full((6,), 2), "loss_mask from 2 to 2, expected 0 to 1"),
        ("input_ids", torch.full((6,), -1), "input_ids from -1 to -1"),
        ("input_ids", torch.full((6,), 2**31), "input_ids from 2147483648 to 2147483648, expected 0 to"),
        ("input_ids", torch.ones(1, 6).long(), "input_ids is int64 [1, 6]"),
    ],
)
def test_specforge_fields(tmp_path: Path, field: str, value: Any, message: str) -> None:
    folder, opener = copied(tmp_path, "specforge")
    path = folder / "rows_0-2000" / "data_0.ckpt"
    resaved(path, lambda values: values.pop(field) if value is None else values.update({field: value}))
    found = refusal(opener, folder, 0)
    assert found.startswith(f"{path}: ") and message in found


def test_modelopt_fields_and_layers(tmp_path: Path) -> None:
    folder, opener = copied(tmp_path, "modelopt-hf")
    path = folder / "chat-0.pt"
    resaved(path, lambda values: values.pop("loss_mask"))
    assert f"{path}: no loss_mask; dump again with --answer-only-loss" in refusal(opener, folder, 0)
    resaved(folder / "chat-1.pt", lambda values: values.update(aux_hidden_states=torch.empty(0)))
    assert "chat-1.pt: aux_hidden_states is float32 [0], expected bfloat16" in refusal(opener, folder, 1)
    last = Shape(layers=(1, 7), hidden=HIDDEN, depth=8)
    assert "7 is the last layer, whose state this dump holds only normed" in refusal(opener, folder, 0, last)
    assert modelopt.open_vllm(folder, last).layers == (0, 6)


def test_speculators_fields(tmp_path: Path) -> None:
    folder, opener = copied(tmp_path, "speculators-fp8")
    paths = [folder / "hidden_states" / f"hs_{i}.safetensors" for i in range(COUNT)]
    values = load_file(paths[0])
    save_file({name: value for name, value in values.items() if name != "token_ids"}, paths[0])
    assert f"{paths[0]}: no token_ids; found hidden_states, hidden_states_scales" in refusal(opener, folder, 0)
    save_file({**values, "hidden_states": values["hidden_states"][:, :2].contiguous()}, paths[0])
    assert "hidden_states is F8_E4M3 [6, 2, 16], expected F8_E4M3 [6, 3, 16]" in refusal(opener, folder, 0)
    save_file({n: v for n, v in values.items() if n != "hidden_states_scales"}, paths[0])
    assert "hidden_states is F8_E4M3 [6, 3, 16], expected BF16" in refusal(opener, folder, 0)
    # What its own reader leaves out is skipped here too, with the reason.
    save_file({**values, "token_ids": values["token_ids"] + 1}, paths[0])
    with pytest.raises(SkipRow, match="token_ids_differ"):
        opener(folder, SHAPE).sample(0)
    paths[1].unlink()
    with pytest.raises(SkipRow, match="no_states"):
        opener(folder, SHAPE).sample(1)
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file:
        table = pa.table({"input_ids": [[1.5]], "loss_mask": [[1]]})
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    assert "expected integer lists input_ids and loss_mask" in refusal(opener, folder, 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 1, "version is 1, expected 2"),
        ("hidden_dtype", "float16", "hidden_dtype is 'float16', expected 'bfloat16'"),
        ("hidden_size", 32, "hidden_size is 32, expected 16"),
        ("target_layer_ids", [1, 3], "target_layer_ids are [1, 3], but layers says [1, 2]"),
        ("target_layer_ids", "x", "not a manifest of DeepSpec (ValueError"),
        ("num_samples", 4, "168 bytes, expected 224 for 4 samples"),
        ("shards", [], "record 1 is sample 1 of 9 tokens in shard 1; expected sample 1 of 0 shards"),
    ],
)
def test_deepspec_manifest(tmp_path: Path, field: str, value: Any, message: str) -> None:
    folder, opener = copied(tmp_path, "deepspec")
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert message in refusal(opener, folder, 1)


def test_deepspec_takes_its_layers_from_the_manifest_and_refuses_the_embedding(tmp_path: Path) -> None:
    folder, opener = copied(tmp_path, "deepspec")
    unsaid = Shape(layers=(), hidden=HIDDEN, depth=8)
    assert opener(folder, unsaid).layers == LAYERS
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_layer_ids": [-1, 2]}))
    assert "has -1, the embedding" in refusal(opener, folder, 0, unsaid)


def test_deepspec_hostile_lengths_are_refused_before_allocating(tmp_path: Path) -> None:
    folder, opener = copied(tmp_path, "deepspec")
    data = bytearray((folder / "samples.idx").read_bytes())
    data[12:16] = b"\xff\xff\xff\xff"
    (folder / "samples.idx").write_bytes(data)
    assert "input_ids of sample 0 ends at 17179869180" in refusal(opener, folder, 0)


def test_deepspec_states_of_more_bytes_than_one_read_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv  # the kernel gives 2 GiB at a time: some 40,000 tokens of a large target
    monkeypatch.setattr("os.preadv", lambda fd, parts, at: preadv(fd, [memoryview(parts[0])[:100]], at))
    test_equal_to_the_projects_own_reader("deepspec")


@pytest.mark.parametrize("name", FORMATS)
def test_layers_and_folders_that_are_not_there(tmp_path: Path, name: str) -> None:
    folder, opener, _ = FORMATS[name]
    if name != "deepspec":
        with pytest.raises(UsageError, match="layers is not set"):
            opener(DATA / folder, Shape(layers=(), hidden=HIDDEN, depth=8))
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=str(place)):
            opener(place, SHAPE)


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder, opener = copied(tmp_path, "specforge")
    rows = folder / "rows_0-2000"
    (rows / "data_1.ckpt").rename(rows / "data_10.ckpt")
    (folder / "rows_2000-4000").mkdir()
    (rows / "data_0.ckpt").rename(folder / "rows_2000-4000" / "data_2000.ckpt")
    cache = opener(folder, SHAPE)
    assert [cache.sample(i).id for i in range(COUNT)] == ["data_2", "data_10", "data_2000"]
