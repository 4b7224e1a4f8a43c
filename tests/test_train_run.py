"""Runs: they learn, stop when asked, and refuse in one line what does not fit."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from train_reference import V, chats, make_cache, spec, target
from train_runs import FLAGS, call, metrics, settings, small

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.command import parse
from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import (
    DataConfig,
    EvalConfig,
    ExportConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from dflash_offline.train.export import run_drafter
from dflash_offline.train.job import prepare
from dflash_offline.train.loop import train
from dflash_offline.train.walk import walk_sample


def test_first_loss_is_near_that_of_guessing(finished: dict[str, Path]) -> None:
    assert abs(metrics(finished["decay"])[0]["loss"] - np.log(V)) < 1


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


def test_a_run_in_bf16_is_measured_too(cache: Path, six: Path, tmp_path: Path) -> None:
    assert train(settings(cache, tmp_path / "run", "--precision", "bfloat16", "--optim.max-steps", "2")) == 0
    one, fp32 = metrics(tmp_path / "run"), metrics(six)
    assert one[0]["loss"] == pytest.approx(fp32[0]["loss"], rel=0.02) and one[0]["loss"] != fp32[0]["loss"]
    assert one[1]["validation"]["tau"] >= 1


def test_the_mask_token_in_training_text_is_counted(tmp_path: Path) -> None:
    samples = chats(6)
    samples[2][0][1] = 40
    marked = sum(bool((ids == 40).any()) for ids, _ in samples)
    made = make_cache(tmp_path / "cache", samples)
    config = small(made.path, tmp_path / "run")
    train(replace(config, model=replace(config.model, mask_token_id=40)))
    assert marked > 0 and sum(m["mask_token_samples"] for m in metrics(tmp_path / "run")) == 2 * marked


def test_bad_input_is_refused_before_work(
    cache: Path, finished: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
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
        (["run", *flags, "--run-dir", finished["decay"], "--optim.lr", 1], "was made with optim.lr = 0.003, now 1.0"),
        (
            ["run", *flags, "--run-dir", finished["decay"], "--model.layer-ids", 1],
            "was made with model.layer_ids = None, now",
        ),
        (["run", *flags, "--run-dir", finished["decay"], "--cache", other], "was made with cache_fingerprint = "),
        (["run", "--config", tmp_path / "none.toml"], "no such file"),
        (["eval", "--run-dir", tmp_path / "mine"], "not a run folder"),
        (["eval", "--run-dir", finished["decay"], "--step", 5], "no checkpoint of step 5; kept steps: 7, 12"),
        (["eval", "--run-dir", finished["decay"], "--val-fraction", 0], "the val split of"),
        (["eval", "--drafter", tmp_path / "mine", "--cache", cache, "--split", "all"], "config.json: no such file"),
        (["export", "--run-dir", tmp_path / "none", "--out", tmp_path / "x"], "not a run folder"),
        (["tune"], "unknown command"),
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
        (lambda: ModelConfig(layers=1, sliding_window=4), r"model.sliding_window = 4: no layer has it; expected a"),
        (lambda: ModelConfig(layers=1, sliding_window=4, layer_types=("full_attention",)), r"no layer has it"),
        (lambda: ModelConfig(layer_ids=(1, 1)), r"expected distinct layers, found \[1, 1\]"),
        (EvalConfig, r"expected either --run-dir RUN or --drafter FOLDER"),
        (lambda: EvalConfig(drafter=Path("d"), cache=Path("c")), r"--split val needs --val-fraction"),
        (lambda: LossConfig(decay=0), r"loss.decay and loss.dpace: expected numbers >= 0, not both 0"),
        (lambda: LossConfig(kd=1.1), r"loss.kd: expected a part between 0 and 1, found 1.1"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), r"optim.betas"),
        (
            lambda: OptimConfig(schedule="wsd", warmup_ratio=0.9),
            r"optim.warmup_ratio = 0.9 and decay_ratio = 0.2: expected at most 1 together",
        ),
    ],
)
def test_settings_out_of_range(settings: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings()


def test_rows_must_be_dealt_evenly(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data.rows_per_step = 1 cannot be dealt to 2 ranks"):
        prepare(small(cache, tmp_path), world=2)


def test_spec_of_a_run_follows_the_cache(cache: Path, tmp_path: Path) -> None:
    assert prepare(small(cache, tmp_path), world=1).spec == spec(layers=2, block_size=6)
    assert Cache(cache).layer_ids == (1, 3, 5)


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
