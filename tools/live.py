"""`dflash-shards live`: speculative decoding with the target itself, beside what the offline walk says of it."""

import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_offline.extract.kernels import fla_fault, has_delta_rule
from dflash_offline.extract.target import HUB_ID
from dflash_offline.shards.command import say
from dflash_offline.shards.device import chosen_device
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.shards.sample import Sample
from dflash_offline.tools.agreement import Comparison, as_sample, compare, cut, drafter_features, response_span
from dflash_offline.tools.browse import open_tokenizer
from dflash_offline.tools.config import Live
from dflash_offline.tools.decoding import LiveTarget, Progress, Propose, client_proposer, decode, offline_proposer
from dflash_offline.train.eval_command import check_fit
from dflash_offline.train.evaluate import bf16_weights, load_target
from dflash_offline.train.export import load_drafter
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter, Target
from dflash_offline.train.plan import held_out, in_key_order
from dflash_offline.train.rows import column_index
from dflash_offline.train.walk import walk_sample

_BF16_SHARE = 0.05
"""In bf16 that many steps may be near ties; in fp32 a hundredth."""
_EVERY = 10.0
"""Seconds between two lines of progress."""
_LOOKED_AT = 20
"""Samples of a cache that tell whether its responses think."""


def live(config: Live) -> int:
    """The command. 0 where both sides agree, else 3."""
    cache, ours = Mix([config.cache]), load_drafter(config.drafter)
    check_fit(ours, cache, None)
    if config.out and not config.out.parent.is_dir():
        raise UsageError(f"{config.out}: its folder does not exist; choose another --out")
    tokenizer = open_tokenizer(cache.caches[0].tokenizer_folder())
    columns = column_index(cache.layer_ids, ours.spec.layer_ids)
    picked = [drafter_features(cache.read(n), columns, cache.hidden_size) for n in _held_out(cache, config)]
    recorded = config.prompts is None and cache.generation == "greedy"
    if config.prompts is not None:
        prompts = _prompts(config.prompts, tokenizer, config, cache)
    else:
        prompts = [sample.input_ids[: response_span(sample)[0]].tolist() for sample in picked]
    device = chosen_device(config.device)
    path = config.target or cache.caches[0].manifest.target["path"]
    if not Path(path).is_dir() and not HUB_ID.fullmatch(str(path)):
        raise UsageError(f"{path}: not a target: no such folder; expected the target's in --target, or a Hub name")
    target = LiveTarget(path, ours.spec.layer_ids, device)
    family = target.model.config.get_text_config().model_type
    if device == "cuda" and has_delta_rule(family) and (fault := fla_fault()):
        say(f"note: the target decodes many times slower than it could: flash-linear-attention: {fault}")
    shared = load_target(cache, torch.device(device), target.model.dtype)
    _check_same(target, shared, cache)
    rounded = bf16_weights(ours, torch.device(device))
    theirs = _client(config.drafter, rounded, shared, target)
    samples = [cut(sample, config.max_new_tokens) for sample in picked] if recorded else None
    stop_ids = set(cache.tokenizer_facts["eos_ids"])
    say(f"decoding {len(prompts)} prompts with {config.drafter} ...")
    found = run_and_compare(
        rounded, shared, theirs, target, prompts, samples, stop_ids,
        most=config.max_new_tokens, near_tie=config.near_tie, thinks=_Thinks(tokenizer),
        progress=_progress(),
    )  # fmt: skip
    result = {
        "drafter": str(config.drafter),
        "cache": str(config.cache),
        "responses": "recorded in the cache" if recorded else "decoded here",
        "modes": {mode: told(part) for mode, part in found.items()},
    }
    if config.out:
        with atomic_file(config.out) as file:
            file.write(json.dumps(result, indent=1).encode())
    print(table(found, recorded))
    known = {_Thinks(tokenizer)(s.input_ids.tolist(), response_span(s)[0]) for s in picked[:_LOOKED_AT]}
    for mode in sorted(found.keys() - known):
        print(
            f"note: of {min(len(picked), _LOOKED_AT)} held-out responses of the cache none is {mode}; the drafter may "
            "never have seen any"
        )
    return 3 if any(part.fault() for part in found.values()) else 0


class _Thinks:
    """Tells a response that thinks from one that does not, by the tokens <think> and </think>."""

    def __init__(self, tokenizer: Any) -> None:
        known = tokenizer.get_vocab()
        self.open, self.close = known.get("<think>"), known.get("</think>")

    def __call__(self, ids: Sequence[int], start: int) -> str:
        if self.close is None:
            return "answered"
        marks = [i for i in ids[:start] if i in (self.open, self.close)]
        return "thinking" if marks[-1:] == [self.open] or self.close in ids[start:] else "not thinking"


def run_and_compare(
    drafter: Drafter,
    shared: Target,
    theirs: Propose,
    target: LiveTarget,
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sample] | None,
    stop_ids: set[int],
    *,
    most: int = 0,
    near_tie: float = 0.5,
    thinks: Any = lambda ids, start: "answered",
    progress: Progress = lambda tokens, active: None,
) -> dict[str, Comparison]:
    """Decode every prompt live with the drafts of `theirs`, and compare with the offline walk; by mode of response.

    The walk is over `samples`, the prompts with their recorded responses, of which so much is decoded live; without
    them, over what was decoded, at most `most` tokens, with the states that the target has of it.
    """
    ours, size = offline_proposer(drafter, shared), drafter.spec.block_size
    limits = [stop - start + size for start, stop in map(response_span, samples)] if samples else [most] * len(prompts)
    runs = decode(target, theirs, size, prompts, limits, stop_ids, progress)
    found: dict[str, Comparison] = {}
    for i, run in enumerate(runs):
        sample = samples[i] if samples else as_sample(run, f"prompt {i}", target([run.ids], 1)[0][1])
        start, stop = response_span(sample)
        steps = [s for s in walk_sample(drafter, shared, sample) if start <= s.anchor < stop]
        share = 0.01 if target.model.dtype == torch.float32 else _BF16_SHARE
        mode = thinks(sample.input_ids.tolist(), start)
        into = found.setdefault(mode, Comparison(near_tie=near_tie, share=share))
        compare(into, sample, steps, run, ours, theirs, target)
    return found


def _progress() -> Progress:
    last = time.monotonic()

    def told(tokens: int, active: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _EVERY:
            last = now
            say(f"  {tokens:,} tokens decoded, {active} prompts go on")

    return told


def told(found: Comparison) -> dict[str, Any]:
    """A comparison for a JSON file."""
    return {
        "prompts": found.samples,
        "steps": found.steps,
        "tau_offline": found.tau_offline,
        "tau_live": found.tau_live,
        "near_ties": found.near_ties,
        "bugs": found.bugs,
        "answered_otherwise": found.left,
        "not_the_targets": found.strangers,
        "fault": found.fault(),
    }


def table(found: dict[str, Comparison], recorded: bool) -> str:
    """Comparisons for people."""
    lines = [] if recorded else ["responses decoded here, as those of the cache are not greedy or not asked for"]
    for mode, part in found.items():
        lines += [
            f"{mode}: {part.samples} prompts, {part.steps} steps compared",
            f"  tau          {part.tau_offline:.4f} offline, {part.tau_live:.4f} live"
            if part.steps
            else "  tau          -",
            f"  steps apart  {part.near_ties} near ties of the draft, {len(part.bugs)} otherwise",
        ]
        if recorded:
            lines.append(
                f"  text apart   {part.left - len(part.strangers)} prompts at near ties of the target (within "
                f"{part.near_tie}), {len(part.strangers)} otherwise"
            )
        lines.append(f"  verdict      {'differ: ' + part.fault() if part.fault() else 'agree'}")
    return "\n".join(lines)


def _client(folder: Path, ours: Drafter, shared: Target, target: LiveTarget) -> Propose:
    if importlib.util.find_spec("dflash") is None:
        say("note: drafts are the trainer's own; an independent client comes with pip install --no-deps dflash==0.1.0")
        return offline_proposer(ours, shared)
    from dflash import DFlashDraftModel

    client = DFlashDraftModel.from_pretrained(folder, dtype=target.model.dtype)
    return client_proposer(client.to(target.model.device).eval(), target)


def _check_same(target: LiveTarget, shared: Target, cache: Mix) -> None:
    for name, live, stored in (
        ("embed_tokens", target.model.get_input_embeddings().weight, shared.embedding_VD),
        ("lm_head", target.head.weight, shared.head_VD),
    ):
        if live.shape != stored.shape or not torch.equal(live, stored.to(live.dtype)):
            raise UsageError(
                f"{target.model.name_or_path}: its {name} is not that of {cache.path}; give its own --target"
            )


def _held_out(cache: Mix, config: Live) -> list[int]:
    chosen = held_out(cache.prompt_keys, config.val_fraction) & (cache.anchors > 0)
    numbers = in_key_order(cache.keys, chosen, config.samples)
    if not numbers:
        raise UsageError(
            f"{cache.path}: nothing is held out at val_fraction = {config.val_fraction}; expected a larger"
        )
    return numbers


def _prompts(path: Path, tokenizer: Any, config: Live, cache: Mix) -> list[list[int]]:
    """Ids of the prompts in a JSONL file, rendered as the cache's were."""
    arguments = dict(cache.caches[0].manifest.settings.get("chat_template.args") or {})
    if config.thinking is not None:
        arguments["enable_thinking"] = config.thinking
    out: list[list[int]] = []
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines[: config.samples], 1):
        try:
            row = json.loads(line)
            if "input_ids" in row:
                out.append([int(i) for i in row["input_ids"]])
                continue
            messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
            while messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
            out.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # a template raises whatever it likes
            reason = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"{path}: line {number}: {type(error).__name__}: {reason}; expected messages, prompt or input_ids"
            ) from None
    if not out or not all(out):
        raise UsageError(f"{path}: has no prompt, or an empty one; expected a JSON object a line")
    return out
