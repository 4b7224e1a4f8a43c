"""What several test files share."""

from pathlib import Path

import pytest
from runs import arguments, extract
from targets import write_chats, write_target
from train_fixtures import cache, finished, run, six, together  # noqa: F401


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a dataset, and a finished cache of several shards."""
    folder = tmp_path_factory.mktemp("site")
    write_target(folder / "t")
    write_chats(folder / "chats.jsonl", 40)
    done = extract(*arguments(folder, folder / "cache", workers=2))
    assert done.returncode == 0, done.stderr
    return folder
