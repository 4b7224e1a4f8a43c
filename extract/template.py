"""How a chat template writes assistant turns: learned from a few probes, not from the name of a model family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_offline.extract.dataset import SkipRow

_ASK, _ANSWER, _THOUGHT = "qzx1ask", "qzx2answer", "qzx3thought"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How a template writes assistant turns."""

    header: str
    """What opens an assistant turn, and nothing else."""
    opener: str
    """The special token in `header`."""
    end: str
    """The token that closes a turn."""
    prompt: str
    """The generation prompt: what the server supplies of a turn."""
    supplied: tuple[int, ...]
    """Its ids."""
    takes_parts: bool
    """Content may be a list of parts."""


def learn_turns(tokenizer: Any, args: dict[str, Any]) -> Turns:
    """The template's turns, from probes. Raises SkipRow when they cannot be told apart from other text."""

    def rendered(*messages: dict[str, Any], **more: Any) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **args, **more)

    ask = {"role": "user", "content": _ASK}
    answer = {"role": "assistant", "content": _ANSWER}
    thinking = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
    try:
        base, prompt = rendered(ask), rendered(ask, add_generation_prompt=True)
        blocks = [rendered(ask, answer), rendered(ask, answer, ask, answer), rendered(ask, thinking)]
        blocks.append(rendered(ask, {**answer, "reasoning_content": _THOUGHT}))
    except Exception as error:  # the template is a program of somebody else's
        raise SkipRow("not_rendered", f"chat template: {type(error).__name__}: {error}") from None
    try:
        parts = rendered({"role": "user", "content": [{"type": "text", "text": _ASK}]})
    except Exception:  # a template may want text
        parts = ""
    if prompt == base or not all(text.startswith(base) for text in (prompt, *blocks)):
        raise SkipRow("mask_not_exact", f"chat template: no generation prompt that opens a turn ({prompt[-40:]!r})")
    prompt = prompt[len(base) :]
    header = prompt
    for block in blocks:
        header = header[: common_prefix(header, block[len(base) :])]
    # Thinking is part of a turn, also where a template always writes it.
    header = header.partition("<think>")[0]
    added = sorted((t.content for t in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    opener = next((t for t in added if t in header), "")
    tail = blocks[0][blocks[0].rfind(_ANSWER) + len(_ANSWER) :]
    end = next((t for t in added if tail.startswith(t)), "")
    if not opener or not end or header in base:
        raise SkipRow("mask_not_exact", f"chat template: turns open with {header!r} and end with {tail!r}, not tokens")
    supplied = tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
    common = {"header": header, "opener": opener, "end": end, "prompt": prompt}
    return Turns(**common, supplied=tuple(supplied), takes_parts=parts == base)


def find_turns(text: str, turns: Turns) -> list[tuple[int, int, int]]:
    """Where each turn's header starts and ends, and where its end token starts."""
    spans: list[tuple[int, int, int]] = []
    at = text.find(turns.header)
    while at >= 0:
        start = at + len(turns.header)
        end = text.find(turns.end, start)
        if end < 0 or turns.opener in text[start:end]:  # some templates close a call by another token
            raise SkipRow("mask_not_exact", f"no {turns.end} after the assistant turn at character {at}")
        spans.append((at, start, end))
        at = text.find(turns.header, end)
    return spans


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common prefix."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
