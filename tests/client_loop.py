"""The client's own loop, as it is, for targets whose cache can be cropped."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from dflash_offline.tools.decoding import LiveTarget, Run
from dflash_offline.train.walk import Step


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
