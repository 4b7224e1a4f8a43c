"""The whole job, small: chats -> cache -> drafter -> acceptance, offline and live, on two CPU cores.

    python -m dflash_offline.tools.demo --out demo-out

Every stage is the command a user would type. Live decoding uses the model class of the PyPI package `dflash`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import RunError, UsageError
from dflash_offline.shards.files import atomic_file
from dflash_offline.tools.tiny_chats import chats
from dflash_offline.train.log import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "tools" / "tiny_target"
CONFIGS = ROOT / "configs"


def write_dataset(path: Path, count: int) -> dict[str, float]:
    """Answer `count` prompts that the target was not trained on, greedily, and write them as chats.

    Returns how many answers end by themselves and how varied they are: real answers, or the demo shows nothing.
    """
    from dflash_offline.tools.tiny_generate import generate

    prompts = [chat.prompt for chat in chats(seed=17, count=count, held_out=True)]
    grams: list[tuple[int, ...]] = []
    ended = kept = 0
    with path.open("w") as file:
        for i, done in enumerate(generate(TARGET, prompts)):
            ids = done.generated_ids
            grams += [tuple(ids[j : j + 4]) for j in range(len(ids) - 3)]
            ended += done.finish_reason == "stop"
            if done.round_trip:  # else the rendered chat is not what the target wrote
                kept += 1
                row = {"id": f"chat-{i}", "messages": done.messages, "finish_reason": done.finish_reason}
                file.write(json.dumps(row) + "\n")
    return {"ended": ended / count, "distinct 4-grams": len(set(grams)) / len(grams), "chats": kept}


def live(cache: Cache, run: Path, drafter: Path, samples: int) -> dict[str, Any]:
    """Decode held-out prompts live with the client's model class, and compare with the offline walk."""
    import torch
    from dflash import DFlashDraftModel

    from dflash_offline.tools.agreement import drafter_features, response_span
    from dflash_offline.tools.decoding import LiveTarget, client_proposer
    from dflash_offline.tools.live import run_and_compare
    from dflash_offline.train.evaluate import load_target
    from dflash_offline.train.export import load_drafter
    from dflash_offline.train.folder import read_config
    from dflash_offline.train.plan import held_out, in_key_order
    from dflash_offline.train.rows import column_index

    ours = load_drafter(drafter).requires_grad_(False)
    client = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()
    chosen = held_out(cache.prompt_keys, read_config(run).data.val_fraction) & (cache.anchors > 0)
    columns = column_index(cache.layer_ids, ours.spec.layer_ids)
    picked = [
        drafter_features(cache.read(n), columns, cache.hidden_size) for n in in_key_order(cache.keys, chosen, samples)
    ]
    shared = load_target(cache, torch.device("cpu"), torch.float32)
    target = LiveTarget(TARGET, ours.spec.layer_ids)
    prompts = [sample.input_ids[: response_span(sample)[0]].tolist() for sample in picked]
    theirs, stop_ids = client_proposer(client, target), set(cache.tokenizer_facts["eos_ids"])
    found = run_and_compare(ours, shared, theirs, target, prompts, picked, stop_ids)["answered"]
    if fault := found.fault():
        raise RunError(f"live decoding and the offline walk do not agree: {fault}")
    return {
        "prompts": found.samples,
        "offline": found.tau_offline,
        "live": found.tau_live,
        "steps": found.steps,
        "near ties": found.near_ties,
        "left": found.left,
    }


def picture(metrics: list[dict[str, Any]], taus: dict[int, float], path: Path) -> None:
    """Loss over steps, and tau: on a few samples while training, and `taus` on all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot([row["step"] for row in metrics], [row["loss"] for row in metrics], linewidth=1)
    left.set(xlabel="step", ylabel="loss (nats a token)", title="Training loss")
    few = {row["step"]: row["validation"]["tau"] for row in metrics if "validation" in row}
    right.plot(list(few), list(few.values()), marker=".", label="while training, 16 prompts")
    right.plot(list(taus), list(taus.values()), "o", label="untrained and trained, all prompts")
    right.legend(loc="lower right")
    right.set(xlabel="step", ylabel="tau (tokens a step)", title="Acceptance on held-out prompts", ylim=(0.9, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def command(*words: object) -> None:
    """Run one of the three programs as a user would, and show what is run."""
    program, *rest = map(str, words)
    print(f"\n$ dflash-{program} {shlex.join(rest)}", flush=True)
    module = "tools" if program == "shards" else program
    # At this size a second thread costs more in waiting than it gives, and on a busy machine ten times more.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", f"dflash_offline.{module}", *rest]
    code = subprocess.run(line, check=False, env=environment).returncode
    if code:
        raise RunError(f"dflash-{program} {rest[0]} left with code {code}")


def demo(out: Path, count: int, samples: int, half: bool) -> None:
    """Run every stage into `out` and print the table; `half`: for the drafter in the middle of its training too."""
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out}: is not empty; remove it or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    data, cache, run = out / "chats.jsonl", out / "cache", out / "run"
    print(f"answering {count} prompts with {TARGET} ...", flush=True)
    answers = write_dataset(data, count)
    command("extract", "run", "--config", CONFIGS / "demo-extract.toml", "--target.path", TARGET, "--data.files", data,
            "--cache", cache)  # fmt: skip
    command("shards", "verify", cache)
    # A quarter more prompts held out than are measured on: which they are is a matter of their keys.
    held = ["--data.val-fraction", round(1.25 * samples / count, 3)] if 1.25 * samples > 0.08 * count else []
    keep = ["--save.keep-last", 99, "--save.every", 50] if half else []
    command("train", "run", "--config", CONFIGS / "demo-train.toml", "--cache", cache, "--run-dir", run, *held, *keep)
    table = Cache(cache)
    taus: dict[str, dict[str, Any]] = {}
    stages: dict[str, list[object]] = {"untrained": ["--step", 0], "trained": []}
    if half:
        kept = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
        stages = {"untrained": ["--step", 0], "half-trained": ["--step", kept[len(kept) // 2 - 1]], "trained": []}
    for name, step in stages.items():
        drafter = out / f"drafter-{name}"
        command("train", "export", "--run-dir", run, *step, "--out", drafter)
        command("train", "eval", "--run-dir", run, *step, "--samples", samples, "--out", out / f"eval-{name}.json")
        print(f"decoding {samples} held-out prompts live ...", flush=True)
        taus[name] = live(table, run, drafter, samples)
    metrics = read_metrics(run)
    losses = [row["loss"] for row in metrics]
    result = {name: json.loads((out / f"eval-{name}.json").read_text()) for name in taus}
    picture(metrics, {0: result["untrained"]["tau"], metrics[-1]["step"]: result["trained"]["tau"]}, out / "curves.png")
    tokens, stored = int(table.tokens.sum()), sum(s.bytes for s in table.manifest.shards)
    lines = {
        "answers": f"{answers['ended']:.1%} end by themselves, distinct 4-grams {answers['distinct 4-grams']:.2f}",
        "samples": f"{len(table)}, {tokens} tokens",
        "bytes a token": f"{2 * len(table.layer_ids) * table.hidden_size} raw, {stored / tokens:.0f} stored",
        "loss": f"{losses[0]:.3f} first, {losses[-1]:.3f} last",
        **{
            f"tau, {name}": f"{t['offline']:.4f} offline, {t['live']:.4f} live "
            f"({t['steps']} steps compared, {t['near ties']} near ties, {t['left']} prompts answered otherwise live)"
            for name, t in taus.items()
        },
        "drafter": str(out / "drafter-trained"),
        "picture": str(out / "curves.png"),
        "time": f"{time.monotonic() - start:.0f} s",
    }
    print()
    for name, value in lines.items():
        print(f"{name:15} {value}")
    with atomic_file(out / "demo.json") as file:
        file.write(json.dumps({"answers": answers, "taus": taus, "loss": [losses[0], losses[-1]]}, indent=1).encode())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m dflash_offline.tools.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="new folder for everything the demo makes")
    parser.add_argument("--chats", type=int, default=1000, help="prompts to answer")
    parser.add_argument("--samples", type=int, default=50, help="held-out prompts to measure on")
    parser.add_argument("--half", action="store_true", help="measure a half-trained drafter too")
    args = parser.parse_args()
    import torch
    from transformers import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        demo(args.out, args.chats, args.samples, args.half)
    except (UsageError, RunError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
