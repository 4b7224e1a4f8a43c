"""Acceptance on recorded samples, with an interval, per slot, and by kind of sample.

Shapes: S samples, K block; counts per slot have K - 1 columns, slots 1 .. K - 1.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter, RMSNorm, Target
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.plan import Ints
from dflash_offline.train.rows import ahead, column_index
from dflash_offline.train.sampled import Floats, expected_steps
from dflash_offline.train.stop import Stop
from dflash_offline.train.walk import Drafts, draft_sample, walk

NOT_GREEDY = (
    "responses were not generated greedily by the target ({}): tau estimates serving only if the target samples "
    "the same way; on text the target did not write it says nothing about serving"
)

ZERO_CENTRED = ("qwen3_5", "qwen3_5_text")
"""Targets whose norms multiply by 1 + weight."""
_THREADS = 2
"""That read samples while the drafter works."""


@dataclass(frozen=True)
class Counts:
    """What the walk counted in each of S samples; sums of it are all that is reported."""

    walked_S2: Ints
    """Tokens gained and steps taken."""
    uniform_S2: Ints
    """Tokens accepted from all anchors, and anchors."""
    slots_S4K: Ints
    """Per slot: within the span, hit; reached with only hits before, and hit then."""
    sampled_S: Floats | None = None
    """[S, 2 + K - 1] at a temperature: expected steps, tokens expected of all anchors, and per slot the chance that a
    draft is kept, summed over the anchors that have it in their span."""


def count(drafts: Drafts) -> tuple[Ints, Ints, Ints]:
    """Counts of one sample."""
    steps = walk(drafts)
    before = np.logical_and.accumulate(np.pad(drafts.hit_AK, ((0, 0), (1, 0)), constant_values=True)[:, :-1], axis=1)
    reached = before & drafts.inside_AK
    slots = np.stack([x.sum(axis=0) for x in (drafts.inside_AK, drafts.hit_AK, reached, reached & drafts.hit_AK)])
    walked = np.array([sum(step.recorded for step in steps), len(steps)])
    return walked, np.array([drafts.accepted_A.sum(), len(drafts.anchor_A)]), slots


def _sampled(drafts: Drafts) -> Floats:
    """A row of `Counts.sampled_S`."""
    assert drafts.chances is not None
    steps = expected_steps(drafts.chances.recorded_AK, drafts.room_A)
    return np.array([steps, drafts.chances.accepted_A().sum(), *drafts.chances.any_AK.sum(axis=0)])


def measure(
    drafter: Drafter,
    target: Target,
    cache: Mix,
    numbers: Sequence[int],
    ranks: Ranks,
    stop: Stop,
    temperature: float = 0.0,
) -> Counts | None:
    """Walk samples `numbers`, shared among the ranks. Each gets all counts, or None where one was told to stop.

    With a temperature above 0 the chances of sampling are counted too; the cache must hold the last hidden state.
    """
    layers = column_index(cache.layer_ids, drafter.spec.layer_ids)
    slots = drafter.spec.block_size - 1
    table = torch.zeros(len(numbers), 4 + 4 * slots, dtype=torch.int64)
    sums = torch.zeros(len(numbers), 2 + slots, dtype=torch.float64)
    mine, pinned = ranks.share(range(len(numbers))), ranks.device.type == "cuda"
    with closing(ahead(lambda i: cache.open(numbers[i], pinned), mine, _THREADS, _THREADS)) as samples:
        for i, sample in zip(mine, samples, strict=True):
            if stop.signal is not None:
                break
            decoded = sample.decode(ranks.device)
            drafts = draft_sample(drafter, target, decoded, layers, temperature=temperature)
            walked, uniform, found = count(drafts)
            table[i] = torch.from_numpy(np.concatenate([walked, uniform, found.ravel()]))
            if temperature:
                sums[i] = torch.from_numpy(_sampled(drafts))
    if ranks.sum(torch.tensor(stop.signal is not None, dtype=torch.int64, device=ranks.device)):
        return None
    all_S = ranks.sum(table.to(ranks.device)).cpu().numpy()
    sampled_S = ranks.sum(sums.to(ranks.device)).cpu().numpy() if temperature else None
    return Counts(all_S[:, :2], all_S[:, 2:4], all_S[:, 4:].reshape(len(numbers), 4, slots), sampled_S)


def summary(counts: Counts, resamples: int, seed: int) -> dict[str, Any]:
    """Pooled numbers and a 95 % bootstrap interval over samples."""
    tokens, steps = counts.walked_S2.sum(axis=0).tolist()
    inside, hits, reached, kept = counts.slots_S4K.sum(axis=0)
    accepted, anchors = counts.uniform_S2.sum(axis=0).tolist()
    return {
        "tau": tokens / max(steps, 1),
        "tau_interval": _interval(counts.walked_S2, resamples, seed),
        "tau_uniform": 1 + accepted / max(anchors, 1),
        "samples": len(counts.walked_S2),
        "tokens": tokens,
        "steps": steps,
        "acceptance_marginal": _ratios(hits, inside),
        "acceptance_conditional": _ratios(kept, reached),
    }


def sampled_summary(counts: Counts, temperature: float, resamples: int, seed: int) -> dict[str, Any]:
    """The same for a server that samples drafts and tokens at `temperature`: see sampled.py."""
    assert counts.sampled_S is not None
    walked_S2 = np.stack([counts.walked_S2[:, 0].astype(np.float64), counts.sampled_S[:, 0]], axis=1)
    tokens, steps = walked_S2.sum(axis=0)
    inside, anchors = counts.slots_S4K.sum(axis=0)[0], counts.uniform_S2[:, 1].sum()
    return {
        "temperature": temperature,
        "tau": float(tokens / max(steps, 1)),
        "tau_interval": _interval(walked_S2, resamples, seed),
        "tau_uniform": float(1 + counts.sampled_S[:, 1].sum() / max(anchors, 1)),
        "expected_steps": float(steps),
        "acceptance_marginal": _ratios(counts.sampled_S[:, 2:].sum(axis=0), inside),
    }


def breakdown(counts: Counts, labels: Sequence[str] | Ints) -> list[dict[str, Any]]:
    """tau of the samples of each label, in the order of the labels."""
    names, which = np.unique(np.asarray(labels), return_inverse=True)
    samples = np.bincount(which)
    tokens, steps = (np.bincount(which, weights=x).astype(np.int64) for x in counts.walked_S2.T)
    return [
        {"label": label, "samples": s, "tokens": t, "steps": n, "tau": t / max(n, 1)}
        for label, s, t, n in zip(names.tolist(), samples.tolist(), tokens.tolist(), steps.tolist(), strict=True)
    ]


def bf16_weights(drafter: Drafter, device: torch.device) -> Drafter:
    """A copy with the weights that an export holds: computed with in fp32 on the CPU, in bf16 elsewhere."""
    with torch.device("meta"):
        rounded = Drafter(drafter.spec)
    tensors = {name: tensor.detach().to(device, torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    rounded.load_state_dict(tensors, assign=True)
    return (rounded.float() if device.type == "cpu" else rounded).requires_grad_(False)


def load_target(cache: Cache | Mix, device: torch.device, dtype: torch.dtype) -> Target:
    """Embedding (as stored), head and final norm of the cache's target."""
    tensors, config = cache.target_tensors(), cache.target_config
    expected = (config["vocab_size"], cache.hidden_size)
    for name in ("embed_tokens", "lm_head"):
        if (found := tuple(tensors[name].shape)) != expected:
            raise UsageError(
                f"{cache.path}: {name} is {found}, (vocab_size, hidden_size) of the target is {expected}; extract again"
            )
    norm = RMSNorm(cache.hidden_size, config["rms_norm_eps"]).to(device).requires_grad_(False)
    centred = config.get("model_type") in ZERO_CENTRED
    norm.weight.copy_(tensors["norm"].float() + centred)
    return Target(tensors["embed_tokens"].to(device), tensors["lm_head"].to(device, dtype), norm)


def _interval(walked_S2: NDArray[Any], resamples: int, seed: int) -> list[float]:
    generator = np.random.Generator(np.random.Philox(seed))
    sums = np.stack(
        [walked_S2[generator.integers(len(walked_S2), size=len(walked_S2))].sum(axis=0) for _ in range(resamples)]
    )
    return np.quantile(sums[:, 0] / np.maximum(sums[:, 1], 1), [0.025, 0.975]).tolist()


def _ratios(part: NDArray[Any], whole: Ints) -> list[float]:
    return (part / np.maximum(whole, 1)).tolist()
