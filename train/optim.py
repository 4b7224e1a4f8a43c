"""Optimizers, their schedules, and the one flat buffer that all gradients live in."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import OptimConfig

PIECE = 64
"""Where matrices begin, products are fastest: 16 bytes or more, of bf16 too."""


class Gradients:
    """Gradients of a module as views of one buffer: zeroed, summed over ranks and measured in one call each.

    The matrices lie part by part, each part filled up to a multiple of `world` times PIECE values; the rest follows.
    """

    def __init__(self, module: nn.Module, parts: Sequence[Sequence[str]] = (), world: int = 1) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        some = next(iter(parameters.values()))
        self.ranges: dict[str, slice] = {}
        self.parts: list[slice] = []
        at = 0
        for part in parts:
            begin = at
            for name in part:
                if name in parameters and parameters[name].ndim > 1:
                    self.ranges[name] = slice(at, at := at + parameters[name].numel())
            self.parts.append(slice(begin, at := at + (begin - at) % (world * PIECE)))
        for name, parameter in parameters.items():
            if name not in self.ranges:
                self.ranges[name] = slice(at, at := at + parameter.numel())
        self.flat = torch.zeros(at, dtype=some.dtype, device=some.device)
        for name, parameter in parameters.items():
            # Backward passes add to an existing gradient in place.
            parameter.grad = self.flat[self.ranges[name]].view_as(parameter)

    def part(self, names: Sequence[str]) -> list[Tensor]:
        """The gradients of these parameters, neighbours in one piece."""
        pieces: list[slice] = []
        for place in sorted((self.ranges[name] for name in names if name in self.ranges), key=lambda s: s.start):
            begin = pieces.pop().start if pieces and pieces[-1].stop == place.start else place.start
            pieces.append(slice(begin, place.stop))
        return [self.flat[piece] for piece in pieces]

    def norm(self) -> float:
        """Of all of them."""
        return float(torch.linalg.vector_norm(self.flat))


def clipped(norm: float, divisor: float, clip: float) -> tuple[float, float]:
    """Of gradients of this norm: the norm once divided, and the factor that divides them and keeps to `clip`."""
    norm /= divisor
    return norm, min(1.0, clip / norm) / divisor if norm > 0 else 1.0


def matching(names: Sequence[str], patterns: Sequence[str], setting: str) -> set[str]:
    """Names that one of the patterns (`layers.0.*`) matches. Raises UsageError for a pattern that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        these = {name for name in names if fnmatchcase(name, pattern)}
        if not these:
            raise UsageError(f"{setting}: no tensor matches {pattern!r}; expected names such as {names[0]}, layers.0.*")
        found |= these
    return found


def freeze(module: nn.Module, config: OptimConfig) -> None:
    """Take what `optim.freeze` names out of training. Raises UsageError where that is everything, or nothing."""
    parameters = dict(module.named_parameters())
    frozen = matching([*parameters], config.freeze, "optim.freeze")
    if len(frozen) == len(parameters):
        raise UsageError(f"optim.freeze = {[*config.freeze]}: every tensor is frozen; expected some left to train")
    for name in frozen:
        parameters[name].requires_grad_(False)


def build_optimizers(
    module: nn.Module, config: OptimConfig, stepped: Mapping[str, Tensor] | None = None
) -> list[Optimizer]:
    """AdamW, or Muon for the matrices and AdamW for the rest, over what is not frozen, or `stepped` in its place.

    A gain has no weight decay, since it has no reason to be small. Raises UsageError where torch has no Muon.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    exempt = matching([name for name, _ in module.named_parameters()], config.no_decay, "optim.no_decay")
    own = stepped or parameters
    matrices: list[Tensor] = [own[name] for name, p in parameters.items() if p.ndim > 1 and name not in exempt]
    exempted: list[Tensor] = [own[name] for name, p in parameters.items() if p.ndim > 1 and name in exempt]
    gains: list[Tensor] = [own[name] for name, p in parameters.items() if p.ndim <= 1]

    def groups(*sets: tuple[list[Tensor], float]) -> list[dict[str, object]]:
        return [{"params": params, "weight_decay": decay} for params, decay in sets if params]

    fused = all(p.is_cuda for p in parameters.values())
    wide, plain = [(matrices, config.weight_decay), (exempted, 0.0)], [(gains, 0.0)]
    if config.optimizer == "adamw":
        kind = torch.optim.AdamW
        if fused:
            from dflash_offline.train.adamw import AdamW as kind  # needs Triton
        return [kind(groups(*wide, *plain), lr=config.lr, betas=config.betas)]
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(f"optim.optimizer = muon: torch {torch.__version__} has none; install torch 2.11 or newer")
    made: list[Optimizer] = []
    if matrices or exempted:
        # Scaled to steps of AdamW's size, so that one rate and one decay fit both.
        made.append(
            torch.optim.Muon(groups(*wide), lr=config.lr, momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw")
        )
    if gains:
        made.append(torch.optim.AdamW(groups(*plain), lr=config.lr, betas=config.betas, fused=fused))
    return made


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Rate of optimizer step 0 .. steps - 1: linear to lr, then down to lr * min_lr_ratio at the last step.

    Down by half a cosine, or (wsd) not before the last decay_ratio of all steps, and then linearly.
    A function of the step alone, so there is no scheduler state to lose on resume.
    """
    warmup = min(math.ceil(config.warmup_ratio * steps), steps - 1)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "cosine":
        above = (1 + math.cos(math.pi * (step + 1 - warmup) / (steps - warmup))) / 2
    else:
        above = min(1.0, (steps - 1 - step) / math.ceil(config.decay_ratio * steps))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * above)


@torch.no_grad()
def average_weights(average: Sequence[Tensor], weights: Sequence[Tensor], decay: float, step: int) -> None:
    """Move `average` towards the weights after `step` steps; faster at first, so that it forgets where it began."""
    decay = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_([*average], [*weights], 1 - decay)


def optimizer_tensors(parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """State of the optimizers under `parameter name : state name`."""
    return {
        f"{name}:{key}": value
        for name, parameter in parameters.items()
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Inverse of `optimizer_tensors`."""
    owner = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, value in tensors.items():
        path, key = name.rsplit(":", 1)
        parameter = parameters[path]
        # Counts stay on the CPU but for fused kernels: read from a GPU, each would wait for it at every step.
        on_cpu = key == "step" and not owner[parameter].defaults.get("fused")
        owner[parameter].state[parameter][key] = value.to("cpu" if on_cpu else parameter.device)
