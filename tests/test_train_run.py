"""Runs: exact on resume and over ranks, stoppable, refused in one line when something does not fit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from train_reference import V, chats, drafter, make_cache, spec, target

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.command import load_toml, parse
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.train import checkpoint
from dflash_offline.train.cli import main
from dflash_offline.train.config import (
    DataConfig,
    EvalConfig,
    ExportConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from dflash_offline.train.evaluate import bf16_weights
from dflash_offline.train.export import export_drafter, load_drafter, run_drafter
from dflash_offline.train.job import prepare
from dflash_offline.train.loop import train
from dflash_offline.train.optim import build_optimizer, optimizer_tensors
from dflash_offline.train.walk import walk_sample

FLAGS = [
    "--model.layers", "2", "--model.block-size", "6", "--model.sliding-window", "8", "--data.row-tokens", "100",
    "--data.row-anchors", "40", "--data.rows-per-step", "2", "--data.val-fraction", "0.1", "--optim.lr", "3e-3",
    "--optim.max-steps", "12", "--save.every", "7", "--save.keep-last", "9", "--log-every", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cache"
    make_cache(folder, chats(30))
    return folder


def call(*argv: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dflash-train", *map(str, argv)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def start(ranks: int, *argv: object) -> subprocess.Popen[str]:
    """A run in a process of its own, or under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "dflash_offline.train", "run", *map(str, argv)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(ranks: int, *argv: object) -> None:
    if ranks == 1:
        assert train(parse(TrainConfig, [str(a) for a in argv], "dflash-train run", "")) == 0
        return
    process = start(ranks, *argv)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output


def metrics(run: Path) -> list[dict[str, Any]]:
    timed = {"seconds", "tokens_per_s", "block_tokens_per_s"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def hashes(run: Path, step: int) -> dict[str, str]:
    return checkpoint.at_step(run / "checkpoints", step).state["files"]


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Twelve steps on one and on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    for ranks in (1, 2):
        finish(ranks, "--cache", cache, "--run-dir", folder / str(ranks), *FLAGS)
    return {ranks: folder / str(ranks) for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_twelve_steps_are_seven_and_five(ranks: int, cache: Path, finished: dict[int, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[ranks], run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    finish(ranks, "--cache", cache, "--run-dir", run, *FLAGS)
    assert hashes(run, 12) == hashes(finished[ranks], 12)
    assert metrics(run) == metrics(finished[ranks]) and len(metrics(run)) == 12


def test_two_ranks_equal_one_that_accumulates(finished: dict[int, Path]) -> None:
    alone, together = metrics(finished[1]), metrics(finished[2])
    for one, two in zip(alone, together, strict=True):
        for name in ("loss", "grad_norm", "divisor", "lr"):
            assert two[name] == pytest.approx(one[name], rel=1e-4), name
        assert [one[n] for n in ("anchors", "tokens", "samples")] == [two[n] for n in ("anchors", "tokens", "samples")]
    paths = [finished[ranks] / "checkpoints" / "step-00000012" / checkpoint.MODEL for ranks in (1, 2)]
    weights = [load_file(path) for path in paths]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=2e-5)
    assert alone[-1]["loss"] < alone[0]["loss"]


def test_two_ranks_go_on_as_one_in_the_same_order(cache: Path, finished: dict[int, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[2], run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    finish(1, "--cache", cache, "--run-dir", run, *FLAGS)
    for one, two in zip(metrics(run), metrics(finished[2]), strict=True):
        assert [one[n] for n in ("anchors", "tokens", "lr")] == [two[n] for n in ("anchors", "tokens", "lr")]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)


def test_weights_and_moments_are_fp32_and_need_no_pickle(finished: dict[int, Path]) -> None:
    folder = finished[1] / "checkpoints" / "step-00000012"
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    tensors = load_file(folder / checkpoint.OPTIMIZER)
    assert all(t.dtype == torch.float32 for t in (*tensors.values(), *load_file(folder / checkpoint.MODEL).values()))
    assert {name.rsplit(":")[1] for name in tensors} == {"step", "exp_avg", "exp_avg_sq"}
    assert not any("embed" in name or "head" in name for name in tensors)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_a_rerun_goes_on(ranks: int, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--cache", cache, "--run-dir", run, *FLAGS, "--optim.max-steps", "100000", "--optim.epochs", "100000"]
    process = start(ranks, *flags)
    wait_for(lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) > 3, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == (143 if ranks == 1 else 1), output  # torchrun has its own code
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["code"]) == ("stopped", 143), output
    found, _ = checkpoint.newest(run / "checkpoints")
    assert found is not None and found.step == metrics(run)[-1]["step"]


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def test_kills_change_nothing(cache: Path, finished: dict[int, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--cache", cache, "--run-dir", run, *FLAGS, "--save.every", "1"]
    for lines in (2, 6):
        process = start(1, *flags)
        wait_for(lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) >= lines, process)  # noqa: B023
        process.kill()
        process.communicate()
    finish(1, *flags)
    assert hashes(run, 12) == hashes(finished[1], 12) and metrics(run) == metrics(finished[1])
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.parametrize("damage", ["cut", "flip", "no state", "no optimizer"])
def test_a_torn_checkpoint_is_passed_over(
    damage: str, cache: Path, finished: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[1], run)
    newest = run / "checkpoints" / "step-00000012"
    model = newest / checkpoint.MODEL
    if damage == "cut":
        os.truncate(model, 1000)
    elif damage == "flip":
        data = bytearray(model.read_bytes())
        data[-5] ^= 1
        model.write_bytes(data)
    else:
        (newest / (checkpoint.STATE if damage == "no state" else checkpoint.OPTIMIZER)).unlink()
    assert train(config_of(run, cache)) == 0
    assert "passed over an incomplete checkpoint" in capsys.readouterr().err
    assert metrics(run)[-1]["step"] == 12 and checkpoint.at_step(run / "checkpoints", 12).step == 12
    for folder in (run / "checkpoints").iterdir():
        (folder / checkpoint.STATE).write_text("{}")
    with pytest.raises(RunError, match="no complete checkpoint among 2"):
        train(config_of(run, cache))


def config_of(run: Path, cache: Path) -> TrainConfig:
    return replace(load_toml(TrainConfig, run / "config.toml"), run_dir=run, cache=cache)


def small(cache: Path, run: Path, **data: Any) -> TrainConfig:
    return TrainConfig(
        cache=cache,
        run_dir=run,
        model=ModelConfig(layers=2, block_size=6),
        data=DataConfig(**{"row_tokens": 2000, "row_anchors": 64, "rows_per_step": 1, "val_fraction": 0.0} | data),
        optim=OptimConfig(lr=3e-3, epochs=2),
    )


def test_empty_rows_change_nothing(cache: Path, tmp_path: Path) -> None:
    train(small(cache, tmp_path / "a"))
    train(small(cache, tmp_path / "b", rows_per_step=4))
    assert hashes(tmp_path / "a", 2)["model.safetensors"] == hashes(tmp_path / "b", 2)["model.safetensors"]
    assert [m["empty_rows"] for m in metrics(tmp_path / "b")] == [3, 3]


def test_a_step_without_supervision_changes_nothing(tmp_path: Path) -> None:
    ids, mask = np.arange(80, dtype=np.int32), np.array([0] * 60 + [1] * 20, np.uint8)
    made = make_cache(tmp_path / "cache", [(ids, mask)])
    config = small(made.path, tmp_path / "run", row_tokens=50)  # the cut leaves the prompt alone
    assert train(config) == 0
    steps = metrics(config.run_dir)
    assert [(m["loss"], m["empty_rows"], m["grad_norm"]) for m in steps] == [(None, 1, 0.0)] * 2
    untrained, trained = (run_drafter(config.run_dir, step)[0].state_dict() for step in (0, 2))
    assert all(torch.equal(untrained[name], trained[name]) for name in untrained)


def test_evaluation_uses_the_exported_numbers() -> None:
    made = drafter()
    rounded = bf16_weights(made, torch.device("cpu")).state_dict()
    for name, tensor in made.state_dict().items():
        assert torch.equal(rounded[name], tensor.bfloat16().float()) and rounded[name].dtype == torch.float32


def test_first_loss_is_near_that_of_guessing(finished: dict[int, Path]) -> None:
    assert abs(metrics(finished[1])[0]["loss"] - np.log(V)) < 1


def test_a_few_samples_are_learnt_by_heart(tmp_path: Path) -> None:
    made = make_cache(tmp_path / "cache", chats(8))
    flags = ["--model.layers", "2", "--model.block-size", "6", "--model.intermediate-size", "128", "--model.head-dim",
             "16", "--data.row-tokens", "512", "--data.row-anchors", "256", "--data.rows-per-step", "1",
             "--data.val-fraction", "0", "--optim.lr", "1e-2", "--optim.epochs", "130"]  # fmt: skip
    run = tmp_path / "run"
    assert train(parse(TrainConfig, ["--cache", str(made.path), "--run-dir", str(run), *flags], "", "")) == 0
    last = metrics(run)[-1]
    assert last["accuracy"] > 0.99 and last["tau_uniform"] > 4.5
    trained, step = run_drafter(run, None)
    assert step == 130
    steps = [len(walk_sample(trained, target(), made.read(i))) for i in range(8)]
    tokens = [sum(s.recorded for s in walk_sample(trained, target(), made.read(i))) for i in range(8)]
    assert sum(tokens) / sum(steps) > 4


def test_export_and_evaluation_agree(
    cache: Path, finished: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "drafter"
    assert call("export", "--run-dir", finished[1], "--out", out, monkeypatch=monkeypatch) == 0
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(out / "model.safetensors")
    assert len(tensors) == 11 * 2 + 3 and all(t.dtype == torch.bfloat16 for t in tensors.values())
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 6 and "auto_map" not in config
    assert config["dflash_config"] == {"mask_token_id": 92, "target_layer_ids": [1, 3, 5]}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert (config["layer_types"], config["sliding_window"], config["use_sliding_window"]) == (
        ["sliding_attention", "full_attention"], 8, True,
    )  # fmt: skip
    shutil.copytree(finished[1], tmp_path / "run")
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
    assert call("export", "--run-dir", finished[1], "--out", out, monkeypatch=monkeypatch) == 2
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


def test_bad_input_is_refused_before_work(
    cache: Path, finished: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    other = make_cache(tmp_path / "other", chats(3, seed=8)).path
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    flags = ["--cache", cache, "--run-dir", run, *FLAGS]
    for argv, message in (
        (["run", *flags, "--cache", tmp_path / "none"], "no such folder"),
        (["run", *flags, "--cache", tmp_path / "mine"], "not a cache"),
        (["run", *flags, "--run-dir", tmp_path / "mine"], "holds other files and no config.toml"),
        (["run", *flags, "--model.layer-ids", 1, 2], r"layers [2] are not in the cache, which has [1, 3, 5]"),
        (["run", *flags, "--data.val-fraction", 0, "--validate.every", 1], "no sample is held out"),
        (["run", *flags, "--data.row-tokens", 5000], "max_position_embeddings is 4096"),
        (["run", *flags, "--run-dir", finished[1], "--optim.lr", 1], "was made with optim.lr = 0.003, now 1.0"),
        (
            ["run", *flags, "--run-dir", finished[1], "--model.layer-ids", 1],
            "was made with model.layer_ids = None, now",
        ),
        (["run", *flags, "--run-dir", finished[1], "--cache", other], "was made with cache_fingerprint = "),
        (["run", "--config", tmp_path / "none.toml"], "no such file"),
        (["eval", "--run-dir", tmp_path / "mine"], "not a run folder"),
        (["eval", "--run-dir", finished[1], "--step", 5], "no checkpoint of step 5; kept steps: 7, 12"),
        (["eval", "--run-dir", finished[1], "--val-fraction", 0], "the val split of"),
        (["eval", "--drafter", tmp_path / "mine", "--cache", cache, "--split", "all"], "config.json: no such file"),
        (["export", "--run-dir", tmp_path / "none", "--out", tmp_path / "x"], "not a run folder"),
        (["sweep"], "unknown command"),
    ):
        assert call(*argv, monkeypatch=monkeypatch) == 2, argv
        error = capsys.readouterr().err
        assert message in error and error.startswith("dflash-train") and error.count("\n") == 1, error
    assert not run.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: DataConfig(fraction=2), r"data.fraction: expected 0 < fraction <= 1, found 2"),
        (lambda: ModelConfig(layers=0), r"model.layers: expected at least 1, found 0"),
        (lambda: ModelConfig(layer_types=("full_attention",)), r"expected one for each of model.layers = 5, found 1"),
        (lambda: ModelConfig(layers=1, layer_types=("sliding_attention",)), r"expected model.sliding_window too"),
        (lambda: ModelConfig(layer_ids=(1, 1)), r"expected distinct layers, found \[1, 1\]"),
        (EvalConfig, r"expected either --run-dir RUN or --drafter FOLDER"),
        (lambda: EvalConfig(drafter=Path("d"), cache=Path("c")), r"--split val needs --val-fraction"),
        (lambda: LossConfig(decay=0), r"loss.decay and loss.dpace: expected numbers >= 0, not both 0"),
        (lambda: LossConfig(kd=1.1), r"loss.kd: expected a part between 0 and 1, found 1.1"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), r"optim.betas"),
    ],
)
def test_settings_out_of_range(settings: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings()


def test_rows_must_be_dealt_evenly(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data.rows_per_step = 1 cannot be dealt to 2 ranks"):
        prepare(small(cache, tmp_path), world=2)


def test_free_settings_may_change(cache: Path, finished: dict[int, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[1], run)
    moved = tmp_path / "moved"
    shutil.copytree(cache, moved)
    finish(
        1, "--cache", moved, "--run-dir", run, *FLAGS, "--save.every", "3", "--log-every", "1", "--data.threads", "1"
    )


def test_a_run_repeats_from_its_own_settings(cache: Path, finished: dict[int, Path], tmp_path: Path) -> None:
    config = config_of(finished[1], cache)
    assert config.model.sliding_window == 8 and config.model.layer_ids is None
    finish(1, "--config", finished[1] / "config.toml", "--run-dir", tmp_path / "again")
    assert hashes(tmp_path / "again", 12) == hashes(finished[1], 12)


def test_settings_that_may_be_none_are_none_by_default() -> None:
    """TOML cannot say None: any other default could not be undone there."""

    def check(cls: type) -> None:
        hints = get_type_hints(cls)
        for field in fields(cls):
            if type(None) in get_args(hints[field.name]):
                assert field.default is None, f"{cls.__name__}.{field.name}"
            elif is_dataclass(hints[field.name]):
                check(hints[field.name])
            else:
                assert field.default is not MISSING

    for cls in (TrainConfig, EvalConfig, ExportConfig):
        check(cls)


def test_help_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['dflash-train', 'run', '--help']\n"
        "from dflash_offline.train.cli import main\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafter()
    optimizer = build_optimizer(made, TrainConfig().optim)
    checkpoint.save(tmp_path, 1, made, optimizer, {}, keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(RunError, match=r"step-00000002: not written: .*No space left"):
        checkpoint.save(tmp_path, 2, made, optimizer, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    found, passed = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 1 and not passed


def test_optimizer_state_comes_back(tmp_path: Path) -> None:
    made, again = drafter(), drafter(seed=5)
    optimizers = [build_optimizer(m, TrainConfig().optim) for m in (made, again)]
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[0].step()
    checkpoint.save(tmp_path, 1, made, optimizers[0], {}, keep=1)
    checkpoint.at_step(tmp_path, 1).restore(again, optimizers[1])
    before, after = (optimizer_tensors(m, o) for m, o in zip((made, again), optimizers, strict=True))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), again.parameters(), strict=True))


def test_the_mask_token_in_training_text_is_counted(tmp_path: Path) -> None:
    samples = chats(6)
    samples[2][0][1] = 40
    marked = sum(bool((ids == 40).any()) for ids, _ in samples)
    made = make_cache(tmp_path / "cache", samples)
    config = small(made.path, tmp_path / "run")
    train(replace(config, model=replace(config.model, mask_token_id=40)))
    assert marked > 0 and sum(m["mask_token_samples"] for m in metrics(tmp_path / "run")) == 2 * marked


def test_spec_of_a_run_follows_the_cache(cache: Path, tmp_path: Path) -> None:
    assert prepare(small(cache, tmp_path), world=1).spec == spec(layers=2, block_size=6)
    assert Cache(cache).layer_ids == (1, 3, 5)
