"""A loaded target and the states it gives: rows of samples in, sound states out.

Legend: P tokens of a row, L layers, D hidden, N positions of the last hidden state.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_offline.extract import checks, fp8, kernels
from dflash_offline.extract.checks import Watch
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dataset import Skip
from dflash_offline.extract.forward import Capture, batches
from dflash_offline.extract.hybrid import HybridCapture
from dflash_offline.extract.plan import Planned
from dflash_offline.extract.target import Target, open_target
from dflash_offline.extract.weights import build_decoder, read_weights
from dflash_offline.shards.errors import RunError
from dflash_offline.shards.keys import last_positions

Beat = Callable[..., None]
"""Called as a sign of life, with words where something slow begins."""
_PATIENCE = 120.0
"""Seconds for the rows before one that did not fit to be written."""


class Alive:
    """How many rows of states exist, of all tasks in flight."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()

    def count(self, row: "Launched") -> "Launched":
        """Count `row` until nobody has it any more, whatever becomes of its task."""
        self._add(1)
        weakref.finalize(row, self._add, -1)
        return row

    def below(self, limit: int, seconds: float) -> bool:
        """Wait for so long until there are fewer than `limit`; whether there are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count < limit, seconds)

    def _add(self, rows: int) -> None:
        with self._changed:
            self._count += rows
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A loaded target."""

    config: ExtractConfig
    layers: tuple[int, ...]
    captured: tuple[int, ...]
    """`layers`, and the target's last one when the last hidden state is stored."""
    capture: Capture | HybridCapture
    kernels: str
    device: torch.device
    writer: ThreadPoolExecutor
    """One thread: shards are finished in order while the target runs on."""
    probe: dict[str, list[float]] = field(default_factory=dict)
    """What checks.probe found."""
    watch: Watch = field(default_factory=Watch)
    alive: Alive = field(default_factory=Alive)
    beat: Beat = lambda begun="": None
    """Called for every row that is done: computed, or written."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A row that the device was asked for; nothing has waited for it yet."""

    samples: list[Planned]
    states_PLD: Tensor | None
    """None: the one sample does not fit into memory."""
    finite_P: Tensor | None = None
    """Whether all states of a token are finite, on the CPU."""
    ready: Any = None
    """On a GPU the event after which both are there."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Samples whose states are at hand, side by side on the device, and those that have none."""

    samples: list[Planned]
    states_PLD: Tensor
    last_ND: Tensor | None
    skipped: list[Skip]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample."""
        return [len(s.input_ids) for s in self.samples]

    @property
    def counts(self) -> list[int]:
        """Stored positions of the last hidden state of every sample."""
        return [len(last_positions(s.loss_mask)) for s in self.samples]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A target on its way to a device."""

    target: Target
    kernels: str
    """Those installed for it."""
    captured: tuple[int, ...]
    hybrid: bool
    weights: Future[dict[str, Tensor]]


def begin_loading(config: ExtractConfig, layers: Sequence[int], device: torch.device) -> Loading:
    """Open the configured target, read its weights in a thread and install its kernels. Raises UsageError."""
    kernels.own(device)
    target = open_target(config.target.path, config.target.revision, config.target.fp8)
    captured = (*layers, target.config.num_hidden_layers - 1) if config.last_hidden else tuple(layers)
    products = f", products: {fp8.kernel(device, target.native)}" if target.native else ""
    pool = ThreadPoolExecutor(1, initializer=kernels.own, initargs=(device,))
    weights = pool.submit(read_weights, target, max(captured), device, compute_dtype(config, device))
    pool.shutdown(wait=False)
    hybrid = config.batching == "packed" and kernels.has_delta_rule(target.model_type)
    used = kernels.install(target.config, device, config.allow_slow, hybrid)  # its imports take seconds
    return Loading(target=target, kernels=used + products, captured=captured, hybrid=hybrid, weights=weights)


def start_runner(
    config: ExtractConfig,
    layers: Sequence[int],
    device: torch.device,
    beat: Beat = lambda begun="": None,
    loading: Loading | None = None,
) -> Runner:
    """A target on `device` that was probed; the slow part of a worker's start. `loading`: where that has begun before.

    Raises UsageError when it does not give the stock model's states.
    """
    kernels.own(device)
    beat(f"loading {config.target.path}")
    loading = loading or begin_loading(config, layers, device)
    target, captured = loading.target, loading.captured
    found: dict[str, list[float]] = {}
    if config.guard.probe and kernels.has_delta_rule(target.model_type):
        # Beside the loading: it needs no weights, and compiles for half a minute where nothing is compiled yet.
        found["rule"] = [checks.check_rule(target.config, device, compute_dtype(config, device))]
        beat("the delta rule is compiled and right")
    if config.guard.probe and target.native:
        found["product"] = [checks.check_product(target.native, device, compute_dtype(config, device))]
    attention = kernels.PACKED_ATTENTION if config.batching == "packed" else "sdpa"
    model = build_decoder(target, max(captured), loading.weights.result(), device, attention)
    beat(f"loaded; {loading.kernels}; the first rows compile what is not compiled yet")
    # Before the hybrid takes the model's weights.
    stock = checks.stock_states(model, captured, device) if config.guard.probe else None
    capture = (
        HybridCapture(model, captured, device) if loading.hybrid else Capture(model, captured, config.batching, device)
    )
    if stock is not None:
        found |= checks.probe(capture, stock, captured, target.config.vocab_size)
        beat("probed: its states are the stock model's")
    return Runner(
        config=config,
        layers=tuple(layers),
        captured=captured,
        capture=capture,
        kernels=loading.kernels,
        device=device,
        writer=ThreadPoolExecutor(1, initializer=kernels.own, initargs=(device,)),
        probe=found,
        beat=beat,
    )


def compute_dtype(config: ExtractConfig, device: torch.device) -> torch.dtype:
    """The compute type of the target on `device`."""
    if config.target.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, config.target.dtype)


def rows(runner: Runner, samples: Sequence[Planned]) -> Iterator[Row]:
    """The states of all samples in order, a row at a time."""
    yield from map(partial(finished, runner), launches(runner, samples))


def launches(runner: Runner, samples: Sequence[Planned]) -> Iterator[Launched]:
    """The rows of all samples in order. On a GPU each is only begun, so that the next can be begun behind it."""
    lengths = [len(s.input_ids) for s in samples]
    for group in batches(lengths, runner.config.token_budget, runner.config.batching == "padded"):
        # Nothing here keeps a row that was given away.
        yield from starmap(partial(_begun, runner), _states(runner, [samples[n] for n in group]))


def _begun(runner: Runner, samples: list[Planned], states_PLD: Tensor | None) -> Launched:
    runner.beat()
    if states_PLD is None:
        return Launched(samples=samples, states_PLD=None)
    # One pass without a copy of the states.
    finite_P = torch.isfinite(torch.linalg.vector_norm(states_PLD, torch.inf, dim=(1, 2)))
    ready: Any = None
    if finite_P.is_cuda:
        finite_P = torch.empty(finite_P.shape, dtype=torch.bool, pin_memory=True).copy_(finite_P, True)
        ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ready.record()
    return runner.alive.count(Launched(samples=samples, states_PLD=states_PLD, finite_P=finite_P, ready=ready))


def finished(runner: Runner, row: Launched) -> Row:
    """Wait for a row. Its states may then be used in any queue of the device, the current one."""
    if row.states_PLD is None or row.finite_P is None:
        (sample,) = row.samples
        detail = f"{len(sample.input_ids)} tokens do not fit into memory"
        nothing = torch.empty(0, len(runner.layers), runner.capture.hidden_size)
        return Row(samples=[], states_PLD=nothing, last_ND=None, skipped=[_skip(sample, "oom", detail)])
    if row.ready is not None:
        row.ready.synchronize()
        row.states_PLD.record_stream(torch.cuda.current_stream(row.states_PLD.device))
    return _sound(runner, row.samples, row.states_PLD, row.finite_P.numpy())


def _states(runner: Runner, samples: list[Planned]) -> Iterator[tuple[list[Planned], Tensor | None]]:
    """bf16 [P, L, D] of the samples; those that do not fit are halved, a sample that does not fit has None."""
    found = _tried(runner, samples)
    if not found:  # it may fit when those before it are gone
        if not runner.alive.below(1, _PATIENCE):
            raise RunError(f"no memory for a row, and those before it were not written in {_PATIENCE:g} s; rerun")
        found = _tried(runner, samples)
    if not found and len(samples) > 1:
        half = len(samples) // 2
        yield from _states(runner, samples[:half])
        yield from _states(runner, samples[half:])
    else:
        yield samples, found.pop() if found else None


def _tried(runner: Runner, samples: list[Planned]) -> list[Tensor]:
    """The states, to be taken out by whoever wants them; nothing where they do not fit."""
    try:
        return [runner.capture([torch.from_numpy(s.input_ids) for s in samples])]
    except torch.OutOfMemoryError:
        pass
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
    return []


def _sound(runner: Runner, samples: list[Planned], states_PLD: Tensor, finite_P: NDArray[np.bool_]) -> Row:
    """The row without samples whose states are not finite: no codec may store them."""
    lengths = [len(s.input_ids) for s in samples]
    skipped, kept = [], [bool(part.all()) for part in np.split(finite_P, np.cumsum(lengths)[:-1])]
    if not all(kept):
        pieces = torch.split(states_PLD, lengths)
        for sample, piece_TLD, sound in zip(samples, pieces, kept, strict=True):
            if not sound:
                at, layer, _ = (~torch.isfinite(piece_TLD)).nonzero()[0].tolist()
                skipped.append(_skip(sample, "nonfinite_hidden", f"layer {runner.captured[layer]}, token {at}"))
        states_PLD = torch.cat([p for p, sound in zip(pieces, kept, strict=True) if sound] or [states_PLD[:0]])
        samples = [s for s, sound in zip(samples, kept, strict=True) if sound]
    last_ND = None
    if runner.config.last_hidden:
        starts = np.cumsum([0, *(len(s.input_ids) for s in samples)])
        at_N = [start + last_positions(s.loss_mask) for s, start in zip(samples, starts, strict=False)]
        at = torch.from_numpy(np.concatenate([*at_N, np.empty(0, np.int64)])).to(states_PLD.device)
        last_ND, states_PLD = states_PLD[at, -1], states_PLD[:, :-1]
    return Row(samples=samples, states_PLD=states_PLD, last_ND=last_ND, skipped=skipped)


def _skip(sample: Planned, reason: str, detail: str) -> Skip:
    who = sample.identity
    return Skip(source=who.source, number=who.source_row, id=who.id, reason=reason, detail=detail)
