"""The golden tests can fail: one line of the code is flipped, and the test that guards it turns red (`make slow`)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MUTATIONS = {
    "layer rule: rounds down": ("extract/layers.py", "round(1 +", "int(1 +", "extract_states.py -k layer_rule"),
    "features: one layer early": (
        "extract/forward.py",
        "decoder[i].register",
        "decoder[i - 1].register",
        "extract_states.py -k stock",
    ),
    "features: last column missing its boundary": (
        "extract/kernels.py",
        "torch.split(x, row.lengths, dim=2)], dim=2)",
        "[x]], dim=2)",
        "extract_states.py -k stock",
    ),
    "decay: starts one slot late": ("train/loss.py", "-(slot - 1) / gamma", "-slot / gamma", "train_loss.py"),
    "decay: slot 0 counts": ("train/loss.py", "torch.where(slot > 0,", "torch.where(slot >= 0,", "train_loss.py"),
    "loss: unsupervised slots count": (
        "train/rows.py",
        "supervised[:, 0] = False",
        "supervised[:, 0] = True",
        "train_loss.py train_rows.py",
    ),
    "27B: projections with bias": (
        "train/model.py",
        "super().__init__(inputs, outputs, bias=False)",
        "super().__init__(inputs, outputs)",
        "train_model.py -k 27b",
    ),
    "leak: the anchor's own state is seen": (
        "train/masks.py",
        "(token < anchor[:, None])",
        "(token <= anchor[:, None])",
        "train_model.py -k before_its_anchor",
    ),
    "leak: other blocks are seen": (
        "train/masks.py",
        "sees_slot = block[:, None] == block",
        "sees_slot = block[:, None] >= block",
        "train_model.py -k each_other",
    ),
    "window: one too wide": (
        "train/masks.py",
        "(window - 1))[:, None]",
        "window)[:, None]",
        "train_model.py -k window",
    ),
    "window: not causal in the block": (
        "train/masks.py",
        "(slot <= slot[:, None]) & ",
        "",
        "train_model.py -k reference_pair",
    ),
    "training: context passes input_layernorm": (
        "train/model.py",
        "context = layer.self_attn.key_value(context_TD, rotary)",
        "context = layer.self_attn.key_value(layer.input_layernorm(context_TD * 2), rotary)",
        "train_model.py -k client",
    ),
    "walk: context passes input_layernorm": (
        "train/model.py",
        "[layer.self_attn.key_value(context_TD, rotary)",
        "[layer.self_attn.key_value(layer.input_layernorm(context_TD * 2), rotary)",
        "train_walk.py",
    ),
    "norm: zero-centred gain": (
        "train/fused.py",
        "return (weight * wide",
        "return ((1 + weight) * wide",
        "train_model.py",
    ),
    "rope: positions of blocks start at 0": (
        "train/masks.py",
        "((self.anchor_A - self.start_A)[:, None] + slots)",
        "((self.anchor_A - self.anchor_A)[:, None] + slots)",
        "train_model.py -k client",
    ),
    "labels: shifted by one": (
        "train/rows.py",
        "np.pad(ids, (0, size))[drawn[:, None] + np.arange(size)]",
        "np.pad(ids, (1, size))[drawn[:, None] + np.arange(size)]",
        "train_rows.py",
    ),
    "export: another block size": (
        "train/hf.py",
        '"block_size": spec.block_size',
        '"block_size": 15',
        "train_export.py -k reads_back",
    ),
    "mask token: padding": (
        "train/spec.py",
        "candidate not in forbidden",
        "candidate is not None",
        "train_model.py -k mask_token",
    ),
    "walk: forgets the target's own token": (
        "train/walk.py",
        "accepted_A[at]) + 1,",
        "accepted_A[at]) or 1,",
        "train_walk.py",
    ),
    "walk: not clipped": (
        "train/walk.py",
        "min(int(accepted_A[at]) + 1, int(drafts.room_A[at]))",
        "int(accepted_A[at]) + 1",
        "train_walk.py",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_flipped_line_turns_its_test_red(name: str, tmp_path: Path) -> None:
    file, old, new, where = MUTATIONS[name]
    for folder in ("extract", "train", "shards", "tools", "tests", "configs", "typings"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = (tmp_path / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    tests = [w if w.startswith("-") or not w.endswith(".py") else f"tests/test_{w}" for w in where.split()]
    # `typings` holds the package under its import name, before any installed one.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "typings"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    (tmp_path / file).write_text(text.replace(old, new))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-3000:]  # 1: tests ran and failed; 2 would be a broken collection
