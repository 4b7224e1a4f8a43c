"""Tiny random targets and datasets for tests: real architectures, real files, no training."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_offline.extract import kernels
from dflash_offline.extract.forward import Capture
from dflash_offline.extract.hybrid import HybridCapture
from dflash_offline.extract.target import open_target
from dflash_offline.extract.weights import build_decoder, read_weights

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|audio_start|>"]
WORDS = [
    "red",
    "blue",
    "green",
    "stone",
    "river",
    "cloud",
    "seven",
    "eight",
    "nine",
    "copy",
    "list",
    "the",
    "of",
    "and",
    "to",
    "is",
    "what",
    "next",
    "day",
]

TEMPLATE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and '</think>' in m.content %}
{%- set r = m.content.split('</think>') %}
{{- '<think>\\n' + r[0].split('<think>')[-1].strip() + '\\n</think>\\n\\n' + r[1].strip() }}
{%- elif m.role == 'assistant' %}{{- '<think>\\n\\n</think>\\n\\n' + m.content }}
{%- else %}{{- m.content }}{% endif %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 290 tokens with ChatML and thinking specials."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+| ?[a-z]+| ?\d|[^\s]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIALS)
    raw.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    out = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    out.chat_template = TEMPLATE
    return out


def model(family: str, seed: int = 0, wide: int = 1) -> Any:
    """A random 8-layer causal LM in fp32, with weights large enough that layers differ; all widths `wide` times."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64 * wide,
        "intermediate_size": 96 * wide,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 * wide,
        "initializer_range": 0.1 / wide**0.5,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "qwen3_5":
        rope = {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [wide, wide, 0],
            "mrope_interleaved": True,
        }
        linear = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16 * wide,
            "linear_value_head_dim": 16 * wide,
        }
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **linear, rope_parameters=rope)).eval()
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True)).eval()
    net = LlamaForCausalLM(LlamaConfig(**common, attention_bias=True)).eval()
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            p.data.normal_(0, 0.1)
    return net


def write_target(folder: Path, family: str = "qwen3_5", prefix: str = "model.", seed: int = 0, wide: int = 1) -> Any:
    """Save a random target with its tokenizer; `prefix` starts the decoder's names. Returns the bf16-exact model."""
    net = model(family, seed, wide)
    for p in net.parameters():
        p.data = p.data.bfloat16().float()
    # A copy: casting would also round the rotary tables, which a checkpoint does not hold.
    copy.deepcopy(net).to(torch.bfloat16).save_pretrained(folder)
    if prefix != "model.":
        path = folder / "model.safetensors"
        tensors = {
            (prefix + k.removeprefix("model.") if k.startswith("model.") else k): v for k, v in load_file(path).items()
        }
        if "language_model" in prefix:
            tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
            tensors["mtp.fc.weight"] = torch.zeros(2, 2)
        save_file(tensors, path, metadata={"format": "pt"})
    tokenizer().save_pretrained(folder)
    return net


def decoder(
    folder: Path, last_layer: int, dtype: torch.dtype = torch.float32, attention: str = "sdpa", device: str = "cpu",
    use: str = "dequantise",
) -> Any:  # fmt: skip
    """Layers 0..last_layer of a checkpoint, loaded as a worker loads them."""
    target, where = open_target(str(folder), None, use), torch.device(device)
    return build_decoder(target, last_layer, read_weights(target, last_layer, where, dtype), where, attention)


def capture(
    folder: Path, layers: Sequence[int], batching: str = "packed", hybrid: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", use: str = "dequantise",
) -> Run:  # fmt: skip
    """Token ids of samples -> the states of each, bf16 [T, L, D]; `hybrid`: by HybridCapture."""
    where = torch.device(device)
    kernels.install(open_target(str(folder), None).config, where, allow_slow=False)
    attention = kernels.PACKED_ATTENTION if batching == "packed" else "sdpa"
    net = decoder(folder, max(layers), dtype, attention, device, use)
    run: Any = HybridCapture(net, layers, where) if hybrid else Capture(net, layers, batching, where)
    return lambda ids: list(run(ids).split([len(i) for i in ids]))


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """JSONL of short chats with thinking; lengths vary."""
    generator = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        n = int(torch.randint(low, high, (1,), generator=generator))
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (n,), generator=generator))

    with path.open("w") as file:
        for i in range(count):
            answer = f"<think>\n{words(2, 12)}\n</think>\n\n{words(3, 40)}"
            messages = [{"role": "user", "content": words(3, 30)}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"chat-{i}", "messages": messages, "finish_reason": "stop"}) + "\n")
    return path


def write_rows(path: Path, *rows: object) -> Path:
    """JSONL of any rows."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path
