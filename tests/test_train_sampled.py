"""Speculative sampling in expectation: chances slot by slot, the expected walk, and a server that really samples."""

from pathlib import Path

import numpy as np
import pytest
import torch
from train_reference import chats, drafter, last_hidden_of, make_cache, one_block, states_of, target

from dflash_offline.shards.keys import last_positions
from dflash_offline.shards.sample import Sample
from dflash_offline.train.evaluate import measure, sampled_summary
from dflash_offline.train.mix import Mix
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.sampled import Chances, expected_steps
from dflash_offline.train.stop import Stop
from dflash_offline.train.walk import draft_sample

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@torch.no_grad()
def test_chances_are_those_of_plain_softmaxes(temperature: float) -> None:
    made, frozen = drafter(), target()
    ids, mask = chats(2, seed=3)[1]
    last = last_hidden_of(ids, mask)
    sample = Sample(key="", input_ids=ids, loss_mask=mask, states=states_of(ids), last_hidden=last)
    drafts = draft_sample(made, frozen, sample, chunk=7, temperature=temperature)
    assert drafts.chances is not None
    row = {int(t): i for i, t in enumerate(last_positions(mask))}
    checked = 0
    for i, anchor in enumerate(drafts.anchor_A.tolist()):
        outputs = one_block(made, frozen, ids, states_of(ids), anchor)
        for k in range(1, made.spec.block_size):
            found = (drafts.chances.recorded_AK[i, k - 1], drafts.chances.any_AK[i, k - 1])
            if k > drafts.room_A[i]:
                assert found == (0, 0)
                continue
            hidden = frozen.norm(last[row[anchor + k - 1]].float())  # of the token before, which predicts this one
            p = torch.softmax(frozen.head_VD @ hidden / temperature, 0)
            q = torch.softmax(frozen.head_VD @ outputs[k] / temperature, 0)
            token = int(ids[anchor + k])
            wanted = (min(1.0, float(q[token] / p[token])), float(torch.minimum(p, q).sum()))
            assert np.allclose(found, wanted, rtol=1e-4, atol=1e-7)
            checked += 1
    assert checked > 100


def test_expected_steps_are_those_of_a_recursion() -> None:
    rng, slots = np.random.default_rng(0), 4
    for rooms in ([3, 2, 1], [1], [], [5, 4, 3, 2, 1, 2, 1], list(range(12, 0, -1))):
        room = np.array(rooms, dtype=np.int64)
        keep = rng.random((len(rooms), slots)) * (np.arange(1, slots + 1) <= room[:, None])

        def steps(a: int, room: np.ndarray = room, keep: np.ndarray = keep) -> float:
            """Of the rest of the span that row `a` is in, one outcome at a time."""
            total, reached = 1.0, 1.0
            for kept in range(min(slots, room[a]) + 1):
                last = kept == min(slots, room[a])
                chance = reached if last else reached * (1 - keep[a, kept])
                gained = min(kept + 1, room[a])
                total += chance * steps(a + gained) if gained < room[a] else 0.0
                reached *= 0 if last else keep[a, kept]
            return total

        starts = [a for a in range(len(rooms)) if a == 0 or rooms[a - 1] == 1]
        assert np.isclose(expected_steps(keep, room), sum(steps(a) for a in starts))


def test_the_estimates_are_what_a_sampling_server_records() -> None:
    """20,000 responses by speculative sampling itself, against 5,000 by plain sampling that only the estimators see."""
    rng = np.random.default_rng(1)
    vocab, slots, length = 3, 3, 8
    p_after = rng.dirichlet(np.ones(vocab), size=vocab)  # the target: a Markov chain
    q_of = rng.dirichlet(np.ones(vocab), size=(vocab, slots))  # the drafter: what it drafts depends on the anchor

    def draw(p: np.ndarray) -> int:
        return int(min(np.searchsorted(np.cumsum(p), rng.random()), vocab - 1))

    tokens, steps = [], []
    for _ in range(20_000):
        text, taken = [0], 0
        while len(text) < length:
            anchor, gained = text[-1], 0
            for k in range(min(slots, length - len(text))):
                p, q = p_after[text[-1]], q_of[anchor, k]
                d = draw(q)
                kept = rng.random() < p[d] / q[d]
                rest = np.maximum(p - q, 0)
                text.append(d if kept else draw(rest / rest.sum()))
                gained += 1
                if not kept:
                    break
            else:
                if len(text) < length:
                    text.append(draw(p_after[text[-1]]))
                    gained += 1
            taken += 1
        tokens.append(length - 1)
        steps.append(taken)
    live, noise = sum(tokens) / sum(steps), np.std(steps) / np.sqrt(len(steps))

    room = np.arange(length - 1, 0, -1)
    expected = []
    for _ in range(5_000):
        text = [0]
        for _ in range(length - 1):
            text.append(draw(p_after[text[-1]]))
        keep, overlap = np.zeros((length - 1, slots)), np.zeros((length - 1, slots))
        for a in range(length - 1):
            for k in range(min(slots, room[a])):
                p, q = p_after[text[a + k]], q_of[text[a], k]
                keep[a, k] = min(1, q[text[a + k + 1]] / p[text[a + k + 1]])
                overlap[a, k] = np.minimum(p, q).sum()
        expected.append((expected_steps(keep, room), Chances(keep, overlap).accepted_A()[0]))
    found, error = np.mean(expected, axis=0), np.std(expected, axis=0) / np.sqrt(len(expected))
    assert abs(found[0] - np.mean(steps)) < 4 * (noise + error[0])
    assert 1.2 < live < 3
    # From the first anchor every server starts, so there the uniform estimate can be checked too.
    first = []
    for _ in range(20_000):
        at, n = 0, 0
        for k in range(slots):
            p, q = p_after[at], q_of[0, k]
            d = draw(q)
            if rng.random() >= p[d] / q[d]:
                break
            at, n = d, n + 1
        first.append(n)
    assert abs(found[1] - np.mean(first)) < 4 * (np.std(first) / np.sqrt(len(first)) + error[1])


def test_a_target_that_drafts_for_itself_is_never_refused(tmp_path: Path) -> None:
    keep = np.ones((6, 3)) * (np.arange(1, 4) <= np.arange(6, 0, -1)[:, None])
    assert expected_steps(keep, np.arange(6, 0, -1)) == 2  # 4 tokens, then the last 2


def test_summary_at_a_temperature(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", chats(12, seed=6), generation="sampled", last_hidden=True)
    counts = measure(drafter(), target(), Mix([cache.path]), list(range(12)), ALONE, Stop(), temperature=1.0)
    assert counts is not None
    found = sampled_summary(counts, 1.0, 200, seed=0)
    low, high = found["tau_interval"]
    assert 1 < low <= found["tau"] <= high < 6 and found["tau_uniform"] > 1
    assert len(found["acceptance_marginal"]) == 5 and all(0 < a < 1 for a in found["acceptance_marginal"])
    assert found["tau"] == counts.walked_S2[:, 0].sum() / found["expected_steps"]
