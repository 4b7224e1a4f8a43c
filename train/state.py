"""What training changes: weights, moments, and the average of the weights."""

import copy
from collections.abc import Iterator
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
    clipped,
    freeze,
    load_optimizer_tensors,
    optimizer_tensors,
)
from dflash_offline.train.parallel import Ranks, Wanted
from dflash_offline.train.precision import copies, refresh, rounded, sinks
from dflash_offline.train.sharded import Sharded


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that a checkpoint holds, on the device."""

    config: OptimConfig
    drafter: Drafter
    """fp32."""
    working: Drafter
    """What is computed with: the drafter, or its rounded copy."""
    gradients: Gradients
    stepped: dict[str, Tensor]
    """What this rank's optimizers work on, by the name of the tensor: all of it, or a piece."""
    copies: dict[Tensor, Tensor]
    """What of it has rounded copies."""
    optimizers: list[Optimizer]
    average: Drafter | None
    sharded: Sharded | None

    @classmethod
    def of(
        cls, drafter: Drafter, config: OptimConfig, dtype: torch.dtype = torch.float32, ranks: Ranks | None = None
    ) -> "State":
        """The state before the first step, which computes in `dtype`."""
        freeze(drafter, config)
        # Muon needs whole matrices, and without rounded copies there would be more to gather than to add up.
        matrices = any(p.requires_grad and p.ndim > 1 for p in drafter.parameters())
        shard = matrices and config.optimizer == "adamw" and dtype != torch.float32
        dealt = ranks if ranks and ranks.world > 1 and shard else None
        gradients = Gradients(drafter, drafter.parts(), dealt.world) if dealt else Gradients(drafter)
        working = rounded(drafter, dtype)
        sharded = Sharded(dealt, gradients, working) if dealt else None
        if sharded:
            stepped: dict[str, Tensor] = {**sharded.stepped(drafter)}
            own = sharded.pieces(working)
            paired = {stepped[name]: own[name] for name, p in drafter.named_parameters() if name in own and p.ndim > 1}
        else:
            stepped = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
            paired = copies(working, drafter)
        return cls(
            config=config,
            drafter=drafter,
            working=working,
            gradients=gradients,
            stepped=stepped,
            copies=paired,
            optimizers=build_optimizers(drafter, config, stepped),
            average=copy.deepcopy(drafter).requires_grad_(False) if config.ema is not None else None,
            sharded=sharded,
        )

    @property
    def served(self) -> Drafter:
        """The drafter that is measured and exported."""
        return self.drafter if self.average is None else self.average

    def sums(self) -> list[list[Wanted]]:
        """The parts of the gradients, by the order in which they are complete, for parallel.Sums."""
        if self.sharded:
            return self.sharded.sums()
        return [[Wanted(p, p) for p in self.gradients.part(names)] for names in self.drafter.parts()]

    def clear(self) -> None:
        """Forget the gradients of the last step. Those of rounded weights will be written over."""
        for sink in (gathered := sinks(self.working)):
            sink.empty = True
        if gathered:
            for p in self.drafter.parameters():
                if p.grad is not None and p.ndim == 1:
                    p.grad.zero_()
        else:
            self.gradients.flat.zero_()

    def settle(self) -> None:
        """No more rows in this step: a gradient that nothing was added to is zero."""
        for sink in sinks(self.working):
            if sink.empty:
                sink.total.zero_()

    def scale(self, divisor: float) -> tuple[float, float]:
        """Norm of the gradients over the divisor of the step, and what to multiply them by. Every rank must call it."""
        norm = self.sharded.norm() if self.sharded else self.gradients.norm()
        return clipped(norm, divisor, self.config.clip)

    def step(self, number: int, rate: float, scale: float = 1.0) -> None:
        """Optimizer step `number`, counted from 1, with the gradients times `scale`. Every rank must call it."""
        self.arrive(all_parts=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        in_one_pass = getattr(self.optimizers[0], "apply", None)  # adamw.py, on a GPU
        if not in_one_pass:
            self.gradients.flat *= scale
            for optimizer in self.optimizers:
                optimizer.step()
            refresh(self.copies)
        for part, names in self.sharded.turns() if self.sharded else [(None, [*self.stepped])]:
            if in_one_pass:
                in_one_pass(scale, [self.stepped[name] for name in names], self.copies)
            if self.sharded and part:
                self.sharded.send(part)
        if self.average is not None and self.config.ema is not None:
            average = self.sharded.pieces(self.average) if self.sharded else dict(self.average.named_parameters())
            pairs = [(average[name], weight) for name, weight in self.stepped.items()]
            average_weights([a for a, _ in pairs], [w for _, w in pairs], self.config.ema, number)

    def arrive(self, all_parts: bool = False) -> None:
        """Wait for the rounded weights of the part that is used next."""
        if self.sharded:
            self.sharded.arrive(all_parts)

    def gather(self) -> None:
        """Bring fp32 weights that other ranks step up to date, before anyone looks at them. Every rank must call it."""
        if self.sharded:
            self.sharded.gather(self.drafter)
            if self.average is not None:
                self.sharded.gather(self.average)

    def items(self) -> Iterator[tuple[str, str, Tensor]]:
        """What a checkpoint holds: file, name, tensor. After `gather`; every rank must come to its end."""
        for file, module in ((checkpoint.MODEL, self.drafter), (checkpoint.EMA, self.average)):
            if module is not None:
                yield from ((file, name, tensor) for name, tensor in module.state_dict().items())
        tensors = optimizer_tensors(self.stepped, self.optimizers)
        if not self.sharded:
            yield from ((checkpoint.OPTIMIZER, name, tensor) for name, tensor in tensors.items())
            return
        shapes = {name: p.shape for name, p in self.drafter.named_parameters()}
        for key in {name.rsplit(":", 1)[1]: None for name in tensors}:
            pieces = {name: tensors[f"{name}:{key}"] for name in self.stepped}
            for name, vector in pieces.items() if key == "step" else self.sharded.whole(pieces):
                yield checkpoint.OPTIMIZER, f"{name}:{key}", vector if key == "step" else vector.view(shapes[name])

    def restore(self, found: Checkpoint) -> None:
        """Inverse of `items`."""
        device = next(self.drafter.parameters()).device
        self.drafter.load_state_dict(found.load(checkpoint.MODEL, device))
        tensors = found.load(checkpoint.OPTIMIZER, device if self.sharded is None else torch.device("cpu"))
        if self.sharded:
            own = self.sharded
            tensors = {n: t if t.ndim == 0 else own.piece(n.rsplit(":", 1)[0], t).clone() for n, t in tensors.items()}
        load_optimizer_tensors(self.stepped, self.optimizers, tensors)
        if self.average is not None:
            self.average.load_state_dict(found.load(checkpoint.EMA, device))
        refresh(copies(self.working, self.drafter))

    def hash(self) -> Tensor:
        """What all ranks must agree on, in a few integers."""
        self.arrive(all_parts=True)
        shared = self.working if self.sharded else self.drafter
        return torch.stack([torch.hash_tensor(p) for p in shared.parameters()]).view(torch.int64)
