"""Configuration files, flags and errors, as every program has them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dflash_offline.shards import command
from dflash_offline.shards.errors import RunError, UsageError


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inner settings."""

    rate: float = 0.5
    """A rate."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"inner.rate: expected 0 to 1, found {self.rate}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Outer settings."""

    path: Path = Path("x")
    """A path."""
    steps: int = 3
    """A count."""
    fast: bool = False
    """A switch."""
    limit: int | None = None
    """May be absent."""
    layers: tuple[int, ...] = ()
    """A list."""
    inner: Inner = field(default_factory=Inner)


def parse(*argv: str) -> Outer:
    return command.parse(Outer, list(argv), "prog", "What it does.")


def test_flags_win_over_the_file_which_wins_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('path = "a"\nsteps = 5\n[inner]\nrate = 1\n')
    assert parse("--config", str(file), "--steps", "7") == Outer(path=Path("a"), steps=7, inner=Inner(rate=1.0))
    assert parse("--inner.rate", "0.25", "--fast", "True") == Outer(fast=True, inner=Inner(rate=0.25))


def test_settings_survive_a_round_trip() -> None:
    config = Outer(path=Path("p q"), inner=Inner(rate=0.1))
    values = command.unstructure(config)
    assert "limit" not in values  # TOML has no null
    assert command.structure(Outer, values, "again") == config


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Required settings, and a check of them."""

    name: str
    """A name."""
    size: int
    """A count."""
    most: int = 9
    """A bound."""

    def __post_init__(self) -> None:
        if self.size > self.most:
            raise ValueError(f"size is {self.size}, expected at most {self.most}")


def test_what_a_file_lacks_may_come_from_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("most = 5")

    def parsed(*argv: str) -> Needs:
        return command.parse(Needs, [*argv, "--config", str(file)], "prog", "What it does.")

    found = parsed("--name", "a", "--size", "4")
    assert type(found) is Needs and found == Needs(name="a", size=4, most=5)
    with pytest.raises(UsageError, match="--size"):
        parsed("--name", "a")
    with pytest.raises(UsageError, match="size is 6, expected at most 5"):
        parsed("--name", "a", "--size", "6")
    file.write_text("size = 2\nmots = 5")
    with pytest.raises(UsageError, match=r"c\.toml: extra fields found \(mots; did you mean most\?\)"):
        parsed("--name", "a")
    with pytest.raises(UsageError, match="required field missing"):
        command.load_toml(Needs, file)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("stepps = 1", r"extra fields found \(stepps; did you mean steps\?\)"),
        ("qqq = 1", r"extra fields found \(qqq; expected path, steps, "),
        ("[inner]\nrat = 1", r"extra fields found \(rat; did you mean rate\?\) @ config.inner"),
        ("steps = 1.5", "expected int, found 1.5"),
        ("steps = true", "expected int, found True"),
        ('fast = "yes"', "expected bool, found 'yes'"),
        ("[inner]\nrate = 2.0", "inner.rate: expected 0 to 1, found 2.0"),
        ("steps = ", "not valid TOML"),
        ('layers = "12"', "expected a list, found '12'"),
        ('layers = [1, "2"]', "expected int, found '2'"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_fault(tmp_path: Path, toml: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(toml)
    with pytest.raises(UsageError, match=message) as error:
        parse("--config", str(file))
    assert "\n" not in str(error.value) and str(file) in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stepps", "1"], "Unrecognized options: --stepps"),
        (["--steps", "x"], "--steps: invalid literal"),
        (["--inner.rate", "2"], "inner.rate: expected 0 to 1, found 2.0"),
        (["--config", "/no/such.toml"], "no such file: /no/such.toml"),
        (["--config"], "--config needs a file name"),
        (["--config=/no/such.toml"], "no such file: /no/such.toml"),
        (["--config", "a", "--config", "b"], "--config is given twice"),
        (["--config", "/tmp"], "Is a directory"),
    ],
)
def test_a_bad_flag_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(*argv)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UsageError("bad input"), 2, "prog go: error: bad input"),
        (UsageError("two\nlines"), 2, "prog go: error: two lines"),
        (RunError("lost"), 1, "prog go: error: lost"),
        (OSError(28, "No space left on device", "/full"), 1, "/full"),
        (KeyboardInterrupt(), 130, ""),
        (None, 0, ""),
    ],
)
def test_exit_codes(
    raised: BaseException | None,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def go(argv: list[str]) -> int:
        if raised:
            raise raised
        return 0

    monkeypatch.setattr(sys, "argv", ["prog", "go"])
    with pytest.raises(SystemExit) as left:
        command.run("prog", {"go": ("goes", go)})
    err = capsys.readouterr().err
    assert left.value.code == code and message in err and "Traceback" not in err
