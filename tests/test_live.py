"""Live decoding: lossless, and step for step what the offline walk says, with the independent client's own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from targets import write_rows, write_target

from dflash_offline.extract.config import DataConfig, ExtractConfig, TargetConfig
from dflash_offline.extract.run import run as extract
from dflash_offline.shards.cache import Cache
from dflash_offline.tools.live import (
    Comparison,
    LiveTarget,
    accept,
    client_loop,
    client_proposer,
    compare,
    decode,
    offline_proposer,
    response_span,
    run_and_compare,
)
from dflash_offline.train.config import DataConfig as TrainData
from dflash_offline.train.config import ModelConfig, OptimConfig, TrainConfig
from dflash_offline.train.evaluate import load_target
from dflash_offline.train.export import export_drafter, load_drafter, run_drafter
from dflash_offline.train.loop import train
from dflash_offline.train.walk import walk_sample

client = pytest.importorskip("dflash.model", reason="the client: pip install --no-deps dflash==0.1.0")
CPU = torch.device("cpu")
SIZE = 8


@torch.inference_mode()
def plain_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """One token at a time, everything recomputed: the slowest loop there is, and the one that cannot be wrong."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(6, 300, (5 + i % 7,), generator=generator).tolist() for i in range(count)]


def trained(folder: Path, family: str, steps: int) -> tuple[Cache, Path]:
    """A target, a cache of its own greedy answers, and a drafter overfitted on them."""
    net = write_target(folder / "t", family)
    rows = []
    for prompt in prompts(12):
        ids = plain_greedy(net, prompt, 24)
        rows.append({"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * 24, "finish_reason": "length"})
    data = DataConfig(files=(write_rows(folder / "d.jsonl", *rows),), generation="greedy")
    target = TargetConfig(path=str(folder / "t"), layers=(1, 3, 5))
    assert extract(ExtractConfig(target=target, data=data, cache=folder / "cache", devices="cpu")) == 0
    config = TrainConfig(
        cache=folder / "cache",
        run_dir=folder / "run",
        device="cpu",
        log_every=1000,
        model=ModelConfig(layers=2, block_size=SIZE, sliding_window=12),
        data=TrainData(row_tokens=128, row_anchors=64, rows_per_step=1, val_fraction=0.0),
        optim=OptimConfig(lr=3e-3, epochs=1000, max_steps=steps),
    )
    assert train(config) == 0
    export_drafter(run_drafter(folder / "run", None)[0], folder / "drafter")
    return Cache(folder / "cache"), folder / "drafter"


@pytest.mark.parametrize(
    ("drafts", "ours", "gained"),
    [
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
        ([5, 9, 7], [5, 6, 7, 8], [5, 6]),
        ([9, 9, 9], [5, 6, 7, 8], [5]),
        ([5, 2, 7], [5, 2, 7, 8], [5, 2]),
        ([9, 6, 7], [2, 6, 7, 8], [2]),
    ],
)
def test_accept(drafts: list[int], ours: list[int], gained: list[int]) -> None:
    assert accept(drafts, ours, stop={2}) == gained


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_the_loop_is_lossless_with_a_drafter_that_is_mostly_wrong(tmp_path: Path, family: str) -> None:
    """B93: what comes out is the target's own greedy output, whatever the drafter proposes."""
    write_target(tmp_path / "t", family)
    target = LiveTarget(tmp_path / "t", (1, 3))
    generator = torch.Generator().manual_seed(0)
    wanted = [plain_greedy(target.model, p, 40) for p in prompts(4)]

    def propose(features_TLD: torch.Tensor, token: int) -> torch.Tensor:
        """Right in the first slot half of the time, by looking up the answer; noise elsewhere."""
        logits = torch.randn(SIZE - 1, 320, generator=generator)
        known = next((w for w in wanted if len(features_TLD) < len(w) - 1 and w[len(features_TLD)] == token), None)
        if known is not None and torch.rand((), generator=generator) < 0.5:
            logits[0, known[len(features_TLD) + 1]] = 99.0
        return logits

    runs = decode(target, propose, SIZE, prompts(4), [40] * 4, stop=set())
    for run, want in zip(runs, wanted, strict=True):
        assert run.ids[: len(want)] == want
        assert sum(s.recorded for s in run.steps) == len(run.ids) - run.prompt - 1
    assert any(s.recorded > 1 for run in runs for s in run.steps)


def test_hybrid_target_offline_equals_live_with_the_clients_model(tmp_path: Path) -> None:
    cache, folder = trained(tmp_path, "qwen3_5", 120)
    ours, theirs = load_drafter(folder), client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    samples = [cache.read(i) for i in range(len(cache))]
    target = LiveTarget(tmp_path / "t", cache.layer_ids)
    found = run_and_compare(ours, load_target(cache, CPU, torch.float32), theirs, target, samples, set())
    assert found.fault() == "" and found.samples == 12 and found.steps > 20 and found.tau_offline > 2


def test_dense_target_offline_equals_the_clients_unmodified_loop(tmp_path: Path) -> None:
    cache, folder = trained(tmp_path, "qwen3", 120)
    ours, theirs = load_drafter(folder), client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    shared, target = load_target(cache, CPU, torch.float32), LiveTarget(tmp_path / "t", cache.layer_ids)
    result = Comparison()
    for i in range(len(cache)):
        sample = cache.read(i)
        start, stop = response_span(sample)
        run = client_loop(theirs, target, sample.input_ids[:start].tolist(), stop - start + SIZE, set())
        offline = walk_sample(ours, shared, sample)
        compare(result, sample, offline, run, offline_proposer(ours, shared), client_proposer(theirs, target))
    assert result.fault() == "" and result.samples == 12 and result.left == 0
    assert result.steps > 20 and result.tau_offline > 2


def test_a_wrong_drafter_is_found_out(tmp_path: Path) -> None:
    """The comparison can fail: weights that differ a little between the two sides are noticed."""
    cache, folder = trained(tmp_path, "qwen3", 120)
    theirs = client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_drafter(folder)
    with torch.no_grad():
        ours.hidden_norm.weight.mul_(1.5)
    samples = [cache.read(i) for i in range(len(cache))]
    target = LiveTarget(tmp_path / "t", cache.layer_ids)
    found = run_and_compare(ours, load_target(cache, CPU, torch.float32), theirs, target, samples, set())
    assert found.fault()
