"""Speculative decoding for real, and whether it takes the steps that the offline walk says it takes.

The loop here recomputes the target without a cache in every round, which is right for every target: the recurrent state
of a hybrid one cannot be rolled back by cropping a cache, and a loop that tries decodes other tokens.

Shapes: T tokens so far, K block, D hidden, V vocabulary, L captured layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_offline.shards.sample import Sample
from dflash_offline.train.masks import Blocks
from dflash_offline.train.model import Drafter, Target, block_inputs
from dflash_offline.train.rows import select_layers
from dflash_offline.train.walk import Step, supervised_spans, walk_sample

Propose = Callable[[Tensor, int], Tensor]
"""Features bf16 [T, L * D] of the tokens before the anchor, and the anchor's token -> draft logits [K - 1, V]."""


class LiveTarget:
    """The whole target in fp32, with the drafter's features read by hooks."""

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        """Load the checkpoint in `folder`; `layers` are the captured ones, in the drafter's order."""
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._layers, self._kept = tuple(layers), dict[int, Tensor]()
        for i in layers:
            self.model.get_decoder().layers[i].register_forward_hook(self._keep(i))

    def _keep(self, i: int) -> Callable[..., None]:
        def hook(module: object, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._kept[i] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]]) -> list[tuple[list[int], Tensor]]:
        """Of each row of ids: its greedy next tokens [T], and its features as the cache stores them, bf16 [T, L * D].

        Rows are padded on the right without a mask: every mixer is causal, so what follows a token cannot reach it.
        """
        ids_BT = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        next_BT = self.model(input_ids=ids_BT, use_cache=False).logits.argmax(dim=-1)
        features = torch.cat([self._kept[i] for i in self._layers], dim=2).to(torch.bfloat16)
        return [(n[: len(r)].tolist(), f[: len(r)]) for n, f, r in zip(next_BT, features, rows, strict=True)]


@dataclass(kw_only=True)
class Run:
    """What live decoding did with one prompt."""

    prompt: int
    """Tokens of the prompt."""
    ids: list[int]
    """Prompt and response."""
    steps: list[Step] = field(default_factory=list)
    """`recorded` as produced: clipped at a stop token, not at the length of a recorded response."""


def decode(
    target: LiveTarget,
    propose: Propose,
    size: int,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    stop: set[int],
) -> list[Run]:
    """Greedy speculative decoding with blocks of `size` tokens, each prompt until a stop token or its limit.

    The prompts advance side by side, one target forward a round, but each at its own pace.
    """
    runs = [Run(prompt=len(p), ids=list(p)) for p in prompts]
    active = list(range(len(runs)))
    features: dict[int, Tensor] = {}
    for i, (next_T, features_TLD) in enumerate(target(prompts)):
        runs[i].ids.append(next_T[-1])
        features[i] = features_TLD
    while active := [
        i for i in active if runs[i].ids[-1] not in stop and len(runs[i].ids) < runs[i].prompt + max_new_tokens[i]
    ]:
        # The anchor's own state does not exist yet when its block is drafted.
        drafts = {
            i: propose(features[i][: len(runs[i].ids) - 1], runs[i].ids[-1]).argmax(dim=-1).tolist() for i in active
        }
        verified = target([runs[i].ids + drafts[i] for i in active])
        for i, (next_T, features_TLD) in zip(active, verified, strict=True):
            anchor = len(runs[i].ids) - 1
            gained = accept(drafts[i], next_T[anchor:], stop)
            runs[i].ids += gained
            runs[i].steps.append(Step(anchor, len(gained), tuple(drafts[i])))
            features[i] = features_TLD
    return runs


def accept(drafts: Sequence[int], ours: Sequence[int], stop: set[int]) -> list[int]:
    """Tokens gained: the drafts that equal the target's own, and one token of the target's; none after a stop token.

    `ours` are the target's tokens after the anchor, after the first draft, and so on; one more than `drafts`.
    """
    accepted = next((k for k, draft in enumerate(drafts) if draft != ours[k]), len(drafts))
    ended = next((k for k in range(accepted + 1) if ours[k] in stop), accepted)
    return list(ours[: ended + 1])


def client_proposer(client: Any, target: LiveTarget) -> Propose:
    """Draft with the model class of the PyPI package `dflash`, one block at a time, without a cache."""
    embed, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()

    @torch.inference_mode()
    def propose(features_TLD: Tensor, token: int) -> Tensor:
        block = torch.full((1, client.block_size), client.mask_token_id)
        block[0, 0] = token
        positions = torch.arange(len(features_TLD) + client.block_size)
        hidden = client(
            target_hidden=features_TLD.float()[None], noise_embedding=embed(block), position_ids=positions[None]
        )
        return head(hidden[0, 1:])

    return propose


class RoundedTarget:
    """A target whose returned hidden states are rounded to bf16, as the cache stores them; otherwise itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        """Forward."""
        out = self._model(*args, **kwargs)
        hidden = out.hidden_states and [h.bfloat16().float() for h in out.hidden_states]
        return SimpleNamespace(logits=out.logits, hidden_states=hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def client_loop(client: Any, target: LiveTarget, prompt: Sequence[int], max_new_tokens: int, stop: set[int]) -> Run:
    """The client's own cached loop, as it is. Only dense targets: it cannot roll back a recurrent state."""
    from dflash.model import dflash_generate

    synchronize = torch.cuda.synchronize
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None  # it times itself by CUDA's clock, also on the CPU
    try:
        out = dflash_generate(
            client,
            RoundedTarget(target.model),
            torch.tensor([list(prompt)]),
            max_new_tokens=max_new_tokens,
            stop_token_ids=sorted(stop),
            return_stats=True,
        )
    finally:
        torch.cuda.synchronize = synchronize
    run = Run(prompt=len(prompt), ids=out.output_ids[0].tolist())
    for recorded in out.acceptance_lengths:
        anchor = len(prompt) + sum(step.recorded for step in run.steps)
        run.steps.append(Step(anchor, recorded, ()))
    return run


def offline_proposer(drafter: Drafter, target: Target) -> Propose:
    """Draft with the trainer's own model, as the offline walk does."""

    @torch.inference_mode()
    def propose(features_TLD: Tensor, token: int) -> Tensor:
        size, anchor = drafter.spec.block_size, len(features_TLD)
        inputs = block_inputs(target.embedding_VD, torch.tensor([token]), size, drafter.spec.mask_token_id)
        blocks = Blocks(torch.tensor([anchor]), torch.tensor([0]), size)
        return drafter(features_TLD, torch.arange(anchor), inputs, blocks)[0, 1:] @ target.head_VD.T

    return propose


@dataclass(kw_only=True)
class Comparison:
    """Offline walk against live decoding, step by step, until the live target itself leaves the recorded response."""

    samples: int = 0
    left: int = 0
    """Samples in which the live target's own token differs from the recorded one somewhere."""
    steps: int = 0
    """Steps taken from the same anchor on both sides."""
    near_ties: int = 0
    """Steps that differ, where the draft's best two logits are closer than four times the difference of computation."""
    bugs: list[str] = field(default_factory=list)
    """Steps that differ without that excuse."""
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
        """Why the two sides do not agree; empty when they do: no bug, at most 1 % near ties, tau within 0.5 %."""
        if self.bugs:
            return f"{len(self.bugs)} steps differ without a near tie; first: {self.bugs[0]}"
        if self.near_ties > 0.01 * self.steps:
            return f"{self.near_ties} of {self.steps} steps differ, expected at most 1 %"
        if abs(self.tau_live - self.tau_offline) > 0.005 * self.tau_live:
            return f"tau is {self.tau_offline:.4f} offline and {self.tau_live:.4f} live, expected within 0.5 %"
        return ""


def response_span(sample: Sample) -> tuple[int, int]:
    """First supervised span: where the live response starts, and where the recorded one ends."""
    return supervised_spans(sample.loss_mask)[0]


def compare(
    into: Comparison, sample: Sample, offline: Sequence[Step], run: Run, ours: Propose, theirs: Propose
) -> None:
    """Add one sample. `ours` and `theirs` redraft a step that differs, to tell a near tie from a bug.

    `sample.states` must hold the drafter's features only, in its order.
    """
    start, stop = response_span(sample)
    recorded = sample.input_ids.tolist()
    # Up to here the live target wrote what the cache recorded.
    common = next((i for i in range(start, min(stop, len(run.ids))) if run.ids[i] != recorded[i]), stop)
    into.samples += 1
    into.left += common < stop
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
            a_V, b_V = ours(features_TLD, token)[slot], theirs(features_TLD, token)[slot]
            best = a_V.topk(2).values
            if best[0] - best[1] < 4 * (a_V - b_V).abs().max():
                into.near_ties += 1
            else:
                into.bugs.append(f"sample {sample.key} anchor {anchor}: offline {walk[anchor]}, live {live[anchor]}")


def drafter_features(sample: Sample, columns: list[int] | None, hidden_size: int) -> Sample:
    """The sample with only the drafter's layers in its states."""
    states = select_layers(sample.states, columns, hidden_size)
    return Sample(key=sample.key, input_ids=sample.input_ids, loss_mask=sample.loss_mask, states=states)


def run_and_compare(
    drafter: Drafter, shared: Target, client: Any, target: LiveTarget, samples: Sequence[Sample], stop_ids: set[int]
) -> Comparison:
    """Decode every sample's prompt live with the client's drafter, and compare with the offline walk."""
    ours, theirs, result = offline_proposer(drafter, shared), client_proposer(client, target), Comparison()
    size, spans = drafter.spec.block_size, [response_span(sample) for sample in samples]
    prompts = [sample.input_ids[:start].tolist() for sample, (start, _) in zip(samples, spans, strict=True)]
    runs = decode(target, theirs, size, prompts, [stop - start + size for start, stop in spans], stop_ids)
    for sample, (start, stop), run in zip(samples, spans, runs, strict=True):
        steps = [s for s in walk_sample(drafter, shared, sample) if start <= s.anchor < stop]
        compare(result, sample, steps, run, ours, theirs)
    return result
