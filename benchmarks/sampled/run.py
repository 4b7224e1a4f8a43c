"""tau at a temperature: worked out from the cache, and recorded by a server that really samples; tiny hybrid target.

    pip install --no-deps dflash==0.1.0
    python -m dflash_offline.tools.demo --out demo-out        # makes the drafter
    python benchmarks/sampled/run.py --drafter demo-out/drafter-trained --out DIR

The target samples responses, which are extracted with its last hidden state; `dflash-train eval --temperature`
estimates tau from that cache. Then the same prompts are decoded live, drafts sampled and kept or replaced by the
functions of the PyPI package `dflash`, with other random numbers. Writes DIR/result.json; fails where the two differ by
more than the 95 % interval of their difference.
"""

import argparse
import json
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline.extract.config import DataConfig, ExtractConfig, TargetConfig
from dflash_offline.extract.run import run as extract
from dflash_offline.tools.decoding import LiveTarget, Propose, client_proposer
from dflash_offline.tools.tiny_chats import chats
from dflash_offline.tools.tiny_generate import render_prompt
from dflash_offline.train.config import EvalConfig
from dflash_offline.train.eval_command import evaluate
from dflash_offline.train.export import read_spec

TARGET = Path(__file__).parents[2] / "tools" / "tiny_target"


@torch.inference_mode()
def sampled_answers(target: LiveTarget, prompts: list[list[int]], path: Path, heat: float, most: int) -> set[int]:
    """One sampled answer to every prompt, as ids with their mask; returns the stop tokens."""
    stop = target.model.generation_config.eos_token_id
    stops = set(stop if isinstance(stop, list) else [stop])
    with path.open("w") as file:
        for width in sorted({len(p) for p in prompts}):  # prompts of one length need no padding
            group = [p for p in prompts if len(p) == width]
            rows = target.model.generate(
                torch.tensor(group), do_sample=True, temperature=heat, top_k=0, top_p=1.0, max_new_tokens=most,
                eos_token_id=sorted(stops), pad_token_id=min(stops),
            )[:, width:].tolist()  # fmt: skip
            for prompt, row in zip(group, rows, strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
                ids, mask = prompt + row[:end], [0] * width + [1] * end
                file.write(json.dumps({"input_ids": ids, "loss_mask": mask, "response_mode": "sampled"}) + "\n")
    return stops


@torch.inference_mode()
def decode_sampled(
    target: LiveTarget, propose: Propose, size: int, prompts: list[list[int]], most: int, stops: set[int], heat: float
) -> list[tuple[int, int]]:
    """Tokens and steps of every prompt, decoded with sampled drafts by rejection sampling."""
    from dflash.model import _rejection_sample, _sample_probs, _sampling_probs

    ids, first = [list(p) for p in prompts], [len(p) for p in prompts]
    steps, features = [0] * len(prompts), {}
    for i, (logits_1V, kept) in enumerate(target(prompts, 1)):
        ids[i].append(int(_sample_probs(_sampling_probs(logits_1V, heat))))
        features[i] = kept
    while active := [i for i, row in enumerate(ids) if row[-1] not in stops and len(row) < first[i] + most]:
        q = {i: _sampling_probs(propose(features[i][: len(ids[i]) - 1], ids[i][-1]), heat)[None] for i in active}
        drafts = {i: _sample_probs(q[i]) for i in active}
        verified = target([ids[i] + drafts[i][0].tolist() for i in active], size)
        for i, (logits_KV, kept) in zip(active, verified, strict=True):
            accepted, extra = _rejection_sample(drafts[i], _sampling_probs(logits_KV, heat)[None], q[i])
            gained = [*drafts[i][0, :accepted].tolist(), int(extra)]
            ended = next((n + 1 for n, token in enumerate(gained) if token in stops), len(gained))
            ids[i] += gained[: min(ended, first[i] + most - len(ids[i]))]
            steps[i] += 1
            features[i] = kept
    return [(len(row) - start - 1, n) for row, start, n in zip(ids, first, steps, strict=True)]


def spread(pairs: list[tuple[int, int]], seed: int) -> np.ndarray:
    """tau of 2,000 resampled sets of prompts."""
    table, rng = np.array([p for p in pairs if p[1]], dtype=float), np.random.default_rng(seed)
    sums = np.stack([table[rng.integers(len(table), size=len(table))].sum(axis=0) for _ in range(2000)])
    return sums[:, 0] / sums[:, 1]


def main() -> None:
    """Sample, extract, estimate, decode, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    from dflash import DFlashDraftModel
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    out: Path = args.out
    out.mkdir(parents=True)
    spec, tokenizer = read_spec(args.drafter), AutoTokenizer.from_pretrained(TARGET)
    texts = [render_prompt(tokenizer, chat.prompt) for chat in chats(seed=23, count=args.prompts, held_out=True)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    target, times = LiveTarget(TARGET, spec.layer_ids), [time.time()]
    stops = sampled_answers(target, prompts, out / "rows.jsonl", args.temperature, args.new_tokens)
    data = DataConfig(files=(out / "rows.jsonl",), generation="sampled")
    which = TargetConfig(path=str(TARGET), layers=spec.layer_ids)
    config = ExtractConfig(target=which, data=data, cache=out / "cache", devices="cpu", last_hidden=True)
    assert extract(config) == 0
    times.append(time.time())
    flags: dict[str, Any] = {"drafter": args.drafter, "cache": out / "cache", "split": "all", "device": "cpu"}
    assert evaluate(EvalConfig(temperature=args.temperature, out=out / "eval.json", **flags)) == 0
    offline = json.loads((out / "eval.json").read_text())["sampled"]
    times.append(time.time())
    client = DFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32).eval()
    torch.manual_seed(1)
    propose = client_proposer(client, target)
    heat = args.temperature
    pairs = decode_sampled(target, propose, spec.block_size, prompts, args.new_tokens, stops, heat)
    times.append(time.time())
    tokens, steps = map(sum, zip(*pairs, strict=True))
    taus = spread(pairs, 0)
    live = {"tau": tokens / steps, "tau_interval": np.quantile(taus, [0.025, 0.975]).tolist(), "steps": steps}
    low, high = offline["tau_interval"]
    half = 1.96 * float(np.hypot(taus.std(), (high - low) / 3.92))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers", "dflash")},
        "temperature": heat,
        "prompts": args.prompts,
        "seconds": [round(b - a, 1) for a, b in pairwise(times)],
        "offline": {name: offline[name] for name in ("tau", "tau_interval", "tau_uniform", "expected_steps")},
        "live": live,
        "difference": offline["tau"] - live["tau"],
        "interval of the difference": half,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    assert abs(result["difference"]) <= half, "the estimate and the live run differ by more than chance"


if __name__ == "__main__":
    main()
