"""Which kernels run, that it is said, and that a slow or unfit one is refused on a GPU (no GPU is needed to ask)."""

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import arguments, copy_without_shards, extract
from torch import Tensor

from dflash_offline.extract import events, kernels, preflight
from dflash_offline.extract.config import DataConfig, ExtractConfig
from dflash_offline.shards import device, manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError

CUDA = torch.device("cuda")
FAMILY = "qwen3_5_text"
CONFIG = SimpleNamespace(model_type=FAMILY, linear_num_key_heads=16, linear_value_head_dim=128)
SLOW = "attention: torch sdpa, conv: torch reference, delta_rule: torch reference"


@pytest.fixture
def fla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name that imports, and the kernels of the CPU again afterwards."""
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    (tmp_path / "fla" / "modules").mkdir()
    for name in ("__init__", "ops/__init__", "modules/__init__"):
        (tmp_path / "fla" / f"{name}.py").touch()
    (tmp_path / "fla" / "modules" / "causal_conv1d.py").write_text("causal_conv1d = print")
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text("chunk_gated_delta_rule = print")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "version", lambda name: "0.6.1")
    yield tmp_path / "fla"
    for name in [n for n in sys.modules if n == "fla" or n.startswith("fla.")]:
        del sys.modules[name]
    kernels.install(CONFIG, torch.device("cpu"), False)


def test_b34_the_cpu_runs_and_says_on_what(site: Path) -> None:
    assert Cache(site / "cache").manifest.kernels == SLOW


def test_b34_fast_kernels_are_named(fla: Path) -> None:
    assert kernels.install(CONFIG, CUDA, False) == (
        "attention: torch sdpa, conv: fla triton causal_conv1d, delta_rule: fla chunk_gated_delta_rule"
    )
    own = kernels.install(CONFIG, CUDA, False, hybrid=True)
    assert own == "attention: torch sdpa, conv: dflash-offline triton, delta_rule: fla chunk_gated_delta_rule"


@pytest.mark.parametrize("broken", ["extension", "missing", "old"])
def test_b34_a_slow_path_is_refused_in_the_package_s_own_words(
    fla: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "libcudart.so.13: cannot open shared object file"
    if broken == "extension":
        (fla / "modules" / "causal_conv1d.py").write_text(f"raise OSError('{said}')")
    elif broken == "missing":
        (fla / "ops" / "gated_delta_rule.py").unlink()
        said = "No module named 'fla.ops.gated_delta_rule'"
    else:
        monkeypatch.setattr(kernels, "version", lambda name: "0.5.9")
        said = "fla-core is 0.5.9, expected 0.6.0 or newer"
        with pytest.raises(UsageError, match=said):  # before the dataset is read
            kernels.check_packages(FAMILY, "cuda:0", False)
    with pytest.raises(UsageError, match=rf"Error: {said}\); pip install -U .*--allow-slow True"):
        kernels.install(CONFIG, CUDA, False)
    assert kernels.install(CONFIG, CUDA, True) == SLOW


def test_a_gpu_that_torch_does_not_find_is_no_reason_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    assert preflight.choose_devices(ExtractConfig(cache=tmp_path)) == ["cpu"]
    monkeypatch.setattr(device, "DRIVER", tmp_path)
    with pytest.raises(UsageError, match=r"torch .* finds no GPU, though .* or use --devices cpu"):
        preflight.choose_devices(ExtractConfig(cache=tmp_path))
    assert preflight.choose_devices(ExtractConfig(cache=tmp_path, devices="cpu")) == ["cpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert preflight.choose_devices(ExtractConfig(cache=tmp_path)) == ["cpu"]


def test_what_fla_hands_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.fla_rule(128) == "fla chunk_gated_delta_rule"
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name)  # type: ignore[attr-defined]
    assert kernels.fla_rule(128) == "fla chunk_gated_delta_rule by flash_qla"
    assert kernels.fla_rule(64) == "fla chunk_gated_delta_rule"
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    assert kernels.fla_rule(128) == "fla chunk_gated_delta_rule"


def test_flash_qla_compiles_for_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own function, whose faults are left to whoever calls the rule."""
    met, both = dict[int, list[int]](), threading.Barrier(2, timeout=10)

    def rule(*heads: Tensor, cu_seqlens: Tensor) -> None:
        both.wait()
        met[len(heads)] = cu_seqlens.tolist()
        raise RuntimeError("no compiler")

    rows = [([2, 3], (torch.zeros(1),) * 5), ([4], (torch.zeros(1),) * 4)]
    kernels.compile_flash_qla(rows)  # not installed
    monkeypatch.setitem(sys.modules, "flash_qla", SimpleNamespace(chunk_gated_delta_rule=rule))
    monkeypatch.setattr(kernels, "has_flash_qla", lambda *_: True)
    kernels.compile_flash_qla(rows)
    assert met == {5: [0, 2, 5], 4: [0, 4]}


def test_kernels_of_every_run_are_in_the_manifest(site: Path, tmp_path: Path) -> None:
    copy_without_shards(site, tmp_path / "c")
    for before in ("other", f"other; {SLOW}"):
        found = manifest.read(tmp_path / "c")
        manifest.write(tmp_path / "c", replace(found, kernels=before, complete=False, shards=[], index={}))
        done = extract(*arguments(site, tmp_path / "c"))
        assert done.returncode == 0 and ("begun with other kernels: other" in done.stdout) == (before == "other")
        assert (
            f"cpu: loading {site / 't'}" in done.stdout
            and f"cpu: loaded; {SLOW}; the first rows compile" in done.stdout
        )
        assert Cache(tmp_path / "c").manifest.kernels == f"other; {SLOW}"
        stages = [e["words"] for e in events.read(tmp_path / "c") if e["event"] == "stage"]
        assert stages[-1] == "probed: its states are the stock model's"
        for path in (tmp_path / "c" / "shards").glob("*.arrow"):
            path.unlink()


def test_rows_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    """The widths of Qwen3.6-27B."""
    heads = {"hidden_size": 5120, "linear_num_key_heads": 16, "linear_num_value_heads": 48}
    config = SimpleNamespace(**heads, linear_key_head_dim=128, linear_value_head_dim=128)
    target: Any = SimpleNamespace(model_type=FAMILY, config=config)

    def check(where: str, layers: int = 5, longest: int = 4096, **settings: Any) -> None:
        config = ExtractConfig(cache=tmp_path, data=DataConfig(max_length=longest), **settings)
        preflight.check_rows(config, [where], target, layers)

    check("cuda:0", token_budget=167_772, longest=167_772)
    check("cuda:0", layers=2, token_budget=209_715)
    check("cpu", layers=2, token_budget=419_430)
    with pytest.raises(UsageError, match=r"token_budget = 209716: expected at most 209715: "):
        check("cuda:0", layers=2, token_budget=209_716)
    with pytest.raises(UsageError, match=r"data.max_length = 167773: expected at most 167772: "):
        check("cpu", longest=167_773)
