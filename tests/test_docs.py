"""Commands in docs/ are commands: every setting is one, and links lead somewhere."""

import re
import shlex
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from dflash_offline.extract.config import AuditConfig, ExtractConfig, PreviewConfig, StatusConfig
from dflash_offline.shards import command
from dflash_offline.tools.cli import COMMANDS
from dflash_offline.train.config import EvalConfig, ExportConfig, TrainConfig
from dflash_offline.train.sweep_config import SweepConfig

ROOT = Path(__file__).parents[1]
PROGRAMS: dict[str, dict[str, type]] = {
    "dflash-extract": {"run": ExtractConfig, "preview": PreviewConfig, "status": StatusConfig, "audit": AuditConfig},
    "dflash-train": {"run": TrainConfig, "eval": EvalConfig, "export": ExportConfig, "sweep": SweepConfig},
    "dflash-shards": {name: settings for name, (_, settings, *_) in COMMANDS.items()},
}
PAGES = ("gpu", "tutorial", "choosing", "training", "evaluation", "sweep", "troubleshooting", "extraction", "scale")


def commands(text: str) -> list[list[str]]:
    """Words of every line of code that is one of the programs."""
    lines = re.findall(r"^ {4}(?:torchrun.* -m dflash_offline\.train .*|dflash-.*)$", text, re.M)
    words = [shlex.split(line, comments=True) for line in lines]
    return [["dflash-train", *w[w.index("dflash_offline.train") + 1 :]] if w[0] == "torchrun" else w for w in words]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_only_settings_that_are_there(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("C.toml", "T.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    found = commands((ROOT / "docs" / f"{page}.md").read_text())
    assert found or page in ("sweep", "troubleshooting")
    for program, name, *argv in found:
        argv = [word.replace("$SLURM_ARRAY_TASK_ID", "0") for word in argv]
        command.parse(PROGRAMS[program][name], argv, program, "")


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_in_passing_is_there(page: str) -> None:
    """`--flag` and `dflash-x command` in running text, links to other files."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    flags = {flag for programs in PROGRAMS.values() for cls in programs.values() for flag in flags_of(cls)}
    plain = re.sub(r"```.*?```", "", text, flags=re.S)
    for code in re.findall(r"`([^`\n]+)`", plain):
        for program, name in re.findall(r"(dflash-(?:extract|train|shards)) (\w+)", code):
            assert name in PROGRAMS[program], code
        if code.startswith(("--", "dflash-", "eval ", "import ")):
            named = {flag for flag in re.findall(r"--[\w.-]+", code) if not flag.endswith(".")}  # --data.fields.*
            assert named <= flags | {"--debug", "--config", "--help"}, code
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / "docs" / link).exists(), link


def flags_of(cls: type, prefix: str = "--") -> set[str]:
    """Flags of a dataclass, its tables' too."""
    out = set()
    for name, kind in get_type_hints(cls).items():
        flag = prefix + name.replace("_", "-")
        out |= flags_of(kind, f"{flag}.") if is_dataclass(kind) else {flag}
    return out
