"""`dflash-shards bench`: what the stages deliver, how they are timed, what is concluded."""

from pathlib import Path

import pytest
import torch
from caches import HIDDEN, LAYERS, write_cache
from test_tools import shards

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.keys import last_positions
from dflash_offline.tools import bench
from dflash_offline.tools.bench import Stage, hold, stages, time_stage, verdict


@pytest.mark.parametrize("last_hidden", [True, False])
def test_stages_deliver_what_they_say(tmp_path: Path, last_hidden: bool) -> None:
    written = {s.key: s for s in write_cache(tmp_path / "c", samples=5, codec="lossless", last_hidden=last_hidden)}
    cache = Cache(tmp_path / "c")
    held = hold(cache, 100, pinned=False)
    assert [number for number, _ in held] == [0, 1, 2, 3, 4]
    read, decode, restore = stages(cache, held, torch.device("cpu"))
    messages = [read.work(i) for i in range(5)]
    assert read.delivers == sum(map(len, messages)) == sum(cache.index.column("length").to_pylist())  # type: ignore[arg-type]
    states = 2 * int(cache.tokens.sum()) * len(LAYERS) * HIDDEN
    last = sum(2 * len(last_positions(s.loss_mask)) * HIDDEN for s in written.values()) if last_hidden else 0
    # Lossless: two planes of a byte a value, each padded to 16 bytes.
    assert states + last <= decode.delivers <= states + last + 5 * 4 * 16
    assert restore.delivers == states + last
    for i in range(5):
        assert torch.equal(decode.work(i).buffer, held[i][1].buffer)  # type: ignore[attr-defined]
        sample = restore.work(i)
        assert torch.equal(sample.states, written[sample.key].states)  # type: ignore[attr-defined]


def test_few_samples_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(tmp_path / "c", samples=9, tokens=40)
    cache = Cache(tmp_path / "c")
    each = cache.read_encoded(0).buffer.numel()
    monkeypatch.setattr(bench, "MOST_BYTES", 3 * each)
    assert len(hold(cache, 9, pinned=False)) == 3 and len(hold(cache, 2, pinned=False)) == 2
    monkeypatch.setattr(bench, "MOST_BYTES", 1)
    assert len(hold(cache, 9, pinned=False)) == 1


def test_a_stage_is_timed_five_times_after_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 24.0, 30.0, 32.0, 40.0, 43.0])  # 5, 1, 4, 2, 3 seconds
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    stage = Stage(name="x", delivers=1, work=done.append, beside="memory")
    assert time_stage(stage, samples=3, threads=2) == 3.0
    assert sorted(done) == sorted(list(range(3)) * 6)


def test_the_verdict() -> None:
    rates = {
        "read": {1: 9e9, 4: 9e9},
        "decode": {1: 1e4, 4: 3e4},
        "copy": {1: 1e5, 4: 1e5},
        "restore": {1: 2e4, 4: 2e4},
    }
    gpu = verdict(rates, 4, cuda=True)
    assert "a core reads, verifies and decodes 10,000 tokens/s, 4 threads 30,000" in gpu
    assert "at most 20,000 tokens/s" in gpu and "slowest stage is 'restore'" in gpu
    cpu = verdict({name: rates[name] for name in ("read", "decode", "restore")}, 4, cuda=False)
    assert "at most 12,000 tokens/s" in cpu and "most time goes to 'restore'" in cpu


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "COPY_BYTES", 1 << 16)
    write_cache(tmp_path / "c", samples=6, codec="ecsq")
    threads = torch.get_num_threads()
    try:
        code, out, _ = shards(capsys, "bench", tmp_path / "c", "--threads", 3, "--samples", 4)
    finally:
        torch.set_num_threads(threads)
    assert code == 0 and "4 samples" in out and "warm page cache" in out and "3 threads" in out
    for line in ("read (pread)", "read, verify, entropy decode", "de-quantise"):
        (row,) = [text for text in out.splitlines() if text.startswith(line + " ")]
        _, tokens, _, _, tokens_of_threads, _ = row.split()[-6:]  # so few bytes may be 0.00 GB/s
        assert row.count("%") == 2 and all(int(n.replace(",", "")) > 0 for n in (tokens, tokens_of_threads))
    assert "memory: " in out and "a core reads" in out
    assert shards(capsys, "bench", tmp_path / "c", "--samples", 0)[0] == 2
    write_cache(tmp_path / "d", samples=1, complete=False)
    (tmp_path / "d" / "shards" / "00000000.arrow").unlink()
    assert shards(capsys, "bench", tmp_path / "d")[0] == 2


@pytest.mark.gpu
def test_the_stages_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {s.key: s for s in write_cache(tmp_path / "c", samples=5, last_hidden=True)}
    cache = Cache(tmp_path / "c")
    held = hold(cache, 5, pinned=True)
    _, decode, copy, restore = stages(cache, held, torch.device("cuda"))
    assert held[0][1].buffer.is_pinned() and decode.work(0).buffer.is_pinned()  # type: ignore[attr-defined]
    assert torch.equal(copy.work(0).cpu(), held[0][1].buffer)  # type: ignore[attr-defined]
    sample = restore.work(0)
    assert sample.states.is_cuda and torch.equal(sample.states.cpu(), written[sample.key].states)  # type: ignore[attr-defined]
    code, out, _ = shards(capsys, "bench", tmp_path / "c")
    assert code == 0 and "host to device" in out and "device: " in out and "slowest stage" in out
