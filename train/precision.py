"""Weights that are computed with: rounded copies of the fp32 ones, which gather their gradients in fp32."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dflash_offline.train.model import Drafter, Linear, Sink


def rounded(master: Drafter, dtype: torch.dtype) -> Drafter:
    """`master` with matrices in `dtype`; the gains are shared. Where that is fp32 already, `master` itself.

    Gradients go where the master's are, which must exist: they are added there without being rounded first.
    """
    if dtype == torch.float32:
        return master
    with torch.device("meta"):
        copy = Drafter(master.spec)
    for (_, module), (_, own) in zip(copy.named_modules(), master.named_modules(), strict=True):
        if isinstance(module, Linear) and isinstance(own, Linear):
            learns = own.weight.requires_grad
            # Required of the copy too, so that its products are part of the graph; its own gradient stays empty.
            module.weight = nn.Parameter(own.weight.detach().to(dtype), requires_grad=learns)
            module.sink = Sink(own.weight.grad) if own.weight.grad is not None and learns else None
        elif isinstance(own, nn.Module) and "weight" in own._parameters:
            module.weight = own.weight
    return copy


def sinks(copy: Drafter) -> list[Sink]:
    """All of a rounded copy."""
    return [module.sink for module in copy.modules() if isinstance(module, Linear) and module.sink is not None]


@torch.no_grad()
def refresh(copies: Mapping[Tensor, Tensor]) -> None:
    """Round weights anew, after a step or a restore."""
    if copies:
        torch._foreach_copy_([*copies.values()], [*copies])


def copies(copy: Drafter, master: Drafter) -> dict[Tensor, Tensor]:
    """Weights of `master` and their rounded copies."""
    return {b: a for a, b in zip(copy.parameters(), master.parameters(), strict=True) if a is not b}
