"""Runs that several tests look at and none may change."""

import shutil
from pathlib import Path

import pytest
from train_reference import chats, make_cache
from train_runs import FLAGS, VARIANTS, finish, settings

from dflash_offline.train.loop import train


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cache"
    make_cache(folder, chats(30), last_hidden=True)
    return folder


def _twelve(ranks: int, cache: Path, folder: Path) -> dict[str, Path]:
    runs = {name: folder / name for name in VARIANTS}
    finish(ranks, *(["--cache", cache, "--run-dir", run, *FLAGS, *VARIANTS[name]] for name, run in runs.items()))
    return runs


@pytest.fixture(scope="session")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve steps of every variant."""
    return _twelve(1, cache, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def together(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same on two ranks."""
    return _twelve(2, cache, tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="session")
def six(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps."""
    run = tmp_path_factory.mktemp("runs") / "six"
    assert train(settings(cache, run)) == 0
    return run


@pytest.fixture
def run(six: Path, tmp_path: Path) -> Path:
    """A copy of them, which may be changed."""
    return Path(shutil.copytree(six, tmp_path / "run"))
