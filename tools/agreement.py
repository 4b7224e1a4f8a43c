"""Whether live decoding takes the steps that the offline walk says it takes, and what it is where they part."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_offline.shards.sample import Sample
from dflash_offline.tools.decoding import LiveTarget, Propose, Run
from dflash_offline.train.rows import select_layers
from dflash_offline.train.walk import Step, supervised_spans


@dataclass(kw_only=True)
class Comparison:
    """Offline walk against live decoding, step by step, until the live target itself leaves the recorded response.

    There are two ways to part. The target may say another token than was recorded: a near tie where that token's logit
    lies within `near_tie` of its best, else the response is not this target's greedy one. Or a step from the same
    anchor may gain another number of tokens: a near tie where the draft's best two logits are closer than four times
    the difference between the two computations, else a bug.
    """

    near_tie: float = 0.5
    share: float = 0.01
    """Near ties among the steps that are no reason to doubt."""
    samples: int = 0
    left: int = 0
    """Samples in which the live target's own token differs from the recorded one somewhere."""
    strangers: list[str] = field(default_factory=list)
    """Those of them where it is no near tie."""
    steps: int = 0
    """Steps taken from the same anchor on both sides."""
    near_ties: int = 0
    """Steps that differ, and are a near tie."""
    bugs: list[str] = field(default_factory=list)
    """Steps that differ and are none."""
    offline: list[int] = field(default_factory=lambda: [0, 0])
    """Tokens and steps of the compared parts."""
    live: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def tau_offline(self) -> float:
        """Mean accepted length of the walk over the compared parts."""
        return self.offline[0] / max(self.offline[1], 1)

    @property
    def tau_live(self) -> float:
        """Mean accepted length of live decoding over the compared parts."""
        return self.live[0] / max(self.live[1], 1)

    def fault(self) -> str:
        """Why the two sides do not agree; empty when they do: no bug, few near ties, tau within half of their share."""
        if self.strangers:
            return (
                f"{len(self.strangers)} of {self.samples} responses are not what the target says greedily; first: "
                f"{self.strangers[0]}; expected responses of this target, template and temperature 0"
            )
        if self.bugs:
            return f"{len(self.bugs)} steps differ without a near tie; first: {self.bugs[0]}"
        if self.near_ties > self.share * self.steps:
            return f"{self.near_ties} of {self.steps} steps differ, expected at most {self.share:.0%}"
        if abs(self.tau_live - self.tau_offline) > self.share / 2 * self.tau_live:
            return (
                f"tau is {self.tau_offline:.4f} offline and {self.tau_live:.4f} live, expected within "
                f"{self.share / 2:.1%}"
            )
        return ""


def response_span(sample: Sample) -> tuple[int, int]:
    """First supervised span: where the live response starts, and where the recorded one ends."""
    return supervised_spans(sample.loss_mask)[0]


def compare(
    into: Comparison,
    sample: Sample,
    offline: Sequence[Step],
    run: Run,
    ours: Propose,
    theirs: Propose,
    target: LiveTarget,
) -> None:
    """Add one sample. `ours` and `theirs` redraft a step that differs, to tell a near tie from a bug.

    `sample.states` must hold the drafter's features only, in its order.
    """
    start, stop = response_span(sample)
    recorded = sample.input_ids.tolist()
    # Up to here the live target wrote what the cache recorded.
    common = next((i for i in range(start, min(stop, len(run.ids))) if run.ids[i] != recorded[i]), stop)
    into.samples += 1
    if common < stop:
        into.left += 1
        gap = target.gap(recorded[:common], recorded[common])
        if gap > into.near_tie:
            into.strangers.append(f"sample {sample.key} token {common}: recorded {recorded[common]}, {gap:.2f} below")
    live = {s.anchor: min(s.recorded, stop - 1 - s.anchor) for s in run.steps}
    walk = {s.anchor: s.recorded for s in offline}
    for side, steps in ((into.live, live), (into.offline, walk)):
        whole = [n for anchor, n in steps.items() if n > 0 and anchor + n < common]
        side[0] += sum(whole)
        side[1] += len(whole)
    for anchor in sorted(live.keys() & walk.keys()):
        if anchor + max(live[anchor], walk[anchor]) >= common:
            break
        into.steps += 1
        if live[anchor] != walk[anchor]:
            features_TLD, token = sample.states[:anchor], recorded[anchor]
            slot = min(live[anchor], walk[anchor]) - 1
            a_V, b_V = (p(features_TLD, token)[slot].float() for p in (ours, theirs))
            best = a_V.topk(2).values
            if best[0] - best[1] < 4 * (a_V - b_V).abs().max():
                into.near_ties += 1
            else:
                into.bugs.append(f"sample {sample.key} anchor {anchor}: offline {walk[anchor]}, live {live[anchor]}")


def drafter_features(sample: Sample, columns: list[int] | None, hidden_size: int) -> Sample:
    """The sample with only the drafter's layers in its states."""
    states = select_layers(sample.states, columns, hidden_size)
    return Sample(key=sample.key, input_ids=sample.input_ids, loss_mask=sample.loss_mask, states=states)


def cut(sample: Sample, response_tokens: int) -> Sample:
    """The sample up to `response_tokens` of its first response. States are causal, so what is kept is exact."""
    start, stop = response_span(sample)
    end = min(stop, start + response_tokens)
    return Sample(
        key=sample.key,
        input_ids=sample.input_ids[:end],
        loss_mask=sample.loss_mask[:end],
        states=sample.states[:end],
    )


def as_sample(run: Run, key: str, features_TLD: torch.Tensor) -> Sample:
    """What was decoded live, as extraction would have stored it."""
    mask = (np.arange(len(run.ids)) >= run.prompt).astype(np.uint8)
    return Sample(key=key, input_ids=np.array(run.ids, np.int32), loss_mask=mask, states=features_TLD)
