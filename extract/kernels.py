"""Sample boundaries for the three mixers of a packed row, and which kernel each of them uses.

transformers looks its delta rule and convolution up as module globals and its attention up by name, so these are
replaced in place; outside `boundaries` they do what they did before. On a GPU the fast kernels take the boundaries
themselves; on the CPU the stock reference runs sample by sample.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from dflash_offline.shards.errors import UsageError

PACKED_ATTENTION = "packed_sdpa"
OLDEST_FLA = "0.6.0"
"""What was tested; before it kernels raced on Blackwell (fla-org/flash-linear-attention#1228)."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Where the samples of the current packed row start and end."""

    lengths: list[int]
    cu_seqlens: Tensor
    """int32 [samples + 1], on the device. New for every row: fla caches by object."""
    cu_seqlens_cpu: Tensor


_row: _Row | None = None
_stock = False


@contextmanager
def stock() -> Iterator[None]:
    """Within the block, forwards without boundaries have transformers' own convolution; it is what ours is held to."""
    global _stock
    _stock = True
    try:
        yield
    finally:
        _stock = False


@contextmanager
def boundaries(lengths: Sequence[int], device: torch.device) -> Iterator[None]:
    """Within the block, forwards of one row treat it as samples of these lengths. One thread of a process at a time."""
    global _row
    _row = _row_of(lengths, device)
    try:
        yield
    finally:
        _row = None


def _row_of(lengths: Sequence[int], device: torch.device) -> _Row:
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return _Row(lengths=list(lengths), cu_seqlens=sent(cu, device), cu_seqlens_cpu=cu)


@lru_cache(maxsize=8)
def _batch(samples: int, tokens: int, device: torch.device) -> _Row:
    """A batch of samples of one length, side by side."""
    with torch.inference_mode(False):  # it is kept
        return _row_of([tokens] * samples, device)


def own(device: torch.device) -> None:
    """Make a GPU this thread's own: Triton's kernels and events go there, whatever tensors they are given."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on `device`. From memory that is not pinned, a GPU's queue would have to be empty first."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def has_delta_rule(model_type: str) -> bool:
    """Whether some layers of the family are Gated DeltaNet."""
    return model_type.startswith("qwen3_5")


def install(config: Any, device: torch.device, allow_slow: bool, hybrid: bool = False) -> str:
    """Make decoders of `config` respect `boundaries`. Returns which kernels will run, for the manifest.

    `hybrid`: for hybrid.HybridCapture, whose convolution is its own.

    Raises UsageError when a fast kernel is missing on a GPU, with the package's own import error.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    used = {"attention": "torch sdpa"}
    if has_delta_rule(config.model_type):
        module = _modeling()
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
            if not hasattr(module, name):
                raise UsageError(f"transformers: {module.__name__}.{name} is gone; use transformers 5.17 to 5.24")
        rule, conv = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn
        if getattr(rule, "is_ours", False):
            rule, conv = rule.stock, conv.stock
        fast_rule, fast_conv = (None, None) if device.type == "cpu" else _fast_kernels(allow_slow)
        module.torch_chunk_gated_delta_rule = _ours(
            rule, _delta_rule(_reference(rule), fast_rule, config.linear_num_key_heads)
        )
        module.causal_conv1d_fn = _ours(conv, _convolution(_reference(conv), fast_conv))
        used["delta_rule"] = fla_rule(config.linear_value_head_dim) if fast_rule else "torch reference"
        used["conv"] = "fla triton causal_conv1d" if fast_conv else "torch reference"
        if hybrid and device.type == "cuda":
            used["conv"] = "dflash-offline triton"
    return ", ".join(f"{k}: {v}" for k, v in sorted(used.items()))


def fla_rule(width: int) -> str:
    """fla itself takes flash_qla for heads of 128 where it is installed, and says so only in a log."""
    return "fla chunk_gated_delta_rule" + (" by flash_qla" if has_flash_qla(width) else "")


def has_flash_qla(width: int = 128) -> bool:
    """Whether fla may take it, for heads of `width`."""
    if width != 128 or os.environ.get("FLA_FLASH_QLA", "1") == "0":
        return False
    return importlib.util.find_spec("flash_qla") is not None


def import_ahead() -> None:
    """What `install` and the first row of a hybrid import, for seconds. If anything is wrong with it, they say so."""
    with suppress(Exception):  # a broken extension may raise anything
        _modeling()
    with suppress(Exception):
        if has_flash_qla():
            _flash_qla()


def _modeling() -> Any:
    """transformers' module of the hybrid, which imports fla where it is."""
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def _flash_qla() -> Any:
    return importlib.import_module("flash_qla")


def compile_flash_qla(rows: Sequence[tuple[Sequence[int], tuple[Tensor, ...]]]) -> None:
    """Where fla may take flash_qla, have it compile for rows of these lengths and heads side by side: 20 s each.

    By its own function: fla's could fall back to Triton, whose autotuner must have one thread. What goes wrong is not
    raised: the caller meets it again.
    """
    q, _, v, *_ = rows[0][1]
    if not has_flash_qla(v.shape[-1]):
        return

    @torch.inference_mode()
    def run(lengths: Sequence[int], heads: tuple[Tensor, ...]) -> None:
        _flash_qla().chunk_gated_delta_rule(*heads, cu_seqlens=_row_of(lengths, q.device).cu_seqlens)

    with ThreadPoolExecutor(len(rows), initializer=own, initargs=(q.device,)) as pool:
        for lengths, heads in rows:
            pool.submit(run, lengths, heads)


def _ours(stock: Any, function: Any) -> Any:
    function.is_ours, function.stock = True, stock
    return function


def _reference(stock: Any) -> Any:
    """The torch function under transformers' kernel selection, which picks fla by import, whatever the device."""
    return getattr(stock, "__wrapped__", stock)


def check_packages(model_type: str, device: str, allow_slow: bool) -> None:
    """Raises UsageError where a GPU would have to do without fla, as far as can be told without opening it."""
    if device.startswith("cuda") and has_delta_rule(model_type) and not allow_slow and (fault := fla_fault()):
        raise _refusal(fault)


def fla_fault() -> str:
    """Why fla cannot be used, as far as its metadata tells; "" where nothing is against it."""
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return "not installed"
    return f"fla-core is {found}, expected {OLDEST_FLA} or newer" if Version(found) < Version(OLDEST_FLA) else ""


def _refusal(why: str) -> UsageError:
    return UsageError(
        f"flash-linear-attention cannot be used ({why}); pip install -U 'flash-linear-attention>={OLDEST_FLA}', "
        "or pass --allow-slow True to run many times slower"
    )


def _fast_kernels(allow_slow: bool) -> tuple[Any, Any]:
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        if fault := fla_fault():
            raise ImportError(fault)
    except Exception as error:  # a broken extension may raise anything at import, and its own words help most
        if allow_slow:
            return None, None
        raise _refusal(f"{type(error).__name__}: {error}") from error
    return chunk_gated_delta_rule, causal_conv1d


def _delta_rule(reference: Any, fast: Any, groups: int) -> Callable[..., Any]:
    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        row = _row
        if fast is not None and q.is_cuda and kwargs.get("initial_state") is None:
            # Without boundaries every batch row is one sample. fla does the same without any, by kernels of their own
            # that take as long to compile again.
            batch, repeats = q.shape[:2], q.shape[2] // groups
            cut = row or _batch(*batch, q.device)
            out, _ = fast(
                # transformers 5.17 repeats the heads of a group, for which the kernels would be compiled once more.
                *(x.reshape(1, -1, *x.shape[2:]) for x in (q[:, :, ::repeats], k[:, :, ::repeats], v)),
                g=g.reshape(1, -1, g.shape[2]),
                beta=beta.reshape(1, -1, beta.shape[2]),
                use_qk_l2norm_in_kernel=kwargs.get("use_qk_l2norm_in_kernel", False),
                output_final_state=False,
                cu_seqlens=cut.cu_seqlens,
                cu_seqlens_cpu=cut.cu_seqlens_cpu,
            )
            return out.view(*batch, *out.shape[2:]), None
        kwargs.pop("cu_seqlens", None)
        if row is None:
            return reference(q, k, v, g=g, beta=beta, **kwargs)
        return _by_sample(reference, row, q, k, v, g, beta, **kwargs), None

    return chunk_gated_delta_rule


def _by_sample(
    reference: Any, row: _Row, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> Tensor:
    shared = v.shape[2] // q.shape[2]  # transformers 5.17 wants as many of the one as of the other
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    pieces = zip(*(torch.split(x, row.lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)
    parts = [reference(qi, ki, vi, g=gi, beta=bi, **kwargs)[0] for qi, ki, vi, gi, bi in pieces]
    return torch.cat(parts, dim=1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule that `install` chose, for q and k [1, P, G, d] of unit length and v [1, P, V, d]. [P, V, d]"""
    module = _modeling()
    out, _ = module.torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta)
    return out[0]


def reference_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """As `delta_rule`, by transformers' reference, sample by sample."""
    module = _modeling()
    assert _row is not None
    return _by_sample(_reference(module.torch_chunk_gated_delta_rule.stock), _row, q, k, v, decay, beta)[0]


def _convolution(reference: Any, fast: Any) -> Callable[..., Tensor]:
    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        row = _row
        if fast is not None and x.is_cuda and not (row is None and _stock):
            out, _ = fast(
                x.transpose(1, 2),
                weight,
                bias,
                activation=kwargs.get("activation"),
                backend="triton",
                cu_seqlens=None if row is None else row.cu_seqlens,
                cu_seqlens_cpu=None if row is None else row.cu_seqlens_cpu,
            )
            return out.transpose(1, 2)
        if row is None:
            return reference(x, weight, bias, **kwargs)
        return torch.cat([reference(p, weight, bias, **kwargs) for p in torch.split(x, row.lengths, dim=2)], dim=2)

    return causal_conv1d_fn


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of each sample with itself. query [1, H, P, d], key and value [1, Hkv, P, d] -> [1, P, H, d]."""
    row = _row
    if row is None or mask is not None:
        raise RuntimeError("packed attention needs sample boundaries and no mask")
    if query.is_cuda and query.dtype == torch.bfloat16:
        # Per sample, cuDNN would make a plan for every length it has not met.
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        cu, longest = row.cu_seqlens, max(row.lengths)
        out, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scaling
        )
        return out[None], None
    pieces = zip(*(torch.split(x, row.lengths, dim=2) for x in (query, key, value)), strict=True)
    own = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in pieces
    ]
    return torch.cat(own, dim=2).transpose(1, 2).contiguous(), None
