"""`dflash-shards regenerate`: a dataset's prompts answered by the target itself, through any OpenAI-compatible server.

Answers are appended to OUT as they come, each with what it is an answer to, so that the same command continues after
any end. What was not answered is in OUT's .skipped.jsonl with the reason.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dflash_offline.extract.dataset import Row, Skip, SkipRow, field_names, read_row, row_id
from dflash_offline.extract.plan import skip_line
from dflash_offline.extract.sources import read_chunks, with_files
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import read_json, take_lock, write_json
from dflash_offline.tools.config import Regenerate

_SAY_EVERY = 30.0
_FINISHED = {"stop", "tool_calls"}
_NOT_THIS_ROW = (401, 403, 404, 405)
"""Refusals that every row would meet: a missing key, another address."""
# The server is the user's own: a proxy meant for the internet would only be in the way.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Question(NamedTuple):
    """A row to answer."""

    source: str
    number: int
    key: str
    """Of its place and prompt: an answered question is not asked again."""
    row: Row
    problem: str = ""
    """Why it cannot be asked."""


class Unanswered(Exception):
    """The server gave no answer after all tries; a rerun asks again."""


def regenerate(args: Regenerate) -> int:
    """Answer every row; 3 when the server left some without an answer."""
    if args.out.is_dir() or args.out.suffix in (".gz", ".zst", ".bz2", ".parquet", ".arrow"):
        raise UsageError(f"--out {args.out}: expected the name of a JSONL file")
    data, skipped_path = with_files(args.data), args.out.with_suffix(".skipped.jsonl")
    # A folder or pattern may find what an earlier run wrote.
    own = {path.resolve() for path in (args.out, skipped_path, args.out.with_suffix(".settings.json"))}
    data = replace(data, files=tuple(path for path in data.files if path.resolve() not in own))
    model = args.model or _model(args)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(args.out.with_suffix(".lock").open("a+"))
        except OSError as error:
            raise UsageError(f"{args.out}: {error.strerror}; expected a file that can be written") from None
        take_lock(lock, args.out)
        _compare(args, model)
        answered, left_out = (_reopen(path, stack) for path in (args.out, skipped_path))
        done = _keys(args.out) | _keys(skipped_path)
        pool = stack.enter_context(ThreadPoolExecutor(args.concurrency))
        waiting: dict[Future[dict[str, Any]], Question] = {}
        said = start = time.monotonic()
        silent = 0

        def collect(all_of_them: bool) -> None:
            nonlocal silent
            ready, _ = wait(waiting, return_when="ALL_COMPLETED" if all_of_them else FIRST_COMPLETED)
            for future in ready:
                question = waiting.pop(future)
                silent += 1
                try:
                    _write(answered, future.result())
                    counts["answered"] += 1
                    silent = 0
                except SkipRow as why:
                    skip(question, why)
                    silent = 0
                except Unanswered as why:
                    counts["unanswered"] += 1
                    if counts["unanswered"] == 1:
                        print(f"{question.source} line {question.number + 1}: {why}; a rerun asks again", flush=True)
                    if silent > args.concurrency:
                        raise RunError(f"--server {args.server}: {silent} rows in a row, {why}; rerun later") from None

        def skip(question: Question, why: SkipRow) -> None:
            counts[why.reason] += 1
            source, number, row = question.source, question.number, question.row
            left = Skip(source=source, number=number, id=row.id, reason=why.reason, detail=why.detail)
            _write(left_out, {**skip_line(left), "regenerated": {"key": question.key}})

        try:
            for question in _questions(args, data):
                counts["rows"] += 1
                if question.key in done:
                    counts["before"] += 1
                    continue
                if question.row.messages:
                    waiting[pool.submit(_answer, args, model, question)] = question
                else:
                    skip(question, SkipRow("wrong_keys", question.problem or "no messages to answer"))
                if len(waiting) >= 2 * args.concurrency:
                    collect(False)
                if time.monotonic() - said > _SAY_EVERY:
                    said = time.monotonic()
                    print(
                        f"{counts['answered']:,} answers, {counts['answered'] / (said - start):.1f} a second",
                        flush=True,
                    )
            collect(True)
        except KeyboardInterrupt:
            print(f"{args.out}: stopped; what was answered is kept, rerun to continue", file=sys.stderr, flush=True)
            os._exit(130)  # the threads wait for the server, which may take an hour
        finally:
            pool.shutdown(cancel_futures=True)
            for future in waiting:  # after an error: what came meanwhile is kept
                if not future.cancelled() and future.exception() is None:
                    _write(answered, future.result())
    known = ("rows", "before", "answered")
    rest = ", ".join(f"{n} {reason}" for reason, n in counts.items() if reason not in known) or "none"
    read, before, answers = (counts[name] for name in known)
    print(f"{args.out}: read {read} rows, {before} were done, {answers} answered by {model}, {rest} left out")
    return 3 if counts["unanswered"] else 0


def mode(args: Regenerate) -> str:
    """How the answers are made, as the dataset and the cache's manifest say it."""
    if args.temperature == 0:
        return "greedy"
    return f"sampled at {args.temperature:g}" + (f", top_p {args.top_p:g}" if args.top_p < 1 else "")


def _compare(args: Regenerate, model: str) -> None:
    """The settings of the answers that are there already must be these. Raises UsageError naming the difference."""
    path = args.out.with_suffix(".settings.json")
    names = ("temperature", "top_p", "max_tokens", "seed", "turns", "keep_truncated")
    settings = {"model": model, **{n: getattr(args, n) for n in names}, "template_args": args.data.arguments()}
    if path.is_file():
        old = read_json(path)
        if changes := [f"{n} was {old.get(n)!r}, now {v!r}" for n, v in settings.items() if old.get(n) != v]:
            raise UsageError(f"{args.out}: {'; '.join(changes)}; use it as before, or another --out")
    elif args.out.is_file():
        raise UsageError(f"{args.out}: is there, and {path.name} is not; choose another --out")
    write_json(path, settings)


def _reopen(path: Path, stack: ExitStack) -> BinaryIO:
    """`path` for appending, without the half line that a killed run may have left."""
    file = stack.enter_context(path.open("a+b"))
    file.seek(0)
    whole = 0
    for line in file:
        whole += len(line) if line.endswith(b"\n") else 0
    if file.tell() > whole:
        file.truncate(whole)
    return file


def _keys(path: Path) -> set[str]:
    keys = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                keys.add(json.loads(line)["regenerated"]["key"])
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{path} line {number}: not what regenerate writes; remove the line") from None
    return keys


def _write(file: BinaryIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n")
    file.flush()


def _questions(args: Regenerate, data: Any) -> Iterator[Question]:
    names = field_names(data.fields)
    for chunk in read_chunks(data.files, data.limit, data.shuffle_seed):
        for number, values in zip(chunk.numbers, chunk.values(), strict=True):
            problem = ""
            try:
                if chunk.columns:  # may hold dates and bytes
                    values = json.loads(json.dumps(values, default=str))
                if isinstance(values, dict) and names["response"] and not any(values.get(n) for n in names["response"]):
                    values = {**values, names["response"][0]: ""}  # a prompt alone is all that is needed
                row = read_row(values, names)
            except (SkipRow, RecursionError) as why:
                row, problem = Row(id=row_id(values, names)), str(getattr(why, "detail", why))
            asked = [chunk.source, number, row.messages, row.tools, row.text or problem or None]
            key = blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=16).hexdigest()
            yield Question(chunk.source, number, key, row, problem)


def _answer(args: Regenerate, model: str, question: Question) -> dict[str, Any]:
    """The row with its assistant turns made anew. Raises SkipRow or Unanswered."""
    row, said = question.row, question.row.messages or []
    if args.turns == "last":
        while said and said[-1]["role"] == "assistant":
            said = said[:-1]
        prompts, given = [said], []
    else:
        if any(m["role"] == "tool" for m in said):
            raise SkipRow("tool_results", "results of calls that the target may not make; expected --turns last")
        given = [m for m in said if m["role"] != "assistant"]
        prompts = [given[: n + 1] for n, m in enumerate(given) if m["role"] == "user"]
    if not prompts or not prompts[-1]:
        raise SkipRow("no_prompt", "nothing to answer")
    messages: list[dict[str, Any]] = []
    asked, finish = 0, ""
    for prompt in prompts:
        messages += prompt[asked:]
        asked = len(prompt)
        message, finish = _ask(args, model, messages, row.tools)
        if finish == "length" and not args.keep_truncated:
            raise SkipRow("truncated", f"an answer of more than {args.max_tokens} tokens")
        messages.append(message)
        if finish == "length":
            break  # nothing follows what was cut
    return {
        "id": row.id,
        "messages": messages,
        **({"tools": row.tools} if row.tools else {}),
        "finish_reason": finish,
        "response_mode": mode(args),
        "regenerated": {"key": question.key, "source": question.source, "row": question.number, "model": model},
    }


def _ask(args: Regenerate, model: str, messages: list[dict[str, Any]], tools: Any) -> tuple[dict[str, Any], str]:
    """One assistant message and its finish reason."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_as_sent(m) for m in messages],
        "temperature": args.temperature,
        "top_p": args.top_p,
        "max_tokens": args.max_tokens,
    }
    optional = {"tools": tools, "seed": args.seed, "chat_template_kwargs": args.data.arguments()}
    reply = _call(args, "chat/completions", body | {name: value for name, value in optional.items() if value})
    try:
        choice = reply["choices"][0]
        given, finish = dict(choice["message"]), str(choice["finish_reason"])
        reasoning = given.get("reasoning_content") or given.get("reasoning") or ""
        content, calls = given.get("content") or "", given.get("tool_calls") or []
        if not (isinstance(content, str) and isinstance(reasoning, str) and isinstance(calls, list)):
            raise TypeError
    except (KeyError, IndexError, TypeError, ValueError):
        raise SkipRow("strange_answer", f"{str(reply)[:200]!r}") from None
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    if finish not in (*_FINISHED, "length"):
        raise SkipRow("not_finished", f"finish_reason {finish!r}")
    if finish != "length" and not message["content"] and "tool_calls" not in message:
        raise SkipRow("empty_answer", f"finish_reason {finish!r}")
    return message, finish


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's API has it: the arguments of a call are text there."""
    if "tool_calls" not in message:
        return message
    calls = [json.loads(json.dumps(call)) for call in message["tool_calls"]]
    for call in calls:
        if not isinstance(call["function"].get("arguments"), str):
            call["function"]["arguments"] = json.dumps(call["function"].get("arguments") or {}, ensure_ascii=False)
    return {**message, "tool_calls": calls}


def _model(args: Regenerate) -> str:
    """The model that the server serves. Raises UsageError when there is no such server."""
    try:
        models = [m["id"] for m in _call(args, "models", None)["data"]]
    except (Unanswered, SkipRow, RunError, KeyError, TypeError) as error:
        raise UsageError(f"--server {args.server}: {error}; expected an OpenAI-compatible server, as vLLM's") from None
    if len(models) != 1:
        raise UsageError(f"--server {args.server} serves {len(models)} models; name one with --model: {models[:5]}")
    return str(models[0])


def _call(args: Regenerate, path: str, body: dict[str, Any] | None) -> Any:
    """The server's reply. Raises SkipRow for a request that it refuses, RunError when it would refuse every one, and
    Unanswered when tries or patience end.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    why = ""
    for attempt in range(args.tries):
        if attempt:
            time.sleep(min(60.0, args.pause * 2 ** (attempt - 1)))
        try:
            request = urllib.request.Request(f"{args.server.rstrip('/')}/{path}", data, headers)
            with _opener.open(request, timeout=args.timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            why = f"{error.code} {error.reason}: {_body(error)}"
            if error.code in _NOT_THIS_ROW:
                raise RunError(f"--server {args.server}: {path}: {why}; mend that and rerun") from None
            if error.code < 500 and error.code not in (408, 429):
                raise SkipRow("refused_by_server", why) from None
        except (OSError, ValueError, HTTPException) as error:
            why = str(getattr(error, "reason", error)).strip() or type(error).__name__
    raise Unanswered(f"no answer after {args.tries} tries: {why}")


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return error.read()[:200].decode(errors="replace")
    except (OSError, HTTPException):
        return "no reason given"
