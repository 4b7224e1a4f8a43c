"""The drafter: tensor names and arithmetic of the published DFlash checkpoints.

Two streams: the context, states of the target reduced once by `fc` and `hidden_norm`, gives only keys and values;
the blocks, an anchor's embedding and K - 1 mask embeddings, go through the layers.

Shapes: T context tokens, A anchors, K block, D hidden, L captured layers, H heads, G key-value heads, E head width.
A row is one micro-batch, so there is no batch dimension.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_offline.train.masks import Blocks, KeyValue, View
from dflash_offline.train.spec import DrafterSpec


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean of squares in fp32; a plain gain, unlike the zero-centred one of Qwen3.5."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


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

    def __call__(self, x_HNE: Tensor) -> Tensor:
        """Rotate halves, in fp32."""
        low, high = x_HNE.float().chunk(2, dim=-1)
        rotated = x_HNE * self.cos + torch.cat([-high, low], dim=-1) * self.sin
        return rotated.to(x_HNE.dtype)


class Attention(nn.Module):
    """Grouped-query attention of the blocks over the context and themselves."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[N, heads * E] -> [heads, N, E]."""
        return x.view(len(x), -1, self.head_dim).transpose(0, 1)

    def key_value(self, x_ND: Tensor, rotary: Rotary) -> KeyValue:
        """Context and blocks share these projections."""
        return KeyValue(rotary(self.k_norm(self.heads(self.k_proj(x_ND)))), self.heads(self.v_proj(x_ND)))

    def forward(self, x_QD: Tensor, rotary: Rotary, context: KeyValue, view: View) -> Tensor:
        """Q = A * K block slots attend to the context and to their own block."""
        query = rotary(self.q_norm(self.heads(self.q_proj(x_QD))))
        attended = view.attend(query, context, self.key_value(x_QD, rotary))
        return self.o_proj(attended.transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer. The context is used as it is: only the blocks pass `input_layernorm`."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size)

    def forward(self, x_QD: Tensor, rotary: Rotary, context: KeyValue, view: View) -> Tensor:
        """One layer over all block slots."""
        x_QD = x_QD + self.self_attn(self.input_layernorm(x_QD), rotary, context, view)
        return x_QD + self.mlp(self.post_attention_layernorm(x_QD))


class Drafter(nn.Module):
    """11 tensors a layer, and `fc`, `hidden_norm`, `norm`. Embedding and head are the target's and not kept here."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.layer_ids) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in spec.layer_types)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def context(self, states_TLD: Tensor, position_T: Tensor) -> list[KeyValue]:
        """Keys and values of the context in every layer, from the states [T, L * D] of its tokens."""
        context_TD = self.hidden_norm(self.fc(states_TLD.to(self.fc.weight.dtype)))
        rotary = self._rotary(position_T)
        return [layer.self_attn.key_value(context_TD, rotary) for layer in self.layers]  # type: ignore[union-attr, operator]

    def draft(self, inputs_AKD: Tensor, context: list[KeyValue], blocks: Blocks) -> Tensor:
        """Outputs [A, K, D] of the blocks; times the target's head they are the logits of the same positions."""
        rotary = self._rotary(blocks.positions())
        windows = [self.spec.window(i) for i in range(len(self.layers))]
        views = {window: View(blocks, window) for window in {*windows}}
        x_QD = inputs_AKD.flatten(0, 1).to(self.norm.weight.dtype)
        for i, layer in enumerate(self.layers):
            x_QD = layer(x_QD, rotary, context[i], views[windows[i]])
        return self.norm(x_QD).view_as(inputs_AKD)

    def forward(self, states_TLD: Tensor, position_T: Tensor, inputs_AKD: Tensor, blocks: Blocks) -> Tensor:
        """Context and blocks of one row in one go."""
        return self.draft(inputs_AKD, self.context(states_TLD, position_T), blocks)

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
