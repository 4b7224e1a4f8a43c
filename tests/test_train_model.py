"""Names, arithmetic and masks of the drafter."""

from pathlib import Path

import numpy as np
import pytest
import torch
from train_reference import (
    LAYERS,
    TARGET_27B,
    TARGET_CONFIG,
    TOKENIZER,
    TOKENIZER_27B,
    V,
    brute_visible,
    chats,
    drafter,
    one_block,
    spec,
    states_of,
    target,
)

from dflash_offline.shards.errors import UsageError
from dflash_offline.train.config import ModelConfig
from dflash_offline.train.export import export_drafter
from dflash_offline.train.masks import Blocks, KeyValue, View, visible
from dflash_offline.train.model import Drafter, RMSNorm, block_inputs, new_drafter
from dflash_offline.train.spec import derive, mask_token

IDS = chats(1)[0][0]


def test_27b_drafter_has_the_published_tensors() -> None:
    model = ModelConfig(sliding_window=2048)
    made = derive(model, TARGET_27B, (1, 16, 31, 46, 61), TOKENIZER_27B, 248320)
    assert made.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert (made.mask_token_id, made.rope_theta) == (248070, 1e7)
    with torch.device("meta"):
        tensors = Drafter(made).state_dict()
    assert len(tensors) == 58 and sum(t.numel() for t in tensors.values()) == 1_730_213_120
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    expected = {
        "fc.weight": (5120, 25600),
        "hidden_norm.weight": (5120,),
        "norm.weight": (5120,),
    }
    for i in range(5):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (5120,),
            f"layers.{i}.post_attention_layernorm.weight": (5120,),
            f"layers.{i}.self_attn.q_proj.weight": (4096, 5120),
            f"layers.{i}.self_attn.k_proj.weight": (1024, 5120),
            f"layers.{i}.self_attn.v_proj.weight": (1024, 5120),
            f"layers.{i}.self_attn.o_proj.weight": (5120, 4096),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (17408, 5120),
            f"layers.{i}.mlp.up_proj.weight": (17408, 5120),
            f"layers.{i}.mlp.down_proj.weight": (5120, 17408),
        }
    assert shapes == expected


def test_fresh_weights() -> None:
    made = new_drafter(spec(), 3)
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert (
                abs(float(parameter.detach().std()) - 0.02) < 0.004 and abs(float(parameter.detach().mean())) < 0.004
            ), name
    again, other = new_drafter(spec(), 3), new_drafter(spec(), 4)
    assert torch.equal(made.fc.weight, again.fc.weight) and not torch.equal(made.fc.weight, other.fc.weight)


def test_rmsnorm_is_a_plain_gain_in_fp32() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    ours, theirs = RMSNorm(16, 1e-6), Qwen3RMSNorm(16, 1e-6)
    with torch.no_grad():
        ours.weight.uniform_(0.5, 2)
        theirs.weight.copy_(ours.weight)
    x = 100 * torch.randn(5, 16)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_mask_equals_the_reference_pair_by_pair(window: int | None) -> None:
    anchors, starts = [5, 0, 9, 14, 17, 0], [0, 0, 8, 8, 8, 0]
    blocks = Blocks(torch.tensor(anchors), torch.tensor(starts), 6)
    assert torch.equal(visible(blocks, 20, window), brute_visible(anchors, starts, 6, 20, window))


def test_window_counts_the_query() -> None:
    seen = visible(Blocks(torch.tensor([10]), torch.tensor([0]), 3), 12, 4)
    assert seen[0, :12].nonzero().flatten().tolist() == [7, 8, 9]  # distance 3 = W - 1 is seen, 4 is not
    assert seen[2, :12].nonzero().flatten().tolist() == [9]  # the bound moves with the query
    assert seen[:, 12:].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert visible(Blocks(torch.tensor([10]), torch.tensor([0]), 3), 12, None)[:, 12:].all()


def test_a_dummy_block_is_finite_and_changes_nothing() -> None:
    """B71."""
    made, frozen = drafter(sliding_window=4), target()
    states, anchors = states_of(IDS), torch.tensor([8, 0, 0])
    token = torch.tensor([int(IDS[8]), 0, 0])
    inputs = block_inputs(frozen.embedding_VD, token, 6, made.spec.mask_token_id)
    out = made(states, torch.arange(len(IDS)), inputs, Blocks(anchors, torch.zeros(3, dtype=torch.int64), 6))
    assert out.isfinite().all()
    torch.testing.assert_close(out[0], one_block(made, frozen, IDS, states, 8), rtol=1e-5, atol=1e-5)
    out[0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("window", [None, 5])
def test_a_block_sees_states_before_its_anchor_and_nothing_else(window: int | None) -> None:
    """B72: overlapping blocks in one row, two tokens apart: each is changed by states before its own anchor alone."""
    made, frozen, states = drafter(sliding_window=window), target(), states_of(IDS)
    anchors = torch.tensor([7, 9, 11])
    blocks = Blocks(anchors, torch.zeros(3, dtype=torch.int64), 6)
    inputs = block_inputs(frozen.embedding_VD, torch.from_numpy(IDS[anchors]).long(), 6, made.spec.mask_token_id)

    def outputs(changed_TLD: torch.Tensor) -> torch.Tensor:
        return made(changed_TLD, torch.arange(len(IDS)), inputs, blocks)

    before = outputs(states)
    for at in range(len(IDS)):
        changed = states.clone()
        changed[at] += 3
        same = (outputs(changed) == before).flatten(1).all(dim=1)
        assert same[anchors <= at].all(), at
        assert window is not None or not same[anchors > at].any(), at
    for anchor in anchors.tolist():  # the nearest state is seen through every window
        changed = states.clone()
        changed[anchor - 1] += 3
        assert not torch.equal(outputs(changed)[anchors == anchor], before[anchors == anchor])


def test_tokens_after_the_anchor_are_no_input() -> None:
    """B72."""
    made, frozen, states, anchor = drafter(), target(), states_of(IDS), 9
    later = IDS.copy()
    later[anchor + 1 :] = 0
    assert torch.equal(one_block(made, frozen, later, states, anchor), one_block(made, frozen, IDS, states, anchor))


def test_blocks_do_not_see_each_other() -> None:
    """B72."""
    made, frozen, states = drafter(), target(), states_of(IDS)
    blocks = Blocks(torch.tensor([6, 8, 9]), torch.zeros(3, dtype=torch.int64), 6)
    inputs = block_inputs(frozen.embedding_VD, torch.from_numpy(IDS[[6, 8, 9]]).long(), 6, made.spec.mask_token_id)
    before = made(states, torch.arange(len(IDS)), inputs, blocks)
    for i in range(3):
        changed = inputs.clone()
        changed[i] += 3
        same = (made(states, torch.arange(len(IDS)), changed, blocks) == before).flatten(1).all(dim=1)
        assert same.tolist() == [j != i for j in range(3)]


def test_only_the_drafter_is_trained() -> None:
    made, frozen = drafter(), target()
    one_block(made, frozen, IDS, states_of(IDS), 9).sum().backward()
    assert not frozen.embedding_VD.requires_grad and not frozen.head_VD.requires_grad
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters())
    assert not any("embed" in name or "head" in name or "rotary" in name for name in made.state_dict())


@pytest.mark.parametrize("window", [None, 4, 64])
def test_training_forward_equals_the_published_client(window: int | None, tmp_path: Path) -> None:
    client = pytest.importorskip("dflash.model")
    made, frozen = drafter(layers=3, sliding_window=window), target()
    export_drafter(made, tmp_path / "drafter")
    theirs = client.DFlashDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32).eval()
    made.load_state_dict({name: p.bfloat16().float() for name, p in made.state_dict().items()})
    assert theirs.state_dict().keys() == made.state_dict().keys()
    assert theirs.block_size == 6 and theirs.mask_token_id == made.spec.mask_token_id
    assert tuple(theirs.target_layer_ids) == LAYERS
    states = states_of(IDS)
    for anchor in (1, 4, 12, len(IDS) - 1):
        token = torch.full((1, 6), made.spec.mask_token_id)
        token[0, 0] = int(IDS[anchor])
        with torch.inference_mode():
            expected = theirs(
                position_ids=torch.arange(anchor + 6)[None],
                noise_embedding=frozen.embedding_VD[token].float(),
                target_hidden=states[None, :anchor].float(),
            )[0]
            found = one_block(made, frozen, IDS, states, anchor)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_row_of_documents_equals_each_alone() -> None:
    made, frozen = drafter(sliding_window=5), target()
    documents = [ids for ids, _ in chats(3, seed=5)]
    states = torch.cat([states_of(ids) for ids in documents])
    position = torch.cat([torch.arange(len(ids)) for ids in documents])
    starts = np.cumsum([0, *map(len, documents)])[:3].tolist()
    inner = [4, 9, 7, 5]
    which = [0, 0, 1, 2]
    start = torch.tensor([starts[d] for d in which])
    token = torch.tensor([int(documents[d][a]) for d, a in zip(which, inner, strict=True)])
    inputs = block_inputs(frozen.embedding_VD, token, 6, made.spec.mask_token_id)
    out = made(states, position, inputs, Blocks(start + torch.tensor(inner), start, 6))
    for j, (d, a) in enumerate(zip(which, inner, strict=True)):
        alone = one_block(made, frozen, documents[d], states_of(documents[d]), a)
        torch.testing.assert_close(out[j], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("explicit", "family", "facts", "vocab", "expected"),
    [
        (5, "qwen3", {}, 97, 5),
        (None, "qwen3_5_text", {"length": 248077}, 248320, 248070),
        (None, "qwen3", {"length": 151669}, 151936, 151669),
        (None, "qwen3", {"length": 92}, 97, 92),  # another tokenizer than the family's
        (None, "llama", {"mask_id": 40}, 97, 40),
        (None, "llama", {"mask_id": 90}, 97, 92),  # the end token cannot be the mask
        (None, "llama", {}, 97, 92),
        (None, "llama", {"length": 97}, 97, None),
        (90, "llama", {}, 97, None),
        (91, "llama", {}, 97, None),
        (97, "llama", {}, 97, None),
    ],
)
def test_mask_token(explicit: int | None, family: str, facts: dict[str, int], vocab: int, expected: int | None) -> None:
    tokenizer = TOKENIZER | facts
    if expected is None:
        with pytest.raises(UsageError, match="mask_token_id"):
            mask_token(explicit, family, tokenizer, vocab)
    else:
        assert mask_token(explicit, family, tokenizer, vocab) == expected


def test_layers_outside_the_cache_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[2\] are not in the cache, which has \[1, 3, 5\]"):
        derive(ModelConfig(layer_ids=(1, 2)), TARGET_CONFIG, LAYERS, TOKENIZER, V)


@pytest.mark.parametrize("window", [None, 3, 30])
@pytest.mark.parametrize("context", [127, 128, 129, 1025])
def test_grouped_attention_equals_plain_softmax(context: int, window: int | None) -> None:
    """B82, B71: on the CPU, with dummies, at lengths that are multiples of nothing; values and gradients."""
    rng = np.random.default_rng(0)
    starts = np.repeat([0, 40, 77, 0], [20, 9, 12, 6])  # the last six are dummies
    anchors = np.concatenate([starts[:41] + rng.integers(1, 30, 41), starts[41:]])
    anchors[40] = context  # the last document goes to the end
    blocks = Blocks(torch.from_numpy(anchors), torch.from_numpy(starts), 5)
    shapes = ((4, 235, 8), (2, context + 235, 8), (2, context + 235, 8))
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    mask = brute_visible(anchors.tolist(), starts.tolist(), 5, context, window)
    scores = (query @ key.repeat_interleave(2, 0).mT / 8**0.5).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 0)
    before, own = (KeyValue(key[:, part], value[:, part]) for part in (slice(context), slice(context, None)))
    found = View(blocks, window).attend(query, before, own)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, (query, key, value), direction)
    for got, gradient in zip(torch.autograd.grad(found, (query, key, value), direction), wanted, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-5)
