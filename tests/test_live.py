"""Live decoding: lossless, and step for step what the offline walk says, with the independent client's own code."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from client_loop import client_loop
from targets import write_rows, write_target
from train_reference import drafter
from transformers import AutoTokenizer

from dflash_offline.extract.config import DataConfig, ExtractConfig, TargetConfig
from dflash_offline.extract.run import run as extract
from dflash_offline.shards import index, manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.tools.agreement import Comparison, compare, response_span
from dflash_offline.tools.cli import main
from dflash_offline.tools.decoding import LiveTarget, accept, client_proposer, decode, offline_proposer
from dflash_offline.tools.live import run_and_compare
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

    told: list[tuple[int, int]] = []
    runs = decode(target, propose, SIZE, prompts(4), [40] * 4, set(), lambda *counts: told.append(counts))
    assert told[-1] == (sum(len(run.ids) - run.prompt for run in runs), told[-1][1]) and told[-1][1] in range(1, 5)
    for run, want in zip(runs, wanted, strict=True):
        assert run.ids[: len(want)] == want
        assert sum(s.recorded for s in run.steps) == len(run.ids) - run.prompt - 1
    assert any(s.recorded > 1 for run in runs for s in run.steps)


def both_sides(cache: Cache, ours: Any, theirs: Any, folder: Path) -> Comparison:
    """Every prompt of the cache, live with the client's model class and offline."""
    samples = [cache.read(i) for i in range(len(cache))]
    prompts = [sample.input_ids[: response_span(sample)[0]].tolist() for sample in samples]
    target, shared = LiveTarget(folder, cache.layer_ids), load_target(cache, CPU, torch.float32)
    found = run_and_compare(ours, shared, client_proposer(theirs, target), target, prompts, samples, set())
    return found["answered"]


def test_hybrid_target_offline_equals_live_with_the_clients_model(tmp_path: Path) -> None:
    cache, folder = trained(tmp_path, "qwen3_5", 120)
    ours, theirs = load_drafter(folder), client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = both_sides(cache, ours, theirs, tmp_path / "t")
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
        both = (offline_proposer(ours, shared), client_proposer(theirs, target))
        compare(result, sample, offline, run, *both, target)
    assert result.fault() == "" and result.samples == 12 and result.left == 0
    assert result.steps > 20 and result.tau_offline > 2


def test_a_wrong_drafter_is_found_out(tmp_path: Path) -> None:
    """The comparison can fail: weights that differ a little between the two sides are noticed."""
    cache, folder = trained(tmp_path, "qwen3", 120)
    theirs = client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_drafter(folder)
    with torch.no_grad():
        ours.hidden_norm.weight.mul_(1.5)
    assert both_sides(cache, ours, theirs, tmp_path / "t").fault()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cache, Path]:
    """A hybrid target with its tokenizer, a cache of its own answers, and the export of a drafter that learnt them."""
    return trained(tmp_path_factory.mktemp("site"), "qwen3_5", 60)


def command(*argv: object) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["dflash-shards", "live", *map(str, argv)])
        main()
    return int(left.value.code or 0)


def test_the_command_agrees_and_tells_the_text_apart(
    site: tuple[Cache, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, drafter = site
    flags = ("--drafter", drafter, "--val-fraction", 1, "--device", "cpu", "--out", tmp_path / "live.json")
    assert command(cache.path, *flags, "--samples", 5, "--max-new-tokens", 16) == 0
    assert "verdict      agree" in capsys.readouterr().out
    found = json.loads((tmp_path / "live.json").read_text())
    assert found["responses"] == "recorded in the cache"
    (part,) = found["modes"].values()
    assert part["prompts"] == 5 and part["tau_live"] == part["tau_offline"] > 1 and part["answered_otherwise"] == 0
    # A cache whose responses are not the target's own, and says that they are.
    other = tmp_path / "other"
    rows = [{"input_ids": p + [7, 8, 9, 10, 11] * 3, "loss_mask": [0] * len(p) + [1] * 15} for p in prompts(4)]
    data = DataConfig(files=(write_rows(tmp_path / "d.jsonl", *rows),), generation="greedy")
    target = TargetConfig(path=str(drafter.parent / "t"), layers=(1, 3, 5))
    assert extract(ExtractConfig(target=target, data=data, cache=other, devices="cpu")) == 0
    assert command(other, *flags) == 3
    assert "4 of 4 responses are not what the target says greedily" in capsys.readouterr().out
    info = replace(manifest.read(other), generation="unknown")
    table = index.load(other, info, ranges=True)
    index.publish(other, info, table)
    assert command(other, *flags, "--max-new-tokens", 20) == 0  # then only its prompts are used
    assert json.loads((tmp_path / "live.json").read_text())["responses"] == "decoded here"


def test_accepted_length_by_mode_from_real_decoding(
    site: tuple[Cache, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B92: prompts with thinking on and off are decoded for real and told apart; live and offline differ by less than
    0.1 in each; and that the cache has no response of a mode is said."""
    cache, drafter = site
    tokenizer = AutoTokenizer.from_pretrained(cache.tokenizer_folder())
    chats = [{"messages": [{"role": "user", "content": f"list the {i} next day"}]} for i in range(4)]
    plain = [{"input_ids": p} for p in prompts(3)]
    path, out = write_rows(tmp_path / "p.jsonl", *chats, *plain), tmp_path / "live.json"
    flags = ("--drafter", drafter, "--val-fraction", 1, "--device", "cpu", "--prompts", path, "--out", out)
    assert command(cache.path, *flags, "--max-new-tokens", 24) == 0
    modes = json.loads(out.read_text())["modes"]
    assert {mode: part["prompts"] for mode, part in modes.items()} == {"thinking": 4, "not thinking": 3}
    assert all(abs(part["tau_live"] - part["tau_offline"]) < 0.1 and part["steps"] > 10 for part in modes.values())
    assert "<think>" in tokenizer.get_vocab()  # the template opens it for the chats
    assert "held-out responses of the cache none is thinking" in capsys.readouterr().out
    for line, message in (
        ('{"input": 1}', "line 1: KeyError"),
        ("{", "line 1: JSONDecodeError"),
        ("", "has no prompt"),
    ):
        path.write_text(line)
        assert command(cache.path, *flags) == 2
        assert message in capsys.readouterr().err


def test_another_target_or_drafter_is_refused(
    site: tuple[Cache, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, folder = site
    write_target(tmp_path / "other", seed=1)
    for target, message in ((tmp_path / "other", "embed_tokens is not that of"), (tmp_path / "none", "not a target")):
        assert command(cache.path, "--drafter", folder, "--val-fraction", 1, "--target", target) == 2
        assert message in capsys.readouterr().err
    assert command(cache.path, "--drafter", folder, "--val-fraction", 1e-6) == 2
    assert "nothing is held out" in capsys.readouterr().err
    export_drafter(drafter(), tmp_path / "small")
    assert command(cache.path, "--drafter", tmp_path / "small") == 2
    assert "hidden_size of the target is 64, the drafter is for one with 32" in capsys.readouterr().err
