"""The optimizer's work dealt to the ranks (ZeRO, stage 1): gradients are summed where they are used, and nowhere else.

A rank owns an equal share of every part of the matrices: it alone has their moments, and steps their fp32 weights. All
that the others need of them are the rounded weights. Those of a part are gathered from when it is stepped, while others
are, until the next forward pass comes to it. Half the bytes of summing all gradients everywhere travel beside the
backward pass, and the optimizer takes a rank's share of its time. Gains are few, and every rank's.

The fp32 weights of other ranks' shares are out of date on this one until `gather`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from dflash_offline.train.model import Drafter
from dflash_offline.train.optim import Gradients
from dflash_offline.train.parallel import Ranks, Wanted


class Sharded:
    """What this rank owns, in the layout of the gradients."""

    def __init__(self, ranks: Ranks, gradients: Gradients, working: Drafter) -> None:
        """Moves the rounded matrices of `working` into one buffer."""
        self._ranks, self._gradients = ranks, gradients
        self._parts = [part for part in gradients.parts if part.stop > part.start]
        self._gains = slice(gradients.parts[-1].stop, len(gradients.flat))
        weights = {n: p for n, p in working.named_parameters() if n in gradients.ranges}
        matrices = [name for name, p in weights.items() if p.ndim > 1]
        some = weights[matrices[0]]
        self._rounded = torch.zeros(self._gains.start, dtype=some.dtype, device=some.device)
        self._owned = {name: slice(None) for name in weights}
        for name in matrices:
            place, weight = gradients.ranges[name], weights[name]
            weight.data = self._rounded[place].view_as(weight).copy_(weight.data)
            share = self._share(next(part for part in self._parts if part.start <= place.start < part.stop))
            begin, end = max(place.start, share.start), min(place.stop, share.stop)
            self._owned[name] = slice(begin - place.start, max(begin, end) - place.start)
        self._coming: deque[Callable[[], None]] = deque()

    def pieces(self, module: nn.Module) -> dict[str, Tensor]:
        """What is owned of the tensors of `module`, as vectors in their memory, some of them empty."""
        parameters = dict(module.named_parameters())
        return {name: self.piece(name, parameters[name]) for name in self._owned}

    def stepped(self, drafter: Drafter) -> dict[str, nn.Parameter]:
        """`pieces` with their gradients: what the optimizer works on."""
        found = {name: nn.Parameter(piece) for name, piece in self.pieces(drafter).items()}
        for name, piece in found.items():
            piece.grad = self._gradients.flat[self._gradients.ranges[name]][self._owned[name]]
        return found

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """What is owned of a tensor."""
        return whole.detach().view(-1)[self._owned[name]]

    def sums(self) -> list[list[Wanted]]:
        """For parallel.Sums."""
        flat = self._gradients.flat
        parts = [[Wanted(flat[p], flat[self._share(p)])] * (p in self._parts) for p in self._gradients.parts]
        return [*parts, [Wanted(flat[self._gains], flat[self._gains])] * (self._gains.stop > self._gains.start)]

    def norm(self) -> float:
        """Of all gradients, once summed."""
        flat = self._gradients.flat
        own = [torch.linalg.vector_norm(flat[self._share(part)]) for part in self._parts]
        squares = self._ranks.sum(torch.stack(own).double().square().sum())
        return float((squares + torch.linalg.vector_norm(flat[self._gains]).double().square()).sqrt())

    def turns(self) -> list[tuple[slice | None, list[str]]]:
        """What is stepped, in turn: names of a part, and the part, to be sent then; the gains first, which are in none.

        Parts come in the order in which they are used.
        """
        return [(None, [*self._within(self._gains)]), *((part, [*self._within(part)]) for part in self._parts[::-1])]

    def send(self, part: slice) -> None:
        """Begin to give every rank the rounded weights of a part. Every rank must call it."""
        self._coming.append(self._ranks.gather(self._rounded[part], self._rounded[self._share(part)]))

    def arrive(self, all_parts: bool = False) -> None:
        """Wait for the next of what was sent, or for all of it: on a GPU its queue does, not the process."""
        while self._coming:
            self._coming.popleft()()
            if not all_parts:
                break

    def whole(self, pieces: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """fp32 vectors of all that every rank has pieces of, a part at a time. Every rank must come to its end."""
        for part in self._parts:
            share = self._share(part)
            own = torch.zeros(share.stop - share.start, device=self._rounded.device)
            places = self._within(part)
            for name, place in places.items():
                begin = place.start + self._owned[name].start - share.start
                own[begin : begin + pieces[name].numel()] = pieces[name].view(-1)
            found = torch.empty(part.stop - part.start, device=own.device)
            self._ranks.gather(found, own)()
            for name, place in places.items():
                yield name, found[place.start - part.start : place.stop - part.start]
        yield from ((name, piece) for name, piece in pieces.items() if self._owned[name] == slice(None))

    @torch.no_grad()
    def gather(self, module: Drafter) -> None:
        """Bring all weights of `module` up to date."""
        parameters = dict(module.named_parameters())
        for name, vector in self.whole(self.pieces(module)):
            parameters[name].copy_(vector.view_as(parameters[name]))

    def _within(self, part: slice) -> dict[str, slice]:
        return {n: p for n, p in self._gradients.ranges.items() if part.start <= p.start < part.stop}

    def _share(self, part: slice) -> slice:
        size = (part.stop - part.start) // self._ranks.world
        return slice(part.start + self._ranks.rank * size, part.start + (self._ranks.rank + 1) * size)
