"""The target forward: samples in, captured states out, nothing else computed.

Legend: T tokens of a sample, P tokens of a packed row, L captured layers, D hidden.

Packed: samples lie one after the other in a single row. Causal attention alone would let a sample see its predecessors,
and so would the convolution and the recurrent state of Gated DeltaNet layers, which no mask or position reset stops. So
all three are given the sample boundaries (kernels.py). Padded: rows are filled up on the right and no mask is passed;
every mixer is causal, so what follows a token cannot reach it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash_offline.extract import kernels


class Capture:
    """Runs a decoder and keeps the residual stream after the chosen layers."""

    def __init__(self, model: nn.Module, layers: Sequence[int], batching: str, device: torch.device) -> None:
        """`model` is a decoder of transformers, truncated after the last of `layers`."""
        self._model, self._layers, self._batching, self._device = model, layers, batching, device
        self._kept: dict[int, Tensor] = {}
        self.hidden_size: int = model.config.hidden_size  # type: ignore[union-attr, assignment]
        decoder: nn.ModuleList = model.layers  # type: ignore[assignment]
        for i in layers:
            decoder[i].register_forward_hook(self._keep(i))

    def _keep(self, i: int):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._kept[i] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def __call__(self, samples: Sequence[Tensor]) -> Tensor:
        """Token ids [T] of several samples -> bf16 [P, L, D], one after the other, on the device."""
        lengths = [len(ids) for ids in samples]
        try:
            if self._batching == "packed":
                with kernels.boundaries(lengths, self._device):
                    self._forward(torch.cat(list(samples))[None], torch.cat([torch.arange(n) for n in lengths])[None])
                return self._stack()[0]
            width = max(lengths)
            ids_BT = torch.stack([torch.nn.functional.pad(ids, (0, width - len(ids))) for ids in samples])
            self._forward(ids_BT, torch.arange(width)[None].expand(len(samples), -1))
            return torch.cat([row[:n] for row, n in zip(self._stack(), lengths, strict=True)])
        finally:
            self._kept.clear()

    def _forward(self, ids_BT: Tensor, positions_BT: Tensor) -> None:
        ids_BT, positions_BT = (kernels.sent(x.contiguous(), self._device) for x in (ids_BT, positions_BT))
        self._model(input_ids=ids_BT.long(), position_ids=positions_BT, use_cache=False)

    def _stack(self) -> Tensor:
        """bf16 [B, T, L, D] in the order of the layer list."""
        return torch.stack([self._kept[i] for i in self._layers], dim=2).to(torch.bfloat16)


def batches(lengths: Sequence[int], token_budget: int, padded: bool) -> list[range]:
    """Cut consecutive samples into forwards of at most `token_budget` tokens, padding counted; long ones go alone."""
    out, start, cost, longest = [], 0, 0, 0
    for i, n in enumerate(lengths):
        longest = max(longest, n)
        cost = longest * (i - start + 1) if padded else cost + n
        if i > start and cost > token_budget:
            out.append(range(start, i))
            start, cost, longest = i, n, n
    return [*out, range(start, len(lengths))] if lengths else []
