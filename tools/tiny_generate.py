"""On-policy answers of the tiny target: greedy, fp32, on the CPU, in a few seconds for some hundred prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT_END = "<|im_end|>"
THINK_END = "\n</think>\n\n"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the target wrote after one prompt.

    `generated_ids` ends with the chat end token exactly if `finish_reason` is "stop"; else it is "length".
    `round_trip` says whether rendering and tokenizing `messages` gives `prompt_ids + generated_ids` again, before the
    chat end that the template adds to a cut answer: only then are these messages on-policy data.
    """

    messages: list[dict[str, str]]
    finish_reason: str
    prompt_ids: list[int]
    generated_ids: list[int]
    round_trip: bool


def generate(
    folder: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 160,
    batch_size: int = 64,
    enable_thinking: bool = True,
) -> Iterator[Completion]:
    """Answer single-turn `prompts` with the model in `folder`; yields in their order, once all are answered."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rendered = [render_prompt(tokenizer, prompt, enable_thinking=enable_thinking) for prompt in prompts]
    ids: list[list[int]] = tokenizer(rendered)["input_ids"]
    done: dict[int, Completion] = {}
    # Prompts of like length share a batch. The rest is left padding, which both mixers mask out: a Gated DeltaNet layer
    # sees zeros there, which leave its zero state as it is.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for batch in (order[start : start + batch_size] for start in range(0, len(order), batch_size)):
        inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        for i, row in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            done[i] = completion(tokenizer, prompts[i], ids[i], row, enable_thinking=enable_thinking)
    yield from (done[i] for i in range(len(prompts)))


def render_prompt(tokenizer: Any, prompt: str, *, enable_thinking: bool = True) -> str:
    """Return the text that the model is given, up to where its own writing begins."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )


def completion(
    tokenizer: Any, prompt: str, prompt_ids: list[int], row: list[int], *, enable_thinking: bool
) -> Completion:
    """Make messages of one generated `row` (ids, padded after the chat end) and check that they render back."""
    end = tokenizer.convert_tokens_to_ids(CHAT_END)
    stopped = end in row
    generated = row[: row.index(end) + 1] if stopped else row
    text = tokenizer.decode(generated[:-1] if stopped else generated)
    reasoning, _, content = text.partition(THINK_END) if enable_thinking else ("", "", text)
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    messages = [{"role": "user", "content": prompt}, answer]
    again = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
    ours = prompt_ids + generated
    return Completion(
        messages=messages,
        finish_reason="stop" if stopped else "length",
        prompt_ids=prompt_ids,
        generated_ids=generated,
        round_trip=again[: len(ours)] == ours,
    )
