"""From the command to the first durable shard: `dflash-extract run` on a checkpoint of 27B shapes, random weights.

    python benchmarks/extract/start.py --out FILE.json [--runs cold,warm,warm] [--work /dev/shm/start] [--small]

The checkpoint lies in memory, so that no disk is measured: 55 GB, made on the GPU; the cache goes to --cache. A cold
run starts with empty folders for what Triton and tilelang compile, a warm one with those of the run before it. Each run
is stopped by SIGTERM after its first shard. Times are of events.jsonl, in seconds since the command was given; Python's
bytecode is written before the first run, as pip leaves it, unless --no-bytecode. --small tries all of it on a CPU.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import shapes
import torch
from safetensors.torch import save_file

from dflash_offline.extract import events
from dflash_offline.tools.demo import TARGET
from dflash_offline.tools.tiny_chats import chats

TOKENS = 130_000
"""Of the dataset: two shards of 2 GiB and the row that follows."""
LAYERS_A_FILE = 6
PACKAGES = {"torch", "transformers", "fla-core", "flash-qla"}


def write_checkpoint(folder: Path, small: bool) -> None:
    """Weights, configuration, and the tokenizer of the demo's target, whose ids are few."""
    if small:
        shutil.copytree(TARGET, folder)
        return
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TARGET / name, folder)
    model = shapes.decoder("sdpa", torch.device("cuda"), layers=64)
    config = {"architectures": ["Qwen3_5ForCausalLM"], **model.config.to_dict(), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    state = model.state_dict()
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name in list(state):
        number = int(name.split(".")[1]) // LAYERS_A_FILE if name.startswith("layers.") else "embedding"
        parts.setdefault(str(number), {})[f"model.{name}"] = state.pop(name)
    width = model.config.hidden_size
    parts["head"] = {
        "lm_head.weight": torch.randn(model.config.vocab_size, width, dtype=torch.bfloat16, device="cuda"),
        "model.norm.weight": torch.zeros(width, dtype=torch.bfloat16, device="cuda"),
    }
    del model
    for name, tensors in parts.items():
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, folder / f"model-{name}.safetensors")
        tensors.clear()
    torch.cuda.empty_cache()


def write_chats(path: Path, tokens: int) -> None:
    """Chats of the dataset's lengths, counted at two tokens a word."""
    drawn = chats(seed=0, count=10**9)

    def lines() -> Iterator[str]:
        left = tokens
        for number, length in enumerate(shapes.lengths(4096)):
            turns, words = [], 0
            while 2 * words < length:
                chat = next(drawn)
                turns += [{"role": "user", "content": chat.prompt}, {"role": "assistant", "content": chat.answer}]
                words += len(f"{chat.prompt} {chat.answer}".split()) + 10
            yield json.dumps({"id": str(number), "messages": turns}) + "\n"
            left -= length
            if left < 0:
                return

    path.write_text("".join(lines()))


def write_bytecode(environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Of all that can be imported; the process to wait for."""
    folders = [path for path in sys.path if path and Path(path).is_dir()]
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *folders]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL)


def run(folder: Path, cache: Path, environment: dict[str, str], small: bool) -> dict[str, float]:
    """One start. Seconds by what had happened."""
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, "-m", "dflash_offline.extract", "run", "--target.path", str(folder / "target")]
    command += ["--data.files", str(folder / "chats.jsonl"), "--cache", str(cache), "--data.max-length", "8192"]
    command += ["--shard-mib", "2"] if small else ["--token-budget", "32768"]
    begun = time.time()
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        while process.poll() is None and not any((cache / "shards").glob("*.arrow")):
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    if not any((cache / "shards").glob("*.arrow")):
        raise SystemExit(f"the run left with code {process.returncode} and no shard")
    return timeline(cache, begun)


def timeline(cache: Path, begun: float) -> dict[str, float]:
    """What events.jsonl has, up to the first shard."""
    names = {"worker": "the worker starts", "start": "the parent asks for work", "done": "the first shard is durable"}
    at: dict[str, float] = {}
    for event in events.read(cache):
        name = names.get(event["event"], event["event"])
        if name == "given":
            name = "calibration given" if event["task"] < 0 else "the first task given"
        elif name == "stage":
            name = event["words"].partition(";")[0]
        at.setdefault(name, round(event.get("since", event["time"]) - begun, 2))
    return dict(sorted(at.items(), key=lambda item: item[1]))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", default="cold,warm,warm")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/start"))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "start-cache")
    parser.add_argument("--no-bytecode", action="store_true")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    kinds = args.runs.split(",")
    if kinds[0] != "cold" or not set(kinds) <= {"cold", "warm"}:
        parser.error(f"--runs is {args.runs}; expected cold, then cold or warm: a first run has no kernels to find")
    with tempfile.TemporaryDirectory(prefix="start-", ignore_cleanup_errors=True) as compiled:
        measure(args, kinds, Path(compiled))


def measure(args: argparse.Namespace, kinds: list[str], compiled: Path) -> None:
    """All runs; `compiled` is for what they compile."""
    environment = {"PYTHONPYCACHEPREFIX": str(compiled / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    if args.no_bytecode:
        environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    with nullcontext() if args.no_bytecode else write_bytecode(environment):
        if not (args.work / "target").exists():
            write_checkpoint(args.work / "target", args.small)
            write_chats(args.work / "chats.jsonl", 5_000 if args.small else TOKENS)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {d.name: d.version for d in distributions() if d.name in PACKAGES},
        "bytecode": not args.no_bytecode,
        "runs": [],
    }
    for number, kind in enumerate(kinds):
        if kind == "cold":
            kernels = compiled / f"kernels-{number}"
        folders = {"TRITON_CACHE_DIR": str(kernels / "triton"), "TILELANG_CACHE_DIR": str(kernels / "tilelang")}
        found = run(args.work, args.cache, environment | folders, args.small)
        results["runs"].append({"kernels": kind, "seconds": found})
        print(json.dumps(results["runs"][-1]), flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
