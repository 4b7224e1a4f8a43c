"""Train the tiny target: a Qwen3.5 text decoder of two million weights that does the tasks of `tiny_chats`.

python -m dflash_offline.tools.tiny_train --out DIR               trains, then answers held-out prompts
python -m dflash_offline.tools.tiny_train --out DIR --seed 1      trains the model in DIR further, on other chats
python -m dflash_offline.tools.tiny_train --out DIR --steps 0     only answers held-out prompts
"""

import argparse
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_offline.tools.tiny_chats import Chat, chats
from dflash_offline.tools.tiny_generate import generate, render_prompt

TEMPLATE = Path(__file__).parent / "tiny_target" / "chat_template.jinja"
# Words keep their leading space and digits stand alone, as in Qwen: a text then has one tokenization, whoever wrote it.
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>")  # the last is never used: a mask token
THINK = ("<think>", "</think>")
IGNORE = -100
BLOCK = 16  # batches


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`batch` counts chats; `workers` are processes that draw and tokenize them; `held_out` counts prompts answered."""

    steps: int = 12000
    batch: int = 512
    lr: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.05
    no_think: float = 0.1
    vocabulary: int = 800
    hidden: int = 128
    intermediate: int = 384
    seed: int = 0
    workers: int = 0
    log_every: int = 100
    held_out: int = 400


def build_tokenizer(vocabulary: int, seed: int) -> Any:
    """Learn `vocabulary` byte-level BPE tokens from training chats and add the special ones after them."""
    bpe = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    texts = (
        text
        for chat in chats(seed, 20_000)
        for text in ("system\n", "user\n", chat.prompt, "assistant\n", f"{chat.reasoning}\n", "\n\n", chat.answer)
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet))
    bpe.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIALS])
    # As in Qwen, decoding without special tokens keeps the think marks.
    bpe.add_tokens([tokenizers.AddedToken(token, special=False) for token in THINK])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE.read_text(),
        model_max_length=4096,
    )


def build_model(tokenizer: Any, settings: Settings) -> Any:
    """Return an untrained decoder with every feature of the large one: see the config that it writes."""
    end_of_text, chat_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    config = Qwen3_5TextConfig(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attn_output_gate=True,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        max_position_embeddings=4096,
        initializer_range=0.04,
        tie_word_embeddings=False,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,  # as in the large one: only generation_config.json names the chat end
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text, eos_token_id=[chat_end, end_of_text], pad_token_id=end_of_text
    )
    return model


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches of training chats: token ids and labels, int64 [batch, tokens], right padded to a multiple of 64.

    All mixers are causal, so padding on the right needs no attention mask.
    """

    def __init__(self, tokenizer: Any, settings: Settings, *, held_out: bool = False) -> None:
        self.tokenizer, self.settings, self.held_out = tokenizer, settings, held_out

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every worker draws its own blocks of batches; inside a block, chats of like length share a batch."""
        worker, size = get_worker_info(), self.settings.batch
        for block in count(worker.id if worker else 0, worker.num_workers if worker else 1):
            seed = (self.settings.seed + 1) * 1_000_000 + block
            rng = random.Random(seed)
            rows = [
                tokenize_chat(self.tokenizer, chat, enable_thinking=rng.random() >= self.settings.no_think)
                for chat in chats(seed, BLOCK * size, held_out=self.held_out)
            ]
            rows.sort(key=lambda row: len(row[0]) + len(row[1]))
            batches = [rows[i : i + size] for i in range(0, len(rows), size)]
            rng.shuffle(batches)
            yield from map(self.collate, batches)

    def collate(self, rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """Pad prompts and responses; only responses have labels."""
        width = math.ceil(max(len(prompt) + len(response) for prompt, response in rows) / 64) * 64
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), IGNORE)
        for i, (prompt, response) in enumerate(rows):
            ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
            labels[i, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
        return ids, labels


def tokenize_chat(tokenizer: Any, chat: Chat, *, enable_thinking: bool) -> tuple[list[int], list[int]]:
    """Return the ids of what the model is given and of what it should write, chat end included."""
    prompt = render_prompt(tokenizer, chat.prompt, enable_thinking=enable_thinking)
    reasoning = f"{chat.reasoning}\n</think>\n\n" if enable_thinking else ""
    prompt_ids, response_ids = tokenizer([prompt, f"{reasoning}{chat.answer}<|im_end|>"])["input_ids"]
    return prompt_ids, response_ids


def response_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over labelled positions; logits are made only there."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    chosen = targets != IGNORE
    return F.cross_entropy(model.lm_head(hidden[chosen]).float(), targets[chosen])


def train(model: Any, tokenizer: Any, settings: Settings, log: "Log") -> None:
    """Train in place: AdamW, warm-up, cosine to zero, bf16 autocast on a GPU and fp32 on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    matrices = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
    # A whole block, since its batches differ by length and so in difficulty: a few of them would be a biased sample.
    few = replace(settings, batch=math.ceil(settings.batch / 8))
    check = [(i.to(device), t.to(device)) for i, t in islice(Batches(tokenizer, few, held_out=True), BLOCK)]
    loader = DataLoader(Batches(tokenizer, settings), batch_size=None, num_workers=settings.workers)
    start, total = time.monotonic(), torch.zeros((), device=device)
    for step, (ids, labels) in enumerate(islice(loader, settings.steps), 1):
        progress = step / settings.steps
        rate = settings.lr * min(step / settings.warmup, 0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = response_loss(model, ids.to(device), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % settings.log_every == 0 or step == settings.steps:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                held_out = sum(response_loss(model, *batch).item() for batch in check) / len(check)
            mean = total.item() / (step % settings.log_every or settings.log_every)
            total.zero_()
            seconds = round(time.monotonic() - start, 1)
            log.write(step=step, loss=round(mean, 4), held_out_loss=round(held_out, 4), seconds=seconds)


def evaluate(folder: Path, number: int) -> dict[str, Any]:
    """Answer `number` held-out prompts on the CPU and compare with the right answers."""
    asked = list(chats(1, number, held_out=True))
    start = time.monotonic()
    answers = list(generate(folder, [chat.prompt for chat in asked]))
    seconds = time.monotonic() - start
    grams = [tuple(a.generated_ids[i : i + 4]) for a in answers for i in range(len(a.generated_ids) - 3)]
    tokens = [len(a.generated_ids) for a in answers]
    right = Counter(c.kind for c, a in zip(asked, answers, strict=True) if a.messages[1]["content"] == c.answer)
    kinds = Counter(chat.kind for chat in asked)
    return {
        "prompts": number,
        "ended": sum(a.finish_reason == "stop" for a in answers) / number,
        "round_trip": sum(a.round_trip for a in answers) / number,
        "distinct_4": round(len(set(grams)) / len(grams), 4),
        "exact": round(right.total() / number, 4),
        "exact_by_kind": {kind: f"{right[kind]}/{kinds[kind]}" for kind in sorted(kinds)},
        "answer_tokens": {"mean": sum(tokens) / number, "min": min(tokens), "max": max(tokens)},
        "seconds": round(seconds, 1),
    }


@dataclass(frozen=True, kw_only=True)
class Log:
    """Prints records and appends them to a file of JSON lines."""

    path: Path

    def write(self, **record: Any) -> None:
        """Write one record."""
        line = json.dumps(record)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    for name, default in asdict(Settings()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"default {default}"
        )
    options = vars(parser.parse_args())
    out: Path = options.pop("out")
    settings = Settings(**options)
    out.mkdir(parents=True, exist_ok=True)
    log = Log(path=out / "train_log.jsonl")
    if settings.steps:
        device = f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
        versions = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
        arguments = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in asdict(settings).items())
        command = f"python -m dflash_offline.tools.tiny_train --out DIR {arguments}"
        log.write(command=command, versions=versions, machine=device)
        torch.manual_seed(settings.seed)
        if (out / "model.safetensors").exists():
            tokenizer = AutoTokenizer.from_pretrained(out)
            model = Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.float32)
        else:
            tokenizer = build_tokenizer(settings.vocabulary, settings.seed)
            tokenizer.save_pretrained(out)
            model = build_model(tokenizer, settings)
        train(model, tokenizer, settings, log)
        model.to("cpu", torch.bfloat16).save_pretrained(out)
    if settings.held_out:
        log.write(held_out=evaluate(out, settings.held_out))


if __name__ == "__main__":
    main()
