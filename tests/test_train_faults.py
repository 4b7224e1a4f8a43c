"""What goes wrong around a run ends in one line, before any harm: bad numbers, mixed up folders, full disks."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_run import call, config_of, hashes, metrics, start, wait_for
from train_reference import chats, drafter, make_cache, target_tensors

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.command import parse
from dflash_offline.shards.errors import CorruptError, RunError, UsageError
from dflash_offline.shards.files import read_json, write_json
from dflash_offline.train import checkpoint, folder, loop
from dflash_offline.train.config import DataConfig, EvalConfig, LossConfig, OptimConfig, SaveConfig, TrainConfig
from dflash_offline.train.evaluate import load_target
from dflash_offline.train.export import export_drafter, load_drafter, run_drafter
from dflash_offline.train.loop import train
from dflash_offline.train.optim import build_optimizer

FLAGS = [
    "--model.layers", "2", "--model.block-size", "6", "--data.row-tokens", "100", "--data.row-anchors", "40",
    "--data.rows-per-step", "2", "--data.val-fraction", "0.2", "--optim.lr", "3e-3", "--optim.max-steps", "6",
    "--save.every", "2", "--save.keep-last", "9", "--validate.every", "2", "--validate.samples", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("made") / "cache", chats(30)).path


def settings(cache: Path, run: Path, *flags: str) -> TrainConfig:
    return parse(TrainConfig, ["--cache", str(cache), "--run-dir", str(run), *FLAGS, *flags], "", "")


@pytest.fixture(scope="module")
def six(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, not to be changed."""
    run = tmp_path_factory.mktemp("runs") / "six"
    assert train(settings(cache, run)) == 0
    return run


@pytest.fixture
def run(six: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(six, tmp_path / "run"))


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# Numbers that are not finite.


@pytest.mark.parametrize("cls", [DataConfig, LossConfig, OptimConfig, EvalConfig])
def test_no_setting_is_nan_or_inf(cls: Callable[..., Any]) -> None:
    tried = 0
    others: dict[str, Any] = {"run_dir": Path("run")} if cls is EvalConfig else {}
    for name, kind in ((f.name, str(f.type)) for f in fields(cls)):  # type: ignore[arg-type]
        if "float" in kind:
            for bad in (math.nan, math.inf, -math.inf):
                tried += 1
                with pytest.raises(ValueError, match=rf"{name}: expected finite numbers, found .*(nan|inf)"):
                    cls(**others, **{name: (0.9, bad) if "tuple" in kind else bad})
    assert tried


@pytest.mark.parametrize("dpace", ["0", "1"])
def test_a_run_that_diverges_fails_and_keeps_its_last_checkpoint(
    dpace: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    argv = ["run", "--cache", cache, "--run-dir", run, *FLAGS, "--optim.lr", "1e20", "--save.every", "1",
            "--loss.dpace", dpace]  # fmt: skip
    assert call(*argv, monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "dflash-train run: error: step " in error and "finite" in error
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    for _, state in checkpoint.states(run / "checkpoints"):
        weights = load_file(run / "checkpoints" / f"step-{state['step']:08d}" / checkpoint.MODEL)
        assert checkpoint.not_finite(weights) is None


def test_a_loss_that_is_not_finite_changes_no_weight(
    cache: Path, run: Path, six: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    plain, steps = loop.block_loss, []

    def bad(*args: Any) -> Any:
        steps.append(1)
        loss = plain(*args)
        return loss if len(steps) < 3 else loss._replace(loss=loss.loss * math.inf)

    monkeypatch.setattr(loop, "block_loss", bad)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: steps.append(100))
    with pytest.raises(RunError, match=r"step 6: loss is inf, gradient norm (nan|inf); expected finite"):
        train(config_of(run, cache))
    assert sum(steps) == 100 + 4 and hashes(run, 4) == hashes(six, 4)
    assert [m["step"] for m in metrics(run)] == [1, 2, 3, 4, 5]


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


# A run folder is of one run.


def test_an_edited_config_is_compared_with_the_checkpoints(
    cache: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.toml"
    plain = config.read_text()
    for old, new, message in (
        ("lr = 0.003", "lr = 0.1", "was made with optim.lr = 0.003, now 0.1"),
        ("seed = 0", "seed = 1", "was made with seed = 0, now 1"),
        ("val_fraction = 0.2", "val_fraction = 0.3", "was made with data.val_fraction = 0.2, now 0.3"),
        ("layers = 2", "layers = 2\nintermediate_size = 64", "drafter.intermediate_size = 48, now 64"),
    ):
        assert old in plain
        config.write_text(plain.replace(old, new).replace(str(run.parent), str(run)))
        before = snapshot(run)
        assert call("run", "--config", config, "--run-dir", run, monkeypatch=monkeypatch) == 2
        assert message in capsys.readouterr().err
        if "intermediate" not in new:  # not in the settings of the checkpoint's drafter, but in its own
            assert call("eval", "--run-dir", run, monkeypatch=monkeypatch) == 2
            assert message in capsys.readouterr().err
        after = snapshot(run)
        after.pop(".lock"), before.pop(".lock")
        assert after == before
    config.write_text(plain.replace("every = 2", "every = 3"))
    assert call("run", "--config", config, "--run-dir", run, monkeypatch=monkeypatch) == 0


@pytest.mark.parametrize("other", ["cache", "seed", "drafter"])
def test_checkpoints_of_another_run_are_refused(other: str, cache: Path, run: Path, tmp_path: Path) -> None:
    flags = {"cache": [], "seed": ["--seed", "5"], "drafter": ["--model.sliding-window", "4"]}[other]
    made = make_cache(tmp_path / "other", chats(20, seed=3)).path if other == "cache" else cache
    assert train(settings(made, tmp_path / "from", *flags)) == 0
    for kept in (run / "checkpoints").iterdir():
        shutil.rmtree(kept)
    shutil.copytree(tmp_path / "from" / "checkpoints" / "step-00000006", run / "checkpoints" / "step-00000006")
    field = {"cache": "cache_fingerprint", "seed": "seed", "drafter": "drafter.layer_types"}[other]
    for refused in (lambda: train(config_of(run, cache)), lambda: run_drafter(run, 6), lambda: run_drafter(run, 0)):
        with pytest.raises(UsageError, match=rf"step-00000006: was made with {field} = .*, now "):
            refused()


@pytest.mark.parametrize("name", ["identity.json", "config.toml"])
def test_a_lost_identity_is_not_made_anew(name: str, cache: Path, run: Path) -> None:
    config = config_of(run, cache)
    (run / name).unlink()
    with pytest.raises(UsageError, match=f"has checkpoints and no {name}; restore it"):
        train(config)
    assert not (run / name).exists()


def test_a_run_folder_is_trained_by_one_process(
    cache: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    flags = ["--cache", cache, "--run-dir", new, *FLAGS, "--optim.max-steps", "100000", "--optim.epochs", "100000"]
    process = start(1, *flags)
    try:
        wait_for(lambda: (new / "metrics.jsonl").is_file() and len(metrics(new)) > 1, process)
        assert call("run", *flags, monkeypatch=monkeypatch) == 2
        error = capsys.readouterr().err
        assert f"in use by pid {process.pid} on " in error and error.count("\n") == 1
        assert json.loads((new / "status.json").read_text())["state"] == "running"
    finally:
        process.kill()
        process.communicate()
    with folder.hold(new):  # the lock died with its process
        assert (new / ".lock").read_text().startswith(f"pid {os.getpid()} on ")


def test_a_kill_while_claiming_is_no_other_file(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml.123.tmp").write_text("cut")
    assert train(settings(cache, run, "--optim.max-steps", "1")) == 0
    assert not list(run.glob("*.tmp"))


def test_places_where_no_run_can_be(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run")):
        assert call("run", "--cache", cache, "--run-dir", place, *FLAGS, monkeypatch=monkeypatch) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"dflash-train run: error: {place}: ") and error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


# Evaluation measures what it says.


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


# Stopping loses nothing.


def test_a_stopped_run_has_the_metrics_of_one_that_was_not(
    cache: Path, six: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plain = settings(cache, tmp_path / "run"), loop.learning_rate

    def stop_at_four(step: int, *rest: Any) -> float:
        if step == 2:  # seen when the counts of the next step, the fourth, are collected
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(step, *rest)

    monkeypatch.setattr(loop, "learning_rate", stop_at_four)
    assert train(config) == 143
    monkeypatch.setattr(loop, "learning_rate", plain)
    assert metrics(config.run_dir)[-1]["step"] == 4 and "validation" in metrics(config.run_dir)[-1]
    assert train(config) == 0
    assert metrics(config.run_dir) == metrics(six) and hashes(config.run_dir, 6) == hashes(six, 6)
    assert [("validation" in m) for m in metrics(six)] == [False, True] * 3


# Full disks and damaged files.


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    made = drafter()
    optimizer = build_optimizer(made, TrainConfig().optim)
    kept = tmp_path / "checkpoints"
    checkpoint.save(kept, 1, made, optimizer, {}, keep=1)
    before = snapshot(kept)
    with largest_file(10_000), pytest.raises(RunError, match=r"model.safetensors: not written: ") as raised:
        checkpoint.save(kept, 2, made, optimizer, {}, keep=1)
    assert "\n" not in str(raised.value) and snapshot(kept) == before and len(list(kept.iterdir())) == 1
    with largest_file(10_000), pytest.raises(RunError, match=r"model.safetensors: not written: "):
        export_drafter(made, tmp_path / "drafter")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]


def test_a_full_disk_while_training_says_so(cache: Path, run: Path, six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    with largest_file(20_000), pytest.raises(RunError, match=r"model.safetensors: not written: "):
        train(config_of(run, cache))
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert not list((run / "checkpoints").glob(".*"))
    assert train(config_of(run, cache)) == 0
    assert hashes(run, 6) == hashes(six, 6) and metrics(run) == metrics(six)


@pytest.mark.parametrize("line", [b"[]", b"{}", b"\x00\xff", b'{"step": "4"}', b""])
def test_metrics_that_are_not_steps(line: bytes, cache: Path, run: Path, six: Path) -> None:
    path = run / "metrics.jsonl"
    plain = path.read_bytes()
    path.write_bytes(plain + line)  # torn: it has no end
    assert train(config_of(run, cache)) == 0 and path.read_bytes() == plain
    path.write_bytes(line + b"\n" + plain)
    with pytest.raises(CorruptError, match=r"metrics.jsonl:1: found .*, expected an object with a step"):
        train(config_of(run, cache))


@pytest.mark.parametrize("state", ["[]", "step", "files"])
def test_a_state_that_is_none_is_passed_over(
    state: str, cache: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step-00000006" / checkpoint.STATE
    if state == "[]":
        path.write_text("[]")
    else:
        write_json(path, read_json(path) | {state: 4})
    assert train(config_of(run, cache)) == 0
    assert "passed over an incomplete checkpoint" in capsys.readouterr().err
    assert checkpoint.at_step(run / "checkpoints", 6).step == 6


def test_strangers_among_checkpoints_are_left_alone(cache: Path, run: Path) -> None:
    root = run / "checkpoints"
    strangers = [root / "step-99999999", root / "step-notes", root / "notes.txt"]
    for path in strangers:
        path.write_text("mine")
    (root / "step-best").mkdir()
    assert train(config_of(run, cache)) == 0 and run_drafter(run, None)[1] == 6
    assert all(path.read_text() == "mine" for path in strangers)
    with pytest.raises(UsageError, match=r"kept steps: 2, 4, 6"):
        run_drafter(run, 5)


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


def test_a_damaged_identity(run: Path) -> None:
    (run / "identity.json").write_text("[]")
    with pytest.raises(CorruptError, match=r"identity.json: "):
        run_drafter(run, None)
    write_json(run / "identity.json", {"drafter": []})
    with pytest.raises(CorruptError, match=r"identity.json: has no drafter or cache_fingerprint"):
        run_drafter(run, None)


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--seed", "99999999999999999999999"],
        ["run", "--seed", "-1"],
        ["run", "--data.row-anchors", "9" * 25],
        ["eval", "--run-dir", "run", "--seed", "-1"],
        ["eval", "--run-dir", "run", "--seed", "99999999999999999999999"],
        ["run", "--optim.lr", "nan"],
        ["run", "--optim.lr", "1e300"],
        ["run", "--optim.lr", "1e20", "--optim.weight-decay", "1e20"],
    ],
)
def test_numbers_out_of_range(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*argv, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert "expected" in error and error.count("\n") == 1


def test_two_ranks_hold_one_lock_and_fail_together(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(2, "--cache", cache, "--run-dir", run, *FLAGS, "--optim.lr", "1e20", "--save.every", "1")
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 1 and "finite" in output and "Traceback" not in output.split("torch/distributed")[0]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    subprocess.run([sys.executable, "-c", f"import fcntl; fcntl.flock(open('{run}/.lock'), 6)"], check=True)
