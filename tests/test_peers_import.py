"""`dflash-shards import` and `export`: whole caches of other projects in, single files out."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import write_cache
from safetensors.torch import load_file, save_file
from targets import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.files import take_lock
from dflash_offline.shards.keys import last_positions, sample_key
from dflash_offline.shards.verify import verify
from dflash_offline.tools.cli import main

DATA = Path(__file__).parent / "data" / "peers"


def shards(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["dflash-shards", *map(str, args)])
        main()
    out = capsys.readouterr()
    return int(left.value.code or 0), out.out, out.err


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as the fixtures, 8 layers deep."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def bring(capsys: Any, target: Path, name: str, source: Path, out: Path, *more: object) -> tuple[int, str, str]:
    layers = () if name == "deepspec" else ("--layers", 1, 2)
    return shards(capsys, "import", source, "--format", name, "--target", target, "--out", out, *layers, *more)


@pytest.mark.parametrize(
    ("name", "folder", "layers"),
    [
        ("specforge", "specforge", (1, 2)),
        ("specforge", "specforge-gz", (1, 2)),
        ("speculators", "speculators", (0, 1)),
        ("speculators", "speculators-fp8", (0, 1)),
        ("modelopt-hf", "modelopt", (1, 2)),
        ("modelopt-vllm", "modelopt", (0, 1)),
        ("deepspec", "deepspec", (1, 2)),
    ],
)
def test_imported_is_what_the_projects_own_reader_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path, name: str, folder: str, layers: tuple[int, ...]
) -> None:
    holds_last = name in ("speculators", "modelopt-vllm")
    more = ("--last-hidden", "True") if holds_last else ()
    code, out, err = bring(capsys, target, name, DATA / folder, tmp_path / "c", "--shard-mib", 1, *more)
    assert code == 0 and "read 3 samples: 3 to import, skipped 0 (none)" in out and "complete, 3 samples" in out, err
    cache, expected = Cache(tmp_path / "c"), load_file(DATA / folder / "expected.safetensors")
    assert cache.layer_ids == layers and not verify(tmp_path / "c", threads=1).faults
    for i in range(3):
        sample = cache.read(i)
        assert sample.input_ids.tolist() == expected[f"ids_{i}"].tolist()
        assert sample.loss_mask.tolist() == expected[f"mask_{i}"].tolist()
        assert torch.equal(sample.states.view(torch.int16), expected[f"states_{i}"].view(torch.int16))
        if holds_last:
            assert sample.last_hidden is not None
            assert torch.equal(sample.last_hidden, expected[f"last_{i}"][last_positions(sample.loss_mask)])
    head = cache.target_tensors()
    assert torch.equal(head["embed_tokens"], load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    assert cache.tokenizer_facts["length"] == len(tokenizer())
    code, out, _ = shards(capsys, "info", tmp_path / "c")
    assert code == 0 and f"imported from {name}" in out


def test_duplicates_and_unusable_samples_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    source = Path(shutil.copytree(DATA / "specforge", tmp_path / "s"))
    rows = source / "rows_0-2000"
    shutil.copy(rows / "data_1.ckpt", rows / "data_3.ckpt")
    values = torch.load(rows / "data_2.ckpt", weights_only=True)
    torch.save({**values, "loss_mask": torch.zeros_like(values["loss_mask"])}, rows / "data_2.ckpt")
    code, out, err = bring(capsys, target, "specforge", source, tmp_path / "c")
    assert code == 0 and "2 to import, skipped 2 (1 no_trainable_anchor, 1 duplicate)" in out, err
    lines = [json.loads(line) for line in (tmp_path / "c" / "skipped.jsonl").read_text().splitlines()]
    assert [(line["file"], line["line"], line["reason"]) for line in lines] == [
        ("rows_0-2000/data_2.ckpt", 3, "no_trainable_anchor"),
        ("rows_0-2000/data_3.ckpt", 4, "duplicate"),
    ]
    assert Cache(tmp_path / "c").manifest.dataset["skipped"] == {"no_trainable_anchor": 1, "duplicate": 1}


def test_states_that_are_not_finite_are_lost_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    source = Path(shutil.copytree(DATA / "speculators", tmp_path / "s"))
    path = source / "hidden_states" / "hs_1.safetensors"
    values = load_file(path)
    values["hidden_states"][3, 1, 7] = float("nan")
    save_file(values, path)
    code, out, err = bring(capsys, target, "speculators", source, tmp_path / "c")
    assert code == 3 and "complete, 2 samples" in out and "1 lost" in out, err
    cache = Cache(tmp_path / "c")
    assert cache.manifest.dataset["lost"] == 1 and cache.manifest.dataset["samples"] == 2
    (line,) = [json.loads(line) for line in (tmp_path / "c" / "skipped.jsonl").read_text().splitlines()]
    assert line["file"] == "hidden_states/hs_1.safetensors" and line["reason"] == "not_finite"
    assert not verify(tmp_path / "c", threads=1).faults


def test_trim_takes_off_the_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path) -> None:
    """SpecForge stores a batch padded to its longest row; the same sample then has the key it would have alone."""
    source, rows = tmp_path / "s", tmp_path / "s" / "rows_0-2000"
    shutil.copytree(DATA / "specforge", source)
    kept = torch.load(rows / "data_0.ckpt", weights_only=True)
    padded = {name: torch.cat([v, torch.zeros(4, dtype=v.dtype)]) for name, v in kept.items() if v.dim() == 1}
    states = torch.cat([kept["hidden_states"], torch.ones(1, 4, 32).bfloat16()], 1)
    torch.save({**padded, "hidden_states": states}, rows / "data_3.ckpt")
    code, out, _ = bring(capsys, target, "specforge", source, tmp_path / "c", "--trim", "True")
    assert code == 0 and "3 to import, skipped 1 (1 duplicate)" in out
    code, out, _ = bring(capsys, target, "specforge", source, tmp_path / "d")
    assert code == 0 and "4 to import" in out and len(Cache(tmp_path / "d").read(3).input_ids) == 10


def test_the_same_command_finishes_and_another_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    small = ("--codec", "ecsq", "--shard-mib", 1)
    assert bring(capsys, target, "specforge", DATA / "specforge", tmp_path / "c", *small)[0] == 0
    paths = [p for p in sorted((tmp_path / "c").rglob("*")) if p.is_file()]
    before = {p: p.read_bytes() for p in paths}
    for lost in (tmp_path / "c" / "shards" / "00000000.arrow", tmp_path / "c" / "codec.safetensors"):
        lost.unlink()
        assert bring(capsys, target, "specforge", DATA / "specforge", tmp_path / "c", *small)[0] == 0
        assert {p: p.read_bytes() for p in paths} == before
    code, _, err = bring(capsys, target, "specforge", DATA / "specforge", tmp_path / "c", "--shard-mib", 1)
    assert code == 2 and "codec was 'ecsq', now 'lossless'" in err and err.count("\n") == 1
    source = Path(shutil.copytree(DATA / "specforge", tmp_path / "s"))
    path = source / "rows_0-2000" / "data_0.ckpt"
    values = torch.load(path, weights_only=True)
    torch.save(values | {"hidden_states": values["hidden_states"] * 2}, path)
    code, _, err = bring(capsys, target, "specforge", source, tmp_path / "c", *small)
    assert code == 2 and "data.states was" in err
    assert {p: p.read_bytes() for p in paths} == before
    shutil.copy(DATA / "specforge" / "rows_0-2000" / "data_0.ckpt", path)
    (source / "rows_0-2000" / "data_2.ckpt").unlink()
    code, _, err = bring(capsys, target, "specforge", source, tmp_path / "c", *small)
    assert code == 2 and "begun with other samples than the source holds now" in err
    assert {p: p.read_bytes() for p in paths} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layers", 1), "hidden_states is bfloat16 [6, 32], expected bfloat16 [6, 16]"),
        (("--layers", 1, 8), "layers: [1, 8] as outputs of layers 0 to 7"),
        (("--layers", 2, 2), "layers: [2, 2]"),
        (("--last-hidden", "True"), "last_hidden: specforge does not hold it before the final norm"),
        (("--delta", "0.5"), "lossless has no step"),
        (("--target", "nowhere"), "no such folder: nowhere"),
        (("--format", "eagle"), "eagle"),
    ],
)
def test_bad_requests_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path, flags: tuple[object, ...], message: str
) -> None:
    names = {"--format": "specforge", "--target": target, "--layers": (1, 2), "--out": tmp_path / "c"}
    names[str(flags[0])] = flags[1:]  # type: ignore[assignment]
    words = [w for n, v in names.items() for w in (n, *(v if isinstance(v, tuple) else (v,)))]
    code, _, err = shards(capsys, "import", DATA / "specforge", *words)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, capsys: Any, target: Path) -> None:
    source = Path(shutil.copytree(DATA / "specforge", tmp_path / "s"))
    path = source / "rows_0-2000" / "data_1.ckpt"
    values = torch.load(path, weights_only=True)
    values["input_ids"][4] = 320
    torch.save(values, path)
    code, _, err = bring(capsys, target, "specforge", source, tmp_path / "c")
    assert code == 2 and f"{path}: input_ids has 320, but the target's vocabulary is 320" in err


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_cache(tmp_path / "c", samples=6)
    out = tmp_path / "e"
    assert shards(capsys, "export", tmp_path / "c", "--out", out, "--limit", 2)[0] == 0
    assert len(list(out.glob("*.safetensors"))) == 2
    code, said, _ = shards(capsys, "export", tmp_path / "c", "--out", out)
    assert code == 0 and "6 samples, 4 of them written now" in said
    listed = json.loads((out / "index.json").read_text())
    assert listed["complete"] and listed["layer_ids"] == [1, 2, 3] and listed["hidden_size"] == 32
    for sample, entry in zip(written, listed["samples"], strict=True):
        found = load_file(out / entry["file"])
        ids, mask = found["input_ids"].numpy(), found["loss_mask"].numpy()
        assert sample_key(ids, mask) == sample.key == entry["key"]
        assert entry["tokens"] == len(ids) and entry["supervised"] == mask.sum()
        assert found["hidden_states"].shape == (len(ids), 3, 32)
        assert torch.equal(found["hidden_states"].flatten(1), sample.states)


def test_export_of_the_last_hidden_state(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path) -> None:
    bring(capsys, target, "speculators", DATA / "speculators", tmp_path / "c", "--last-hidden", "True")
    assert shards(capsys, "export", tmp_path / "c", "--out", tmp_path / "e")[0] == 0
    expected, cache = load_file(DATA / "speculators" / "expected.safetensors"), Cache(tmp_path / "c")
    for i, key in enumerate(cache.keys):
        found = load_file(tmp_path / "e" / f"{key}.safetensors")
        assert torch.equal(found["last_hidden"], expected[f"last_{i}"][found["last_positions"]])
        assert found["last_positions"].tolist() == last_positions(found["loss_mask"].numpy()).tolist()


def test_export_refuses_other_folders_and_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=3)
    write_cache(tmp_path / "d", samples=3, codec="ecsq")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "mine").touch()
    code, _, err = shards(capsys, "export", tmp_path / "c", "--out", tmp_path / "e")
    assert code == 2 and "holds mine and no index.json" in err
    assert shards(capsys, "export", tmp_path / "c", "--out", tmp_path / "f")[0] == 0
    code, _, err = shards(capsys, "export", tmp_path / "d", "--out", tmp_path / "f")
    assert code == 2 and "cache was" in err and err.count("\n") == 1
    (tmp_path / "f" / "index.json").write_text("{")
    code, _, err = shards(capsys, "export", tmp_path / "c", "--out", tmp_path / "f")
    assert code == 2 and "index.json: not readable" in err and err.count("\n") == 1
    (tmp_path / "c" / ".lock").touch()
    assert shards(capsys, "export", tmp_path / "c", "--out", tmp_path / "c")[0] == 2
    code, _, err = shards(capsys, "export", tmp_path / "c", "--out", tmp_path / "e" / "mine")
    assert code == 2 and "expected a folder" in err
    path = tmp_path / "c" / "shards" / "00000000.arrow"
    data = bytearray(path.read_bytes())
    row = Cache(tmp_path / "c").row(1)
    data[row["offset"] + row["length"] - 200] ^= 1
    path.write_bytes(data)
    code, _, err = shards(capsys, "export", tmp_path / "c", "--out", tmp_path / "g")
    assert code == 1 and f"sample {row['key']}" in err
    assert not json.loads((tmp_path / "g" / "index.json").read_text())["complete"]


def test_two_exports_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=3)
    out = tmp_path / "e"
    assert shards(capsys, "export", tmp_path / "c", "--out", out, "--limit", 1)[0] == 0
    with (out / ".lock").open("a+") as lock:
        take_lock(lock, out)
        (out / "a.safetensors.1.tmp").touch()  # what the other one is writing
        code, _, err = shards(capsys, "export", tmp_path / "c", "--out", out)
        assert code == 2 and "in use by pid" in err and (out / "a.safetensors.1.tmp").exists()
    assert shards(capsys, "export", tmp_path / "c", "--out", out)[0] == 0
    assert len(list(out.glob("*.safetensors"))) == 3 and not list(out.glob("*.tmp"))
