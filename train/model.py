"""The drafter: tensor names and arithmetic of the published DFlash checkpoints.

Two streams: the context, states of the target reduced once by `fc` and `hidden_norm`, gives only keys and values;
the blocks, an anchor's embedding and K - 1 mask embeddings, go through the layers.

Shapes: T context tokens, A anchors, K block, D hidden, L captured layers, H heads, G key-value heads, E head width.
A row is one micro-batch, so there is no batch dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_offline.train.fused import add_norm, norm_rotate, rms_norm, swiglu
from dflash_offline.train.masks import Attends, Blocks, KeyValue, View
from dflash_offline.train.spec import DrafterSpec


class Edges(NamedTuple):
    """What is told when a pass comes to the beginning of a part of the drafter, of those of `Drafter.parts`."""

    forward: Callable[[], None]
    """Its weights are used from here on. The last part comes first."""
    backward: Callable[[], None] | None
    """Its gradients are complete. Of the last part nobody is told."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean of squares in fp32; a plain gain, unlike the zero-centred one of Qwen3.5."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class Sink:
    """fp32 [out, in]: where the gradient of a weight that is a rounded copy is gathered, over the rows of a step."""

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.empty = True
        """Whether `total` is still of another step."""

    def add(self, gradient: Tensor, x: Tensor) -> None:
        """Add gradient.T @ x, which is never rounded. The first of a step is stored: it need not be cleared before."""
        total, left = self.total, gradient.T
        if x.is_cuda and self.empty:
            torch.mm(left, x, out_dtype=torch.float32, out=total)
        elif x.is_cuda:
            torch.addmm(total, left, x, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(left.float(), x.float(), beta=0 if self.empty else 1)
        self.empty = False


class Linear(nn.Linear):
    """x [N, in] -> [N, out], no bias."""

    sink: Sink | None = None
    """Where the weight is a rounded copy, what the backward pass adds its gradient to."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return super().forward(x) if self.sink is None else _Product.apply(x, self.weight, self.sink)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """x @ weight.T. The gradient of the weight goes to the sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: Sink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.sink.add(gradient, x)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None


class _Begin(torch.autograd.Function):
    """Identity, whose backward pass says that everything behind it is done."""

    @staticmethod
    def forward(ctx: Any, complete: Callable[[], None], *x: Tensor) -> Any:
        ctx.complete = complete
        return tuple(t.view_as(t) for t in x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.complete()
        return None, *gradients


def _begin(edges: Edges | None, *x: Tensor) -> tuple[Tensor, ...]:
    if edges is None:
        return x
    edges.forward()
    return x if edges.backward is None else _Begin.apply(edges.backward, *x)  # type: ignore[no-untyped-call]


class Rotary(NamedTuple):
    """Cosines and sines of some positions, [N, E]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> "Rotary":
        """Plain one-dimensional RoPE over the whole head, also where the target rotates a part or in three axes."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
        angle = positions[:, None].float() * (1.0 / theta**exponent)
        angle = torch.cat([angle, angle], dim=-1)
        return cls(angle.cos(), angle.sin())


class Attention(nn.Module):
    """Grouped-query attention of the blocks over the context and themselves."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = Linear(spec.hidden_size, spec.heads * spec.head_dim)
        self.k_proj = Linear(spec.hidden_size, spec.kv_heads * spec.head_dim)
        self.v_proj = Linear(spec.hidden_size, spec.kv_heads * spec.head_dim)
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[N, heads * E] -> [heads, N, E]."""
        return x.view(len(x), -1, self.head_dim).transpose(0, 1)

    def key_value(self, x_ND: Tensor, rotary: Rotary) -> KeyValue:
        """Context and blocks share these projections."""
        return KeyValue(self.rotate(self.k_norm, self.k_proj(x_ND), rotary), self.heads(self.v_proj(x_ND)))

    def rotate(self, norm: RMSNorm, x: Tensor, rotary: Rotary) -> Tensor:
        """Heads of x, normalised and rotated."""
        return norm_rotate(self.heads(x), norm.weight, norm.eps, *rotary)

    def forward(self, x_QD: Tensor, rotary: Rotary, context: KeyValue, view: View) -> Tensor:
        """Q = A * K block slots attend to the context and to their own block."""
        query = self.rotate(self.q_norm, self.q_proj(x_QD), rotary)
        attended = view.attend(query, context, self.key_value(x_QD, rotary))
        return self.o_proj(attended.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """Pre-norm decoder layer. The context is used as it is: only the blocks pass `input_layernorm`."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size)

    def forward(
        self, x_QD: Tensor, rotary: Rotary, context: KeyValue, view: Attends, edges: Edges | None = None
    ) -> Tensor:
        """One layer over all block slots. `edges`: the beginning of the MLP."""
        attended_QD = self.self_attn(self.input_layernorm(x_QD), rotary, context, view)
        x_QD, attended_QD = _begin(edges, x_QD, attended_QD)
        norm = self.post_attention_layernorm
        x_QD, normed_QD = add_norm(x_QD, attended_QD, norm.weight, norm.eps)
        return x_QD + self.mlp(normed_QD)


class Drafter(nn.Module):
    """11 tensors a layer, and `fc`, `hidden_norm`, `norm`. Embedding and head are the target's and not kept here."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = Linear(len(spec.layer_ids) * spec.hidden_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in spec.layer_types)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def reduced(self, states_TLD: Tensor) -> Tensor:
        """The context [T, D]: the states [T, L * D] of its tokens, reduced once for all layers."""
        return self.hidden_norm(self.fc(states_TLD.to(self.fc.weight.dtype)))

    def context(self, states_TLD: Tensor, position_T: Tensor) -> list[KeyValue]:
        """Keys and values of the context in every layer."""
        context_TD, rotary = self.reduced(states_TLD), self._rotary(position_T)
        return [layer.self_attn.key_value(context_TD, rotary) for layer in self._layers]

    def draft(self, inputs_AKD: Tensor, context: list[KeyValue], blocks: Blocks) -> Tensor:
        """Outputs [A, K, D] of the blocks; times the target's head they are the logits of the same positions."""
        rotary, views = self._rotary(blocks.positions()), self._views(blocks)
        x_QD = inputs_AKD.flatten(0, 1).to(self.norm.weight.dtype)
        for layer, known, window in zip(self._layers, context, self.spec.windows, strict=True):
            x_QD = layer(x_QD, rotary, known, views[window])
        return self.norm(x_QD).view_as(inputs_AKD)

    def forward(
        self,
        states_TLD: Tensor,
        position_T: Tensor,
        inputs_AKD: Tensor,
        blocks: Blocks,
        views: Mapping[int | None, Attends] | None = None,
        edges: Edges | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Context and blocks of one row in one go: what is trained. `views`: the row's, by window.

        `recompute`: the backward pass computes a layer again, of which nothing was kept but its input.
        """
        rotary, own, views = self._rotary(position_T), self._rotary(blocks.positions()), views or self._views(blocks)
        if edges:
            edges.forward()
        (context_TD,) = _begin(edges, self.reduced(states_TLD))
        x_QD = inputs_AKD.flatten(0, 1).to(self.fc.weight.dtype)
        for i, (layer, window) in enumerate(zip(self._layers, self.spec.windows, strict=True)):
            if i:
                x_QD, context_TD = _begin(edges, x_QD, context_TD)
            context = layer.self_attn.key_value(context_TD, rotary)
            given = x_QD, own, context, views[window], edges
            x_QD = checkpoint(layer, *given, use_reentrant=False) if recompute else layer(*given)
        return self.norm(x_QD).view_as(inputs_AKD)

    def parts(self) -> list[list[str]]:
        """Names of the parameters, by the order in which their gradients are complete."""
        names = [name for name, _ in self.named_parameters()]
        found = []
        for i in reversed(range(len(self.layers))):
            found += [[f"layers.{i}.mlp.", f"layers.{i}.post_"], [f"layers.{i}.input_", f"layers.{i}.self_attn."]]
        found.append(["fc.", "hidden_norm.", "norm."])
        return [[name for name in names if name.startswith(tuple(part))] for part in found]

    @property
    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _views(self, blocks: Blocks) -> dict[int | None, Attends]:
        return {window: View(blocks, window) for window in {*self.spec.windows}}

    def _rotary(self, positions: Tensor) -> Rotary:
        return Rotary.at(positions, self.spec.head_dim, self.spec.rope_theta)


@dataclass(frozen=True)
class Target:
    """What a drafter shares with its target, frozen and in no checkpoint."""

    embedding_VD: Tensor
    head_VD: Tensor
    norm: RMSNorm
    """Between the target's last hidden state and its head."""


def new_drafter(spec: DrafterSpec, seed: int) -> Drafter:
    """Fresh weights: normal(0, 0.02) matrices and gains of 1, the same on every rank."""
    drafter = Drafter(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    return drafter


def block_inputs(embedding_VD: Tensor, anchor_token_A: Tensor, size: int, mask_token: int) -> Tensor:
    """Embeddings [A, K, D] of [anchor, mask, mask, ...]."""
    anchor_AD, mask_D = embedding_VD[anchor_token_A], embedding_VD[mask_token]
    return torch.cat([anchor_AD[:, None], mask_D.expand(len(anchor_AD), size - 1, -1)], dim=1)
