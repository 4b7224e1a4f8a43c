"""The dense Qwen3.5 and 3.6 hybrids, one packed row at a time, without what is not needed between matrix products.

The mathematics is transformers' own, with its roundings: projections that read the same input are one
product, the residual is added by the product before it, the convolution also cuts and normalises the heads, heads are
grouped natively, and nothing is copied for its layout. The stock modules give up their weights layer by layer.

Legend: P tokens of the row, L captured layers, D hidden; see hybrid_plain.py for the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_offline.extract import fp8, kernels

LENGTH_STEP = 128
Weight = Tensor | fp8.Matrix


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of a decoder layer; `mixer` holds those that depend on its kind."""

    attention: bool
    """Full attention; else a gated delta rule."""
    before: Tensor
    after: Tensor
    project: list[Weight]
    """Projections of the mixer's input: [q and gate | k | v], or [q k v | z]."""
    out: Weight
    gate_up: list[Weight]
    down: Weight
    mixer: Any


class HybridCapture:
    """As forward.Capture, for packed rows of a Qwen3.5 or 3.6 decoder."""

    def __init__(self, model: nn.Module, layers: Sequence[int], device: torch.device) -> None:
        """Takes the weights of `model`, which is of no use afterwards."""
        from dflash_offline.extract import hybrid_plain

        self._device, self._wanted = device, tuple(layers)
        self._ops: Any = hybrid_plain
        if device.type == "cuda":
            from dflash_offline.extract import hybrid_kernels

            self._ops = hybrid_kernels
        net: Any = model
        self.config = net.config
        self.hidden_size: int = net.config.hidden_size
        self._embed, self._rotary = net.embed_tokens.weight, net.rotary_emb
        self._layers = [_take(net.layers[i]) for i in range(len(net.layers))]

    @torch.inference_mode()
    def __call__(self, samples: Sequence[Tensor]) -> Tensor:
        """Token ids [T] of several samples -> bf16 [P, L, D], one after the other, on the device."""
        lengths = [len(ids) for ids in samples]
        ids_P = kernels.sent(torch.cat(list(samples)), self._device).long()
        place_P = kernels.sent(torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]), self._device)
        x_PD = F.embedding(ids_P, self._embed)
        cos, sin = self._rotary(x_PD[None], place_P.long().expand(3, 1, -1))
        states_PLD = torch.empty(
            len(ids_P), len(self._wanted), x_PD.shape[1], dtype=torch.bfloat16, device=self._device
        )
        lent = kernels.sent(_lent(lengths), self._device)
        eps: float = self.config.rms_norm_eps
        with kernels.boundaries(lengths, self._device):
            for i, layer in enumerate(self._layers):
                normed_PD = self._ops.norm(x_PD, layer.before, eps)
                proj_P = _products(normed_PD, layer.project)
                if layer.attention:
                    mixed_PC = self._attend(layer, proj_P, lengths, lent, cos[0], sin[0])
                else:
                    mixed_PC = self._recur(layer, proj_P, _products(normed_PD, layer.mixer["gates"]), place_P)
                del normed_PD, proj_P  # else they would lie beside the MLP's
                _add_product(x_PD, mixed_PC, layer.out)
                gate_up = _products(self._ops.norm(x_PD, layer.after, eps), layer.gate_up)
                _add_product(x_PD, self._ops.swiglu(gate_up), layer.down)
                for place in (n for n, wanted in enumerate(self._wanted) if wanted == i):
                    states_PLD[:, place] = x_PD
        return states_PLD

    def _attend(
        self, layer: Layer, proj_P: Tensor, lengths: Sequence[int], lent: Tensor, cos_PR: Tensor, sin_PR: Tensor
    ) -> Tensor:
        """Causal attention of each sample, gated. [P, H * d]"""
        c, m = self.config, layer.mixer
        heads, kv_heads, d = c.num_attention_heads, c.num_key_value_heads, len(m["q_norm"])
        # cuDNN plans every length anew, so samples get tokens behind them up to a multiple, which none of theirs sees.
        q, k = self._ops.rope_heads(
            proj_P, m["q_norm"], m["k_norm"], cos_PR, sin_PR, heads, kv_heads, c.rms_norm_eps, LENGTH_STEP
        )
        v = F.pad(proj_P[:, 2 * heads * d + kv_heads * d :].view(-1, kv_heads, d), (0, 0, 0, 0, 0, LENGTH_STEP))
        k, v = (x.index_select(0, lent) for x in (k, v))
        out_PC = proj_P.new_empty(len(proj_P), heads * d)
        start = at = 0
        for n in lengths:
            size, own = -(-n // LENGTH_STEP) * LENGTH_STEP, slice(start, start + n)
            query, key, value = (
                x[begin : begin + size].transpose(0, 1)[None] for x, begin in ((q, start), (k, at), (v, at))
            )
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=d**-0.5, enable_gqa=True)
            self._ops.gate_heads(out[0].transpose(0, 1)[:n], proj_P[own], out_PC[own])
            start, at = start + n, at + size
        return out_PC

    def _recur(self, layer: Layer, proj_P: Tensor, gates_P: Tensor, place_P: Tensor) -> Tensor:
        c, m = self.config, layer.mixer
        keys, values = c.linear_num_key_heads, c.linear_num_value_heads
        z, (b, a) = proj_P[:, m["conv"].shape[0] :], gates_P.chunk(2, dim=1)
        q, k, v = self._ops.conv_heads(
            proj_P, m["conv"], place_P, keys, values, c.linear_key_head_dim, c.linear_value_head_dim
        )
        decay, beta = self._ops.gates(b, a, m["A_log"], m["dt_bias"])
        out = kernels.delta_rule(q[None], k[None], v[None], decay[None], beta[None])
        return self._ops.gated_norm(out, z, m["norm"], c.rms_norm_eps)


def _lent(lengths: Sequence[int]) -> Tensor:
    """Rows of keys and values of every sample, filled up with the row behind the last, which is zero.

    Not with the next sample's: where those are not finite, a probability of zero would not keep them out.
    """
    total, start, parts = sum(lengths), 0, []
    for n in lengths:
        parts += [torch.arange(start, start + n), torch.full((-n % LENGTH_STEP,), total)]
        start += n
    return torch.cat(parts)


def _products(x_PI: Tensor, weights: Sequence[Weight]) -> Tensor:
    """x times each of `weights`, side by side."""
    parts = [F.linear(x_PI, w) if isinstance(w, Tensor) else fp8.product(x_PI, w) for w in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _add_product(x_PD: Tensor, y_PI: Tensor, weight: Weight) -> None:
    """The residual, which cuBLAS adds in the same pass where it can."""
    if isinstance(weight, Tensor):
        x_PD.addmm_(y_PI, weight.t())
    else:
        x_PD += fp8.product(y_PI, weight)


def _take(layer: Any) -> Layer:
    """The layer's weights, those that are joined as one tensor; the layer gives them up."""
    names: tuple[str, ...]
    attention = hasattr(layer, "self_attn")
    part = layer.self_attn if attention else layer.linear_attn
    if attention:
        names, out = ("q_proj", "k_proj", "v_proj"), "o_proj"
        mixer = {"q_norm": part.q_norm.weight, "k_norm": part.k_norm.weight}
    else:
        names, out = ("in_proj_qkv", "in_proj_z"), "out_proj"
        mixer = {
            "conv": part.conv1d.weight.squeeze(1).contiguous(),
            "gates": _join(part, ("in_proj_b", "in_proj_a")),
            "A_log": part.A_log,
            "dt_bias": part.dt_bias,
            "norm": part.norm.weight,
        }
    return Layer(
        attention=attention,
        before=layer.input_layernorm.weight,
        after=layer.post_attention_layernorm.weight,
        project=_join(part, names),
        out=_weight(getattr(part, out)),
        gate_up=_join(layer.mlp, ("gate_proj", "up_proj")),
        down=_weight(layer.mlp.down_proj),
        mixer=mixer,
    )


def _weight(module: Any) -> Weight:
    return module.matrix() if isinstance(module, fp8.Linear) else module.weight


def _join(module: nn.Module, names: Sequence[str]) -> list[Weight]:
    """One weight, or one of each kind in turn: a checkpoint in FP8 leaves narrow projections as they were."""
    joined: list[Weight] = []
    for quantised, run in groupby((getattr(module, name) for name in names), lambda m: isinstance(m, fp8.Linear)):
        parts = list(run)
        joined.append(fp8.join([m.matrix() for m in parts]) if quantised else torch.cat([m.weight for m in parts]))
    for name in names:
        delattr(module, name)
    return joined
