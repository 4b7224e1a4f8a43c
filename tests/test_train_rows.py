"""Rows, anchors and their order: functions of seed, epoch, keys and lengths."""

import math
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_reference import LAYERS, D, chats, drafter, make_cache, one_block, spec, states_of, target

from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.keys import eligible_anchors, sample_key
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import block_inputs
from dflash_offline.train.plan import EMPTY, Plan, anchor_slots, chosen, held_out, make_plan
from dflash_offline.train.rows import Row, RowBuilder, ahead, column_index, draw_anchors, select_layers


def keys(count: int) -> list[str]:
    return [blake2b(str(i).encode(), digest_size=16).hexdigest() for i in range(count)]


def planned(
    tokens: np.ndarray, names: list[str] | None = None, weights: np.ndarray | float = 1.0, **settings: int
) -> Plan:
    options: dict[str, Any] = {"row_tokens": 100, "row_anchors": 16, "rows_per_step": 4, "seed": 0, "epochs": 3}
    names = names or keys(len(tokens))
    return make_plan(np.broadcast_to(weights, tokens.shape), names, tokens, tokens // 2, **options | settings)


def build(builder: RowBuilder, members: list[int], visit: int = 0) -> Row:
    return builder.build(np.array(members, np.int64), np.full(len(members), visit))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(4, 150), min_size=1, max_size=300), st.integers(1, 40), st.integers(0, 2))
def test_every_sample_is_in_one_row_and_rows_keep_their_budgets(lengths: list[int], slots: int, epoch: int) -> None:
    tokens = np.array(lengths)
    plan = planned(tokens, row_anchors=slots)
    packing = plan.epochs[epoch]
    assert sorted(packing.members.tolist()) == list(range(len(tokens))) and not packing.copies.any()
    anchors = anchor_slots(tokens, tokens // 2, 100, slots)
    for row in range(packing.rows):
        samples = packing.members[packing.row(row)]
        assert 0 < np.minimum(tokens[samples], 100).sum() <= 100
        assert 0 < anchors[samples].sum() <= slots
    order = plan.epoch_order(epoch)
    assert len(order) * 3 == plan.steps * 4
    assert sorted(order[order != EMPTY].tolist()) == list(range(packing.rows))


def test_anchors_go_by_length() -> None:
    tokens, eligible = np.array([10, 50, 100, 400, 50]), np.array([9, 40, 90, 390, 3])
    assert anchor_slots(tokens, eligible, 100, 16).tolist() == [2, 8, 16, 16, 3]


def test_order_does_not_depend_on_ranks_or_on_the_cache_s_order() -> None:
    """B63, B65: other rows every epoch, none on two ranks, and any restart goes on where it was."""
    tokens, names = np.random.default_rng(0).integers(5, 100, 60), keys(60)
    plan = planned(tokens, names)

    def seen(plan: Plan, names: list[str], world: int, first: int = 0) -> list[list[str]]:
        dealt = [list(plan.dealt(first, plan.steps, rank, world)) for rank in range(world)]
        rows = [row for together in zip(*dealt, strict=True) for row in together]
        return [sorted(f"{names[i]} {visit}" for i, visit in zip(*row, strict=True)) for row in rows]

    alone = seen(plan, names, 1)
    assert seen(plan, names, 2) == alone and seen(plan, names, 4) == alone
    shuffled = np.random.default_rng(1).permutation(60)
    other = [names[i] for i in shuffled]
    assert seen(planned(tokens[shuffled], other), other, 1) == alone
    assert seen(planned(tokens, names, seed=1), names, 1) != alone
    epochs = [alone[i * len(alone) // 3 : (i + 1) * len(alone) // 3] for i in range(3)]
    for epoch, rows in enumerate(epochs):
        assert sorted(name for row in rows for name in row) == sorted(f"{name} {epoch}" for name in names)
    orders = [[[name.split()[0] for name in row] for row in rows] for rows in epochs]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    # The position in the data is the step alone: any stop and restart goes on where it was.
    for step in range(plan.steps):
        assert seen(plan, names, 1, first=step) == alone[step * 4 :]
    mixed = planned(tokens, names, weights=np.where(np.arange(60) % 2, 0.4, 2.5))
    whole = seen(mixed, names, 1)
    assert seen(mixed, names, 4) == whole
    assert all(seen(mixed, names, 2, first=step) == whole[step * 4 :] for step in range(mixed.steps))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0.05, 0.3, 0.5, 1.0, 1.7, 3.0]), min_size=1, max_size=60),
    st.integers(1, 7),
    st.integers(0, 9),
)
def test_weights_say_how_often_samples_are_seen(weights: list[float], epochs: int, seed: int) -> None:
    tokens = np.full(len(weights), 30)
    try:
        plan = planned(tokens, weights=np.array(weights), epochs=epochs, seed=seed)
    except UsageError as error:
        assert "no sample is seen" in str(error) and max(weights) < 1
        return
    visits: dict[int, list[int]] = {i: [] for i in range(len(weights))}
    for members, seen in plan.dealt(0, plan.steps, 0, 1):
        for member, visit in zip(members.tolist(), seen.tolist(), strict=True):
            visits[member].append(visit)
    for member, weight in enumerate(weights):
        assert sorted(visits[member]) == list(range(len(visits[member])))  # each with anchors of its own
        assert int(epochs * weight) <= len(visits[member]) <= math.ceil(epochs * weight)
    for packing in plan.epochs:
        for row in range(packing.rows):
            assert 0 < 30 * len(packing.members[packing.row(row)]) <= 100


def test_a_tenth_of_the_samples_an_epoch_and_all_in_ten() -> None:
    plan = planned(np.full(5000, 30), weights=0.1, epochs=10)
    sizes = [len(packing.members) for packing in plan.epochs]
    assert min(sizes) > 420 and sorted(np.concatenate([p.members for p in plan.epochs])) == list(range(5000))
    assert len(planned(np.full(5000, 30), weights=0.1, epochs=10, most_steps=45).epochs) == 2


def test_fractions_are_nested_and_prompts_stay_together() -> None:
    names = keys(4000)
    parts = [chosen(names, fraction) for fraction in (0.1, 0.5, 1.0)]
    assert abs(parts[0].mean() - 0.1) < 0.02 and abs(parts[1].mean() - 0.5) < 0.03 and parts[2].all()
    assert not (parts[0] & ~parts[1]).any()
    val = held_out([names[i // 4] for i in range(4000)], 0.2)
    assert abs(val.mean() - 0.2) < 0.03 and (val.reshape(-1, 4).all(1) | ~val.reshape(-1, 4).any(1)).all()
    assert abs((val & parts[1]).mean() - 0.1) < 0.03  # independent of the fraction


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to train on: of 3 samples 3 are chosen"):
        make_plan(
            np.ones(3), keys(3), np.full(3, 9), np.zeros(3, int), row_tokens=9, row_anchors=1, rows_per_step=1,
            seed=0, epochs=1,
        )  # fmt: skip


def test_anchors_are_drawn_by_key_and_epoch() -> None:
    eligible = np.arange(10, 60)
    first = draw_anchors(eligible, 12, 0, 0, "a")
    assert first.tolist() == [11, 18, 23, 24, 27, 28, 30, 36, 41, 42, 46, 53]
    assert len(set(first.tolist())) == 12 and (np.diff(first) > 0).all() and np.isin(first, eligible).all()
    assert np.array_equal(first, draw_anchors(eligible, 12, 0, 0, "a"))
    for other in ((1, 0, "a"), (0, 1, "a"), (0, 0, "b")):
        assert not np.array_equal(first, draw_anchors(eligible, 12, *other))
    often = np.concatenate([draw_anchors(eligible, 5, 0, epoch, "a") for epoch in range(2000)])
    assert np.bincount(often, minlength=60)[10:].min() > 140  # 200 expected
    assert np.array_equal(draw_anchors(eligible, 50, 0, 0, "a"), eligible)


def test_a_row_holds_its_samples(tmp_path: Path) -> None:
    samples = [*chats(4), chats(1, seed=9, longest=200)[0]]
    cache = make_cache(tmp_path / "cache", samples)
    row_tokens, made = 160, spec(layer_ids=(5, 1))
    slots = anchor_slots(cache.tokens, cache.anchors, row_tokens, 40)
    builder = RowBuilder(
        samples=Mix([cache.path]), slots=slots, spec=made, layers=column_index(LAYERS, (5, 1)), row_tokens=row_tokens,
        row_anchors=40, seed=0,
    )  # fmt: skip
    members = [0, 2]
    row = build(builder, members, 3)
    assert row.states_TLD.shape == (row_tokens, 2 * D) and row.label_AK.shape == (40, 6)
    assert row.keys == tuple(cache.keys[i] for i in members) and row.tokens == sum(len(samples[i][0]) for i in members)
    assert row.anchors == slots[members].sum() and not row.supervised_AK[row.anchors :].any()
    at = used = 0
    for number in members:
        ids, mask = samples[number]
        states = states_of(ids).view(-1, 3, D)[:, [2, 0]].flatten(1)
        assert torch.equal(row.states_TLD[at : at + len(ids)], states)
        assert row.position_T[at : at + len(ids)].tolist() == list(range(len(ids)))
        count = int(slots[number])
        drawn = draw_anchors(eligible_anchors(mask), count, 0, 3, sample_key(ids, mask))
        for j, anchor in enumerate(drawn.tolist(), start=used):
            assert (int(row.blocks.anchor_A[j]) - at, int(row.blocks.start_A[j])) == (anchor, at)
            assert int(row.anchor_token_A[j]) == ids[anchor]
            alive = True
            for k in range(1, 6):
                alive = alive and anchor + k < len(ids) and mask[anchor + k] == 1
                assert bool(row.supervised_AK[j, k]) == alive
                if alive:
                    assert int(row.label_AK[j, k]) == ids[anchor + k]
        at, used = at + len(ids), used + count
    cut = build(builder, [4], 0)
    assert len(samples[4][0]) > row_tokens and cut.tokens == row_tokens
    assert torch.equal(cut.states_TLD[:, :D], states_of(samples[4][0])[:row_tokens, 2 * D :])
    assert int(cut.blocks.anchor_A.max()) < row_tokens - 1
    empty = build(builder, [], 0)
    assert empty.anchors == 0 and not empty.supervised_AK.any()


def test_a_row_holds_the_state_before_every_supervised_slot(tmp_path: Path) -> None:
    samples = [*chats(3), chats(1, seed=9, longest=200)[0]]
    cache = make_cache(tmp_path / "cache", samples)

    def last_hidden(ids: np.ndarray) -> torch.Tensor:
        return (torch.from_numpy(ids).float()[:, None] + torch.arange(D) / D).bfloat16()

    class Stored:
        def open(self, number: int, pinned: bool) -> Any:
            sample = cache.read(number)
            kept = last_hidden(sample.input_ids)[np.flatnonzero(sample.loss_mask[1:])]
            whole = SimpleNamespace(**vars(sample) | {"last_hidden": kept})
            return SimpleNamespace(**vars(sample), decode=lambda device: whole)

    builder = RowBuilder(
        samples=Stored(), slots=anchor_slots(cache.tokens, cache.anchors, 150, 40), spec=spec(), layers=None,
        row_tokens=150, row_anchors=40, seed=0, last_hidden=True,
    )  # fmt: skip
    for members in ([0, 1, 2], [3]):  # the last sample is cut
        row = build(builder, members, 1)
        assert row.last_TD is not None and row.supervised_samples == len(members)
        at = 0
        for number in members:
            ids = samples[number][0][:150]
            for j in np.flatnonzero(row.blocks.start_A[: row.anchors].numpy() == at):
                for k in np.flatnonzero(row.supervised_AK[j].numpy()):
                    before = int(row.blocks.anchor_A[j]) - at + k - 1
                    found = row.last_TD[row.blocks.before(150)[j, k]]
                    assert torch.equal(found, last_hidden(ids)[before])
            at += len(ids)


def test_noise_on_the_states_goes_by_key_and_epoch(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", chats(4))
    slots = anchor_slots(cache.tokens, cache.anchors, 256, 64)

    def states(members: list[int], epoch: int, noise: float, seed: int = 0) -> dict[str, torch.Tensor]:
        builder = RowBuilder(
            samples=Mix([cache.path]),
            slots=slots,
            spec=spec(),
            layers=None,
            row_tokens=256,
            row_anchors=64,
            seed=seed,
            noise=noise,
        )
        row = build(builder, members, epoch)
        ends = np.cumsum([len(cache.read(i).input_ids) for i in members])
        assert not row.states_TLD[ends[-1] :].any()
        parts = torch.split(row.states_TLD[: ends[-1]].float(), np.diff(ends, prepend=0).tolist())
        return dict(zip(row.keys, parts, strict=True))

    plain, noisy, elsewhere = states([0, 1], 2, 0.0), states([0, 1], 2, 0.5), states([2, 1], 2, 0.5)
    key = cache.keys[1]
    assert torch.equal(noisy[key], elsewhere[key])  # whatever else is in the row
    for other in (states([1], 3, 0.5), states([1], 2, 0.5, seed=1)):
        assert not torch.equal(noisy[key], other[key])
    noise = torch.cat([(noisy[k] - plain[k]).flatten() for k in plain])
    assert 0.49 < noise.abs().max() < 0.52 and abs(noise.mean()) < 0.01
    assert float(noise.std()) == pytest.approx(0.5 / 3**0.5, rel=0.02)


def test_packed_rows_draft_as_samples_alone(tmp_path: Path) -> None:
    samples = chats(4, seed=2)
    cache = make_cache(tmp_path / "cache", samples)
    made, frozen = drafter(sliding_window=5), target()
    slots = anchor_slots(cache.tokens, cache.anchors, 256, 64)
    builder = RowBuilder(
        samples=Mix([cache.path]), slots=slots, spec=made.spec, layers=None, row_tokens=256, row_anchors=64, seed=0
    )
    row = build(builder, [0, 1, 2], 0)
    inputs = block_inputs(frozen.embedding_VD, row.anchor_token_A, 6, made.spec.mask_token_id)
    out = made(row.states_TLD, row.position_T, inputs, row.blocks)
    assert out.isfinite().all()
    owner = np.repeat([0, 1, 2], slots[:3])
    for j in range(row.anchors):
        ids = samples[owner[j]][0]
        anchor = int(row.blocks.anchor_A[j] - row.blocks.start_A[j])
        alone = one_block(made, frozen, ids, states_of(ids), anchor)
        torch.testing.assert_close(out[j], alone, rtol=1e-4, atol=1e-4)


def test_layers_are_selected_by_name() -> None:
    states = torch.arange(12).view(2, 6)
    assert select_layers(states, column_index((1, 3, 5), (5, 3)), 2).tolist() == [[4, 5, 2, 3], [10, 11, 8, 9]]
    assert column_index((1, 3, 5), (1, 3, 5)) is None


def test_rows_ahead_keep_their_order_and_end_early() -> None:
    made: list[int] = []

    def make(job: int) -> int:
        made.append(job)
        return -job

    assert list(ahead(make, range(20), threads=4, depth=3)) == [-i for i in range(20)]
    made.clear()
    rows = ahead(make, range(1000), threads=2, depth=3)
    assert [next(rows), next(rows)] == [0, -1]
    rows.close()
    assert len(made) <= 5


def test_planning_is_fast_enough() -> None:
    tokens = np.clip(np.random.default_rng(0).lognormal(7.4, 0.6, 30_000), 20, 8000).astype(np.int64)
    plan = planned(tokens, row_tokens=3072, row_anchors=512)
    assert np.minimum(tokens, 3072).sum() / (plan.epochs[0].rows * 3072) > 0.93


def anonymous() -> int:
    """Private memory of this process in MB: what counts, unlike the resident size, which has the page cache in it."""
    (line,) = [x for x in Path("/proc/self/smaps_rollup").read_text().splitlines() if x.startswith("Anonymous:")]
    return int(line.split()[1]) // 1024


@pytest.mark.parametrize("samples", [250, pytest.param(17_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_epochs(samples: int, tmp_path: Path) -> None:
    """B67: 30 MB of shards here, 2 GB in the slow form."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 80, (samples, 600)).astype(np.int32)
    cache = make_cache(tmp_path / "cache", [(row, (np.arange(600) > 100).astype(np.uint8)) for row in ids])
    slots = anchor_slots(cache.tokens, cache.anchors, 2400, 64)
    builder = RowBuilder(
        samples=Mix([cache.path]), slots=slots, spec=spec(), layers=None, row_tokens=2400, row_anchors=64, seed=0
    )
    plan = make_plan(np.ones(samples), cache.keys, cache.tokens, cache.anchors, row_tokens=2400, row_anchors=64,
                     rows_per_step=1, seed=0, epochs=3)  # fmt: skip
    after = []
    for first, last in pairwise([0, *plan.ends.tolist()]):
        for row in ahead(lambda job: builder.build(*job), plan.dealt(first, last, 0, 1), threads=2, depth=4):
            assert row.anchors > 0
        after.append(anonymous())
    assert after[2] < after[0] * 1.05, after
