"""Command-line conventions shared by the three programs: configuration files, exit codes, one-line errors.

Imports nothing heavy, so that `--help` answers at once.
"""

import io
import os
import re
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import MISSING, field, fields, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_origin

from dflash_offline.shards.errors import RunError, UsageError

T = TypeVar("T")


def parse(cls: type[T], argv: list[str], prog: str, description: str) -> T:
    """Build the frozen dataclass `cls` from `[--config FILE.toml] [--field.name VALUE ...]`; flags win over the file.

    A switch may stand without a value. Raises UsageError for an unreadable file, an unknown key or a value of the wrong
    type or range.
    """
    import tyro

    default: Any = tyro.MISSING_NONPROP
    argv = [word for a in argv for word in (a.split("=", 1) if a.startswith("--config=") else [a])]
    switches = {f"--{f.name.replace('_', '-')}" for f in fields(cls) if f.type is bool}  # type: ignore[arg-type]
    for at in reversed(range(len(argv))):
        if argv[at] in switches and argv[at + 1 : at + 2] not in (["True"], ["False"]):
            argv.insert(at + 1, "True")
    if "--config" in argv:
        at = argv.index("--config")
        if "--config" in argv[at + 1 :]:
            raise UsageError("--config is given twice; expected one file")
        if at + 1 == len(argv):
            raise UsageError("--config needs a file name; expected: --config FILE.toml")
        default = _defaults(cls, Path(argv[at + 1]))
        argv = argv[:at] + argv[at + 2 :]
    # tyro draws its errors as a box over several lines; a log wants one.
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            options = (tyro.conf.FlagConversionOff,)
            return tyro.cli(cls, args=argv, prog=prog, description=description, default=default, config=options)
    except SystemExit as left:
        if left.code == 0:
            raise
        lines = (re.sub(r"[\u2500-\u257f]+|-{4,}", " ", line) for line in box.getvalue().splitlines())
        text = " ".join(" ".join(lines).split())
        for title in ("Unrecognized options ", "Value error ", "Required options ", "Parsing error "):
            text = text.removeprefix(title)
        raise UsageError(text) from None


def load_toml(cls: type[T], path: Path) -> T:
    """Read `path` into `cls`. Unknown keys are errors: a typo must not silently leave a default in force."""
    return structure(cls, _values(path), str(path))


def _values(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}; expected a TOML file of settings") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def _defaults(cls: type[T], path: Path) -> T:
    """`load_toml`, but required fields that the file lacks are left to the flags; tyro then checks the whole."""
    import tyro

    values = _values(path)
    holes = [
        (f.name, f.type, field(default=tyro.MISSING))
        for f in fields(cls)  # type: ignore[arg-type]
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if not holes:
        return structure(cls, values, str(path))
    unchecked = {"__post_init__": lambda self: None}
    partial = make_dataclass(cls.__name__, holes, bases=(cls,), namespace=unchecked, frozen=True, kw_only=True)
    found: Any = structure(partial, values, str(path))
    out = object.__new__(cls)
    for f in fields(found):
        object.__setattr__(out, f.name, getattr(found, f.name))
    return out


def structure(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """`values` -> `cls`, strictly. `where` names the source in errors."""
    import cattrs

    converter, inner = _converter(), _converter()

    def sequence(kind: Any) -> Callable[[Any, Any], Any]:
        hook = inner.get_structure_hook(kind)

        def checked(value: Any, _: Any) -> Any:
            if isinstance(value, str):  # it would become a list of its characters
                raise ValueError(f"expected a list, found {value!r}")
            return hook(value, kind)

        return checked

    def is_sequence(kind: Any) -> bool:
        origin: Any = get_origin(kind)
        return origin in (tuple, list)

    converter.register_structure_hook_factory(is_sequence, sequence)
    try:
        return converter.structure(values, cls)
    except Exception as error:
        found = cattrs.transform_error(error, path="config", format_exception=_explain)
        raise UsageError(f"{where}: " + "; ".join(found)) from None


def _explain(error: BaseException, kind: type | None) -> str:
    """A range error in its own words, of which cattrs would say only "invalid value"; what was meant by a typo."""
    from cattrs import ForbiddenExtraKeysError
    from cattrs.v import format_exception

    if isinstance(error, ForbiddenExtraKeysError):
        extra, known = sorted(error.extra_fields), [f.name for f in fields(error.cl)]
        near = [match for name in extra for match in get_close_matches(name, known, 1)]
        meant = f"did you mean {', '.join(near)}?" if near else f"expected {', '.join(known)}"
        return f"extra fields found ({', '.join(extra)}; {meant})"
    return str(error) if type(error) is ValueError else format_exception(error, kind)


def _converter() -> Any:
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(Path, lambda value, _: Path(value).expanduser())
    # cattrs would take "3" for an int field and 1 for a bool; a configuration file should say what it means.
    for kind, accepts in ((int, int), (bool, bool), (str, str), (float, (int, float))):
        converter.register_structure_hook(kind, _strict(kind, accepts))
    return converter


def _strict(kind: type, accepts: Any) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, accepts) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"expected {kind.__name__}, found {value!r}")
        return kind(value)

    return hook


def unstructure(config: Any) -> dict[str, Any]:
    """`config` -> plain values that `structure` reads back; None fields are left out (TOML has no null)."""
    import cattrs

    converter = cattrs.Converter()
    converter.register_unstructure_hook(Path, str)

    def drop_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: drop_none(v) for k, v in value.items() if v is not None}
        if isinstance(value, (list, tuple)):
            return [drop_none(v) for v in value]
        return value

    return drop_none(converter.unstructure(config))


def run(prog: str, commands: Mapping[str, tuple[str, Callable[[list[str]], int]]]) -> None:
    """Dispatch `prog COMMAND ...` and leave with the documented exit code.

    0 done; 1 failed while running; 2 bad input, before work; 3 done but with bad shards or lost samples;
    130 and 143 on SIGINT and SIGTERM (raised as SystemExit by the commands themselves).
    """
    argv = sys.argv[1:]
    debug = "--debug" in argv
    argv = [a for a in argv if a != "--debug"]
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, commands))
        print(f"usage: {prog} COMMAND [--config FILE.toml] [--field.name VALUE ...] [--debug]\n\ncommands:")
        for name, (summary, _) in commands.items():
            print(f"  {name:{width}}  {summary}")
        print(f"\n`{prog} COMMAND --help` lists a command's settings.")
        sys.exit(0 if argv else 2)
    name = argv[0]
    if name not in commands:
        sys.exit(_fail(prog, f"unknown command {name!r}; expected one of: {', '.join(commands)}", 2))
    try:
        code = commands[name][1](argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # `dflash-shards ls CACHE | head` is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except UsageError as error:
        code = _fail(f"{prog} {name}", str(error), 2, debug)
    except (RunError, OSError) as error:
        code = _fail(f"{prog} {name}", str(error), 1, debug)
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending; one Ctrl-C more would only change the exit code
    sys.exit(code)


def say(text: str) -> None:
    """Print a line. A run of hours does not end because nobody reads its lines any more."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(prog: str, message: str, code: int, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    line = " ".join(message.split("\n"))  # a name may hold one, and so may what a library says
    print(f"{prog}: error: {line}", file=sys.stderr)
    return code
