"""`dflash-extract preview` and `run --dry-run`: what would happen, said before it does."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import arguments, extract
from safetensors.torch import load_file
from targets import tokenizer, write_chats, write_rows

from dflash_offline.extract import forecast
from dflash_offline.extract.config import ExtractConfig, PreviewConfig, TargetConfig
from dflash_offline.extract.preview import marked, preview
from dflash_offline.extract.target import open_target
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.command import structure


def test_preview_shows_samples_lengths_and_skips(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in write_chats(tmp_path / "a.jsonl", 30).read_text().splitlines()]
    path = write_rows(tmp_path / "d.jsonl", *rows, rows[0], {"x": 1}, {"x": 2})
    given = {"target": {"path": str(site / "t")}, "data": {"files": [str(path)]}, "samples": 2, "rows": 32}
    assert preview(structure(PreviewConfig, given, "test")) == 0
    out = capsys.readouterr().out
    said = rows[1]["messages"][1]["content"].removeprefix("<think>\n")
    assert f"<|im_start|>assistant\n<think>\n«{said}<|im_end|>»\n" in out and out.count("«") == 2
    assert "d.jsonl line 2  id chat-1  key " in out and "chat-2" not in out
    bars = re.findall(r"up to +([\d,]+) +(\d+) (#+)", out)
    assert sum(int(count) for _, count, _ in bars) == 30 and max(len(bar) for *_, bar in bars) == 50
    assert "skipped 1 duplicate, such as d.jsonl line 31: " in out
    assert "skipped 1 wrong_keys, such as d.jsonl line 32: keys are [x]" in out
    assert "read 32 rows: 30 samples, skipped 2 (1 duplicate, 1 wrong_keys)" in out
    assert PreviewConfig().target == TargetConfig()


def test_supervised_text_is_green_on_a_terminal() -> None:
    ids = tokenizer()("1234")["input_ids"]
    assert marked(tokenizer(), ids, [0, 1, 1, 0], True) == "1\x1b[32m23\x1b[0m4"


def test_a_dry_run_says_what_the_run_then_takes(site: Path, tmp_path: Path) -> None:
    """Shards, samples and tokens exactly, bytes within some percent; nothing is written."""
    cache = tmp_path / "c"
    changes = {"codec": "bf16", "rate": 100}
    dry = extract(*arguments(site, cache, **changes, dry_run=True))
    assert dry.returncode == 0 and not cache.exists(), dry.stderr
    assert extract(*arguments(site, cache, **changes)).returncode == 0
    real = Cache(cache)
    tokens = int(real.tokens.sum())
    numbers = {k.strip(): v.replace(",", "") for k, v in re.findall(r"^  (.+?)  +([\d.,]+)$", dry.stdout, re.M)}
    assert (numbers["tokens"], numbers["supervised"]) == (str(tokens), str(int(real.supervised.sum())))
    assert numbers["shards"] == str(len(real.manifest.shards))
    assert float(numbers["hours on 1 devices"]) == pytest.approx(tokens / 100 / 3600, abs=0.006)
    assert int(numbers["bytes of embedding and head"]) == sum(
        t.nbytes for t in load_file(cache / "target" / "target.safetensors").values()
    )
    (said,) = (int(v) for k, v in numbers.items() if k.startswith("bytes, bf16"))
    assert said == pytest.approx(sum(s.bytes for s in real.manifest.shards), rel=0.2)


def test_a_dry_run_refuses_what_does_not_fit(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots on one disk count once; finished shards count as done."""
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    changes = {"dry_run": True, "roots": f"{tmp_path / 'a'} {tmp_path / 'b'}"}
    words = [w for a in arguments(site, tmp_path / "c", **changes) for w in (a.split() if isinstance(a, str) else [a])]
    done = extract(*words)
    assert done.returncode == 2 and f"bytes more: 10,000 free on {tmp_path / 'a'}; add --roots" in done.stderr
    assert extract(*arguments(site, site / "cache", dry_run=True)).returncode == 0


def test_embedding_and_head_need_room_beside_the_shards(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the cache's own disk, wherever the roots are."""
    target = open_target(str(site / "t"), None)
    config = ExtractConfig(cache=tmp_path / "c", roots=(tmp_path / "a",))
    head = sum(t.nbytes for t in load_file(site / "cache" / "target" / "target.safetensors").values())
    rooms = {tmp_path / "a": (1, 100), tmp_path / "c": (2, head + 5)}
    monkeypatch.setattr(forecast, "_disks", lambda folders: {rooms[f][0]: (f, rooms[f][1]) for f in folders})
    assert forecast.shortage(config, target, 100, plan=5) == ""
    assert forecast.shortage(config, target, 101, plan=5).startswith(f"needs 101 bytes more: 100 free on {tmp_path}/a;")
    found = forecast.shortage(config, target, 100, plan=6)
    assert found == f"needs {head + 6:,} bytes more: {head + 5:,} free on {tmp_path}/c; put the cache on another disk"
    rooms[tmp_path / "c"] = (1, 0)  # the same disk
    assert forecast.shortage(config, target, 100 - head) == ""
    assert forecast.shortage(config, target, 101 - head).startswith("needs 101 bytes more: 100 free on ")
