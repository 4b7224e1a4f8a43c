"""Datasets of every shape and container, what is skipped and why, and what happens to a plan."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from qwen import VOCAB, Taken, renderer, spans, take
from targets import tokenizer, write_rows

from dflash_offline.extract.config import DataConfig, Fields
from dflash_offline.extract.dataset import Row, SkipRow, field_names, read_row
from dflash_offline.extract.keyset import KeySet
from dflash_offline.extract.plan import Samples
from dflash_offline.extract.render import Renderer, make_renderer
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.keys import keys_hash


def tiny(**data: Any) -> Renderer:
    return make_renderer(tokenizer(), VOCAB, DataConfig(**data))


def chat(n: int = 0, **more: Any) -> dict[str, Any]:
    answer = "<think>\nred\n</think>\n\nstone river"
    messages = [{"role": "user", "content": f"next {n}"}, {"role": "assistant", "content": answer}]
    return {"id": f"c{n}", "messages": messages, **more}


def same(one: Taken, two: Taken) -> bool:
    pairs = zip(one.samples, two.samples, strict=True)
    return all(np.array_equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


def row(values: dict[str, Any], **fields: str) -> Row:
    return read_row(values, field_names(Fields(**fields)))


ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"messages": [ASK, SAY], "prompt": "other"}, {}),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, {}),
        ({"prompt": "q", "response": "a"}, {}),
        ({"prompt": [ASK], "completion": [SAY]}, {}),
        ({"input": [ASK], "output": "a", "reasoning": "off"}, {}),
        ({"instruction": "q", "output": "a", "input": ""}, {}),
        ({"frage": "q", "antwort": "a"}, {"prompt": "frage", "response": "antwort"}),
        ({"dialog": [ASK, SAY], "messages": "other"}, {"messages": "dialog"}),
        ({"messages": [{**ASK, "tool_calls": None, "name": None}, SAY], "tools": None}, {}),
    ],
)
def test_shapes_of_a_row(values: dict[str, Any], fields: dict[str, str]) -> None:
    found = row(values, **fields)
    assert found.messages == [ASK, SAY] and found.tools is None


def test_a_configured_shape_wins() -> None:
    values = {"input_ids": [1], "loss_mask": [1], "messages": [ASK, SAY], "prompt": "x", "response": "y"}
    assert row(values).input_ids == [1] and row(values, messages="messages").messages == [ASK, SAY]
    found = row(values, prompt="prompt").messages
    assert found is not None and found[0]["content"] == "x"


def test_what_else_a_row_may_hold() -> None:
    found = row({"prompt": "q", "response": "a", "system": "s", "thinking": "t", "uuid": 7, "finish_reason": "stop"})
    assert found.messages is not None and found.messages[0] == {"role": "system", "content": "s"}
    assert found.messages[2] == {**SAY, "reasoning_content": "t"}
    assert (found.id, found.finish_reason) == ("7", "stop")
    calls = [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
             {"from": "observation", "value": "3"}, {"from": "gpt", "value": "a"}]  # fmt: skip
    found = row({"conversations": calls})
    assert found.messages is not None and [m["role"] for m in found.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    found = row({"messages": [ASK, {**SAY, "reasoning_content": "", "reasoning": "t", "thinking": True}]})
    assert found.messages == [ASK, {**SAY, "reasoning_content": "t"}]
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a", "image_url": None}]
    found = row({"messages": [ASK, {"role": "assistant", "content": parts}]})
    assert found.messages is not None and found.messages[1]["reasoning_content"] == "t"
    assert found.messages[1]["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"messages": [{"content": "x"}]}, "message keys are [content]; expected role, content"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "role 'developer'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is 5"),
        ({"prompt": "x"}, "keys are [prompt]; expected `messages`"),
        ({"input_ids": [1]}, "row has input_ids but no loss_mask"),
        ({"text": "abc", "response_start": 9}, "response_start is 9"),
        ({"instruction": "x", "input": "y", "output": "z"}, "both `instruction` and `input`"),
        ({"messages": [ASK], "tools": "{"}, "`tools` is not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0] has no function name"),
        ({"messages": [{"from": "function_call", "value": "f("}]}, "the function_call is not JSON"),
        ({"messages": [ASK, {**SAY, "reasoning": [{"text": "t"}]}]}, "message 1 has reasoning [[{'text': 't'}]]"),
    ],
)
def test_b09_a_wrong_row_is_told_its_real_cause(values: dict[str, Any], said: str) -> None:
    """B09: the cause in the row itself, not what the template happens to say."""
    with pytest.raises(SkipRow) as why:
        row(values)
    assert said in why.value.detail


def test_b09_a_system_message_in_the_middle(tmp_path: Path) -> None:
    """B09: what only the template knows is quoted from it."""
    bad = [ASK, {"role": "system", "content": "s"}, SAY]
    taken = take(tmp_path, renderer(), write_rows(tmp_path / "d.jsonl", chat(), {"messages": bad}))
    assert [s["line"] for s in taken.skips] == [2]
    assert "System message must be at the beginning." in taken.skips[0]["detail"]


def test_b01_conversations_without_a_user(tmp_path: Path) -> None:
    """B01: two of six rows are written, four skipped with file, line, id and reason."""
    system = {"role": "system", "content": "s"}
    query = {"role": "user", "content": "<tool_response>x</tool_response>"}
    rows = [
        chat(1),
        *({"id": f"bad{i}", "messages": m} for i, m in enumerate(([system], [system, SAY], [], [query]))),
        chat(2),
    ]
    taken = take(tmp_path, renderer(), write_rows(tmp_path / "d.jsonl", *rows))
    assert taken.lines == [1, 6]
    assert [(s["file"], s["line"], s["id"], s["reason"]) for s in taken.skips] == [
        ("d.jsonl", 2, "bad0", "not_rendered"),
        ("d.jsonl", 3, "bad1", "not_rendered"),
        ("d.jsonl", 4, "bad2", "wrong_keys"),
        ("d.jsonl", 5, "bad3", "not_rendered"),
    ]
    assert all("No user query found" in s["detail"] for s in taken.skips if s["reason"] == "not_rendered")


def test_b03_parquet_with_nulls_renders_as_jsonl(tmp_path: Path) -> None:
    """B03: keys that Arrow filled with nulls are as good as absent, at any depth."""
    part = {"type": "text", "text": "q", "image_url": None}
    call = {"function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    other = {"function": {"name": "f", "arguments": {"x": 2, "y": "z"}}}
    messages = [
        {"role": "user", "content": [part], "tool_calls": None},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a", "image_url": None}],
            "tool_calls": [call, other],
        },
    ]
    tools = [
        {"function": {"name": "f", "parameters": {"a": {"b": None}}}},
        {"function": {"name": "g", "parameters": None}},
    ]
    rows = [{"messages": messages, "tools": tools, "id": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    plain = json.loads(json.dumps(rows[0]))
    del (
        plain["messages"][0]["content"][0]["image_url"],
        plain["messages"][1]["tool_calls"][0]["function"]["arguments"]["y"],
    )
    arrow = take(tmp_path / "a", renderer(), tmp_path / "d.parquet")
    lines = take(tmp_path / "j", renderer(), write_rows(tmp_path / "d.jsonl", plain))
    assert same(arrow, lines)
    text = renderer().tokenizer.decode(arrow.samples[0][0])
    assert "user\nq<|im_end|>" in text and "null" not in text and "vision" not in text


def test_b06_rows_with_nothing_to_learn(tmp_path: Path) -> None:
    """B06: an empty answer is no sample; an empty turn within a chat costs only that turn."""
    empty = [{"messages": [ASK, {"role": "assistant", **more}]} for more in ({"content": ""}, {"content": None}, {})]
    middle = {"messages": [ASK, {"role": "assistant", "content": ""}, *chat(1)["messages"]]}
    taken = take(tmp_path, renderer(), write_rows(tmp_path / "d.jsonl", *empty, middle))
    assert taken.lines == [4] and [s["reason"] for s in taken.skips] == ["no_trainable_anchor"] * 3
    assert spans(renderer(), *taken.samples[0])[0] == "<|im_end|>"


def test_b12_lone_surrogates(tmp_path: Path) -> None:
    """B12: half a surrogate pair anywhere is a reason to skip; a whole pair is text."""
    text = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "ok ok"}], "id": "%s"}\n'
    (tmp_path / "d.jsonl").write_text(
        text % ("hi \\ud800 x", "1") + text % ("hi", "a\\udcff") + text % ("\\ud83d\\ude00", "3")
    )
    taken = take(tmp_path, renderer(), tmp_path / "d.jsonl")
    assert [(s["line"], s["reason"]) for s in taken.skips] == [(1, "invalid_unicode"), (2, "invalid_unicode")]
    assert "😀" in renderer().tokenizer.decode(taken.samples[0][0])


def test_b13_lines_of_jsonl(tmp_path: Path) -> None:
    """B13: BOM, blank lines, CRLF and U+2028 change nothing; a cut line and a wrong byte are named by file and line."""
    rows = [chat(n, note="a\u2028b") for n in range(3)]
    lines = [json.dumps(r, ensure_ascii=False).encode() for r in rows]
    clean = take(tmp_path / "clean", tiny(), write_rows(tmp_path / "d.jsonl", *rows))
    files = {
        "bom": b"\xef\xbb\xbf" + b"\n".join(lines),
        "blank": b"\n\n  \n".join(lines) + b"\n\n",
        "crlf": b"\r\n".join(lines),
    }
    for name, data in files.items():
        (tmp_path / f"{name}.jsonl").write_bytes(data)
        assert same(take(tmp_path / name, tiny(), tmp_path / f"{name}.jsonl"), clean), name
    for name, data in (("cut", b'{"messages":[{"'), ("byte", lines[2].replace(b"next", b"\xff"))):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"\n".join([*lines[:2], data]))
        with pytest.raises(UsageError, match=f"{path} line 3: invalid JSON"):
            take(tmp_path / name, tiny(), path)


def test_b14_text_that_is_templated_already_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B14: a prompt with chat markers is counted in the summary, an answer with them is skipped."""
    whole = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>"
    twice = [{"messages": [{"role": "user", "content": whole}, SAY]}, {"messages": [ASK, {**SAY, "content": whole}]}]
    taken = take(tmp_path, renderer(), write_rows(tmp_path / "d.jsonl", *twice))
    assert [s["reason"] for s in taken.skips] == ["chat_markers_in_content"]
    assert ["chat", "markers", "in", "a", "prompt", "1"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_b15_cutting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B15: a prompt of 50 tokens, an answer of 30: cut at 40, 50, 55, 79, 80."""
    path = write_rows(tmp_path / "d.jsonl", {"input_ids": list(range(80)), "loss_mask": [0] * 50 + [1] * 30})
    for length, supervised in ((55, 5), (79, 29), (80, 30)):
        ids, mask = take(tmp_path / str(length), tiny(), path, max_length=length).samples[0]
        assert ids.tolist() == list(range(length)) and mask.sum() == supervised and mask[-5:].all()
        assert f"cut at {length} tokens" in (said := capsys.readouterr().out)
        assert said.split(f"cut at {length} tokens")[1].split()[0] == str(int(length < 80))
    for length in (40, 50):
        with pytest.raises(UsageError, match="1 no_supervised_tokens_after_truncation"):
            take(tmp_path / str(length), tiny(), path, max_length=length)
    with pytest.raises(UsageError, match=r"80 tokens; data.max_length is 79"):
        take(tmp_path / "skip", tiny(), path, max_length=79, too_long="skip")


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        ([5, -100, 7], [0, 1, 1], "input_ids[1] is -100"),
        ([5, VOCAB, 7], [0, 1, 1], f"input_ids[1] is {VOCAB}; expected 0 to {VOCAB - 1}"),
        ([5, 6, 7], [1, 1], "3 input_ids and 2 loss_mask"),
        ([5, 6, 7], [0, 1, 2], "loss_mask[2] is 2"),
        ([5.0, 6.0, 7.0], [0, 1, 1], "input_ids is not a list of 32-bit integers"),
        (["5", "6", "7"], [0, 1, 1], "input_ids is not a list of 32-bit integers"),
        ([], [], "expected equal and not 0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_b17_bad_ids(tmp_path: Path, ids: list[Any], mask: list[Any], said: str, container: str) -> None:
    """B17: row, position and value are named before anything is loaded."""
    values = {"input_ids": ids, "loss_mask": mask}
    path = write_rows(tmp_path / "d.jsonl", values)
    if container == "parquet":
        pq.write_table(pa.Table.from_pylist([values]), path := tmp_path / "d.parquet")
    with pytest.raises(UsageError) as why:
        take(tmp_path, tiny(), path)
    assert said in str(why.value) and f"{path.name} line 1" in str(why.value)


def test_b19_ids_are_names_not_keys(tmp_path: Path) -> None:
    """B19: rows of one id are different samples; equal content is one sample whatever its id."""
    rows = [chat(1), {**chat(2), "id": "c1"}, {**chat(1), "id": "c1"}, {**chat(3), "id": "12345678a"},
            {**chat(4), "id": "12345678b"}, {"messages": chat(5)["messages"]}]  # fmt: skip
    taken = take(tmp_path, tiny(), write_rows(tmp_path / "d.jsonl", *rows))
    assert taken.lines == [1, 2, 4, 5, 6] and [s["reason"] for s in taken.skips] == ["duplicate"]
    planned = Samples(tmp_path, taken.plan)
    assert [planned.identity(i).id for i in range(5)] == ["c1", "c1", "12345678a", "12345678b", ""]


def test_duplicate_prompts_and_least_supervised(tmp_path: Path) -> None:
    other = {"messages": [chat(1)["messages"][0], {"role": "assistant", "content": "<think>\nred\n</think>\n\nblue"}]}
    path = write_rows(tmp_path / "d.jsonl", chat(1), other, chat(2))
    assert len(take(tmp_path / "a", tiny(), path).samples) == 3
    taken = take(tmp_path / "b", tiny(), path, duplicates="prompt")
    assert taken.lines == [1, 3] and [s["reason"] for s in taken.skips] == ["duplicate_prompt"]
    assert taken.plan.selection == {"duplicates": "prompt"}
    least = int(take(tmp_path / "a", tiny(), path).samples[0][1].sum())
    taken = take(tmp_path / "c", tiny(), path, min_supervised=least)
    assert taken.lines == [1, 3] and [s["reason"] for s in taken.skips] == ["too_few_supervised"]


def test_b22_nothing_usable(tmp_path: Path) -> None:
    """B22 and B08: no rows, or none that can be used: said with counts and the template, and nothing is left."""
    empty = write_rows(tmp_path / "d.jsonl")
    with pytest.raises(UsageError, match=r"0 usable samples of 0 rows \(no rows\)"):
        take(tmp_path / "a", tiny(), empty)
    rows = write_rows(tmp_path / "e.jsonl", chat(1), chat(2), {"x": 1})
    with pytest.raises(
        UsageError, match=r"0 usable samples of 3 rows \(2 mask_not_exact, 1 wrong_keys\).*chat template [0-9a-f]{16}"
    ):
        take(tmp_path / "b", renderer("{% for m in messages %}{{ m.content }}{% endfor %}"), rows)
    assert not list(tmp_path.rglob("*.arrow")) and not list(tmp_path.rglob("plan.json"))


def test_strict_refuses_any_skip(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", chat(1), {"x": 1}, chat(2))
    with pytest.raises(
        UsageError, match=r"skipped 1 of 3 rows \(1 wrong_keys\); first: d.jsonl line 2: keys are \[x\]"
    ):
        take(tmp_path, tiny(), path, strict=True)
    assert not list(tmp_path.rglob("*.arrow"))
    take(tmp_path, tiny(), path)
    with pytest.raises(UsageError, match=r"data.strict, and rows were skipped: \{'wrong_keys': 1\}"):
        take(tmp_path, tiny(), path, strict=True)


def test_a_plan_knows_which_rows_it_took(tmp_path: Path) -> None:
    """The same files with another limit are read again: more rows are added, fewer are refused."""
    path = write_rows(tmp_path / "d.jsonl", *(chat(n) for n in range(20)))
    assert len(take(tmp_path, tiny(), path, limit=10).samples) == 10
    taken = take(tmp_path, tiny(), path, limit=15)
    assert sorted(taken.lines) == list(range(1, 16)) and len(taken.plan.tokens_files) == 2
    with pytest.raises(UsageError, match="5 of its 15 samples are not in the dataset any more"):
        take(tmp_path, tiny(), path, limit=10)
    keys = {Samples(tmp_path, taken.plan).identity(i).key for i in range(15)}
    assert taken.plan.keys == keys_hash(list(keys))


def test_a_key_set_is_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for keys with zeros at the end or within, which numpy's strings drop."""
    monkeypatch.setattr("dflash_offline.extract.keyset._FRESH", 50)
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, (3000, 16), dtype=np.uint8)
    raw[generator.random(raw.shape) < 0.2] = 0
    raw[:500, 8:] = 0
    raw[500:600, 1:] = 0
    keys = list(dict.fromkeys(row.tobytes() for row in raw))
    there, other = keys[::2], keys[1::2]
    found = KeySet(key.hex() for key in there)
    assert all(key in found for key in there) and not any(key in found for key in other)
    assert len(found) == len(there) and found.hash() == keys_hash([key.hex() for key in there])
    assert found.missing_in(KeySet(key.hex() for key in [*there[5:], *other])) == 5
    assert KeySet().hash() == keys_hash([]) and bytes(16) not in KeySet()


def test_processes_give_the_same_plan_and_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, and a rerun from the rows kept by content: equal bytes; damage is made again."""
    rows = [*(chat(n) for n in range(700)), {"x": 1}]
    path, kept = write_rows(tmp_path / "d.jsonl", *rows), tmp_path / "rows"
    alone = take(tmp_path / "a", tiny(), path)
    before = (tmp_path / "a" / "plan" / "tokens-00000.arrow").read_bytes()
    for name in ("b", "c", "d"):
        taken = take(tmp_path / name, tiny(), path, workers=2 if name == "b" else 1, rows_cache=kept)
        assert taken.skips == alone.skips and taken.plan == alone.plan
        assert (tmp_path / name / "plan" / "tokens-00000.arrow").read_bytes() == before
        chunks = sorted(kept.iterdir())
        assert len(chunks) == 3
        if name == "b":
            chunks[0].write_bytes(chunks[0].read_bytes()[:-1])
            monkeypatch.setattr("dflash_offline.extract.tokenise.render_chunk", _only_once(chunks[0]))
        if name == "c":
            monkeypatch.setattr("dflash_offline.extract.tokenise.render_chunk", None)
    take(tmp_path / "e", tiny(), path, rows_cache=kept)
    with pytest.raises(TypeError):  # other settings are other rows
        take(tmp_path / "f", tiny(), path, rows_cache=kept, max_length=50)


def _only_once(path: Path) -> Any:
    from dflash_offline.extract.tokenise import render_chunk

    used: list[int] = []

    def render(*args: Any) -> Any:
        assert not used
        used.append(1)
        return render_chunk(*args)

    return render
