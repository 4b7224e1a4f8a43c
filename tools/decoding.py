"""Speculative decoding for real, greedy, many prompts side by side.

The target is recomputed without a cache in every round, which is right for every target: the recurrent state of a
hybrid one cannot be rolled back by cropping a cache, and a loop that tries decodes other tokens.

Shapes: B prompts, T tokens so far, K block, D hidden, V vocabulary, L captured layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_offline.shards.errors import UsageError
from dflash_offline.train.masks import Blocks
from dflash_offline.train.model import Drafter, Target, block_inputs
from dflash_offline.train.walk import Step

Progress = Callable[[int, int], None]
"""Tokens decoded so far, prompts that are not done."""
Propose = Callable[[Tensor, int], Tensor]
"""Features bf16 [T, L * D] of the tokens before the anchor, and the anchor's token -> draft logits [K - 1, V]."""
_TOKENS = 32768
"""Of a forward pass, padding included."""


class LiveTarget:
    """The whole target, with the drafter's features read by hooks; fp32 on the CPU, bf16 elsewhere."""

    def __init__(self, folder: Path | str, layers: Sequence[int], device: str = "cpu") -> None:
        """Load the checkpoint in `folder`; `layers` are the captured ones, in the drafter's order.

        Raises UsageError where it is none, or lacks weights.
        """
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        try:
            self.model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder}: not a target that transformers loads: {str(error).splitlines()[0]}") from None
        if missing := sorted(found["missing_keys"]):
            raise UsageError(f"{folder}: {len(missing)} weights are missing, the first {missing[0]}; copy it again")
        self.model = self.model.to(device).eval()
        self.head: Any = self.model.get_output_embeddings()
        self._layers, self._kept = tuple(layers), dict[int, Tensor]()
        for i in layers:
            self.model.get_decoder().layers[i].register_forward_hook(self._keep(i))

    def _keep(self, i: int) -> Callable[..., None]:
        def hook(module: object, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._kept[i] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]], last: int) -> list[tuple[Tensor, Tensor]]:
        """Of each row of ids: logits fp32 [last, V] after its last tokens, and features as the cache stores them, bf16
        [T, L * D].

        Rows are padded on the right without a mask: every mixer is causal, so what follows a token cannot reach it.
        """
        out: dict[int, tuple[Tensor, Tensor]] = {}
        for group in _groups([len(row) for row in rows]):
            ids_BT = pad_sequence([torch.tensor(rows[i]) for i in group], batch_first=True).to(self.model.device)
            hidden_BTD = self.model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
            features = torch.cat([self._kept[i] for i in self._layers], dim=2).to(torch.bfloat16)
            for i, hidden_TD, kept in zip(group, hidden_BTD, features, strict=True):
                n = len(rows[i])
                out[i] = self.head(hidden_TD[n - last : n]).float(), kept[:n]
        return [out[i] for i in range(len(rows))]

    def gap(self, ids: Sequence[int], token: int) -> float:
        """How far the logit of `token` after `ids` lies below the best one."""
        logits_V = self([ids], 1)[0][0][-1]
        return float(logits_V.max() - logits_V[token])


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows that share a forward pass: of like length, and not too many."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and lengths[group[0]] * (len(group) + 1) > _TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


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
    progress: Progress = lambda tokens, active: None,
) -> list[Run]:
    """Greedy speculative decoding with blocks of `size` tokens, each prompt until a stop token or its limit.

    The prompts advance side by side, one target forward a round, but each at its own pace. `progress` is told after
    each round.
    """
    runs = [Run(prompt=len(p), ids=list(p)) for p in prompts]
    active = list(range(len(runs)))
    features: dict[int, Tensor] = {}
    for i, (logits_1V, features_TLD) in enumerate(target(prompts, 1)):
        runs[i].ids.append(int(logits_1V.argmax()))
        features[i] = features_TLD
    while active := [
        i for i in active if runs[i].ids[-1] not in stop and len(runs[i].ids) < runs[i].prompt + max_new_tokens[i]
    ]:
        # The anchor's own state does not exist yet when its block is drafted.
        drafts = {
            i: propose(features[i][: len(runs[i].ids) - 1], runs[i].ids[-1]).argmax(dim=-1).tolist() for i in active
        }
        verified = target([runs[i].ids + drafts[i] for i in active], size)
        for i, (logits_KV, features_TLD) in zip(active, verified, strict=True):
            anchor = len(runs[i].ids) - 1
            gained = accept(drafts[i], logits_KV.argmax(dim=-1).tolist(), stop)
            runs[i].ids += gained
            runs[i].steps.append(Step(anchor, len(gained), tuple(drafts[i])))
            features[i] = features_TLD
        progress(sum(len(run.ids) - run.prompt for run in runs), len(active))
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
    embed, device = target.model.get_input_embeddings(), target.model.device

    @torch.inference_mode()
    def propose(features_TLD: Tensor, token: int) -> Tensor:
        block = torch.full((1, client.block_size), client.mask_token_id, device=device)
        block[0, 0] = token
        positions = torch.arange(len(features_TLD) + client.block_size, device=device)
        hidden = client(
            target_hidden=features_TLD.to(device, client.dtype)[None],
            noise_embedding=embed(block),
            position_ids=positions[None],
        )
        return client.compute_logits(hidden[0, 1:], target.head)

    return propose


def offline_proposer(drafter: Drafter, target: Target) -> Propose:
    """Draft with the trainer's own model, as the offline walk does."""
    size, device = drafter.spec.block_size, target.head_VD.device

    @torch.inference_mode()
    def propose(features_TLD: Tensor, token: int) -> Tensor:
        anchor = len(features_TLD)
        ids = torch.tensor([token], device=device)
        inputs = block_inputs(target.embedding_VD, ids, size, drafter.spec.mask_token_id)
        blocks = Blocks(torch.tensor([anchor], device=device), torch.tensor([0], device=device), size)
        positions = torch.arange(anchor, device=device)
        output_1KD = drafter(features_TLD.to(device), positions, inputs, blocks)
        return output_1KD[0, 1:].to(target.head_VD.dtype) @ target.head_VD.T

    return propose
