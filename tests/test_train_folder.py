"""A run folder is of one run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from train_reference import chats, make_cache
from train_runs import FLAGS, SIX, call, config_of, finish, metrics, settings, snapshot, start, wait_for

from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.files import write_json
from dflash_offline.train import folder
from dflash_offline.train.export import run_drafter
from dflash_offline.train.loop import train


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


def test_a_damaged_identity(run: Path) -> None:
    (run / "identity.json").write_text("[]")
    with pytest.raises(CorruptError, match=r"identity.json: "):
        run_drafter(run, None)
    write_json(run / "identity.json", {"drafter": []})
    with pytest.raises(CorruptError, match=r"identity.json: has no drafter or cache_fingerprint"):
        run_drafter(run, None)


def test_a_run_folder_is_trained_by_one_process(
    cache: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    flags = ["--cache", cache, "--run-dir", new, *SIX, "--optim.max-steps", "100000", "--optim.epochs", "100000"]
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


def test_two_ranks_hold_one_lock_and_fail_together(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(2, "--cache", cache, "--run-dir", run, *SIX, "--optim.lr", "1e20", "--save.every", "1")
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 1 and "finite" in output and "Traceback" not in output.split("torch/distributed")[0]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    subprocess.run([sys.executable, "-c", f"import fcntl; fcntl.flock(open('{run}/.lock'), 6)"], check=True)


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
        assert call("run", "--cache", cache, "--run-dir", place, *SIX, monkeypatch=monkeypatch) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"dflash-train run: error: {place}: ") and error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_free_settings_may_change(cache: Path, finished: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished["decay"], run)
    moved = tmp_path / "moved"
    shutil.copytree(cache, moved)
    flags = ["--save.every", "3", "--log-every", "1", "--data.threads", "1"]
    finish(1, ["--cache", moved, "--run-dir", run, *FLAGS, *flags])


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
