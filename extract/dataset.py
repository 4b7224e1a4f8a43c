"""One dataset row, whatever its shape, becomes a chat, a text, or token ids; or a skip with a reason.

Nothing is repaired by guessing. What is translated: ShareGPT's from/value, tool arguments given as a JSON string, and
nulls, which Arrow puts where a key was absent while chat templates ask whether the key is there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dflash_offline.extract.config import Fields

ROLES = {"system", "user", "assistant", "tool"}
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_USUAL = {
    "id": ("id", "prompt_id", "uuid", "conversation_id"),
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question", "input"),
    "response": ("response", "completion", "output", "answer"),
    "reasoning": ("reasoning_content", "thinking"),
    "system": ("system", "system_prompt"),
}
_SHAPES = (("messages",), ("prompt", "response"), ("text", "response_start"), ("input_ids", "loss_mask"))
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One dataset row: a chat to render, a text, or ready token ids."""

    id: str = ""
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    """Tool descriptions for the chat template."""
    text: str | None = None
    response_start: int = 0
    """Character of `text`."""
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    finish_reason: str = "unknown"
    response: str = ""
    """How this row's response was made; empty: as configured for the dataset."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A row that is not written, and why."""

    source: str
    number: int
    id: str
    reason: str
    """Short and countable."""
    detail: str = ""


class SkipRow(Exception):
    """Raised where a row turns out unusable; carries reason and detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def field_names(fields: Fields) -> dict[str, tuple[str, ...]]:
    """What each field may be called: as configured, or its usual names. A configured shape is the only one tried."""
    given = asdict(fields)
    chosen = [shape for shape in _SHAPES if any(given[name] for name in shape)]
    other = {name for shape in _SHAPES if chosen and shape not in chosen for name in shape}
    usual = {name: () if name in other else _USUAL.get(name, (name,)) for name in given}
    return {name: (given[name],) if given[name] else usual[name] for name in given}


def row_id(values: Any, names: Mapping[str, tuple[str, ...]]) -> str:
    """The row's own id, fit for any file; empty when it has none."""
    found = _get(values, names["id"]) if isinstance(values, dict) else None
    return "" if found is None else str(found).encode(errors="replace").decode()


def read_row(values: Any, names: Mapping[str, tuple[str, ...]]) -> Row:
    """A row's values -> what is in them. Raises SkipRow."""
    if not isinstance(values, dict):
        raise SkipRow("wrong_keys", f"a row is a JSON object, found {type(values).__name__}")
    found = {name: _get(values, usual) for name, usual in names.items()}
    for name in ("id", "finish_reason", "response_mode"):
        _check_text(str(found[name] or ""))
    common: dict[str, Any] = {
        "id": row_id(values, names),
        "finish_reason": str(found["finish_reason"] or "unknown"),
        "response": str(found["response_mode"] or ""),
    }
    if found["input_ids"] is not None:
        if found["loss_mask"] is None:
            raise SkipRow("wrong_keys", "row has input_ids but no loss_mask")
        return Row(**common, input_ids=found["input_ids"], loss_mask=found["loss_mask"])
    if found["messages"] is None and found["text"] is not None and found["response_start"] is not None:
        text, start = found["text"], found["response_start"]
        if not isinstance(text, str) or type(start) is not int or not 0 <= start <= len(text):
            raise SkipRow("wrong_keys", f"response_start is {start!r}; expected a character of `text`")
        return Row(**common, text=text, response_start=start)
    messages = _conversation(values, found, names)
    chat = [_message(n, m) for n, m in enumerate(messages)]
    if isinstance(found["system"], str) and found["system"] and chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": found["system"]})
    return Row(**common, messages=chat, tools=_tools(found["tools"]))


def _get(values: Mapping[str, Any], usual: tuple[str, ...]) -> Any:
    return next((values[name] for name in usual if values.get(name) is not None), None)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair is legal JSON, and no text
        raise SkipRow("invalid_unicode", f"a lone surrogate: {text[error.start]!r}") from None


def _conversation(
    values: Mapping[str, Any], found: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]
) -> list[Any]:
    """The row's messages, or those that prompt and response make."""
    name = next((n for n in names["messages"] if n in values), None)
    if found["messages"] is not None or (name and found["response"] is None):
        if not isinstance(found["messages"], list) or not found["messages"]:
            raise SkipRow("wrong_keys", f"`{name}` is {str(found['messages'])[:60]!r}; expected a list of messages")
        return found["messages"]
    prompt, response = found["prompt"], found["response"]
    if prompt is None or response is None:
        keys = ", ".join(sorted(map(str, values))) or "none"
        raise SkipRow(
            "wrong_keys",
            f"keys are [{keys}]; expected `messages`, `prompt` and `response`, `text` and `response_start`, or "
            "`input_ids` and `loss_mask` (other names: data.fields)",
        )
    if names["prompt"] == _USUAL["prompt"] and values.get("instruction") is not None and values.get("input"):
        raise SkipRow("wrong_keys", "both `instruction` and `input`; name the prompt with data.fields.prompt")
    first = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    answer = {"role": "assistant", "content": response, "reasoning_content": found["reasoning"]}
    return [*first, *(response if isinstance(response, list) else [answer])]


def _message(at: int, message: Any) -> dict[str, Any]:
    """One message as chat templates expect it."""
    if not isinstance(message, dict):
        raise SkipRow("wrong_keys", f"message {at} is {type(message).__name__}; expected a JSON object")
    message = {key: _without_nulls(value) for key, value in message.items() if value is not None}
    if "from" in message and "value" in message:
        message = _from_sharegpt(at, message)
    if "role" not in message:
        raise SkipRow("wrong_keys", f"message keys are [{', '.join(sorted(message))}]; expected role, content")
    if not isinstance(message["role"], str) or message["role"] not in ROLES:
        raise SkipRow("unknown_role", f"role {message['role']!r}; expected one of {', '.join(sorted(ROLES))}")
    thoughts = [t for name in _REASONING if (t := message.pop(name, None))]
    if any(isinstance(t, list | dict) for t in thoughts):
        raise SkipRow("not_text", f"message {at} has reasoning {str(thoughts)[:60]}; expected text")
    content, more = _content(at, message.get("content", ""))
    message["content"] = content
    reasoning = "".join([t for t in thoughts if isinstance(t, str)][:1] or more)
    if reasoning and message["role"] == "assistant":
        message["reasoning_content"] = reasoning
    if (call := message.pop("function_call", None)) and not message.get("tool_calls"):
        message["tool_calls"] = [call]
    calls = message.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise SkipRow("bad_tool_call", f"message {at}: tool_calls is {type(calls).__name__}; expected a list")
        message["tool_calls"] = [_tool_call(f"message {at}: tool_calls[{n}]", call) for n, call in enumerate(calls)]
    return message


def _from_sharegpt(at: int, message: dict[str, Any]) -> dict[str, Any]:
    role = str(message["from"])
    if role != "function_call":
        return {"role": _SHAREGPT_ROLES.get(role, role), "content": message["value"]}
    try:
        return {"role": "assistant", "tool_calls": [json.loads(message["value"])]}
    except (ValueError, TypeError):
        raise SkipRow("bad_tool_call", f"message {at}: the function_call is not JSON") from None


def _content(at: int, content: Any) -> tuple[str | list[dict[str, str]], list[str]]:
    """Text, or a list of text parts; and thinking that stood among the parts."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise SkipRow("unknown_content", f"content is {content!r}; expected text or a list of parts")
    parts: list[dict[str, str]] = []
    thoughts: list[str] = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("thinking", "reasoning") and isinstance(thought := part.get(kind, part.get("text")), str):
            thoughts.append(thought)
        else:
            raise SkipRow("not_text", f"message {at} has a part {str(part)[:60]!r}; expected text parts only")
    return parts or "", thoughts


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """A call with arguments as an object: templates iterate them, OpenAI's API has them as a JSON string."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SkipRow("bad_tool_call", f"{where} has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise SkipRow("bad_tool_call", f"{where}.arguments is not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise SkipRow("bad_tool_call", f"{where}.arguments is {type(arguments).__name__}; expected an object")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise SkipRow("bad_tools", f"`tools` is not JSON ({error})") from None
    if not isinstance(tools or [], list):
        raise SkipRow("bad_tools", f"`tools` is {type(tools).__name__}; expected a list")
    return _without_nulls(tools) or None


def _without_nulls(value: Any) -> Any:
    """`value` without keys that are null, at any depth. A null in a list stays: its place means something."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
