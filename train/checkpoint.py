"""Checkpoints: complete or absent, checked before use, without pickle.

    RUN/checkpoints/step-00000012/
        model.safetensors        fp32 weights
        optimizer.safetensors    moments and step counts
        ema.safetensors          average of the weights, where one is kept
        state.json               step, settings, cache, drafter, and the xxh3 of the other files

A folder is written under another name, fsynced and renamed. There is no generator state to keep: rows and anchors
follow from the seed and the step.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_offline.shards.errors import CorruptError, RunError, UsageError
from dflash_offline.shards.files import file_hash, publish, read_json, write_json

MODEL, OPTIMIZER, EMA, STATE = "model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"
_REPLACED = ".old"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, its files found as they were written."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state["step"]

    @property
    def served(self) -> str:
        """File with the weights that are measured and exported."""
        return EMA if EMA in self.state["files"] else MODEL

    def load(self, name: str, device: torch.device | None = None) -> dict[str, Tensor]:
        """Tensors of one of the files."""
        with safe_open(self.folder / name, "pt", device=str(device or "cpu")) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def save(
    root: Path,
    step: int,
    files: Mapping[str, dict[str, Tensor]],
    facts: dict[str, Any],
    keep: int,
    best: int | None = None,
) -> Path:
    """Write the checkpoint of `step` under `root`, then remove all but the newest `keep` and that of step `best`."""
    final = root / f"step-{step:08d}"
    temporary = root / f".{final.name}.{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, tensors in files.items():
            write_tensors(temporary / name, tensors)
        hashes = {name: file_hash(temporary / name) for name in files}
        write_json(temporary / STATE, {**facts, "step": step, "files": hashes})
        replaced = root / f".{final.name}{_REPLACED}"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.replace(replaced)
        publish(temporary, final)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise RunError(f"{final}: not written: {error}; older checkpoints are kept, rerun to go on from them") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    # Newer ones were passed over; counted as kept, they would cost this one.
    for old in [folder for folder in _folders(root) if _step(folder) <= step][keep:]:
        if _step(old) != best:
            _remove(old)
    return final


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint under `root`, and why newer ones were passed over.

    Raises RunError when there are checkpoints and none is complete: starting anew would hide the loss.
    """
    passed: list[str] = []
    for folder in _folders(root):
        try:
            found = _open(folder)
        except CorruptError as error:
            passed.append(str(error))
            continue
        # A newer one that was passed over may have taken the place of the best before it.
        if (best := found.state.get("best")) and not (root / f"step-{best['step']:08d}").is_dir():
            found.state["best"] = None
        return found, passed
    if passed:
        raise RunError(f"{root}: no complete checkpoint among {len(passed)}; the newest: {passed[0]}")
    return None, passed


def at_best(root: Path) -> Checkpoint:
    """The checkpoint with the highest held-out tau, as the newest tells. Raises UsageError where it is not known."""
    found, _ = newest(root)
    if found is None or found.state.get("best") is None:
        raise UsageError(
            f"{root}: no step was measured while training, or the best of them is lost; expected a run with "
            "validate.every > 0, or --step"
        )
    return at_step(root, found.state["best"]["step"])


def at_step(root: Path, step: int) -> Checkpoint:
    """The checkpoint of one step. Raises UsageError where it is not kept, CorruptError where it is damaged."""
    folder = root / f"step-{step:08d}"
    if not folder.is_dir():
        kept = ", ".join(str(_step(f)) for f in reversed(_folders(root))) or "none"
        raise UsageError(f"{root}: no checkpoint of step {step}; kept steps: {kept}")
    return _open(folder)


def states(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folder and state of every checkpoint under `root` whose state can be read; the tensors are not looked at."""
    found = []
    for folder in _folders(root):
        try:
            found.append((folder, _state(folder)))
        except CorruptError:
            continue  # passed over, or refused by name, when it is opened
    return found


def clean(root: Path) -> None:
    """Remove what a killed process left half written. Only before anything is read or written here."""
    for replaced in root.glob(f".step-*{_REPLACED}"):  # whole; killed between two renames, it has no successor
        if not (final := root / replaced.name[1:].removesuffix(_REPLACED)).exists():
            replaced.replace(final)
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file and make it durable."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
        path.chmod(0o644)  # save_file leaves it to its owner alone
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (SafetensorError, OSError) as error:  # a full disk is either
        raise RunError(f"{path}: not written: {error}") from None


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor that holds inf or nan; None where there is none."""
    return next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)


def _state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        state = read_json(path)
    except FileNotFoundError:
        raise CorruptError(f"{folder}: {STATE} is missing") from None
    files = state.get("files")
    if state.get("step") != _step(folder) or not isinstance(files, dict) or {*files} - {EMA} != {MODEL, OPTIMIZER}:
        raise CorruptError(f"{path}: step is {state.get('step')}, files {files}; expected those of {folder.name}")
    return state


def _open(folder: Path) -> Checkpoint:
    state = _state(folder)
    for name, expected in state["files"].items():
        path = folder / name
        if not path.is_file():
            raise CorruptError(f"{path}: missing")
        if (found := file_hash(path)) != expected:
            raise CorruptError(f"{path}: xxh3 is {found}, expected {expected}")
    return Checkpoint(folder, state)


def _folders(root: Path) -> list[Path]:
    """Newest first. Whatever else lies there is not ours to read or remove."""
    found = (p for p in root.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir())
    return sorted(found, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that no moment shows a part of it under its name."""
    hidden = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
