"""The serving walk against a loop that asks for one block at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from train_reference import LAYERS, chats, drafter, make_cache, one_block, states_of, target

from dflash_offline.shards.sample import Sample
from dflash_offline.train.eval_command import table
from dflash_offline.train.evaluate import NOT_GREEDY, bf16_weights, breakdown, count, measure, summary
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter, Target
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.rows import column_index
from dflash_offline.train.stop import Stop
from dflash_offline.train.walk import Drafts, Step, draft_sample, supervised_spans, walk, walk_sample

ALONE = Ranks(0, 1, torch.device("cpu"))


def sample_of(ids: np.ndarray, mask: np.ndarray) -> Sample:
    return Sample(key="0" * 32, input_ids=ids, loss_mask=mask, states=states_of(ids))


def scripted(ids: np.ndarray, mask: np.ndarray, size: int, rng: np.random.Generator) -> Drafts:
    """Drafts that are right three times in four."""
    spans = supervised_spans(mask)
    anchor = np.array([a for start, stop in spans for a in range(start, stop - 1)], dtype=np.int64)
    room = np.array([stop - 1 - a for start, stop in spans for a in range(start, stop - 1)], dtype=np.int64)
    wanted = np.pad(ids, (0, size))[anchor[:, None] + np.arange(1, size)]
    token = np.where(rng.random(wanted.shape) < 0.75, wanted, wanted + 1)
    inside = np.arange(1, size) <= room[:, None]
    return Drafts(anchor, room, token, inside, inside & (token == wanted))


def serve(ids: np.ndarray, mask: np.ndarray, size: int, drafted: dict[int, list[int]]) -> list[Step]:
    """The walk as serving runs it, with a target that says what was recorded."""
    steps = []
    for start, stop in supervised_spans(mask):
        at = start
        while at < stop - 1:
            accepted = 0
            for k in range(1, min(size - 1, stop - 1 - at) + 1):
                if drafted[at][k - 1] != ids[at + k]:
                    break
                accepted += 1
            gained = min(accepted + 1, stop - 1 - at)
            steps.append(Step(at, gained, tuple(drafted[at])))
            at += gained
    return steps


@pytest.mark.parametrize("size", [2, 5, 16])
def test_walk_is_what_serving_records(size: int) -> None:
    rng = np.random.default_rng(size)
    for ids, mask in chats(40, seed=size):
        drafts = scripted(ids, mask, size, rng)
        steps = walk(drafts)
        drafted = dict(zip(drafts.anchor_A.tolist(), drafts.token_AK.tolist(), strict=True))
        assert steps == serve(ids, mask, size, drafted)
        spans = supervised_spans(mask)
        assert sum(s.recorded for s in steps) == sum(stop - start - 1 for start, stop in spans)
        assert all(1 <= s.recorded <= size for s in steps)


def test_spans() -> None:
    assert supervised_spans(np.array([0, 1, 1, 0, 1], np.uint8)) == [(1, 3), (4, 5)]
    assert supervised_spans(np.zeros(3, np.uint8)) == [] and supervised_spans(np.ones(2, np.uint8)) == [(0, 2)]


def test_a_response_of_one_token_gives_no_step() -> None:
    ids, mask = np.arange(5, dtype=np.int32), np.array([0, 0, 1, 0, 0], np.uint8)
    assert walk_sample(drafter(), target(), sample_of(ids, mask)) == []


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [3, 64])
def test_drafts_equal_the_training_forward_of_one_anchor(window: int | None, chunk: int) -> None:
    made, frozen = drafter(sliding_window=window), target()
    ids, mask = chats(2, seed=3)[1]
    drafts = draft_sample(made, frozen, sample_of(ids, mask), chunk=chunk)
    assert len(drafts.anchor_A) == sum(stop - start - 1 for start, stop in supervised_spans(mask))
    for anchor, token in zip(drafts.anchor_A.tolist(), drafts.token_AK.tolist(), strict=True):
        logits = one_block(made, frozen, ids, states_of(ids), anchor)[1:] @ frozen.head_VD.T
        assert logits.argmax(-1).tolist() == token


def test_drafts_do_not_depend_on_labels() -> None:
    made, frozen = drafter(), target()
    ids, mask = chats(1, seed=4)[0]
    before = draft_sample(made, frozen, sample_of(ids, mask))
    states = states_of(ids)
    at = int(before.anchor_A[3])
    changed = ids.copy()
    changed[at + 1 :] = 0
    after = draft_sample(made, frozen, Sample(key="", input_ids=changed, loss_mask=mask, states=states))
    assert np.array_equal(before.token_AK[:4], after.token_AK[:4])


def test_a_layer_subset_reads_its_own_columns() -> None:
    made, frozen = drafter(layer_ids=(5, 1)), target()
    ids, mask = chats(1)[0]
    drafts = draft_sample(made, frozen, sample_of(ids, mask), column_index(LAYERS, (5, 1)))
    states = states_of(ids).view(len(ids), 3, -1)[:, [2, 0]].flatten(1)
    logits = one_block(made, frozen, ids, states, int(drafts.anchor_A[5]))[1:] @ frozen.head_VD.T
    assert logits.argmax(-1).tolist() == drafts.token_AK[5].tolist()


def test_counts_per_slot() -> None:
    hit = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0]], bool)
    inside = np.array([[1, 1, 1], [1, 1, 1], [1, 0, 0]], bool)
    drafts = Drafts(np.array([4, 5, 6]), np.array([3, 2, 1]), np.zeros((3, 3), int), inside, hit)
    walked, uniform, slots = count(drafts)
    assert walked.tolist() == [3, 1] and uniform.tolist() == [3, 3]
    assert slots.tolist() == [[3, 2, 2], [2, 2, 1], [3, 1, 1], [2, 1, 0]]


def test_summary_pools_and_says_what_it_means(tmp_path: Path) -> None:
    samples = chats(12, seed=6)
    cache = make_cache(tmp_path / "cache", samples, generation="sampled")
    made: Drafter = bf16_weights(drafter(), torch.device("cpu"))
    frozen: Target = target()
    numbers = list(range(12))
    counts = measure(made, frozen, Mix([cache.path]), numbers, ALONE, Stop())
    result = summary(counts, 300, seed=0)
    steps = [walk_sample(made, frozen, cache.read(i)) for i in numbers]
    tokens = sum(s.recorded for each in steps for s in each)
    assert result["tau"] == tokens / sum(map(len, steps)) and result["tokens"] == tokens
    assert result["tau_interval"][0] <= result["tau"] <= result["tau_interval"][1]
    assert summary(counts, 300, seed=0) == result and summary(counts, 300, seed=1) != result
    told = {**result, "drafter": "RUN", "step": 7, "split": "all", "trained_on": 3, "cache": "CACHE", "note": None}
    assert "tau estimates serving only if" in table({**told, "note": NOT_GREEDY.format(cache.generation)})
    assert "RUN, step 7: all samples of CACHE, 3 of them trained on" in table(told) and "note" not in table(told)
    labels = ["a" if i % 3 else "b" for i in numbers]
    for row in breakdown(counts, labels):
        part = [len(x) for x, label in zip(steps, labels, strict=True) if label == row["label"]]
        assert (row["samples"], row["steps"]) == (len(part), sum(part)) and row["tau"] == row["tokens"] / row["steps"]


def test_a_perfect_drafter_gets_whole_blocks() -> None:
    ids, mask = np.arange(60, dtype=np.int32), np.array([0] * 10 + [1] * 50, np.uint8)
    anchor = np.arange(10, 59)
    inside = np.arange(1, 6) <= (59 - anchor)[:, None]
    drafts = Drafts(anchor, 59 - anchor, anchor[:, None] + np.arange(1, 6), inside, inside)
    assert [s.recorded for s in walk(drafts)] == [6] * 8 + [1]
    assert len(ids) == len(mask)
