"""Answers from a real HTTP server on this machine that behaves as vLLM's does, and sometimes badly."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from qwen import VOCAB, spans, take
from targets import tokenizer, write_rows

from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.render import make_renderer
from dflash_offline.shards.command import structure
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.tools.config import Regenerate
from dflash_offline.tools.regenerate import regenerate


class Server(ThreadingHTTPServer):
    """Answers `red` to everything, but as the prompt's last word says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.tries: Counter[str] = Counter()
        self.now = self.most = 0
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, code: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][-1]["content"]
        word = said.split()[-1]
        with self.server.guard:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            self.server.asked.append(body)
            self.server.tries[said] += 1
            first = self.server.tries[said] == 1
        time.sleep(0.02)
        with self.server.guard:
            self.server.now -= 1
        if word == "busy" and first:
            return self.reply(503, {"error": "busy"})
        if word == "cut" and first:
            return self.connection.close()
        if word == "half" and first:
            self.send_response(200)
            self.send_header("Content-Length", "500")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            return self.connection.close()
        if word == "down":
            return self.reply(500, {"error": "down"})
        if word == "locked":
            return self.reply(401, {"error": "no key"})
        if word == "null":
            return self.reply(200, {"choices": [{"message": None, "finish_reason": "stop"}]})
        if word == "toolong":
            return self.reply(400, {"error": "prompt of 9999 tokens"})
        if word == "odd":
            return self.reply(200, {"choices": []})
        message: dict[str, Any] = {"role": "assistant", "content": "red stone", "reasoning_content": "blue"}
        if word == "empty":
            message = {"role": "assistant", "content": None}
        if word == "tool":
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        finish = {"long": "length", "tool": "tool_calls", "filtered": "content_filter"}.get(word, "stop")
        self.reply(200, {"choices": [{"message": message, "finish_reason": finish}]})


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(using: Server, /, out: Path, *files: Path, **changes: Any) -> int:
    given = {"out": str(out), "server": using.url, "data": {"files": list(map(str, files))}, "pause": 0.01, "tries": 3}
    return regenerate(structure(Regenerate, {**given, **changes}, "test"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(n: int, word: str = "", *more: dict[str, Any]) -> dict[str, Any]:
    old = {"role": "assistant", "content": "old"}
    return {"id": f"c{n}", "messages": [{"role": "user", "content": f"next {n} {word}".strip()}, old, *more]}


def test_answers_are_made_side_by_side_and_go_into_a_plan(server: Server, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", *(chat(n) for n in range(40)), {"id": "p", "prompt": "what is next"})
    assert ask(server, tmp_path / "out.jsonl", path, concurrency=8) == 0
    rows = lines(tmp_path / "out.jsonl")
    assert {row["id"] for row in rows} == {*(f"c{n}" for n in range(40)), "p"} and 3 < server.most <= 8
    assert all(row["messages"][-1]["reasoning_content"] == "blue" and len(row["messages"]) == 2 for row in rows)
    assert {(row["finish_reason"], row["response_mode"]) for row in rows} == {("stop", "greedy")}
    assert server.asked[0]["temperature"] == 0 and "seed" not in server.asked[0]
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    raw = tokenizer()
    raw.chat_template = template
    using = make_renderer(raw, VOCAB, DataConfig())
    taken = take(tmp_path / "plan", using, tmp_path / "out.jsonl")
    assert len(taken.samples) == 41
    assert all(spans(using, *sample) == ["blue\n</think>\n\nred stone<|im_end|>"] for sample in taken.samples)


def test_what_is_no_whole_answer_is_left_out_with_a_reason(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fine", "busy", "cut", "tool", "long", "toolong", "odd", "empty", "filtered", "down", "half", "null"]
    path = write_rows(tmp_path / "d.jsonl", *(chat(n, word) for n, word in enumerate(words)), {"x": 1})
    assert ask(server, tmp_path / "out.jsonl", path) == 3
    rows = {row["id"]: row for row in lines(tmp_path / "out.jsonl")}
    assert rows.keys() == {"c0", "c1", "c2", "c3", "c10"}
    assert rows["c3"]["finish_reason"] == "tool_calls" and rows["c3"]["messages"][-1]["tool_calls"]
    skipped = {(s["line"], s["reason"]) for s in lines(tmp_path / "out.skipped.jsonl")}
    assert skipped == {
        (5, "truncated"),
        (6, "refused_by_server"),
        (7, "strange_answer"),
        (8, "empty_answer"),
        (9, "not_finished"),
        (12, "strange_answer"),
        (13, "wrong_keys"),
    }
    assert "prompt of 9999 tokens" in (tmp_path / "out.skipped.jsonl").read_text()
    said = capsys.readouterr().out
    assert "no answer after 3 tries: 500" in said and "read 13 rows, 0 were done, 5 answered by tiny" in said
    # A rerun asks again only what had no answer.
    server.asked.clear()
    assert ask(server, tmp_path / "out.jsonl", path) == 3 and len(server.asked) == 3
    assert ask(server, tmp_path / "kept.jsonl", path, keep_truncated=True) == 3
    assert "length" in {row["finish_reason"] for row in lines(tmp_path / "kept.jsonl")}


def test_a_killed_run_continues(server: Server, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", *(chat(n) for n in range(20)))
    out = tmp_path / "out.jsonl"
    assert ask(server, out, path, data={"files": [str(path)], "limit": 8}) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:-5])  # as a kill leaves it
    server.asked.clear()
    assert ask(server, out, path) == 0 and len(server.asked) == 13
    assert sorted(row["id"] for row in lines(out)) == sorted(f"c{n}" for n in range(20))
    with out.open("a") as file:
        file.write("{}\n")
    with pytest.raises(UsageError, match=r"out.jsonl line 21: not what regenerate writes"):
        ask(server, out, path)
    out.write_bytes(out.read_bytes()[:-3])
    before = out.stat().st_mtime_ns
    assert ask(server, out, path) == 0 and out.stat().st_mtime_ns == before
    with pytest.raises(UsageError, match=r"temperature was 0.0, now 0.7"):
        ask(server, out, path, temperature=0.7)


def test_sampling_is_recorded_and_arguments_are_sent(server: Server, tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    more = [{"role": "user", "content": "and"}, {"role": "assistant", "content": "old", "tool_calls": [call]},
            {"role": "tool", "content": "3"}]  # fmt: skip
    path = write_rows(tmp_path / "d.jsonl", {**chat(1, "", *more), "tools": [{"name": "f"}]})
    data = {"files": [str(path)], "enable_thinking": False}
    assert ask(server, tmp_path / "o.jsonl", path, data=data, temperature=0.7, top_p=0.9, seed=3, max_tokens=50) == 0
    (row,) = lines(tmp_path / "o.jsonl")
    assert row["response_mode"] == "sampled at 0.7, top_p 0.9" and row["tools"] == [{"name": "f"}]
    (sent,) = server.asked
    assert sent["chat_template_kwargs"] == {"enable_thinking": False} and sent["seed"] == 3 and sent["max_tokens"] == 50
    # The dataset's own history stays, but for what followed the last prompt; arguments travel as text.
    assert [m["role"] for m in sent["messages"]] == ["user", "assistant", "user", "assistant", "tool"]
    assert json.loads(sent["messages"][3]["tool_calls"][0]["function"]["arguments"]) == {"x": 1}


def test_every_turn_after_the_target_s_own_answers(server: Server, tmp_path: Path) -> None:
    two = chat(1, "", {"role": "user", "content": "and"}, {"role": "assistant", "content": "old"})
    tools = chat(2, "", {"role": "tool", "content": "3"})
    path = write_rows(tmp_path / "d.jsonl", two, tools)
    assert ask(server, tmp_path / "o.jsonl", path, turns="all") == 0
    (row,) = lines(tmp_path / "o.jsonl")
    assert [m["content"] for m in row["messages"]] == ["next 1", "red stone", "and", "red stone"]
    assert server.asked[1]["messages"][1]["reasoning_content"] == "blue"
    assert [s["reason"] for s in lines(tmp_path / "o.skipped.jsonl")] == ["tool_results"]


def test_no_server_is_said_at_once(server: Server, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", chat(1))
    with pytest.raises(UsageError, match=r"--server http://127.0.0.1:9/v1: no answer after 3 tries: .*refused"):
        ask(server, tmp_path / "o.jsonl", path, server="http://127.0.0.1:9/v1")
    assert list(tmp_path.iterdir()) == [path]
    for url in ("nonsense", "http://127.0.0.1:x/v1"):
        with pytest.raises(UsageError, match=f"--server {url}: "):
            ask(server, tmp_path / "o.jsonl", path, server=url)


def test_a_refusal_of_every_row_ends_the_run(server: Server, tmp_path: Path) -> None:
    """No row is given up for a missing key or a server that is gone; what was answered is kept."""
    path = write_rows(tmp_path / "d.jsonl", chat(0), chat(1, "locked"), *(chat(n, "down") for n in range(2, 30)))
    with pytest.raises(RunError, match="401 Unauthorized"):
        ask(server, tmp_path / "a.jsonl", path, concurrency=4)
    assert [row["id"] for row in lines(tmp_path / "a.jsonl")] == ["c0"]
    assert not lines(tmp_path / "a.skipped.jsonl")
    write_rows(path, chat(0), *(chat(n, "down") for n in range(2, 30)))
    server.asked.clear()
    with pytest.raises(RunError, match="5 rows in a row, no answer after 3 tries"):
        ask(server, tmp_path / "b.jsonl", path, concurrency=4)
    assert [row["id"] for row in lines(tmp_path / "b.jsonl")] == ["c0"] and len(server.asked) < 60


def test_answers_are_no_prompts(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OUT in the folder that is read; what was done is counted once, and only of the rows read."""
    write_rows(tmp_path / "d.jsonl", *(chat(n) for n in range(5)))
    for done in (0, 5):
        assert ask(server, tmp_path / "o.jsonl", tmp_path) == 0
        assert f"read 5 rows, {done} were done, {5 - done} answered" in capsys.readouterr().out
    ask(server, tmp_path / "o.jsonl", tmp_path, data={"files": [str(tmp_path)], "limit": 2})
    assert "read 2 rows, 2 were done, 0 answered" in capsys.readouterr().out
    for name in ("o.jsonl.gz", "o.parquet", "."):
        with pytest.raises(UsageError, match="expected the name of a JSONL file"):
            ask(server, tmp_path / name, tmp_path)


def test_nothing_follows_an_answer_that_was_cut(server: Server, tmp_path: Path) -> None:
    two = chat(1, "long", {"role": "user", "content": "and"}, {"role": "assistant", "content": "old"})
    path = write_rows(tmp_path / "d.jsonl", two)
    assert ask(server, tmp_path / "o.jsonl", path, turns="all", keep_truncated=True) == 0
    (row,) = lines(tmp_path / "o.jsonl")
    assert len(row["messages"]) == 2 and row["finish_reason"] == "length"
