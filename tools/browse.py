"""`dflash-shards info | ls | show | verify`: what is in a cache, and whether it is still what was written."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_offline.extract.preview import marked
from dflash_offline.shards import manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.verify import describe, verify
from dflash_offline.tools.config import Ls, OneCache, Show, Verify


def info(args: OneCache) -> int:
    """Print what a cache is: target, layers, codec, samples, bytes a token."""
    cache = Cache(path := args.cache, allow_incomplete=True)
    m = cache.manifest
    stored = sum((path / s).stat().st_size for s in {*cache.index.column("shard").to_pylist()})
    tokens = int(cache.tokens.sum())
    each, raw = stored / max(tokens, 1), 2 * len(m.layer_ids) * m.hidden_size
    rows = {
        "cache": f"{path} ({'complete' if m.complete else 'being written'})",
        "target": f"{m.target.get('path')} ({m.target.get('model_type')}, revision {m.target.get('revision')})",
        "layers": f"{m.layer_ids}, {m.convention}",
        "hidden": str(m.hidden_size),
        "codec": describe(m),
        "samples": f"{len(cache):,} in {len(cache.index.column('shard').unique()):,} shards",
        "tokens": f"{tokens:,} ({int(cache.supervised.sum()):,} supervised)",
        "bytes": f"{stored:,} ({each:,.0f} a token, {each / raw:.3f} of raw {raw:,})",
        "responses": m.generation,
        "dataset": f"{m.dataset.get('rows')} rows, skipped {m.dataset.get('skipped')}, lost {m.dataset.get('lost')}",
        "kernels": m.kernels,
        "versions": ", ".join(f"{k} {v}" for k, v in m.versions.items()),
    }
    for name, value in rows.items():
        print(f"{name:10} {value}")
    return 0


def ls(args: Ls) -> int:
    """Print one line a sample: key, tokens, supervised, source, row, id."""
    cache, limit = Cache(args.cache, allow_incomplete=True), args.limit
    print(f"{'key':32} {'tokens':>7} {'superv.':>7} {'shard':24} source:line id")
    for row in cache.index.slice(0, limit or len(cache)).to_pylist():
        place = f"{row['source']}:{row['source_row'] + 1}"
        print(one_line(f"{row['key']} {row['tokens']:7} {row['supervised']:7} {row['shard']:24} {place} {row['id']}"))
    if limit and limit < len(cache):
        print(f"... {len(cache) - limit} more (--limit 0 shows all)")
    return 0


def show(args: Show) -> int:
    """Print a sample's text with supervised tokens marked, and the size of its states per layer."""
    cache = Cache(args.cache, allow_incomplete=True)
    found = [i for i, k in enumerate(cache.keys) if k.startswith(args.key)]
    if len(found) != 1:
        raise UsageError(
            f"{args.cache}: {len(found)} samples have a key starting with {args.key!r}; expected exactly one"
        )
    row, sample, tokenizer = cache.row(found[0]), cache.read(found[0]), open_tokenizer(cache.tokenizer_folder())
    print(one_line(f"key {sample.key}  {row['source']} line {row['source_row'] + 1}  id {row['id'] or '-'}"))
    print(f"{len(sample.input_ids)} tokens, {int(sample.loss_mask.sum())} supervised, finish {row['finish_reason']}\n")
    print(marked(tokenizer, sample.input_ids.tolist(), sample.loss_mask.tolist(), sys.stdout.isatty()))
    states_TLD = sample.states.float().view(len(sample.input_ids), len(cache.layer_ids), cache.hidden_size)
    print()
    for i, layer in enumerate(cache.layer_ids):
        x_TD = states_TLD[:, i]
        print(f"layer {layer:3}: rms {x_TD.square().mean().sqrt():.4g}, largest {x_TD.abs().max():.4g}")
    return 0


def one_line(text: str) -> str:
    """`text` without line ends and control characters: a dataset's id may hold any."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`. Raises UsageError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever a strange file leads to
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{folder}: no usable tokenizer: {type(error).__name__}: {reason}") from None


def check(args: Verify) -> int:
    """Verify every byte, or a random share of the samples; 3 when anything is wrong."""
    begin = time.monotonic()
    show = _bar() if sys.stderr.isatty() else lambda read, total: None
    found = verify(args.cache, threads_to_read(), args.sample, args.seed, show)
    seconds = time.monotonic() - begin
    for fault in found.faults:
        print(f"FAULT {fault}")
    if found.faults:
        print(f"to mend: dflash-shards repair {args.cache}; then rerun the same `dflash-extract run` for what was lost")
    elif not manifest.read(args.cache).complete:
        print("note: extraction is not complete; only finished shards were checked")
    part = f"checked {found.checked} of " if found.checked < found.samples else ""
    print(
        f"{found.shards} shards, {part}{found.samples} samples, {found.tokens} tokens, {found.bytes} bytes; "
        f"read {found.read} bytes in {seconds:.2f} s ({found.read / 1e9 / max(seconds, 1e-9):.2f} GB/s): "
        f"{len(found.faults)} faults"
    )
    return 3 if found.faults else 0


def threads_to_read() -> int:
    """Two a core, so that one reads while the other hashes."""
    return 2 * len(os.sched_getaffinity(0))


def _bar() -> Callable[[int, int], None]:
    """A line on the terminal, written anew every half second."""
    begin = last = time.monotonic()

    def show(read: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.5:
            last, rate = now, read / (now - begin)
            line = (
                f"{read / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {(total - read) / rate:.0f} s left"
            )
            print(f"\r{line}   ", end="", file=sys.stderr, flush=True)
        if read >= total:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    return show
