"""What a reader of another project's cache gives, and the checks that all of them need.

Opening a sample reads ids and mask and checks every shape and size; its states are read when asked for. So a first pass
over a cache finds what is missing, cut or of another kind before anything is written.
Legend: T tokens, L layers, D hidden.
"""

import gzip
import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_offline.shards.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is asked for: the layers as the other project was told them, and the target's width and depth."""

    layers: tuple[int, ...]
    """Empty when not given."""
    hidden: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class PeerSample:
    """One sample of another project's cache."""

    place: str
    """File, relative to the cache; for people."""
    id: str
    input_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T]"""
    states: Callable[[], Tensor]
    """Reads bf16 [T, L, D]."""
    last_hidden: Callable[[], Tensor] | None = None
    """Reads bf16 [T, D], the residual stream after the last layer, before its norm; None where it is not stored so."""


@dataclass(frozen=True, kw_only=True)
class PeerCache:
    """An open cache of another project."""

    layers: tuple[int, ...]
    """Ours: 0-based decoder layers, the residual stream after each of which is stored."""
    count: int
    sample: Callable[[int], PeerSample]
    """By number. Raises UsageError naming file and field, SkipRow for what the project itself would leave out."""


def given_layers(shape: Shape, project: str) -> tuple[int, ...]:
    """The layers from the command line, which this project's files do not say."""
    if not shape.layers:
        raise UsageError(f"layers is not set; {project} files do not say them: give the ids that {project} was given")
    return shape.layers


def numbered(files: Sequence[Path], folder: Path, what: str) -> list[Path]:
    """`files` with data_10 after data_9. Raises UsageError when there are none."""
    if not files:
        raise UsageError(f"{folder}: no {what}")
    return sorted(files, key=lambda p: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", str(p))])


def load_pt(path: Path) -> dict[str, Any]:
    """The dictionary of a torch.save file, its tensors mapped, not read (of a .gz: read). Code in it never runs."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                values = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        else:
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"a Python object ({found[1]})" if found else "a Python object"
        raise UsageError(f"{path}: holds {what}, which would run code; expected tensors only") from None
    except Exception as error:  # torch raises whatever a damaged pickle leads to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path}: not a whole torch file ({reason}); fetch or dump it again") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds a {type(values).__name__}, expected a dictionary of tensors")
    return values


def field(values: Mapping[str, Any], name: str, path: Path) -> Tensor:
    """A tensor by name. Raises UsageError when it is not there or is none."""
    if name not in values:
        raise UsageError(f"{path}: no {name}; found {', '.join(map(str, values)) or 'nothing'}")
    value = values[name]
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        kind = f"{value.layout} of {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"{path}: {name} is a {kind}, expected a tensor")
    return value


def ids_and_mask(ids: Tensor, mask: Tensor, path: Path) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """ids [T] as int32 and mask [T] as 0 and 1, from whatever integers they are stored as."""
    for name, value in (("input_ids", ids), ("loss_mask", mask)):
        if value.dim() != 1 or value.is_floating_point() or value.is_complex():
            raise UsageError(f"{path}: {name} is {describe(value)}, expected integers [T]")
    if len(ids) != len(mask) or not len(ids):
        raise UsageError(f"{path}: {len(ids)} input_ids and {len(mask)} of loss_mask; expected as many, at least one")
    for name, value, most in (("input_ids", ids.long(), 2**31 - 1), ("loss_mask", mask.long(), 1)):
        if value.min() < 0 or value.max() > most:
            raise UsageError(f"{path}: {name} from {value.min()} to {value.max()}, expected 0 to {most}")
    return ids.to(torch.int32).numpy().copy(), mask.to(torch.uint8).numpy().copy()


def expect(value: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], name: str, path: Path) -> None:
    """Raises UsageError when a tensor is not of this shape and one of these types."""
    if tuple(value.shape) != tuple(shape) or value.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise UsageError(f"{path}: {name} is {describe(value)}, expected {wanted} {list(shape)}")


def describe(value: Tensor) -> str:
    """`int64 [5, 7]`."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
