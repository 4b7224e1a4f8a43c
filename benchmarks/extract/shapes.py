"""The real shapes of Qwen3.6-27B with random weights, and the lengths of a dataset: speed without a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

FEATURES = (1, 16, 31, 46, 61)


def config(layers: int) -> Any:
    """The text decoder's configuration, cut after `layers`."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        layer_types=kinds,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        use_cache=False,
    )


def decoder(attention: str, device: torch.device, layers: int = max(FEATURES) + 1) -> Any:
    """Random bf16 weights on `device`, made there."""
    made = config(layers)
    made._attn_implementation = attention
    with torch.device("meta"):
        model = Qwen3_5TextModel(made)
    model.norm = torch.nn.Identity()
    model = model.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0 if "linear_attn" in name else 0.0)
        elif name.endswith("A_log"):
            parameter.data.uniform_(0.01, 16, generator=generator).log_()
        else:
            parameter.data.normal_(
                0, 0.5 / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 1, generator=generator
            )
    model.rotary_emb = type(model.rotary_emb)(config=made).to(device)
    return model.eval().requires_grad_(False)


def lengths(count: int) -> list[int]:
    """Tokens of `count` samples: lognormal(ln 1500, 0.75) from 64 to 8192, seed 0; also in lengths.txt."""
    drawn = np.random.default_rng(0).lognormal(np.log(1500), 0.75, count)
    return np.clip(drawn, 64, 8192).astype(int).tolist()


if __name__ == "__main__":
    Path(__file__).with_name("lengths.txt").write_text("\n".join(map(str, lengths(4096))) + "\n")
