"""FP8 multiplied by FP8: as servers do it, held to plain loops over blocks and groups."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import arguments, call, extract
from targets import capture, decoder, write_chats, write_target
from test_extract_fp8 import NAME, change_tensors, is_matrix, write_fp8
from test_extract_states import CPU, LAYERS, samples, stock
from torch import Tensor, nn

from dflash_offline.extract import checks, fp8
from dflash_offline.extract.config import ExtractConfig, TargetConfig
from dflash_offline.extract.runner import start_runner
from dflash_offline.extract.target import open_target
from dflash_offline.extract.weights import check, loaded_bytes, read_weights
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError

BLOCK = (32, 32)
"""Of which the tiny target's matrices are whole, but for the narrow gates of the delta rule."""


def rounded(x_PI: Tensor, columns: int) -> Tensor:
    """By plain loops over tokens and groups: what is left of x in FP8."""
    out_PI = torch.empty_like(x_PI)
    for row, into in zip(x_PI, out_PI, strict=True):
        for at in range(0, len(row), columns):
            group = row[at : at + columns]
            scale = max(float(group.abs().max()), 1e-10) / 448
            into[at : at + columns] = (group / scale).to(torch.float8_e4m3fn).float() * scale
    return out_PI


def quantise_inputs(net: Any) -> None:
    """The stock model with dequantised weights, whose whole matrices see their inputs as FP8 holds them."""
    for name, module in net.named_modules():
        whole = isinstance(module, nn.Linear) and "layers." in name and fp8.is_whole(module.weight.shape, BLOCK)
        if whole and module.bias is None:
            module.register_forward_pre_hook(
                lambda module, given: (rounded(given[0].flatten(0, -2), BLOCK[1]).view_as(given[0]),)
            )


def anything(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2


@pytest.mark.parametrize(
    ("family", "batching", "which"),
    [
        ("qwen3_5", "packed", is_matrix),
        ("qwen3_5", "padded", is_matrix),
        ("qwen3_5", "packed", anything),
        ("qwen3", "packed", is_matrix),
        ("llama", "padded", is_matrix),
    ],
)
def test_states_are_those_of_the_stock_model_with_rounded_inputs(
    tmp_path: Path, family: str, batching: str, which: Callable[[str, Tensor], bool]
) -> None:
    """But for a value here and there that another order of sums puts on the other side of a step of FP8.

    An embedding in FP8 is looked up, not multiplied; a product with a bias is not one of FP8.
    """
    net = write_fp8(tmp_path / "t", BLOCK, family, which=which)
    quantise_inputs(net)
    hybrid = family == "qwen3_5" and batching == "packed"
    found, plain = (
        capture(tmp_path / "t", LAYERS, batching, hybrid, use=use)(samples()) for use in ("native", "dequantise")
    )
    for ids, got, dequantised in zip(samples(), found, plain, strict=True):
        want_TLD = stock(net, ids)
        near, far = checks.relative(want_TLD, got), checks.relative(want_TLD, dequantised)
        assert near[0] < 0.003  # bfloat16 alone is 0.002
        assert all(a < b / 4 for a, b in zip(near, far, strict=True)), (near, far)


def test_a_product_is_the_sum_over_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    x_PI = torch.randn(7, 96, generator=generator)
    values_OI = torch.randn(64, 96, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator) + 0.5
    want_PO = torch.zeros(7, 64)
    for a in range(2):
        for b in range(3):
            block = values_OI[a * 32 : a * 32 + 32, b * 32 : b * 32 + 32].float() * scale[a, b]
            want_PO[:, a * 32 : a * 32 + 32] += rounded(x_PI, 32)[:, b * 32 : b * 32 + 32] @ block.t()
    matrix = fp8.Matrix(values_OI=values_OI, scale=scale, block=BLOCK)
    torch.testing.assert_close(fp8.product(x_PI, matrix), want_PO)
    halves = [
        fp8.Matrix(values_OI=values_OI[32 * a : 32 * a + 32], scale=scale[a : a + 1], block=BLOCK) for a in range(2)
    ]
    assert torch.equal(fp8.product(x_PI, fp8.join(halves)), fp8.product(x_PI, matrix))
    assert fp8.product(x_PI.bfloat16(), matrix).dtype == torch.bfloat16


def test_values_that_are_no_numbers_stay_so() -> None:
    """Such samples must be skipped, not stored as if nothing had been."""
    x_PI = torch.zeros(3, 64)
    x_PI[0, 1], x_PI[1, 40] = torch.nan, torch.inf
    matrix = fp8.Matrix(values_OI=torch.ones(32, 64).to(torch.float8_e4m3fn), scale=torch.ones(1, 2), block=BLOCK)
    finite_PO = torch.isfinite(fp8.product(x_PI, matrix))
    assert not finite_PO[:2].any() and finite_PO[2].all()


def test_whole_matrices_stay_in_fp8(tmp_path: Path) -> None:
    write_fp8(tmp_path / "t", BLOCK)
    state = decoder(tmp_path / "t", max(LAYERS), use="native").state_dict()
    small = {n for n, t in state.items() if t.dtype == torch.float8_e4m3fn}
    matrices = {n for n, t in state.items() if is_matrix(n, t) and not n.endswith(fp8.SCALE)}
    assert {n.split(".")[-2] for n in matrices - small} == {"in_proj_a", "in_proj_b"}
    native, plain = (
        loaded_bytes(open_target(str(tmp_path / "t"), None, use), max(LAYERS), torch.float32)
        for use in ("native", "dequantise")
    )
    assert plain - native == 3 * sum(state[n].numel() for n in small)


def test_a_cache_of_native_products_says_so(tmp_path: Path) -> None:
    write_fp8(tmp_path / "t", BLOCK)
    write_chats(tmp_path / "chats.jsonl", 6)
    native = arguments(tmp_path, tmp_path / "c", **{"target.fp8": "native"})
    done = extract(*native)
    assert done.returncode == 0, done.stderr
    info = Cache(tmp_path / "c").manifest
    assert info.settings["target.fp8"] == "native" and "products: torch reference in fp8" in info.kernels
    audited = call("audit", tmp_path / "c")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    done = extract(*arguments(tmp_path, tmp_path / "c"))
    assert done.returncode == 2 and "target.fp8 was 'native', now None" in done.stderr


def test_a_target_that_is_not_in_fp8_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "t")
    with pytest.raises(UsageError, match=r"target\.fp8 is native, but config\.json does not say"):
        open_target(str(tmp_path / "t"), None, "native")
    write_fp8(tmp_path / "cut", (128, 128))
    with pytest.raises(UsageError, match=r"target\.fp8 is native, but no matrix has whole blocks of \[128, 128\]"):
        check(open_target(str(tmp_path / "cut"), None, "native"), max(LAYERS), packed=True)


@pytest.mark.parametrize("use", ["native", "dequantise"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, use: str) -> None:
    write_fp8(tmp_path / "t", BLOCK)
    change_tensors(tmp_path / "t", lambda t: NAME in t and t[NAME].view(torch.uint8)[3].fill_(0xFF))
    with pytest.raises(UsageError, match=f"{NAME}: holds NaN; fetch it again"):
        decoder(tmp_path / "t", max(LAYERS), use=use)


def test_files_that_change_before_they_are_read_are_named(tmp_path: Path) -> None:
    write_fp8(tmp_path / "t", BLOCK)
    target = open_target(str(tmp_path / "t"), None, "native")
    path = tmp_path / "t" / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="has changed since it was looked at"):
        read_weights(target, max(LAYERS), CPU, torch.float32)
    path.unlink()
    with pytest.raises(UsageError, match="has changed since it was looked at"):
        read_weights(target, max(LAYERS), CPU, torch.float32)


def test_what_steps_of_fp8_hide_does_not_pass_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of a joined matrix in another order: less than the noise of rounding to FP8."""
    write_fp8(tmp_path / "t", BLOCK)
    config = ExtractConfig(target=TargetConfig(path=str(tmp_path / "t"), fp8="native"))
    probed = start_runner(config, LAYERS, CPU).probe
    assert max(probed["noise"]) < 0.001
    right = fp8.join

    def rolled(parts: Sequence[fp8.Matrix]) -> fp8.Matrix:
        return replace(right(parts), scale=right(parts).scale.roll(1, 1))

    monkeypatch.setattr(fp8, "join", rolled)
    with pytest.raises(UsageError, match="away from the stock model's"):
        start_runner(config, LAYERS, CPU)


def test_a_wrong_product_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp8.product
    assert checks.check_product((128, 128), CPU, torch.bfloat16) < 0.005
    monkeypatch.setattr(fp8, "product", lambda x, m: right(x, m) * (1.03 if x.dtype == torch.bfloat16 else 1))
    with pytest.raises(UsageError, match=r"a product in FP8 is .* away from fp32"):
        checks.check_product((128, 128), CPU, torch.bfloat16)
