"""The shipped tiny target: what it is, and that it answers prompts it was not trained on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_offline.tools import tiny_train
from dflash_offline.tools.tiny_chats import KINDS, chats, is_held_out
from dflash_offline.tools.tiny_generate import Completion, completion, generate

FOLDER = Path(tiny_train.__file__).parent / "tiny_target"
ASKED = list(chats(5, 48, held_out=True))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def answers() -> list[Completion]:
    return list(generate(FOLDER, [chat.prompt for chat in ASKED]))


def test_is_small_bf16_and_has_the_real_architecture():
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 5_000_000
    with safe_open(weights, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in shapes} == {"BF16"}
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert config["attn_output_gate"] and not config["tie_word_embeddings"]
    rope = config["rope_parameters"]
    assert rope["partial_rotary_factor"] == 0.25 and rope["mrope_interleaved"]
    assert 2 * sum(rope["mrope_section"]) == config["head_dim"] * rope["partial_rotary_factor"]
    # The query projection makes the output gate too.
    assert shapes["model.layers.3.self_attn.q_proj.weight"][0] == 2 * config["num_attention_heads"] * config["head_dim"]
    assert "model.layers.0.linear_attn.conv1d.weight" in shapes and "lm_head.weight" in shapes


def test_special_tokens(tokenizer):
    for token in (*tiny_train.SPECIALS, *tiny_train.THINK):
        assert len(tokenizer.encode(token)) == 1
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation["eos_token_id"]
    assert tokenizer.decode(tokenizer.encode("<think>a<|im_end|>"), skip_special_tokens=True) == "<think>a"


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_gold_chats_render_to_what_was_trained(tokenizer, enable_thinking):
    for chat in chats(6, 200):
        prompt, response = tiny_train.tokenize_chat(tokenizer, chat, enable_thinking=enable_thinking)
        reasoning = chat.reasoning if enable_thinking else ""
        answer = {"role": "assistant", "content": chat.answer, "reasoning_content": reasoning}
        messages = [{"role": "user", "content": chat.prompt}, answer]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer(text)["input_ids"] == prompt + response + tokenizer.encode("\n")
        inline = {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{chat.answer}"}
        assert tokenizer.apply_chat_template([messages[0], inline], tokenize=False) == text


def test_template_drops_old_reasoning_and_refuses_what_it_cannot_render(tokenizer):
    user = {"role": "user", "content": "a"}
    old = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    assert "<think>" not in tokenizer.apply_chat_template([user, old, user], tokenize=False)
    assert "c\n</think>" in tokenizer.apply_chat_template([user, old, user], tokenize=False, preserve_thinking=True)
    for messages in ([], [old], [user, {"role": "system", "content": "d"}], [user, {"role": "tool", "content": "e"}]):
        with pytest.raises(Exception, match="message"):
            tokenizer.apply_chat_template(messages, tokenize=False)


def test_splits_are_disjoint_and_draws_are_seeded():
    assert all(is_held_out(chat.prompt) for chat in ASKED)
    assert not any(is_held_out(chat.prompt) for chat in chats(5, 500))
    assert list(chats(7, 50)) == list(chats(7, 50)) != list(chats(8, 50))
    assert {chat.kind for chat in chats(7, 500)} == set(KINDS)


def test_answers_to_held_out_prompts_end_differ_and_are_right(answers):
    grams = [tuple(a.generated_ids[i : i + 4]) for a in answers for i in range(len(a.generated_ids) - 3)]
    right = sum(a.messages[1]["content"] == chat.answer for chat, a in zip(ASKED, answers, strict=True))
    assert sum(a.finish_reason == "stop" for a in answers) >= 0.9 * len(answers)
    assert len(set(grams)) >= 0.5 * len(grams)
    assert right >= 0.8 * len(answers)
    assert all(a.round_trip for a in answers)


def test_batched_cached_answers_equal_plain_greedy_decoding(answers):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for answer in answers[:4]:
        ids = torch.tensor([answer.prompt_ids])
        with torch.inference_mode():
            for _ in answer.generated_ids:
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert ids[0].tolist() == answer.prompt_ids + answer.generated_ids


def test_a_cut_answer_and_an_uncanonical_one_are_told_apart(tokenizer, answers):
    answer, prompt = answers[0], ASKED[0].prompt
    cut = completion(tokenizer, prompt, answer.prompt_ids, answer.generated_ids[:-1], enable_thinking=True)
    assert cut.finish_reason == "length" and cut.round_trip
    thinking = completion(tokenizer, prompt, answer.prompt_ids, answer.generated_ids[:3], enable_thinking=True)
    assert thinking.finish_reason == "length" and thinking.round_trip
    letters = [i for letter in "assistant" for i in tokenizer.encode(letter)]
    end = tokenizer.encode("\n</think>\n\nb<|im_end|>")
    odd = completion(tokenizer, prompt, answer.prompt_ids, letters + end, enable_thinking=True)
    assert odd.finish_reason == "stop" and not odd.round_trip
