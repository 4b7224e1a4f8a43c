"""Captured states against the stock model, for every family, batching and checkpoint layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from targets import capture, write_target

from dflash_offline.extract import kernels
from dflash_offline.extract.forward import batches
from dflash_offline.extract.layers import choose_layers, layer_rule
from dflash_offline.extract.target import identity, open_target
from dflash_offline.extract.weights import check
from dflash_offline.shards.errors import UsageError

LAYERS = (1, 3, 6)
LENGTHS = (3, 67, 130, 1, 40)
CPU = torch.device("cpu")


def samples(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (n,), generator=generator, dtype=torch.int32) for n in LENGTHS]


@torch.inference_mode()
def stock(net: Any, ids: torch.Tensor, layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    """fp32 [T, L, D]: hidden_states[id + 1] of the whole, unmodified model, one sample at a time."""
    out = net(input_ids=ids[None].long(), output_hidden_states=True, use_cache=False)
    return torch.stack([out.hidden_states[i + 1][0] for i in layers], dim=1)


def assert_same_bf16(found: torch.Tensor, expected_fp32: torch.Tensor) -> None:
    """Equal after rounding to bf16, but for values whose fp32 noise straddles a rounding boundary."""
    expected = expected_fp32.to(torch.bfloat16)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected_fp32, rtol=2**-8, atol=1e-5)
    assert (found != expected).sum() <= 1 + 0.002 * found.numel()


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_states_equal_hidden_states_of_the_stock_model(tmp_path: Path, family: str, batching: str) -> None:
    """B31."""
    net = write_target(tmp_path / "t", family)
    expected = [stock(net, ids) for ids in samples()]
    for found, want in zip(capture(tmp_path / "t", LAYERS, batching)(samples()), expected, strict=True):
        assert_same_bf16(found, want)
    # A neighbour layer is not close: an index that is off by one cannot pass.
    off_by_one = stock(net, samples()[1], tuple(i + 1 for i in LAYERS))
    assert (off_by_one - expected[1]).abs().mean() > 0.05 * expected[1].abs().mean()


def test_packing_without_boundaries_leaks(tmp_path: Path) -> None:
    """B29: the negative of the test above: each mixer really needs the boundaries."""
    net = write_target(tmp_path / "t", "qwen3_5")
    run = capture(tmp_path / "t", LAYERS)
    ids = samples()
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        import transformers.models.qwen3_5.modeling_qwen3_5 as module

        ours = getattr(module, name)
        setattr(module, name, lambda *a, ours=ours, **k: _without_row(ours, a, k))
        try:
            leaked = run(ids)[2].float()
        finally:
            setattr(module, name, ours)
        assert (leaked - stock(net, ids[2])).abs().max() > 0.05, name


def _without_row(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    row, kernels._row = kernels._row, None
    try:
        return function(*args, **kwargs)
    finally:
        kernels._row = row


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_states_do_not_depend_on_the_batch(tmp_path: Path, batching: str) -> None:
    write_target(tmp_path / "t", "qwen3_5")
    run = capture(tmp_path / "t", LAYERS, batching)
    together, alone = run(samples()), [run([ids])[0] for ids in samples()]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_every_checkpoint_layout_loads_the_same(tmp_path: Path, prefix: str) -> None:
    """B36."""
    net = write_target(tmp_path / "t", "qwen3_5", prefix)
    assert_same_bf16(capture(tmp_path / "t", LAYERS)(samples())[1], stock(net, samples()[1]))


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), r"missing model\.layers\.2\.mlp\.up_proj\.weight"),
        (lambda t: t.pop("model.embed_tokens.weight"), "no embed_tokens.weight"),
        (lambda t: t.update({"model.layers.1.extra.weight": torch.zeros(2)}), r"unexpected model\.layers\.1\.extra"),
        (lambda t: t.update({"model.layers.99.mlp.up_proj.weight": torch.zeros(2)}), r"unexpected model\.layers\.99"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}), r"is \[2, 2\], the config"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.float8_e4m3fn)}),
            "quantised",
        ),
        (lambda t: t.pop("lm_head.weight"), r"no lm_head\.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(319, 64)}), r"lm_head\.weight is \[319, 64\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    """B36."""
    write_target(tmp_path / "t", "qwen3_5")
    edit(tmp_path / "t", change)
    with pytest.raises(UsageError, match=message):
        check(open_target(str(tmp_path / "t"), None), max(LAYERS), packed=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "sliding.*use batching = padded"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}}, "rope_type dynamic"),
    ],
)
def test_layers_that_packing_would_change_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_target(tmp_path / "t", "qwen3")
    path = tmp_path / "t" / "config.json"
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps({**config, **change}))
    with pytest.raises(UsageError, match=message):
        check(open_target(str(tmp_path / "t"), None), max(LAYERS), packed=True)


def test_a_changed_value_in_any_tensor_changes_the_identity(tmp_path: Path) -> None:
    write_target(tmp_path / "t", "qwen3")
    before = identity(open_target(str(tmp_path / "t"), None))
    for name in ("model.layers.5.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"):
        edit(tmp_path / "t", lambda t, name=name: t[name].view(-1)[0].neg_().add_(1))
        after = identity(open_target(str(tmp_path / "t"), None))
        assert after != before
        before = after


def test_a_cut_weight_file_is_named(tmp_path: Path) -> None:
    write_target(tmp_path / "t", "qwen3")
    path = tmp_path / "t" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"model\.safetensors: not a whole safetensors file"):
        open_target(str(tmp_path / "t"), None)


@pytest.mark.parametrize(
    ("layers", "n", "ids"),
    [
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (40, 5, [1, 10, 19, 28, 37]),
        (48, 5, [1, 12, 23, 34, 45]),
        (28, 5, [1, 7, 13, 19, 25]),
        (24, 5, [1, 6, 11, 16, 21]),
        (64, 3, [1, 31, 61]),
        (30, 5, [1, 8, 14, 20, 27]),
        (18, 5, [1, 4, 8, 12, 15]),
        (64, 1, [32]),
    ],
)
def test_layer_rule(layers: int, n: int, ids: list[int]) -> None:
    assert list(layer_rule(layers, n)) == ids


def test_layers_that_do_not_fit_are_refused() -> None:
    """B31, B33."""
    with pytest.raises(UsageError, match="duplicates"):
        choose_layers((), 5, 6)
    with pytest.raises(UsageError, match="9, 17, 25, 33 out of range; the target has layers 0 to 7"):
        choose_layers((1, 9, 17, 25, 33), 5, 8)
    with pytest.raises(UsageError, match="-1 out of range"):
        choose_layers((-1,), 5, 8)


def test_batches_keep_order_and_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 40).tolist()
    for padded in (False, True):
        groups = batches([*lengths, 500], 100, padded)
        assert [i for g in groups for i in g] == list(range(41))
        for g in groups:
            cost = max(lengths[i] for i in g) * len(g) if padded and g.stop < 41 else 0
            assert cost <= 100
    assert batches([], 10, False) == []
