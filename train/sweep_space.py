"""What a sweep varies: fields of TrainConfig, checked against it before anything starts.

[space]
optim.lr = { low = 1e-4, high = 2e-3, log = true }
model.layers = { low = 3, high = 6 }
model.layer_ids = { choices = [[1, 31, 61], [1, 16, 31, 46, 61]] }
optim.ema = { choices = ["None", 0.999] }
"""

import copy
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from decimal import Decimal
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from dflash_offline.shards.command import structure, unstructure
from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.sweep_config import Method

if TYPE_CHECKING:
    import optuna

SET_HERE = ("run_dir", "validate.every", "save.every", "save.keep_last", "save.keep_best")
"""Fields that a sweep itself sets."""
NONE = "None"
"""As in flags: TOML has no null."""
_WORDS = {"low", "high", "log", "step", "choices"}
_COMBINATIONS = 2000
"""Looked at when a value does not go with the base."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """Values of one field: a range, or choices."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()
    whole: bool = False
    """The field is an integer; not in files."""

    def ends(self) -> tuple[Any, ...]:
        """Values that show whether the field takes them."""
        return self.choices or tuple(int(x) if self.whole else x for x in (self.low, self.high) if x is not None)


def read_space(space: Mapping[str, Any], base: TrainConfig) -> dict[str, Dimension]:
    """Dimensions by field. Raises UsageError for what is no field, no values for it, or fits no setting of the rest."""
    dimensions = {name: _dimension(name, values) for name, values in flat(space)}
    if not dimensions:
        raise UsageError(
            "space is empty; expected fields of `dflash-train run` to vary, such as "
            "optim.lr = { low = 1e-4, high = 1e-3, log = true } below [space]"
        )
    for name, dimension in dimensions.items():
        others = {n: d for n, d in dimensions.items() if n != name}
        for value in dimension.ends():
            try:
                settings(base, {name: value})
            except UsageError as error:
                if not _goes_with_any(base, name, value, others):
                    text = str(error).removeprefix("trial: ")
                    raise UsageError(f"space.{name}: {value!r} is refused: {text}") from None
    return dimensions


def settings(base: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """`base` with `values` by dotted field. Raises UsageError where they are out of range or do not go together."""
    out: dict[str, Any] = copy.deepcopy(unstructure(base))
    for name, value in values.items():
        *path, leaf = name.split(".")
        table = out
        for part in path:
            table = table.setdefault(part, {})
        if value == NONE:
            table.pop(leaf, None)
        else:
            table[leaf] = value
    return structure(TrainConfig, out, "trial")


def suggest(trial: "optuna.Trial", dimensions: Mapping[str, Dimension]) -> dict[str, Any]:
    """The trial's value of every field. A trial that has some already keeps them, so this may be repeated."""
    out: dict[str, Any] = {}
    for name, d in dimensions.items():
        if d.choices:
            labels = {_label(value): value for value in d.choices}
            out[name] = labels[trial.suggest_categorical(name, list(labels))]
            continue
        assert d.low is not None and d.high is not None
        if d.whole:
            out[name] = trial.suggest_int(name, int(d.low), int(d.high), step=int(d.step or 1), log=d.log)
        else:
            out[name] = trial.suggest_float(name, d.low, d.high, step=d.step, log=d.log)
    return out


def flat(space: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names with their tables as dots, as TOML makes tables of dotted names; {low, high} and {choices} stay whole."""
    for name, values in space.items():
        if isinstance(values, Mapping) and values and not values.keys() & _WORDS:
            yield from flat(values, f"{prefix}{name}.")
        else:
            yield prefix + name, values


def combinations(dimensions: Mapping[str, Dimension], sampler: Method) -> int | None:
    """How many settings an exhaustive sampler has, None for others. Raises UsageError where it cannot list them.

    Optuna's repeat a setting when they are asked for one while the last ones are still at work: a whole training.
    """
    if sampler.name == "GridSampler":
        grid = sampler.arguments["search_space"]
        if missing := sorted(dimensions.keys() - grid.keys()):
            raise UsageError(f"sampler.arguments.search_space: has no values of {', '.join(missing)}, which space has")
        return math.prod(len(values) for values in grid.values())
    if sampler.name != "BruteForceSampler":
        return None
    counts = []
    for name, d in dimensions.items():
        if not d.choices and not d.whole and d.step is None:
            raise UsageError(f"space.{name}: BruteForceSampler needs a step or choices, found {d.low} to {d.high}")
        low, high, step = (Decimal(str(x)) for x in (d.low or 0, d.high or 0, d.step or 1))
        counts.append(len(d.choices) or int((high - low) / step) + 1)
    return math.prod(counts)


def _label(value: Any) -> Any:
    """Optuna stores plain values only."""
    return json.dumps(value) if isinstance(value, (list, tuple)) else value


def _dimension(name: str, values: Any) -> Dimension:
    kinds, where = _kinds(name), f"space.{name}"
    if not isinstance(values, Mapping) or not values.keys() <= _WORDS:
        raise UsageError(f"{where}: found {values!r}, expected {{ low, high, log, step }} or {{ choices }}")
    d = structure(Dimension, {**values, "whole": int in kinds and float not in kinds}, where)
    if d.choices:
        if len(values) > 1 or len({json.dumps(c) for c in d.choices}) < len(d.choices):
            raise UsageError(f"{where}: found {dict(values)}, expected distinct choices and nothing else")
        return d
    if not kinds & {int, float}:
        raise UsageError(f"{where}: found {dict(values)}, expected {{ choices }}: the field is not a number")
    if d.low is None or d.high is None or not -math.inf < d.low < d.high < math.inf:
        raise UsageError(f"{where}: low is {d.low}, high {d.high}; expected finite numbers, low below high")
    numbers = [x for x in (d.low, d.high, d.step) if x is not None]
    if d.whole and any(x != int(x) for x in numbers):
        raise UsageError(f"{where}: found {numbers}, expected whole numbers, as the field is one")
    if d.log and (d.low <= 0 or d.step is not None):
        raise UsageError(f"{where}: log = true needs low > 0 and no step, found low = {d.low}, step = {d.step}")
    if d.step is not None and d.step <= 0:
        raise UsageError(f"{where}: step is {d.step}, expected more than 0")
    return d


def _kinds(name: str) -> set[Any]:
    """Types that the field takes; None left out."""
    if name in SET_HERE:
        raise UsageError(f"space.{name}: is set by the sweep; expected another field")
    kind: Any = TrainConfig
    for part in name.split("."):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        if part not in hints:
            known = ", ".join(hints) or "nothing below it"
            raise UsageError(f"space.{name}: no such field of `dflash-train run`; in place of {part} there is: {known}")
        kind = hints[part]
    if is_dataclass(kind):
        raise UsageError(f"space.{name}: is a table; expected one of its fields: {', '.join(get_type_hints(kind))}")
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return {part for part in parts if isinstance(part, type)} - {type(None)}


def _goes_with_any(base: TrainConfig, name: str, value: Any, others: Mapping[str, Dimension]) -> bool:
    """Whether some values of the other fields go with this one, such as loss.dpace = 1 with loss.decay = 0."""
    combinations: Iterable[tuple[Any, ...]] = itertools.product(*(d.ends() for d in others.values()))
    for combination in itertools.islice(combinations, _COMBINATIONS if others else 0):
        try:
            settings(base, {name: value, **dict(zip(others, combination, strict=True))})
        except UsageError:
            continue
        return True
    return False
