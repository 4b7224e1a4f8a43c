"""What servers do with an exported folder, by their rules, and `export --check`, which reads it back.

The rules were read in the servers' sources; each test names the file. Commits: vllm-project/vllm 036a00d1 (the model),
0cfdd2e1 (the layer ids); sgl-project/sglang 003b23d7 (the model), 00731f0b (the config).
"""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_reference import TARGET_27B, TOKENIZER_27B, chats, drafter, make_cache, spec
from train_runs import call, settings

from dflash_offline.shards import manifest
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import read_json, write_json
from dflash_offline.train.config import ModelConfig
from dflash_offline.train.export import export_drafter, run_drafter
from dflash_offline.train.export_check import check_export, config_faults, expected_shapes, tensor_faults
from dflash_offline.train.hf import to_config
from dflash_offline.train.loop import train
from dflash_offline.train.mix import Mix
from dflash_offline.train.spec import derive

client = pytest.importorskip("dflash.model", reason="the client: pip install --no-deps dflash==0.1.0")
Exported = tuple[Path, Path, Path]
IDS_27B = (1, 16, 31, 46, 61)
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
         "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip


def published(**model: Any) -> dict[str, Any]:
    made = derive(ModelConfig(sliding_window=2048, **model), TARGET_27B, IDS_27B, TOKENIZER_27B, 248320)
    return to_config(made)


def server_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters that both servers make, by the sizes in the config, without a prefix."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.qkv_proj": ((heads + 2 * kv) * head, hidden),
                "self_attn.o_proj": (hidden, heads * head),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "mlp.gate_up_proj": (2 * config["intermediate_size"], hidden),
                "mlp.down_proj": (hidden, config["intermediate_size"]),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    return shapes


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_every_tensor_finds_its_place_in_the_servers(prefix: str, tmp_path: Path) -> None:
    """vLLM puts model. before every name (models/qwen3_dflash.py, DFlashQwen3ForCausalLM.load_weights) and fuses q, k,
    v and gate, up (DFlashQwen3Model.hf_to_vllm_mapper). SGLang takes names with or without model. and fuses the same
    (srt/models/dflash.py, load_weights). What is left over vLLM refuses and SGLang drops without a word, so nothing may
    be left over."""
    export_drafter(drafter(sliding_window=8), tmp_path / "d")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    rows: dict[str, int] = {}
    for name, tensor in tensors.items():
        # Names that vLLM treats apart: refused, mapped, dropped, or the target's own.
        assert not re.search("mask_hidden|d2t|t2d|embed_tokens|lm_head|midlayer|encoder", name)
        part = name.split(".")[-2]
        place = prefix + name.replace(f".{part}.", f".{FUSED.get(part, part)}.")
        rows[place] = rows.get(place, 0) + tensor.shape[0]
    assert rows == {prefix + name: shape[0] for name, shape in server_shapes(config).items()}


def test_vllm_counts_layers_from_one() -> None:
    """v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, get_eagle3_aux_layers_from_config: target_layer_ids of
    dflash_config + 1, unless eagle_aux_hidden_state_layer_ids is there, which is taken as it is.
    models/qwen3_dflash.py, _get_dflash_fc_input_size: fc is as wide as these layers, of target_hidden_size where that
    is given."""
    config = published()
    assert "eagle_aux_hidden_state_layer_ids" not in config and "target_hidden_size" not in config
    ids = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
    assert ids == [2, 17, 32, 47, 62] and max(ids) <= config["num_target_layers"]
    assert expected_shapes(config)["fc.weight"] == (5120, len(ids) * config["hidden_size"])


@pytest.mark.parametrize("window", [None, 8])
def test_servers_see_the_windows_that_were_trained(window: int | None) -> None:
    """vLLM, models/qwen3_dflash.py: _dflash_layer_causal takes is_causal, then dflash_config.causal, then whether the
    layer slides; without use_swa a layer slides as layer_types says, by sliding_window (_resolve_layer_attention).
    SGLang, srt/models/dflash.py and srt/speculative/dflash_utils.py: a sliding layer is a causal decoder layer whose
    window is one less, as it counts without the token itself; a full one is an encoder layer
    (_get_dflash_layer_attention_params, get_dflash_attention_sliding_window_size). Training: masks.visible."""
    made = spec(layers=3, sliding_window=window)
    config = to_config(made)
    assert not {"is_causal", "causal", "use_swa"} & {*config, *config["dflash_config"]}
    for i, kind in enumerate(config["layer_types"]):
        slides = kind == "sliding_attention"
        assert (config["sliding_window"] if slides else None) == made.windows[i]
        if slides:
            assert config["sliding_window"] - 1 == 7  # tokens to the left, in SGLang
    assert config["use_sliding_window"] == (window is not None)  # else transformers drops the window


def test_sglang_reads_block_size_and_layers() -> None:
    """srt/speculative/dflash_utils.py, parse_dflash_draft_config: dflash_config first, then the top; ids lie in 0 ..
    num_target_layers - 1; without a mask id it looks for a token <|MASK|>. srt/models/dflash.py: only silu; fc of
    another width is an error."""
    config = published()
    own = config["dflash_config"]
    assert config["block_size"] == 16 and "block_size" not in own
    assert own["mask_token_id"] == 248070 and config["hidden_act"] == "silu"
    assert all(0 <= i < config["num_target_layers"] for i in own["target_layer_ids"])


def test_config_is_the_published_one() -> None:
    """B91: the fields that servers check, for the 27B target, as in z-lab/Qwen3.6-27B-DFlash; vocab_size is the
    target's padded one (248320), not the tokenizer's 248077; rope in the old and the new form."""
    config = published()
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "num_target_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "max_window_layers": 5,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": 248320,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 248044,
        "pad_token_id": 248044,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    assert {name: config[name] for name in expected} == expected
    assert set(config) - set(expected) == {"rope_parameters"}
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000000}
    shapes = expected_shapes(config)
    assert len(shapes) == 58 and sum(map(math.prod, shapes.values())) == 1_730_213_120


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tensors_of_an_export(ranks: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """B89: also from a run on two ranks, exactly the 11 L + 3 tensors, contiguous, of the dtype that the config says,
    and no prefix of a wrapper (module., _orig_mod.), no embedding, head or rotary table."""
    run = request.getfixturevalue("finished" if ranks == 1 else "together")["decay"]
    export_drafter(run_drafter(run, None)[0], tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_shapes(config)
    assert all(t.is_contiguous() and t.dtype == torch.bfloat16 for t in tensors.values())
    assert not list(tensor_faults(tmp_path / "d" / "model.safetensors", config))
    for name, change in (("fc.weight", None), ("module.norm.weight", torch.ones(32)), ("norm.weight", torch.ones(32))):
        other = {k: v for k, v in tensors.items() if k != name} | ({} if change is None else {name: change})
        save_file(other, tmp_path / "other.safetensors")
        assert len(list(tensor_faults(tmp_path / "other.safetensors", config))) == 1, name


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A cache of a target that rotates a quarter of each head in three axes, a run on it, and its checked export."""
    folder = tmp_path_factory.mktemp("exported")
    rope = {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    cache = make_cache(folder / "cache", chats(20, seed=1), rope_parameters=rope).path
    assert train(settings(cache, folder / "run", "--model.sliding-window", "8")) == 0
    with pytest.MonkeyPatch.context() as patch:
        flags = ("--run-dir", folder / "run", "--out", folder / "drafter", "--check", "True")
        assert call("export", *flags, monkeypatch=patch) == 0
    return cache, folder / "run", folder / "drafter"


def test_the_whole_head_is_rotated(exported: Exported) -> None:
    """B86: the target's partial rotary factor and three axes are in no field of the export, since training does not
    know them; logits of the client equal the trainer's within 1e-4 (the check), and a config that does name them, or
    another base, is found out."""
    cache, run, folder = exported
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}
    assert config["rope_theta"] == 50000.0 and config["rope_scaling"] is None
    assert not re.search("partial|mrope", json.dumps(config))
    rope = client.DFlashDraftModel.from_pretrained(folder).rotary_emb.inv_freq
    head = config["head_dim"]
    assert torch.allclose(rope, 50000.0 ** (-torch.arange(0, head, 2) / head))
    made, mix = run_drafter(run, None)[0], Mix([cache])
    assert not list(config_faults(config, made, mix))
    for change in (
        {"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.25}},
        {"partial_rotary_factor": 0.25},
        {"rope_theta": 10000.0},
    ):
        assert len(list(config_faults(config | change, made, mix))) == 1, change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"mask_token_id": 92, "target_layer_ids": [1, 3, 6]}}, "dflash_config is .*1, 3, 6"),
        ({"dflash_config": {"mask_token_id": 92}}, r"expected .*\[1, 3, 5\]"),
        ({"block_size": 16}, "block_size is 16, expected 6"),
        ({"vocab_size": 92}, "vocab_size is 92, expected 97"),
        ({"sliding_window": 9}, "sliding_window is 9, expected 8"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is"),
        ({"is_causal": True}, "has is_causal = True"),
        ({"dtype": "float32"}, "dtype is float32"),
        ({"torch_dtype": "float16"}, "has torch_dtype = float16"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, expected False"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, r"has eagle_aux_hidden_state_layer_ids = \[1, 3, 5\]"),
        ({"target_layer_ids": [1, 3, 5]}, r"has target_layer_ids = \[1, 3, 5\]"),
        ({"use_swa": True}, "has use_swa"),
        ({"dflash_config": {"mask_token_id": 92, "target_layer_ids": [1, 3, 5], "causal": False}}, "dflash_config is"),
        ({"target_hidden_size": 32}, "has target_hidden_size"),
        ({"draft_vocab_size": 97}, "has draft_vocab_size"),
        ({"rms_norm_eps": 1e-2}, "rms_norm_eps is 0.01"),
    ],
)
def test_a_config_that_disagrees_is_refused(
    change: dict[str, Any], message: str, exported: Exported, tmp_path: Path
) -> None:
    """B87 and others: the same number of other layers loads without an error and kills acceptance."""
    cache, run, folder = exported
    shutil.copytree(folder, tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(RunError, match=f"do not serve it: config.json: .*{message}"):
        check_export(tmp_path / "d", run_drafter(run, None)[0], Mix([cache]))


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def export(exported: Exported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`dflash-train export` with flags; its exit code and what it printed."""

    def exporting(*flags: object, run: Path = exported[1]) -> tuple[int, str, str]:
        code = call("export", "--run-dir", run, *flags, monkeypatch=monkeypatch)
        return code, *capsys.readouterr()

    return exporting


def test_a_folder_that_is_there_is_checked_and_not_written(exported: Exported, export: Call, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported[2], tmp_path / "d"))
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    code, out, _ = export("--out", folder, "--check")
    assert code == 0 and f"{folder}: checked, not written; it is step 6" in out and "drafts the same" in out
    code, _, error = export("--out", folder, "--check", "--step", 2)
    assert code == 1 and "dflash drafts other tokens" in error and "compared with step 2 of" in error
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before
    code, _, error = export("--out", folder)
    assert code == 2 and "exists; expected a new folder" in error


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("config.json", None, 2, "config.json: no such file; expected an exported folder, or a new --out"),
        ("model.safetensors", None, 2, "model.safetensors: no such file; expected an exported folder"),
        ("config.json", b'{"a', 1, "config.json: not valid JSON"),
        ("config.json", b"\xff", 1, "config.json: not valid JSON"),
        ("config.json", b"[]", 1, "config.json: is a list, expected an object"),
        ("model.safetensors", 5000, 1, "model.safetensors: cut or no safetensors file"),
        ("model.safetensors", 4, 1, "model.safetensors: cut or no safetensors file"),
        ("model-00002.safetensors", b"", 1, "model-00002.safetensors: more weights"),
    ],
)
def test_a_damaged_folder_is_one_line(
    name: str, content: Any, code: int, message: str, exported: Exported, export: Call, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(exported[2], tmp_path / "d")) / name
    if content is None:
        path.unlink()
    elif isinstance(content, int):
        os.truncate(path, content)
    else:
        path.write_bytes(content)
    found, out, error = export("--out", tmp_path / "d", "--check")
    assert (found, out, error.count("\n")) == (code, "", 1) and message in error


def test_checkpoints_that_were_tidied_away_are_told_so(exported: Exported, export: Call, tmp_path: Path) -> None:
    run = Path(shutil.copytree(exported[1], tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    for flags in ((), ("--step", 2), ("--best", True)):
        code, _, error = export("--out", tmp_path / "d", *flags, run=run)
        assert code == 2 and "none left of the 6 steps" in error and "unless keep_checkpoints = true" in error
    assert export("--out", tmp_path / "d", "--step", 0, run=run)[0] == 0
    (run / "metrics.jsonl").unlink()
    assert "no checkpoint yet" in export("--out", tmp_path / "e", run=run)[2]


def test_weights_of_another_step_are_found_out(exported: Exported) -> None:
    cache, run, folder = exported
    with pytest.raises(RunError, match=r"dflash drafts other tokens in \d+ of 8 blocks"):
        check_export(folder, run_drafter(run, 2)[0], Mix([cache]))


def test_layers_of_the_run_that_the_cache_does_not_have(exported: Exported, tmp_path: Path) -> None:
    """B87: neither the run's own record of its layers nor the cache may disagree."""
    cache, run, folder = exported
    shutil.copytree(cache, tmp_path / "cache")
    manifest.write(tmp_path / "cache", replace(manifest.read(cache), layer_ids=[1, 3, 4]))
    config, made = json.loads((folder / "config.json").read_text()), run_drafter(run, None)[0]
    found = list(config_faults(config, made, Mix([tmp_path / "cache"])))
    assert found == ["config.json: target_layer_ids has [5], which the cache does not have: [1, 3, 4]"]
    shutil.copytree(run, tmp_path / "run")
    identity = read_json(run / "identity.json")
    del identity["drafter"]["dflash_config"]["target_layer_ids"]
    write_json(tmp_path / "run" / "identity.json", identity)
    with pytest.raises(UsageError, match=r"was made with drafter.dflash_config.target_layer_ids = \[1, 3, 5\]"):
        run_drafter(tmp_path / "run", None)


def test_the_card_says_what_it_is(exported: Exported, tmp_path: Path) -> None:
    _, run, folder = exported
    text = (folder / "README.md").read_text()
    assert "20 samples" in text and "responses greedy" in text and "max_steps = 6" in text
    assert "Mean accepted length (tau)" in text and "2 held-out samples" in text  # from metrics.jsonl
    assert '"num_speculative_tokens": 5' in text and "--speculative-num-draft-tokens 6" in text
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in text  # a sliding and a full layer
    assert str(run.parent) not in text
    with pytest.MonkeyPatch.context() as patch:
        copy = Path(shutil.copytree(run, tmp_path / "run"))
        assert call("eval", "--run-dir", copy, monkeypatch=patch) == 0
        assert call("export", "--run-dir", copy, "--out", tmp_path / "again", monkeypatch=patch) == 0
        held = json.loads((copy / "eval" / "step-00000006-val.json").read_text())["samples"]
        assert f"{held} held-out samples" in (tmp_path / "again" / "README.md").read_text()
        assert call("export", "--run-dir", copy, "--step", 0, "--out", tmp_path / "first", monkeypatch=patch) == 0
        assert "Not measured" in (tmp_path / "first" / "README.md").read_text()


def test_without_the_client_nothing_is_written(
    exported: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "dflash", None)
    flags = ("--run-dir", exported[1], "--out", tmp_path / "d", "--check", "True")
    assert call("export", *flags, monkeypatch=monkeypatch) == 2
    assert "pip install --no-deps dflash==0.1.0" in capsys.readouterr().err and not (tmp_path / "d").exists()
