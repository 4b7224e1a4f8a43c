"""Drafter folders and evaluation: what is written is what was trained, and nothing else is replaced."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_reference import chats, drafter, make_cache, spec, target_tensors
from train_runs import call, config_of, settings, snapshot

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.tools.report import collect
from dflash_offline.train import checkpoint, step_end
from dflash_offline.train.card import measured
from dflash_offline.train.config import (
    SaveConfig,
)
from dflash_offline.train.evaluate import bf16_weights, load_target
from dflash_offline.train.export import export_drafter, load_drafter, run_drafter
from dflash_offline.train.folder import read_config
from dflash_offline.train.hf import from_config, to_config
from dflash_offline.train.loop import train
from dflash_offline.train.plan import chosen, held_out


def test_evaluation_uses_the_exported_numbers() -> None:
    made = drafter()
    rounded = bf16_weights(made, torch.device("cpu")).state_dict()
    for name, tensor in made.state_dict().items():
        assert torch.equal(rounded[name], tensor.bfloat16().float()) and rounded[name].dtype == torch.float32


def test_export_and_evaluation_agree(
    cache: Path, finished: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "drafter"
    assert call("export", "--run-dir", finished["decay"], "--out", out, monkeypatch=monkeypatch) == 0
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    tensors = load_file(out / "model.safetensors")
    assert len(tensors) == 11 * 2 + 3 and all(t.dtype == torch.bfloat16 for t in tensors.values())
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 6 and "auto_map" not in config
    assert config["dflash_config"] == {"mask_token_id": 92, "target_layer_ids": [1, 3, 5]}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert (config["layer_types"], config["sliding_window"], config["use_sliding_window"]) == (
        ["sliding_attention", "full_attention"], 8, True,
    )  # fmt: skip
    shutil.copytree(finished["decay"], tmp_path / "run")
    for argv in (["--run-dir", tmp_path / "run"], ["--drafter", out, "--cache", cache, "--val-fraction", "0.1"]):
        assert call("eval", *argv, "--out", tmp_path / f"{argv[0]}.json", monkeypatch=monkeypatch) == 0
    assert "tau" in capsys.readouterr().out
    of_run, of_folder = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("--run-dir", "--drafter"))
    same = ("tau", "tau_interval", "acceptance_conditional", "per_sample")
    assert [of_run[n] for n in same] == [of_folder[n] for n in same] and of_run["step"] == 12
    assert call("eval", "--run-dir", tmp_path / "run", "--step", 0, monkeypatch=monkeypatch) == 0
    assert (tmp_path / "run" / "eval" / "step-00000000-val.json").is_file()
    assert call("eval", "--run-dir", tmp_path / "run", "--val-fraction", "0.5", monkeypatch=monkeypatch) == 2
    assert "the run held out only 0.1 and trained on the rest" in capsys.readouterr().err
    assert call("export", "--run-dir", finished["decay"], "--out", out, monkeypatch=monkeypatch) == 2
    assert "exists; expected a new folder" in capsys.readouterr().err


def test_a_drafter_folder_reads_back(tmp_path: Path) -> None:
    made = drafter(sliding_window=8, layer_ids=(5, 1))
    export_drafter(made, tmp_path / "d")
    again = load_drafter(tmp_path / "d")
    assert again.spec == made.spec
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), name
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    older = {k: v for k, v in config.items() if k not in ("rope_parameters", "dflash_config")}
    for published in (
        older | {"dflash_config": config["dflash_config"] | {"block_size": config["block_size"]}, "block_size": None},
        older | config["dflash_config"],
    ):
        (tmp_path / "d" / "config.json").write_text(json.dumps(published))
        assert load_drafter(tmp_path / "d").spec == made.spec
    for change, message in (
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"output_multiplier": 2.0}, "output_multiplier = 2.0 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = yarn"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"11 tensors do not fit config.json; the first: layers.2"),
    ):
        (tmp_path / "d" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UsageError, match=message):
            load_drafter(tmp_path / "d")


@pytest.mark.parametrize(
    ("window", "change", "message"),
    [
        (8, {"dflash_config": {"causal": True}}, "causal = True is not supported; expected no such field"),
        (8, {"dflash_config": {"causal": False}}, "causal = False is not supported; expected no such field"),
        (None, {"dflash_config": {"causal": True}}, "causal = True is not supported; expected False"),
        (None, {"causal": True}, "causal = True is not supported"),
        (None, {"dflash_config": {"causal": False}, "causal": True}, "causal = True is not supported"),
        (None, {"is_causal": True}, "is_causal = True is not supported"),
        (None, {"dflash_config": {"use_swa": True, "swa_window_size": 8}}, "use_swa = True is not supported"),
        (None, {"use_swa": True}, "use_swa = True is not supported"),
        (8, {"dflash_config": {"swa_window_size": 9}}, "swa_window_size = 9 is not supported; expected 8"),
        (None, {"draft_vocab_size": 40}, "draft_vocab_size = 40 is not supported; expected 97"),
        (None, {"target_hidden_size": 64}, "target_hidden_size = 64 is not supported; expected 32"),
        (
            None,
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            r"= \[1, 3, 5\] is not .*; expected \[2, 4, 6\]",
        ),
        (None, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25 is not supported"),
        (None, {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias = True is not supported"),
        (None, {"is_neox_style": False}, "is_neox_style = False is not supported; expected True"),
        (8, {"swa_window_size": 8, "draft_vocab_size": 97, "target_hidden_size": 32, "use_swa": False}, None),
        (None, {"dflash_config": {"causal": False}, "is_causal": False, "partial_rotary_factor": 1.0}, None),
        (None, {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, None),
    ],
)
def test_a_config_with_other_arithmetic_is_not_read(
    window: int | None, change: dict[str, Any], message: str | None
) -> None:
    """By vLLM's rules (its files are named in test_train_loaders.py). Automodel writes dflash_config.causal,
    Model-Optimizer use_swa with causal = false; both leave every tensor as it is, so nothing else would tell. What only
    says again what is computed is accepted."""
    made = spec(layers=2, sliding_window=window)
    config = to_config(made)
    for name, value in change.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    if message is None:
        assert from_config(config, "d/config.json") == made
        return
    with pytest.raises(UsageError, match=rf"^d/config.json: .*{message}.*choose another drafter$"):
        from_config(config, "d/config.json")


def test_weights_that_are_not_finite_are_neither_saved_nor_exported_nor_loaded(
    cache: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = drafter()
    export_drafter(made, tmp_path / "good")
    with torch.no_grad():
        made.norm.weight[0] = 3.4e38  # finite, but not in bf16
    with pytest.raises(RunError, match=r"norm.weight is not finite in bf16"):
        export_drafter(made, tmp_path / "bad")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "run"]
    tensors = load_file(tmp_path / "good" / "model.safetensors")
    tensors["norm.weight"][0] = math.nan
    save_file(tensors, tmp_path / "good" / "model.safetensors")
    with pytest.raises(UsageError, match=r"norm.weight holds inf or nan"):
        load_drafter(tmp_path / "good")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: self.param_groups[0]["params"][0].data.fill_(math.inf))
    with pytest.raises(RunError, match=r"step 5: fc.weight is no longer finite and was not saved"):
        train(replace(config_of(run, cache), save=SaveConfig(every=1)))
    found, _ = checkpoint.newest(run / "checkpoints")
    assert found is not None and found.step == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "is a list; expected an object"),
        ("config.json", b"\xff{", "not valid JSON"),
        ("config.json", {"dflash_config": []}, "no block_size|not the config|mask_token_id"),
        ("config.json", {"num_hidden_layers": "two", "layer_types": None}, "not the config of a drafter"),
        ("config.json", {"hidden_size": "wide"}, "hidden_size = 'wide'; expected a whole number"),
        ("config.json", {"num_attention_heads": 0, "head_dim": None}, "not the config of a drafter"),
        ("config.json", {"vocab_size": 50}, "mask_token_id = 92 is not below vocab_size = 50"),
        ("model.safetensors", 1000, "cut or no safetensors file"),
        ("model.safetensors", 4, "cut or no safetensors file"),
    ],
)
def test_a_damaged_drafter_folder(name: str, content: Any, message: str, tmp_path: Path) -> None:
    export_drafter(drafter(), tmp_path / "d")
    path = tmp_path / "d" / name
    if isinstance(content, int):
        os.truncate(path, content)
    else:
        new = json.dumps(json.loads(path.read_text()) | content).encode() if isinstance(content, dict) else content
        path.write_bytes(new)
    with pytest.raises(UsageError, match=message) as raised:
        load_drafter(tmp_path / "d")
    assert "\n" not in str(raised.value)


def test_eval_asks_for_the_cache_of_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = (make_cache(tmp_path / n, chats(20, seed=s)) for n, s in (("c", 1), ("other", 2)))
    mine = tmp_path / "mine"
    assert train(settings(first.path, mine)) == 0
    shutil.rmtree(first.path)
    shutil.copytree(other.path, first.path)
    assert call("eval", "--run-dir", mine, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert first.fingerprint in error and other.fingerprint in error
    assert call("eval", "--run-dir", mine, "--cache", other.path, monkeypatch=monkeypatch) == 0
    # Beside the run's own results, and in no report or card.
    (path,) = (mine / "eval").glob("*.json")
    result, fraction = json.loads(path.read_text()), read_config(mine).data.val_fraction
    assert path.name == f"step-{result['step']:08d}-val-{other.fingerprint[:8]}-{fraction:g}.json"
    assert f"on {result['samples']} held-out" not in measured(mine, result["step"])[0]
    assert collect((mine,))[0].shown["by"] == "training"
    for name, field in (("vocab_size", 98), ("num_hidden_layers", 9)):
        made = make_cache(tmp_path / name, chats(20, seed=2), **{name: field}).path
        assert call("eval", "--run-dir", mine, "--cache", made, monkeypatch=monkeypatch) == 2
        assert f"{name} of the target is {field}, the drafter is for one with" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_target_tensors_have_the_shape_of_the_target(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = target_tensors()
    for cut in (tensors[name][:-1], tensors[name][:, :-1]):
        monkeypatch.setattr(Cache, "target_tensors", lambda _, cut=cut: tensors | {name: cut})
        with pytest.raises(UsageError, match=rf"{name} is \(\d+, \d+\), \(vocab_size, hidden_size\) .* \(97, 32\)"):
            load_target(Cache(cache), torch.device("cpu"), torch.float32)


def test_eval_replaces_only_its_own_results(
    cache: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drafter"
    assert call("export", "--run-dir", run, "--out", out, monkeypatch=monkeypatch) == 0
    (tmp_path / "link.json").symlink_to(out / "config.json")
    flags = ["eval", "--drafter", out, "--cache", cache, "--split", "all", "--samples", 1]
    before = snapshot(out)
    for bad, message in (
        (out, "is no regular file"),
        (out / "config.json", "is no result of"),
        (out / "model.safetensors", "is no result of"),
        (tmp_path / "link.json", "is no result of"),
        (out / "config.json" / "x.json", "cannot be written"),
        (run / "identity.json", "is no result of"),
        (Path("/dev/null"), "is no regular file"),
    ):
        assert call(*flags, "--out", bad, monkeypatch=monkeypatch) == 2, bad
        assert message in capsys.readouterr().err
    assert snapshot(out) == before
    for _ in range(2):
        assert call(*flags, monkeypatch=monkeypatch) == 0
    assert (out / "eval.json").is_file()


def test_a_run_starts_from_a_drafter_folder(cache: Path, tmp_path: Path) -> None:
    made, folder = drafter(sliding_window=8), tmp_path / "published"
    export_drafter(made, folder)
    flags = ("--optim.max-steps", "2", "--validate.every", "0", "--model.init")
    config = settings(cache, tmp_path / "run", *flags, str(folder))  # which has another window
    assert train(config) == 0
    begin = run_drafter(config.run_dir, 0)[0].state_dict()
    for name, tensor in made.state_dict().items():
        assert torch.equal(begin[name], tensor.bfloat16().float()), name
    assert run_drafter(config.run_dir, 2)[0].spec.sliding_window is None
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    shutil.rmtree(config.run_dir / "checkpoints" / "step-00000002")
    assert train(settings(cache, config.run_dir, *flags, str(moved))) == 0
    export_drafter(drafter(seed=3), folder)
    with pytest.raises(UsageError, match=r"run: was made with init = "):
        train(config)
    shutil.rmtree(moved)
    shutil.copytree(folder, moved)
    with pytest.raises(UsageError, match=r"moved/model.safetensors: is not what .*run started from"):
        run_drafter(config.run_dir, 0)
    for other, message in (
        (drafter(layer_ids=(5, 1)), r"model.init: .* has layer_ids = \(5, 1\), this run \(1, 3, 5\); they must be"),
        (drafter(layers=3), r"model.init: .* has 3 layers, this run 2"),
        (drafter(mask_token_id=40), r"has mask_token_id = 40, this run 92"),
    ):
        shutil.rmtree(folder)
        export_drafter(other, folder)
        with pytest.raises(UsageError, match=message):
            train(settings(cache, tmp_path / "other", *flags, str(folder)))
    with pytest.raises(UsageError, match=r"none/config.json: no such file"):
        train(settings(cache, tmp_path / "other", *flags, str(tmp_path / "none")))
    assert not (tmp_path / "other").exists()


def test_a_best_that_was_pruned_is_none(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint took the place of the best before it, and is damaged: its forerunner names a lost one."""
    run, plain, script = tmp_path / "run", step_end.summary, [2.0, 1.5, 3.0]
    monkeypatch.setattr(step_end, "summary", lambda *a, **k: {**plain(*a, **k), "tau": script.pop(0)})
    flags = ("--validate.every", "2", "--save.every", "2", "--save.keep-last", "2")
    assert train(settings(cache, run, *flags)) == 0
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    (run / "checkpoints" / "step-00000006" / checkpoint.MODEL).unlink()
    with pytest.raises(UsageError, match=r"no step was measured while training, or the best of them is lost"):
        run_drafter(run, None, best=True)
    assert run_drafter(run, None)[1] == 4
    script += [1.0]
    assert train(settings(cache, run, *flags)) == 0  # whatever is measured now is the best that there is
    assert run_drafter(run, None, best=True)[1] == 6


def test_eval_measures_what_was_trained_on_and_tells_it_all(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "e.json"
    assert train(settings(cache, run, "--data.fraction", "0.5", "--validate.every", "0")) == 0
    flags = ["eval", "--run-dir", run, "--out", out, "--resamples", 50]
    assert call(*flags, "--split", "train", "--temperature", 1.0, "--draft-ms", 2, "--verify-ms", 8, "--target-ms", 6,
                monkeypatch=monkeypatch) == 0  # fmt: skip
    table, found = Cache(cache), json.loads(out.read_text())
    used = ~held_out(table.prompt_keys, 0.2) & chosen(table.keys, 0.5) & (table.anchors > 0)
    assert {s["key"] for s in found["per_sample"]} == {key for key, use in zip(table.keys, used, strict=True) if use}
    assert all(s["tau"] == s["tokens"] / s["steps"] for s in found["per_sample"])
    assert found["speedup"]["speedup"] == found["tau"] * 6 / (2 + 8) and found["note"] is None
    assert 1 < found["sampled"]["tau"] < 6 and "these are greedy" in found["sampled"]["note"]
    for rows in (found["by_length"], found["by_source"]):
        assert sum(row["steps"] for row in rows) == found["steps"]
    assert [row["label"] for row in found["by_length"]] == [8, 16, 32, 64][-len(found["by_length"]) :]
    assert found["by_source"][0]["label"] == "made"
    printed = capsys.readouterr().out
    assert "speed-up" in printed and "by length" in printed and "at temperature 1.0" in printed
    assert call(*flags, "--draft-ms", 2, monkeypatch=monkeypatch) == 2
    assert "needs both --draft-ms and --verify-ms" in capsys.readouterr().err
    other = make_cache(tmp_path / "other", chats(20, seed=1), generation="unknown").path
    flags += ["--cache", other, "--split", "all"]
    assert call(*flags, "--temperature", 1.0, monkeypatch=monkeypatch) == 2
    assert "does not store the target's last hidden state, which --temperature needs" in capsys.readouterr().err
    assert call(*flags, monkeypatch=monkeypatch) == 0
    assert "(unknown): tau estimates serving only if" in json.loads(out.read_text())["note"]
