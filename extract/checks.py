"""Whether states can be right: against the stock model before the first task, and on the way to the disk.

A fault here stops the run: wrong states train nicely and serve badly.

Legend: T tokens, P tokens of a row, L captured layers, D hidden, B batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from dflash_offline.extract import fp8, kernels
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.frames import FRAME_TOKENS, decode_frame, spans
from dflash_offline.shards.quality import chan_snr, snr

PROBE_LENGTHS = (5, 37, 64, 150)
ROUNDING = 2**-10
"""Relative distance that storing equal states as bfloat16 may make."""
RULE = 0.02
"""So far may a delta rule in bfloat16 be from one in fp32; on an H200 both fla's and flash_qla's are 0.3 % away."""
FIDELITY_TOKENS = 4 * FRAME_TOKENS
"""So much of a sample is decoded again."""
_MARGIN = 10.0
"""dB that a single sample may be worse than what was measured on the calibration's tokens."""
_REMEMBERED = 4096


class StatesError(RunError):
    """States that no model gives; going on would store more of them."""


def probe_samples(vocab: int) -> list[Tensor]:
    """The same random ids for everybody."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (n,), generator=generator, dtype=torch.int32) for n in PROBE_LENGTHS]


@fp8.unrounded()
def stock_states(model: nn.Module, layers: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 [P, L, D] of the probe's samples by the unmodified modules: each alone, in a right-padded batch, and alone
    again with noise of the compute type's last bit before every layer."""
    samples = probe_samples(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    width = max(PROBE_LENGTHS)
    ids_BT = torch.stack([torch.nn.functional.pad(ids, (0, width - len(ids))) for ids in samples])
    with _stock_attention(model), kernels.stock():
        alone = torch.cat([_hooked(model, layers, ids[None], device)[0] for ids in samples])
        rows = zip(_hooked(model, layers, ids_BT, device), PROBE_LENGTHS, strict=True)
        batch = torch.cat([row[:n] for row, n in rows])
        with _last_bits_lost(model, device):
            noisy = torch.cat([_hooked(model, layers, ids[None], device)[0] for ids in samples])
    return alone, batch, noisy


@contextmanager
def _stock_attention(model: nn.Module) -> Iterator[None]:
    config: Any = model.config
    before, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _last_bits_lost(model: nn.Module, device: torch.device) -> Iterator[None]:
    """What any other order of roundings does to the states: the ten or so of a layer, at once."""
    generator = torch.Generator(device).manual_seed(0)

    def blur(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0]
        noise = torch.randn(x.shape, generator=generator, device=device)
        return ((x * (1 + torch.finfo(x.dtype).eps / 2 * noise)).to(x.dtype), *args[1:]), kwargs

    decoder: nn.ModuleList = model.layers  # type: ignore[assignment]
    handles = [layer.register_forward_pre_hook(blur, with_kwargs=True) for layer in decoder]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def _hooked(model: nn.Module, layers: Sequence[int], ids_BT: Tensor, device: torch.device) -> Tensor:
    """bf16 [B, T, L, D]."""
    kept: dict[int, Tensor] = {}

    def keep(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            kept[i] = output if isinstance(output, Tensor) else output[0]

        return hook

    decoder: nn.ModuleList = model.layers  # type: ignore[assignment]
    handles = [decoder[i].register_forward_hook(keep(i)) for i in layers]
    try:
        model(input_ids=ids_BT.to(device, torch.long), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([kept[i] for i in layers], dim=2).to(torch.bfloat16)


@fp8.unrounded()
def probe(
    capture: Callable[[Sequence[Tensor]], Tensor], stock: tuple[Tensor, ...], layers: Sequence[int], vocab: int
) -> dict[str, list[float]]:
    """Compare `capture` with `stock_states`, layer by layer. Returns the relative distances, and what noise makes.

    Raises UsageError naming the first layer that is further than twice the noise: the larger of the distances that the
    stock model's own states keep between two batch shapes and with their last bits lost.
    """
    alone, found_PLD = stock[0], capture(probe_samples(vocab))
    parts = torch.split(alone, list(PROBE_LENGTHS))
    finite_SL = torch.stack([torch.isfinite(part).all(dim=0).all(dim=-1) for part in parts])
    sound = finite_SL.all(dim=1)
    if not bool(sound.any()):
        layer = next((i for i, fine in zip(layers, finite_SL.any(dim=0), strict=True) if not fine), layers[-1])
        raise UsageError(f"the target's states after layer {layer} are finite for no sample tried; check its files")
    kept = torch.repeat_interleave(sound, torch.tensor(PROBE_LENGTHS, device=sound.device))
    distance = relative(alone[kept], found_PLD[kept])
    noise = [max(pair) for pair in zip(*(relative(alone[kept], other[kept]) for other in stock[1:]), strict=True)]
    for layer, far, near in zip(layers, distance, noise, strict=True):
        if not far <= 2 * near + ROUNDING:
            raise UsageError(
                f"states after layer {layer} are {far:.2%} away from the stock model's, and noise makes {near:.2%}; "
                f"try --batching padded or other kernel versions, and report this"
            )
    if fault := layer_fault(found_PLD[kept], layers):
        raise UsageError(f"probe: {fault}; check the target's files")
    _look_for_leaks(capture, found_PLD, layers, vocab)
    return {"distance": distance, "noise": noise}


def _look_for_leaks(
    capture: Callable[[Sequence[Tensor]], Tensor], found_PLD: Tensor, layers: Sequence[int], vocab: int
) -> None:
    """Raise UsageError when a sample's states change with the others of its row, which no rounding excuses.

    In bfloat16 a leak is smaller than the noise between batch shapes; here the shapes are the same.
    """
    *others, last = probe_samples(vocab)
    changed = capture([*((ids + 1) % vocab for ids in others), last])
    first, second, again = (x[-len(last) :].nan_to_num() for x in (found_PLD, changed, capture([*others, last])))
    # `again` is the same bits wherever kernels are deterministic.
    for layer, far, near in zip(layers, relative(first, second), relative(first, again), strict=True):
        if far > 2 * near:
            raise UsageError(
                f"a sample's states after layer {layer} depend on the samples beside it: other ones move them by "
                f"{far:.2g}, and the same ones by {near:.2g}; try --batching padded or other kernel versions, and "
                "report this"
            )


def check_rule(config: Any, device: torch.device, dtype: torch.dtype) -> float:
    """Relative distance of the delta rule that will run from transformers' reference in fp32, on random heads.

    The larger of a row of several samples and a row of one, which some kernels compute in another way: both are
    compiled here. `stock_states` computes by the same kernels, so they say nothing of them. Raises UsageError beyond
    RULE.
    """
    rows = [(lengths, _heads(config, lengths, device, dtype)) for lengths in (PROBE_LENGTHS, PROBE_LENGTHS[-1:])]
    if device.type == "cuda":
        kernels.compile_flash_qla(rows)
    distance = max(_rule_distance(lengths, heads) for lengths, heads in rows)
    if not distance <= RULE:
        raise UsageError(
            f"the delta rule's kernel is {distance:.2%} away from transformers' reference, {RULE:.0%} is the most; "
            "install other versions of flash-linear-attention and triton, and report this"
        )
    return distance


@torch.inference_mode()
def check_product(block: tuple[int, int], device: torch.device, dtype: torch.dtype) -> float:
    """Relative distance of a product in FP8 from the same in fp32; the probe is of products without rounding.

    Raises UsageError beyond RULE, and where torch refuses it.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = 2 * block[0], 5 * block[1]
    x_PI = torch.randn(PROBE_LENGTHS[-1], columns, generator=generator).to(dtype)
    values_OI = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    matrix = fp8.Matrix(values_OI=values_OI, scale=torch.rand(2, 5, generator=generator) + 0.5, block=block)
    there = replace(matrix, values_OI=values_OI.to(device), scale=matrix.scale.to(device))
    try:
        found_PO = fp8.product(x_PI.to(device), there)
    except (RuntimeError, ValueError) as error:  # whatever torch has against it
        raise UsageError(f"target.fp8 is native, and torch says: {error}; use --target.fp8 dequantise") from error
    (distance,) = relative(fp8.product(x_PI.float(), matrix)[:, None], found_PO.cpu()[:, None])
    if not distance <= RULE:
        raise UsageError(
            f"a product in FP8 is {distance:.2%} away from fp32; use --target.fp8 dequantise, and report this"
        )
    return distance


def _heads(config: Any, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random q, k, v, decay and beta of a row."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    generator = torch.Generator().manual_seed(0)

    def heads(n: int, width: int) -> Tensor:
        return torch.randn(1, sum(lengths), n, width, generator=generator).to(device)

    q, k = (torch.nn.functional.normalize(heads(keys, config.linear_key_head_dim), dim=-1).to(dtype) for _ in range(2))
    v = heads(values, config.linear_value_head_dim).to(dtype)
    decay = -torch.nn.functional.softplus(heads(values, 1)[..., 0])
    return q, k, v, decay, heads(values, 1)[..., 0].sigmoid().to(dtype)


@torch.inference_mode()
def _rule_distance(lengths: Sequence[int], heads: tuple[Tensor, ...]) -> float:
    q, k, v, decay, beta = heads
    with kernels.boundaries(lengths, q.device):
        found = kernels.delta_rule(q, k, v, decay, beta)
        wanted = kernels.reference_rule(q.float(), k.float(), v.float(), decay, beta.float())
    (distance,) = relative(wanted[:, None].flatten(2), found[:, None].flatten(2))
    return distance


def relative(a_TLD: Tensor, b_TLD: Tensor) -> list[float]:
    """L2 distance of every layer over the size of a."""
    a_TLD, b_TLD = a_TLD.float(), b_TLD.float()
    far_L, size_L = (a_TLD - b_TLD).square().sum(dim=(0, 2)), a_TLD.square().sum(dim=(0, 2))
    return (far_L / size_L.clamp(min=1e-30)).sqrt().tolist()


def layer_fault(states_TLD: Tensor, layers: Sequence[int]) -> str:
    """A layer that is zero, the same for all tokens, or equal to another, of different tokens; "" when none is."""
    pairs = list(combinations(range(len(layers)), 2))
    found = torch.stack(
        [
            *(states_TLD == 0).all(dim=0).all(dim=-1),
            *(states_TLD == states_TLD[:1]).all(dim=0).all(dim=-1),
            *((states_TLD[:, i] == states_TLD[:, j]).all() for i, j in pairs),
        ]
    ).tolist()
    names = [
        *(f"states after layer {i} are all zero" for i in layers),
        *(f"states after layer {i} are the same for every token" for i in layers),
        *(f"states after layers {layers[i]} and {layers[j]} are equal" for i, j in pairs),
    ]
    return next((name for name, there in zip(names, found, strict=True) if there), "")


def is_drawn(key: str, every: int) -> bool:
    """Whether a sample is looked at more closely: one of `every`, by its key."""
    return bool(every) and int(key[:8], 16) % every == 0


class Watch:
    """What a worker remembers of the states it has seen."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, str]] = {}

    def row(self, states_PLD: Tensor, keys: Sequence[str], ids: Sequence[NDArray[np.int32]]) -> None:
        """Raise StatesError when a sample of the row ends in the very state of another: stale or misplaced states."""
        ends = [end - 1 for end in accumulate(map(len, ids))]
        for last_D, key, own in zip(states_PLD[ends, -1].cpu().view(torch.int16).numpy(), keys, ids, strict=True):
            print_, what = xxhash.xxh3_64_intdigest(last_D.tobytes()), xxhash.xxh3_64_intdigest(own.tobytes())
            other, name = self._ends.setdefault(print_, (what, key))
            if other != what:
                raise StatesError(f"sample {key} has the states of sample {name}; rerun, and report this")
        while len(self._ends) > _REMEMBERED:
            del self._ends[next(iter(self._ends))]


def check_sample(states_TLD: Tensor, key: str, ids: NDArray[np.int32], layers: Sequence[int]) -> Tensor:
    """Raise StatesError when a layer cannot be right. Returns the part that `fidelity` compares, on the CPU."""
    if len(np.unique(ids)) > 1 and (fault := layer_fault(states_TLD, layers)):
        raise StatesError(f"sample {key}: {fault}; rerun, and report this")
    return states_TLD[:FIDELITY_TOKENS].cpu()


def fidelity(codec: Calibrated, frames: Sequence[bytes], states_TLD: Tensor, key: str) -> bool:
    """Decode a sample's first frames again. True when they are as close as the calibration promised.

    False: some channels are much worse. Raises StatesError when exact frames differ, or lossy ones by far too much.
    """
    lengths = [b - a for a, b in spans(len(states_TLD))]
    parts = [decode_frame(codec.states, memoryview(f), n) for f, n in zip(frames, lengths, strict=False)]
    lossy_TLD = torch.cat(parts).view_as(states_TLD)
    as_promised = True
    promises = zip(codec.quality["snr"], codec.quality["chan_snr"], strict=True)
    for layer, (plain, by_channel) in enumerate(promises):
        x, y = states_TLD[:, layer, None], lossy_TLD[:, layer, None]
        if torch.equal(x, y):
            continue
        found = -math.inf if plain is None else float(snr(x, y))
        if plain is None or found < plain - _MARGIN:
            promised = "exact" if plain is None else f"{plain:.1f} dB"
            raise StatesError(f"sample {key}: frames of layer {layer} decode to {found:.1f} dB, promised: {promised}")
        alive = x.float().var(dim=0, correction=0)[0] > 0
        as_promised &= float(chan_snr(x[..., alive], y[..., alive])) > by_channel - _MARGIN
    return as_promised
