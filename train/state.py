"""What training changes: weights, moments, and the average of the weights."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from dflash_offline.train import checkpoint
from dflash_offline.train.checkpoint import Checkpoint
from dflash_offline.train.config import OptimConfig
from dflash_offline.train.model import Drafter
from dflash_offline.train.optim import (
    Gradients,
    average_weights,
    build_optimizers,
    freeze,
    load_optimizer_tensors,
    optimizer_tensors,
)
from dflash_offline.train.precision import copies, refresh, rounded, sinks


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that a checkpoint holds, on the device."""

    config: OptimConfig
    drafter: Drafter
    """fp32."""
    working: Drafter
    """What is computed with: the drafter, or its rounded copy."""
    gradients: Gradients
    optimizers: list[Optimizer]
    average: Drafter | None

    @classmethod
    def of(cls, drafter: Drafter, config: OptimConfig, dtype: torch.dtype = torch.float32) -> "State":
        """The state before the first step, which computes in `dtype`."""
        freeze(drafter, config)
        gradients = Gradients(drafter)
        return cls(
            config=config,
            drafter=drafter,
            working=rounded(drafter, dtype),
            gradients=gradients,
            optimizers=build_optimizers(drafter, config),
            average=copy.deepcopy(drafter).requires_grad_(False) if config.ema is not None else None,
        )

    @property
    def served(self) -> Drafter:
        """The drafter that is measured and exported."""
        return self.drafter if self.average is None else self.average

    def clear(self) -> None:
        """Forget the gradients of the last step. Those of rounded weights will be written over."""
        for sink in (gathered := sinks(self.working)):
            sink.empty = True
        if gathered:
            torch._foreach_zero_([p.grad for p in self.drafter.parameters() if p.grad is not None and p.ndim == 1])
        else:
            self.gradients.flat.zero_()

    def settle(self) -> None:
        """No more rows in this step: a gradient that nothing was added to is zero."""
        for sink in sinks(self.working):
            if sink.empty:
                sink.total.zero_()

    def step(self, number: int, rate: float, scale: float = 1.0) -> None:
        """Optimizer step `number`, counted from 1, with the gradients times `scale`."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        in_one_pass = getattr(self.optimizers[0], "apply", None)  # adamw.py, on a GPU
        if in_one_pass:
            in_one_pass(scale, copies(self.working, self.drafter))
        else:
            self.gradients.flat *= scale
            for optimizer in self.optimizers:
                optimizer.step()
            refresh(self.working, self.drafter)
        if self.average is not None and self.config.ema is not None:
            average_weights(self.average, self.drafter, self.config.ema, number)

    def files(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by file of a checkpoint."""
        files = {
            checkpoint.MODEL: self.drafter.state_dict(),
            checkpoint.OPTIMIZER: optimizer_tensors(self.drafter, self.optimizers),
        }
        return files if self.average is None else {**files, checkpoint.EMA: self.average.state_dict()}

    def restore(self, found: Checkpoint) -> None:
        """Inverse of `files`."""
        device = next(self.drafter.parameters()).device
        self.drafter.load_state_dict(found.load(checkpoint.MODEL, device))
        load_optimizer_tensors(self.drafter, self.optimizers, found.load(checkpoint.OPTIMIZER, device))
        if self.average is not None:
            self.average.load_state_dict(found.load(checkpoint.EMA, device))
        refresh(self.working, self.drafter)

    def hash(self) -> Tensor:
        """What all ranks must agree on, in a few integers."""
        return torch.stack([torch.hash_tensor(p) for p in self.drafter.parameters()]).view(torch.int64)
