"""The rules of the house: which room imports which, what `--help` costs, what the wheel holds, every recipe loads."""

import ast
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dflash_offline.extract.config import ExtractConfig
from dflash_offline.shards.command import load_toml, structure, unstructure
from dflash_offline.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
ROOMS = ("extract", "train", "shards", "tools")
ALLOWED = {"extract": {"extract", "shards"}, "train": {"train", "shards"}, "shards": {"shards"}, "tools": set(ROOMS)}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        names = imports(path)
        rooms = {n.split(".")[1] for n in names if n.startswith("dflash_offline.")}
        assert rooms <= ALLOWED[room], path
        if room == "shards":
            assert not any(n.startswith(("transformers", "torch.distributed")) for n in names), path
        if any(n.startswith("torch.distributed") for n in names):
            assert path == ROOT / "train" / "parallel.py", path
        if any(n.startswith("multiprocessing") for n in names):
            assert path in [ROOT / "extract" / f"{name}.py" for name in ("pool", "worker", "tokenise")], path


def test_every_package_is_in_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        "dflash_offline." + ".".join(p.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for p in (ROOT / room).rglob("__init__.py")
    }
    assert listed == found


@pytest.mark.parametrize("room", ["extract", "train", "tools"])
@pytest.mark.parametrize("words", [["--help"], ["COMMAND", "--help"]])
def test_help_is_quick_and_imports_no_torch(room: str, words: list[str]) -> None:
    first = {"extract": "run", "train": "run", "tools": "info"}[room]
    argv = [first if w == "COMMAND" else w for w in words]
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['dflash', *{argv!r}]\n"
        f"try: runpy.run_module('dflash_offline.{room}', run_name='__main__')\n"
        "except SystemExit as left: assert left.code == 0, left.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'imported torch'\n"
    )
    seconds = []
    for _ in range(3):  # of a core, and the least of three: this machine may be busy with something else
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert "--" in done.stdout
    assert min(seconds) < 1.0


@pytest.mark.parametrize(
    "path",
    sorted(p for folder in ("configs", "benchmarks") for p in (ROOT / folder).rglob("*.toml")),
    ids=lambda p: p.name,
)
def test_every_recipe_loads_and_survives_a_round_trip(path: Path) -> None:
    cls = ExtractConfig if "extract" in path.name else TrainConfig
    config = load_toml(cls, path)
    assert structure(cls, unstructure(config), "again") == config
