"""Reading datasets: every row becomes a chat, token ids, or a skip with a reason. Rows read == kept + skipped."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.shards.errors import UsageError

ROLES = {"system", "user", "assistant", "tool"}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One dataset row: a chat to render, or ready token ids."""

    source: str
    """File name; with its folder where two files share a name."""
    number: int
    """0-based row in the file."""
    id: str
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    """Tool descriptions for the chat template."""
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


def read_rows(files: Sequence[Path]) -> Iterator[Row | Skip]:
    """All rows of JSONL files in order, one in memory at a time. Raises UsageError for a file that cannot be read."""
    names = [path.name for path in files]
    for path in files:
        source = path.name if names.count(path.name) == 1 else str(path)
        source = source.encode(errors="replace").decode()
        try:
            # Opened in binary: splitting text would also split at U+2028 inside a string.
            with path.open("rb") as file:
                for number, line in enumerate(file):
                    if line.strip():
                        yield _parse_line(
                            path, source, number, line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
                        )
        except FileNotFoundError:
            raise UsageError(f"no such file: {path}") from None
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; expected a JSONL file") from None


def _parse_line(path: Path, source: str, number: int, line: bytes) -> Row | Skip:
    try:
        values = json.loads(line)
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} line {number + 1}: invalid JSON ({error}); mend or remove the line") from None
    except RecursionError:
        return Skip(source=source, number=number, id="", reason="invalid_row", detail="nested too deeply")
    row_id = str(values.get("id", "")).encode(errors="replace").decode() if isinstance(values, dict) else ""
    try:
        return _row(source, number, row_id, values)
    except SkipRow as skip:
        return Skip(source=source, number=number, id=row_id, reason=skip.reason, detail=skip.detail)


def _row(source: str, number: int, row_id: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise SkipRow("wrong_keys", f"a row is a JSON object, found {type(values).__name__}")
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair is legal JSON, and no text
        raise SkipRow("invalid_unicode", f"a lone surrogate: {error.object[error.start]!r}") from None
    except RecursionError:
        raise SkipRow("invalid_row", "nested too deeply") from None
    common: dict[str, Any] = {
        "source": source,
        "number": number,
        "id": row_id,
        "finish_reason": str(values.get("finish_reason") or "unknown"),
        "response": str(values.get("response_mode") or ""),
    }
    if "input_ids" in values:
        if "loss_mask" not in values:
            raise SkipRow("wrong_keys", "row has input_ids but no loss_mask")
        return Row(**common, input_ids=values["input_ids"], loss_mask=values["loss_mask"])
    name = next((n for n in ("messages", "conversations") if n in values), None)
    if name is None:
        keys = ", ".join(sorted(values)) or "none"
        raise SkipRow("wrong_keys", f"keys are [{keys}]; expected `messages`, or `input_ids` and `loss_mask`")
    messages = values[name]
    if not isinstance(messages, list) or not messages:
        raise SkipRow("wrong_keys", f"`{name}` is {str(messages)[:60]!r}; expected a list of messages")
    return Row(**common, messages=[_message(m) for m in messages], tools=values.get("tools"))


def _message(message: Any) -> dict[str, Any]:
    """One OpenAI-style message; ShareGPT's from/value are translated."""
    if not isinstance(message, dict):
        raise SkipRow("wrong_keys", f"a message is a JSON object, found {type(message).__name__}")
    if "from" in message and "value" in message:
        role = _SHAREGPT_ROLES.get(str(message["from"]), message["from"])
        message = {"role": role, "content": message["value"]}
    if "role" not in message:
        raise SkipRow("wrong_keys", f"message keys are [{', '.join(sorted(message))}]; expected role, content")
    if str(message["role"]) not in ROLES:
        raise SkipRow("unknown_role", f"role {message['role']!r}; expected one of {', '.join(sorted(ROLES))}")
    if not isinstance(message.get("content") or "", (str, list)):
        raise SkipRow("unknown_content", f"content is {message['content']!r}; expected text or a list of parts")
    # Arrow fills absent keys with null, and templates test for the key: a null must be as good as absent.
    return {key: value for key, value in message.items() if value is not None}
