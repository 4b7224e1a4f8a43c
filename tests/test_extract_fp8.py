"""Checkpoints quantised in FP8 blocks are read as exactly what they say; anything else quantised is refused by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import arguments, extract
from safetensors.torch import load_file, save_file
from targets import capture, decoder, write_chats, write_target
from test_extract_states import LAYERS, assert_same_bf16, samples, stock
from torch import Tensor

from dflash_offline.extract.fp8 import SCALE, dequantise
from dflash_offline.extract.target import open_target
from dflash_offline.extract.weights import check
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError


def quantise(weight_OI: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """By plain loops over blocks: float8 values, fp32 scales, and their fp32 product."""
    o, i = weight_OI.shape
    values = torch.empty(o, i, dtype=torch.float8_e4m3fn)
    scales, product = torch.empty(-(-o // rows), -(-i // columns)), torch.empty(o, i)
    for a in range(0, o, rows):
        for b in range(0, i, columns):
            block = weight_OI[a : a + rows, b : b + columns].float()
            scale = block.abs().amax() / 448 * 1.1
            values[a : a + rows, b : b + columns] = (block / scale).to(torch.float8_e4m3fn)
            scales[a // rows, b // columns] = scale
            product[a : a + rows, b : b + columns] = values[a : a + rows, b : b + columns].float() * scale
    return values, scales, product


def is_matrix(name: str, tensor: Tensor) -> bool:
    """What a checkpoint in FP8 has quantised."""
    return "layers." in name and tensor.dim() == 2


def write_fp8(
    folder: Path, block: tuple[int, int], family: str = "qwen3_5", prefix: str = "model.", wide: int = 1,
    which: Callable[[str, Tensor], bool] = is_matrix,
) -> Any:  # fmt: skip
    """A target in FP8, its tensors in two files. Returns the fp32 model whose weights are the dequantised ones."""
    net = copy.deepcopy(write_target(folder, family, prefix, wide=wide))
    path = folder / "model.safetensors"
    tensors, whole = load_file(path), dict(net.named_parameters())
    for name in [n for n in tensors if which(n, tensors[n])]:
        values, scales, product = quantise(tensors[name], *block)
        tensors[name], tensors[name + SCALE] = values, scales
        whole[name if name == "lm_head.weight" else "model." + name.removeprefix(prefix)].data = product
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                     "weight_block_size": list(block)}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    path.unlink()
    for n, part in enumerate((lambda name: name.endswith(SCALE), lambda name: not name.endswith(SCALE)), 1):
        some = {name: t.contiguous() for name, t in tensors.items() if part(name)}
        save_file(some, folder / f"model-0000{n}-of-00002.safetensors", metadata={"format": "pt"})
    return net


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("block", [(128, 128), (32, 48)])
def test_states_equal_the_stock_model_with_the_dequantised_weights(
    tmp_path: Path, family: str, block: tuple[int, int]
) -> None:
    """Also where the last block of a row or column is cut."""
    net = write_fp8(tmp_path / "t", block, family)
    assert_same_bf16(capture(tmp_path / "t", LAYERS)(samples())[1], stock(net, samples()[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_product_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    net = write_fp8(tmp_path / "t", (32, 48), prefix="model.language_model.")
    target = open_target(str(tmp_path / "t"), None)
    check(target, max(LAYERS), packed=True)
    model = decoder(tmp_path / "t", max(LAYERS), dtype)
    wanted = dict(net.model.named_parameters())
    for name, tensor in model.named_parameters():
        want = wanted[name].to(dtype) if is_matrix(name, tensor) or dtype == torch.float32 else wanted[name]
        assert torch.equal(tensor.to(want.dtype), want), name
        assert tensor.dtype == dtype


def test_a_cache_from_fp8_says_so(tmp_path: Path) -> None:
    write_fp8(tmp_path / "t", (128, 128))
    write_chats(tmp_path / "chats.jsonl", 6)
    assert extract(*arguments(tmp_path, tmp_path / "c")).returncode == 0
    cache = Cache(tmp_path / "c")
    assert cache.manifest.target["quantised"] == {"method": "fp8", "block": [128, 128]}
    assert "quantization_config" not in cache.target_config
    assert cache.target_tensors()["lm_head"].dtype == torch.bfloat16


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})


NAME = "model.layers.1.mlp.up_proj.weight"
OTHER = "model.layers.1.mlp.up_proj.input_scale"


def rescale(scale: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda t: NAME + SCALE in t and t.update({NAME + SCALE: scale})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME + SCALE, 0), rf"missing {NAME}{SCALE}; {NAME} is quantised"),
        (rescale(torch.ones(2, 2)), r"F32 \[2, 2\], expected floats \[1, 1\]"),
        (rescale(torch.ones(1, 1).int()), r"is I32 \[1, 1\], expected floats"),
        (lambda t: t.pop(NAME, 0), rf"missing {NAME}"),
        (lambda t: NAME in t and t.update({OTHER: torch.ones(1)}), rf"unexpected {OTHER}"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    write_fp8(tmp_path / "t", (128, 128))
    change_tensors(tmp_path / "t", change)
    with pytest.raises(UsageError, match=message):
        check(open_target(str(tmp_path / "t"), None), max(LAYERS), packed=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by gptq"),
        ({"quant_method": "fp8"}, "quantised by fp8, weight_block_size None"),
        ({"quant_method": "compressed-tensors"}, "quantised by compressed-tensors"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_target(tmp_path / "t")
    path = tmp_path / "t" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(UsageError, match=message):
        open_target(str(tmp_path / "t"), None)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_that_are_none_are_refused(bad: float) -> None:
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(UsageError, match=r"w_scale_inv: holds .*; expected finite scales above 0"):
        dequantise("w", weight, torch.tensor([[1.0, bad]]), (4, 2))


def test_swapped_files_load_the_same_and_cut_ones_are_named(tmp_path: Path) -> None:
    """B36: names come from the files' own headers, whatever the files are called."""
    net = write_fp8(tmp_path / "t", (128, 128))
    one, two = sorted((tmp_path / "t").glob("*.safetensors"))
    other = tmp_path / "other"
    one.rename(other), two.rename(one), other.rename(two)
    assert_same_bf16(capture(tmp_path / "t", LAYERS)(samples())[1], stock(net, samples()[1]))
    one.write_bytes(one.read_bytes()[:-9])
    with pytest.raises(UsageError, match=f"{one.name}: not a whole safetensors file"):
        open_target(str(tmp_path / "t"), None)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_moe", "mixtral"])
def test_mixtures_of_experts_are_refused_by_name(tmp_path: Path, model_type: str) -> None:
    write_target(tmp_path / "t", "qwen3")
    path = tmp_path / "t" / "config.json"
    path.write_text(json.dumps({"model_type": model_type, "architectures": ["X"]}))
    with pytest.raises(UsageError, match=r"mixture of experts|model type mixtral; expected one of"):
        open_target(str(tmp_path / "t"), None)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_a_missing_tensor_is_named_under_every_prefix(tmp_path: Path, prefix: str) -> None:
    """B36: never a weight that keeps its random initial values."""
    write_target(tmp_path / "t", "qwen3_5", prefix)
    gone = f"{prefix}layers.3.self_attn.k_proj.weight"
    change_tensors(tmp_path / "t", lambda t: t.pop(gone))
    with pytest.raises(UsageError, match=f"missing {gone}"):
        check(open_target(str(tmp_path / "t"), None), max(LAYERS), packed=True)
