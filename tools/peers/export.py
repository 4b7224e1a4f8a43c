"""`dflash-shards export`: every sample as a safetensors file of its own, for whoever reads no caches.

OUT/index.json            layers, convention, codec, and a line a sample; complete: false -> true at the end
OUT/<key>.safetensors     input_ids int32 [T], loss_mask uint8 [T], hidden_states bf16 [T, L, D]; where the cache
                          has them, last_hidden bf16 [N, D] of the tokens last_positions int64 [N]
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from dflash_offline.shards.build import in_threads
from dflash_offline.shards.cache import LOCK, Cache
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import atomic_file, take_lock
from dflash_offline.shards.keys import last_positions
from dflash_offline.tools.config import Export

INDEX = "index.json"


def run(args: Export) -> int:
    """Write the files that are missing, then the index that says complete."""
    torch.set_num_threads(1)  # the samples are what is parallel
    cache = Cache(args.cache)
    rows = cache.index.slice(0, args.limit or len(cache)).to_pylist()
    facts = {
        "cache": cache.fingerprint,
        "layer_ids": list(cache.layer_ids),
        "hidden_size": cache.hidden_size,
        "convention": cache.manifest.convention,
        "codec": {"name": cache.manifest.codec.name, "parameters": cache.manifest.codec.parameters},
        "target": cache.manifest.target.get("path"),
        "generation": cache.generation,
    }
    with _claim(args.out):
        todo = _todo(args.out, facts, rows)
        _write(args, cache, facts, rows, todo)
    print(f"{args.out}: {len(rows)} samples, {len(todo)} of them written now")
    return 0


@contextmanager
def _claim(out: Path) -> Iterator[None]:
    """Make the folder and hold it for this process. Raises UsageError when it is another's, or holds other things."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = sorted(p.name for p in out.iterdir() if p.name != LOCK and not p.match(f"{INDEX}.*.tmp"))
        if there and INDEX not in there:
            raise UsageError(f"{out}: holds {there[0]} and no {INDEX}; choose an empty or new folder")
        lock = (out / LOCK).open("a+")
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}; expected a folder that can be written") from None
    with lock:
        take_lock(lock, out)
        for leftover in (*out.glob(f"{INDEX}.*.tmp"), *out.glob("*.safetensors.*.tmp")):
            leftover.unlink()
        yield


def _write(
    args: Export, cache: Cache, facts: dict[str, Any], rows: Sequence[dict[str, Any]], todo: Sequence[int]
) -> None:
    size = sum(rows[i]["tokens"] for i in todo) * 2 * len(cache.layer_ids) * cache.hidden_size
    if size > (free := shutil.disk_usage(args.out).free):
        raise UsageError(
            f"{args.out}: needs {size >> 20:,} MiB, {free >> 20:,} are free; choose another disk or --limit"
        )
    _write_index(args.out, facts, rows, complete=False)

    def write(number: int) -> None:
        sample = cache.read(number)
        tensors = {
            "input_ids": torch.from_numpy(sample.input_ids),
            "loss_mask": torch.from_numpy(sample.loss_mask),
            "hidden_states": sample.states.view(len(sample.input_ids), len(cache.layer_ids), -1),
        }
        if sample.last_hidden is not None:
            tensors["last_hidden"] = sample.last_hidden
            tensors["last_positions"] = torch.from_numpy(last_positions(sample.loss_mask))
        with atomic_file(args.out / _name(sample.key)) as file:
            file.write(save(tensors))

    in_threads(write, todo, args.threads or len(os.sched_getaffinity(0)))
    _write_index(args.out, facts, rows, complete=True)


def _name(key: str) -> str:
    return f"{key}.safetensors"


def _todo(out: Path, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of the samples without a file. Raises UsageError when the folder is of another making."""
    if (out / INDEX).is_file():
        try:
            found = dict(json.loads((out / INDEX).read_bytes()))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{out / INDEX}: not readable ({error}); choose another folder") from None
        if changes := [f"{k} was {found.get(k)!r}, now {v!r}" for k, v in facts.items() if found.get(k) != v]:
            raise UsageError(f"{out}: {'; '.join(changes)}; choose another folder")
    return [i for i, row in enumerate(rows) if not (out / _name(row["key"])).is_file()]


def _write_index(out: Path, facts: dict[str, Any], rows: Sequence[dict[str, Any]], complete: bool) -> None:
    names = ("key", "id", "source", "source_row", "tokens", "supervised")
    samples = [{"file": _name(row["key"]), **{name: row[name] for name in names}} for row in rows]
    with atomic_file(out / INDEX) as file:
        file.write(json.dumps({**facts, "complete": complete, "samples": samples}, indent=1).encode())
