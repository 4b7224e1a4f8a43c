"""AdamW, its schedule, and the one flat buffer that all gradients live in."""

import math

import torch
from torch import Tensor, nn

from dflash_offline.train.config import OptimConfig


class Gradients:
    """Gradients of a module as views of one buffer: zeroed, summed over ranks, scaled and clipped in one call each."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        at = 0
        for parameter in parameters:
            # Backward passes add to an existing gradient in place.
            parameter.grad = self.flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def normalise(self, divisor: float, clip: float) -> float:
        """Divide by the weight of the step, then limit the norm. Returns the norm before the limit."""
        self.flat /= divisor
        norm = float(torch.linalg.vector_norm(self.flat))
        if norm > clip:
            self.flat *= clip / norm
        return norm


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, since a norm's gain has no reason to be small."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    gains = [p for p in module.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
    )


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Rate of optimizer step 0 .. steps - 1: linear to lr, then half a cosine to lr * min_lr_ratio at the last step.

    A function of the step alone, so there is no scheduler state to lose on resume.
    """
    warmup = min(math.ceil(config.warmup_ratio * steps), steps - 1)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step + 1 - warmup) / (steps - warmup)
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of the optimizer under `parameter name : state name`."""
    return {
        f"{name}:{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Inverse of `optimizer_tensors`."""
    parameters = dict(module.named_parameters())
    for name, value in tensors.items():
        parameter, key = name.rsplit(":", 1)
        optimizer.state[parameters[parameter]][key] = value
