"""Chats to token ids and loss mask, by the tokenizer's own template, exact on ids.

The text is rendered whole and tokenised once, as a server does. Assistant turns are then found on the ids:

    <|im_start|> assistant \n  [ what the server supplies ]  response ...  <|im_end|>
                                                             ^^^^^^^^^^^^^^^^^^^^^^^^ supervised

What the server supplies is the longest common prefix of the turn and the generation prompt (`<think>\n` for thinking
models). Messages whose text contains the template's own markers would fake turns; such rows are skipped, never guessed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_offline.extract.dataset import Row, SkipRow
from dflash_offline.shards.errors import UsageError

MASK_RULE = "assistant turns on ids, generation prompt excluded, end token included; 1"
_START, _END, _HEADER = "<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n"


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A tokenizer with what the mask needs to know of its template."""

    tokenizer: Any
    template_args: dict[str, Any]
    vocab_size: int
    header: tuple[int, ...]
    """Ids of `<|im_start|>assistant\\n`."""
    supplied: tuple[int, ...]
    """Ids of the rest of the generation prompt."""
    end: int
    """Id of `<|im_end|>`; -1 where the tokenizer has no chat template, and only rows of ids can be read."""


def make_renderer(tokenizer: Any, vocab_size: int, template_args: dict[str, Any]) -> Renderer:
    """Learn the template's generation prompt. Raises UsageError for a template whose turns cannot be found on ids."""
    if len(tokenizer) > vocab_size:
        raise UsageError(f"the tokenizer has {len(tokenizer)} tokens, the target only {vocab_size}: not its tokenizer")
    common = {"tokenizer": tokenizer, "template_args": template_args, "vocab_size": vocab_size}
    if not tokenizer.chat_template:
        return Renderer(**common, header=(), supplied=(), end=-1)
    probe = [{"role": "user", "content": "x"}]
    try:
        whole = tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True, **template_args)
        prompt = whole.removeprefix(tokenizer.apply_chat_template(probe, tokenize=False, **template_args))
    except Exception as error:  # the template is a program of somebody else's
        raise UsageError(f"chat template does not render one user message: {type(error).__name__}: {error}") from None
    end = tokenizer.convert_tokens_to_ids(_END)
    if not prompt.startswith(_HEADER) or not isinstance(end, int) or end == tokenizer.unk_token_id:
        raise UsageError(f"chat template: generation prompt is {prompt!r}; expected ChatML, starting with {_HEADER!r}")
    header = _tokenise(tokenizer, _HEADER)
    ids = _tokenise(tokenizer, prompt)
    if ids[: len(header)] != header:
        raise UsageError(f"chat template: {prompt!r} does not tokenise as {_HEADER!r} and a rest")
    return Renderer(**common, header=tuple(header), supplied=tuple(ids[len(header) :]), end=end)


def render(renderer: Renderer, row: Row) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """A row -> ids [T], loss mask [T]. Raises SkipRow with the reason."""
    if row.messages is None:
        return _check_ids(row, renderer.vocab_size)
    if renderer.end < 0:
        raise SkipRow("no_chat_template", "the tokenizer has no chat template; give rows of input_ids and loss_mask")
    for where, part in [*enumerate(row.messages), ("tools", row.tools)]:
        text = json.dumps(part, ensure_ascii=False)
        if _START in text or _END in text:
            raise SkipRow("chat_markers_in_content", f"message {where} contains {_START} or {_END}")
    tokenizer, args = renderer.tokenizer, renderer.template_args
    try:
        text = tokenizer.apply_chat_template(row.messages, tools=row.tools, tokenize=False, **args)
        ids = np.array(_tokenise(tokenizer, text), dtype=np.int32)
    except Exception as error:  # the template is a program of somebody else's
        raise SkipRow("not_rendered", f"chat template: {type(error).__name__}: {error}") from None
    mask = np.zeros(len(ids), dtype=np.uint8)
    turns = _find(ids, renderer.header)
    expected = sum(m["role"] == "assistant" for m in row.messages)
    if len(turns) != expected:
        raise SkipRow("mask_not_exact", f"{len(turns)} assistant turns in the rendered ids, {expected} in the messages")
    for at in turns:
        start = at + len(renderer.header)
        start += _common_prefix(ids[start:], renderer.supplied)
        ends = np.flatnonzero(ids[start:] == renderer.end)
        if len(ends) == 0:
            raise SkipRow("mask_not_exact", f"no {_END} after the assistant turn at token {at}")
        mask[start : start + ends[0] + 1] = 1
    if row.finish_reason == "length" and np.any(mask):
        # The template closed a turn that the target had not finished: that end token is not the target's.
        mask[np.flatnonzero(mask)[-1]] = 0
    return ids, mask


def _check_ids(row: Row, vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Ready ids and mask, checked before they can reach a GPU."""
    for name, values in (("input_ids", row.input_ids), ("loss_mask", row.loss_mask)):
        if not isinstance(values, list) or any(type(v) is not int or abs(v) >= 2**31 for v in values):
            raise SkipRow("bad_ids", f"{name} is not a list of 32-bit integers")
    ids, mask = np.array(row.input_ids, dtype=np.int64), np.array(row.loss_mask, dtype=np.int64)
    if len(ids) != len(mask) or len(ids) == 0:
        raise SkipRow("bad_ids", f"{len(ids)} input_ids and {len(mask)} loss_mask values; expected equal and not 0")
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise SkipRow("bad_ids", f"input_ids[{bad[0]}] is {ids[bad[0]]}; expected 0 to {vocab_size - 1}")
    bad = np.flatnonzero((mask != 0) & (mask != 1))
    if len(bad):
        raise SkipRow("bad_ids", f"loss_mask[{bad[0]}] is {mask[bad[0]]}; expected 0 or 1")
    return ids.astype(np.int32), mask.astype(np.uint8)


def _tokenise(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _find(ids: NDArray[np.int32], pattern: Sequence[int]) -> list[int]:
    """Every position where `pattern` occurs in `ids`."""
    if len(ids) < len(pattern):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == np.array(pattern)).all(axis=1)).tolist()


def _common_prefix(ids: NDArray[np.int32], pattern: Sequence[int]) -> int:
    count = 0
    for a, b in zip(ids, pattern, strict=False):
        if a != b:
            break
        count += 1
    return count
