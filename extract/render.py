"""Chats to token ids and loss mask, by the tokenizer's own template, exact on ids.

The text is rendered whole and tokenised once, as a server does. How the template opens and closes an assistant turn is
learned from a few probes; turns are then found in the text, and their places on the ids by the tokenizer's offsets:

    <|im_start|>assistant\n  [ what the server supplies ]  response ...  <|im_end|>
                                                           ^^^^^^^^^^^^^^^^^^^^^^^^ supervised

What the server supplies is the longest common prefix of the turn and the generation prompt, on ids (`<think>\n` for
thinking models). Text that contains the template's own markers fakes no turn: for the search they are replaced by
stand-ins of the same length. A turn that cannot be placed to the token is a reason to skip the row, never a guess.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.dataset import Row, SkipRow
from dflash_offline.extract.template import Turns, common_prefix, find_turns, learn_turns
from dflash_offline.shards.errors import UsageError

MASK_RULE = "assistant turns on ids, generation prompt excluded, end token included; 2"
NOTES = ("chat markers in a prompt", "thinking of earlier turns left out by the template", "empty thinking supervised")
"""What is worth saying of a row that is kept; bit n of `Rendered.notes`."""
_MARKERS, _LEFT_OUT, _EMPTY = 1, 2, 4
_MIN_CHARS, _CHARS_A_TOKEN = 4 << 20, 64
"""Longer texts are skipped unread: of a book only the first page would be kept, and tokenising it takes gigabytes."""


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A tokenizer with what the mask needs to know of its template."""

    tokenizer: Any
    template_args: dict[str, Any]
    vocab_size: int
    turns: Turns | None
    problem: tuple[str, str]
    """Reason and detail for skipping chats, where there are no `turns`."""
    last_only: bool = False
    """Only the last assistant turn counts."""
    max_chars: int = _MIN_CHARS


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A row as the target will see it."""

    input_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T]"""
    notes: int = 0


class Prepared(NamedTuple):
    """A row's text, and what makes ids and mask of its encoding."""

    text: str
    finish: Callable[[Any], Rendered]


def open_renderer(folder: Path, vocab_size: int, data: DataConfig) -> Renderer:
    """The tokenizer in `folder`, with the template and its arguments as configured. Raises UsageError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever a strange file leads to
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{folder}: no usable tokenizer: {type(error).__name__}: {reason}") from None
    if data.template is not None:
        try:
            tokenizer.chat_template = data.template.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"data.template {data.template}: {error}") from None
    return make_renderer(tokenizer, vocab_size, data)


def make_renderer(tokenizer: Any, vocab_size: int, data: DataConfig) -> Renderer:
    """Learn the template's turns. Raises UsageError for a tokenizer that is not the target's."""
    if len(tokenizer) > vocab_size:
        raise UsageError(f"the tokenizer has {len(tokenizer)} tokens, the target only {vocab_size}: not its tokenizer")
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UsageError(f"{type(tokenizer).__name__} has no tokenizer.json: its tokens cannot be placed in the text")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    turns, problem = None, ("no_chat_template", "the tokenizer has none; give rows of input_ids and loss_mask")
    if tokenizer.chat_template:
        try:
            turns = learn_turns(tokenizer, data.arguments())
        except SkipRow as why:
            problem = (why.reason, why.detail)
    return Renderer(
        tokenizer=tokenizer,
        template_args=data.arguments(),
        vocab_size=vocab_size,
        turns=turns,
        problem=problem,
        last_only=data.supervise == "last",
        max_chars=max(_MIN_CHARS, _CHARS_A_TOKEN * data.max_length),
    )


def render(renderer: Renderer, row: Row) -> Rendered:
    """One row. Raises SkipRow with the reason."""
    (result,) = render_all(renderer, [row])
    if isinstance(result, SkipRow):
        raise result
    return result


def render_all(renderer: Renderer, rows: Sequence[Row | SkipRow]) -> list[Rendered | SkipRow]:
    """Rows in order, tokenised together."""
    prepared = [_attempt(lambda row=row: _prepare(renderer, row)) for row in rows]
    texts = [p.text for p in prepared if isinstance(p, Prepared)]
    encodings = iter(renderer.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
    return [
        _attempt(lambda finish=p.finish: finish(next(encodings))) if isinstance(p, Prepared) else p for p in prepared
    ]


def _attempt(work: Any) -> Any:
    try:
        return work()
    except SkipRow as why:
        return why


def _prepare(renderer: Renderer, row: Row | SkipRow) -> Prepared | Rendered:
    """The row as text, unless it is tokens already."""
    if isinstance(row, SkipRow):
        raise row
    if row.input_ids is not None:
        return _check_ids(row, renderer.vocab_size)
    prepared = _prepare_text(row, row.text) if row.text is not None else _prepare_chat(renderer, row)
    text = prepared.text
    if len(text) > renderer.max_chars:
        raise SkipRow("too_long", f"{len(text)} characters; expected at most {renderer.max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair is legal JSON, and no text
        raise SkipRow("invalid_unicode", f"a lone surrogate: {text[error.start]!r}") from None
    return prepared


def _prepare_text(row: Row, text: str) -> Prepared:
    def finish(encoding: Any) -> Rendered:
        at = encoding.char_to_token(row.response_start)
        if at is None or encoding.token_to_chars(at)[0] != row.response_start:
            raise SkipRow("mask_not_exact", f"no token begins at response_start, character {row.response_start}")
        mask = np.zeros(len(encoding.ids), dtype=np.uint8)
        mask[at:] = 1
        return Rendered(input_ids=np.array(encoding.ids, dtype=np.int32), loss_mask=mask)

    return Prepared(text, finish)


def _prepare_chat(renderer: Renderer, row: Row) -> Prepared:
    turns = renderer.turns
    if turns is None:
        raise SkipRow(*renderer.problem)
    messages = row.messages or []
    if not turns.takes_parts:
        # As servers do for such templates.
        messages = [{**m, "content": _joined(m["content"], "\n")} for m in messages]

    def rendered(messages: list[dict[str, Any]], tools: Any) -> str:
        try:
            return renderer.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, **renderer.template_args
            )
        except Exception as error:  # the template is a program of somebody else's
            raise SkipRow("not_rendered", f"chat template: {type(error).__name__}: {error}") from None

    text = searched = rendered(messages, row.tools)
    marked = [_is_marked(m, turns) for m in messages]
    notes = 0
    if any(marked) or _holds(row.tools, turns):
        notes = _MARKERS
        stand_in = _stand_ins(turns, text)
        searched = rendered(stand_in(messages), stand_in(row.tools))
        if stand_in(searched, back=True) != text:
            raise SkipRow("chat_markers_in_content", "the template renders its own markers differently than other text")
    spans = find_turns(searched, turns)
    assistants = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    if len(spans) != len(assistants):
        found = f"{len(spans)} assistant turns in the rendered text, {len(assistants)} in the messages"
        raise SkipRow("mask_not_exact", found)
    counted = list(zip(assistants, spans, strict=True))[-1 if renderer.last_only else 0 :]
    for n, (_, start, end) in zip(assistants, spans, strict=True):
        notes |= _LEFT_OUT * _thinking_left_out(messages, n, text[start:end])
    for n, (at, start, end) in counted:
        if marked[n]:
            raise SkipRow("chat_markers_in_content", f"message {n} (assistant) contains {turns.opener} or {turns.end}")
        names = [call["function"]["name"] for call in messages[n].get("tool_calls", [])]
        if not all(words in text[start:end] for words in (_answer(messages[n]), *names)):
            raise SkipRow("content_not_rendered", f"the chat template leaves out some of what message {n} says")
        own = text[at + common_prefix(text[at:end], turns.prompt) : end]
        if _thought(messages[n]) or not _has_substance(messages[n]) or "</think>" not in own:
            continue
        notes |= _EMPTY
        said, is_cut = _joined(messages[n]["content"]), row.finish_reason == "length" and n == counted[-1][0]
        if "</think>" not in said and (is_cut or said.lstrip().startswith("<think>")):
            raise SkipRow("thinking_not_closed", f"message {n}: the template adds the </think> that the target did not")
    empty = {n for n, _ in counted if not _has_substance(messages[n])}
    unfinished = _unfinished(messages, text, counted) if row.finish_reason == "length" and counted else None
    return Prepared(text, lambda encoding: _masked(renderer, turns, encoding, counted, empty, unfinished, notes))


def _unfinished(messages: list[dict[str, Any]], text: str, counted: list[tuple[int, tuple[int, int, int]]]) -> int:
    """The character at which the last turn's own text ends: the template closed what the target had not."""
    n, (_, start, end) = counted[-1]
    thought = _thought(messages[n])
    if _answer(messages[n]) or messages[n].get("tool_calls") or thought not in text[start:end]:
        return end
    return text.rindex(thought, start, end) + len(thought) if thought else end


def _joined(content: Any, between: str = "") -> str:
    return content if isinstance(content, str) else between.join(part["text"] for part in content)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _holds(value: Any, turns: Turns) -> bool:
    return any(turns.opener in text or turns.end in text for text in _strings(value))


def _is_marked(message: dict[str, Any], turns: Turns) -> bool:
    """Also where a marker is made of several parts."""
    return _holds(message, turns) or _holds(_joined(message["content"]), turns)


def _stand_ins(turns: Turns, text: str) -> Callable[..., Any]:
    """A function that swaps the turn markers in any value for letters of as many characters that `text` has not."""
    free = (chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in text)
    pairs = [(marker, next(free) * len(marker)) for marker in dict.fromkeys((turns.opener, turns.end))]

    def swap(value: Any, back: bool = False) -> Any:
        if isinstance(value, str):
            for marker, letters in pairs:
                value = value.replace(letters, marker) if back else value.replace(marker, letters)
            return value
        if isinstance(value, dict):
            return {swap(key): swap(item) for key, item in value.items()}
        return [swap(item) for item in value] if isinstance(value, list) else value

    return swap


def _thought(message: dict[str, Any]) -> str:
    content = _joined(message["content"])
    before = content.partition("</think>")[0] if "</think>" in content else ""
    return str(message.get("reasoning_content") or before).split("<think>")[-1].strip()


def _answer(message: dict[str, Any]) -> str:
    """What follows the thinking."""
    content = _joined(message["content"])
    is_thought = "</think>" in content and not message.get("reasoning_content")
    return (content.partition("</think>")[2] if is_thought else content).strip()


def _thinking_left_out(messages: Sequence[dict[str, Any]], n: int, turn: str) -> bool:
    """True when the template drops what an earlier turn thought; of the last message it must not."""
    if _thought(messages[n]) in turn:
        return False
    if n == len(messages) - 1:
        raise SkipRow("thinking_not_rendered", "the chat template leaves out the thinking of the last turn")
    return True


def _has_substance(message: dict[str, Any]) -> bool:
    texts = (_joined(message["content"]), message.get("reasoning_content", ""))
    return any(text.strip() for text in texts) or bool(message.get("tool_calls"))


def _masked(
    renderer: Renderer,
    turns: Turns,
    encoding: Any,
    counted: list[tuple[int, tuple[int, int, int]]],
    empty: set[int],
    unfinished: int | None,
    notes: int,
) -> Rendered:
    """Ids and mask of a rendered chat whose turns lie at the characters of `counted`."""
    ids, end_id = encoding.ids, renderer.tokenizer.convert_tokens_to_ids(turns.end)
    mask = np.zeros(len(ids), dtype=np.uint8)
    for n, (at, start, end) in counted:
        first, last = encoding.char_to_token(at), encoding.char_to_token(end)
        if first is None or last is None or ids[last] != end_id:
            raise SkipRow("mask_not_exact", f"the turn of message {n} does not begin and end with whole tokens")
        begin = first + common_prefix(ids[first : first + len(turns.supplied)], turns.supplied)
        if encoding.token_to_chars(begin)[0] < start:
            raise SkipRow("mask_not_exact", f"message {n} joins with {turns.header!r} into one token")
        begin = last if n in empty else begin
        mask[begin : last + 1] = 1
    if unfinished is not None:
        mask[encoding.char_to_token(unfinished) :] = 0  # that character is a template's, so there is such a token
    return Rendered(input_ids=np.array(ids, dtype=np.int32), loss_mask=mask, notes=notes)


def _check_ids(row: Row, vocab_size: int) -> Rendered:
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
    return Rendered(input_ids=ids.astype(np.int32), loss_mask=mask.astype(np.uint8))
