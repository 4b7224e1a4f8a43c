"""`dflash-shards merge | split | convert`: which samples a new cache takes, and what is refused before any work."""

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.codecs import EXACT
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.keys import keys_hash
from dflash_offline.shards.verify import describe
from dflash_offline.tools.config import Convert, Merge, NewCache, Split, codec_parameters
from dflash_offline.tools.rewrite_cache import Job, Pick, picks_of, rewrite, same_calibration

FREE = ("data.", "batching", "token_budget", "shard_mib", "made_by")
"""Settings of which merged caches may have different ones: what samples there are, and how they were grouped."""


def merge(args: Merge) -> int:
    """All samples of several caches, equal ones once."""
    if len(args.caches) < 2:
        raise UsageError(f"{len(args.caches)} cache given, expected two or more")
    sources = list(_open(args.caches, args.allow_incomplete))
    for other in sources[1:]:
        _check_same(sources[0], other)
    seen, picks, left_out = set[str](), list[Pick](), list[tuple[Pick, str]]()
    for pick in (pick for source in sources for pick in picks_of(source)):
        if pick.key in seen:
            left_out.append((pick, "duplicate"))
        else:
            seen.add(pick.key)
            picks.append(pick)
    settings = sources[0].manifest.settings | _several(sources)
    job = Job(
        out=args.out,
        sources=sources,
        picks=picks,
        left_out=left_out,
        settings=settings | _made_by("merge", sources),
    )
    return _run(job, args, f", {len(left_out)} duplicates left out")


def _check_same(a: Cache, b: Cache) -> None:
    """Raises UsageError naming every field in which two caches differ that must be equal to be one."""
    one, two = _facts(a), _facts(b)
    pairs = [(name, one.get(name), two.get(name)) for name in sorted(one | two)]
    different = [f"{name} is {x!r} and {y!r}" for name, x, y in pairs if x != y]
    # What only a complete cache knows, and what only some extractions stored.
    x, y = a.manifest.target.get("files"), b.manifest.target.get("files")
    if x and y and x != y:
        different.append(f"target.files is {x!r} and {y!r}")
    if different:
        raise UsageError(f"{a.path} and {b.path}: {'; '.join(different)}; expected caches of one target and one codec")
    if a.manifest.codec.name not in EXACT and not same_calibration(a.codec, b.codec):
        raise UsageError(
            f"{a.path} and {b.path}: both {a.manifest.codec.name}, measured on different states, so merging would "
            f"quantise a second time; merge the bf16 or lossless caches they come from, and convert the result"
        )


def _facts(cache: Cache) -> dict[str, Any]:
    m = cache.manifest
    return {
        **{name: value for name, value in m.settings.items() if not name.startswith(FREE)},
        **{name: getattr(m, name) for name in ("layer_ids", "hidden_size", "convention", "last_hidden", "tokenizer")},
        "codec": describe(m),
        "codec.version": m.codec.version,
        "target.model_type": m.target.get("model_type"),
        "target.safetensors": m.target["copied"].get("target.safetensors"),
    }


def _several(sources: Sequence[Cache]) -> dict[str, Any]:
    """The settings that may differ and do, with all their values."""
    settings = [source.manifest.settings for source in sources]
    names = sorted({name for s in settings for name in s if name.startswith(FREE)})
    values = {name: [s.get(name) for s in settings] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def split(args: Split) -> int:
    """Some of the samples of a cache."""
    (source,) = _open([args.cache], args.allow_incomplete)
    taken, prompts, chosen = _chosen(source, args), source.prompt_keys, picks_of(source)
    if not taken.any():
        raise UsageError(f"{args.cache}: none of its {len(source)} samples is chosen; expected at least one")
    here, there = ({prompts[i] for i in np.flatnonzero(side)} for side in (taken, ~taken))
    rule = {name: getattr(args, name) for name in ("fraction", "seed", "source", "limit", "rest")}
    if args.keys:
        rule["keys"] = keys_hash(_keys(source, args.keys))
    job = Job(
        out=args.out,
        sources=[source],
        picks=[pick for pick, take in zip(chosen, taken, strict=True) if take],
        left_out=[(pick, "split") for pick, take in zip(chosen, taken, strict=True) if not take],
        settings=source.manifest.settings | _made_by("split", [source], **rule),
    )
    return _run(job, args, f" of {len(source):,}; {len(here & there)} of their prompts are in the rest too")


def _chosen(cache: Cache, args: Split) -> NDArray[np.bool_]:
    """Which samples pass every condition that is set; with `rest` those that do not."""
    taken = np.ones(len(cache), dtype=bool)
    if args.fraction is not None:
        taken &= [_draw(key, args.seed) < args.fraction for key in cache.prompt_keys]
    if args.source:
        taken &= [args.source in name for name in cache.sources]
    if args.keys:
        wanted = set(_keys(cache, args.keys))
        taken &= [key in wanted for key in cache.keys]
    if args.limit:
        taken &= np.cumsum(taken) <= args.limit
    return ~taken if args.rest else taken


def _draw(prompt_key: str, seed: int) -> float:
    """Uniform in [0, 1), by seed and prompt alone: a larger fraction keeps what a smaller one has."""
    digest = blake2b(f"split {seed} {prompt_key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _keys(cache: Cache, file: Path) -> list[str]:
    """The keys in `file`, one a line. Raises UsageError for one that the cache does not have."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}; expected a text file with one key a line") from None
    known = set(cache.keys)
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if unknown := [(number, key) for number, key in keys if key not in known]:
        number, key = unknown[0]
        raise UsageError(f"{file}: line {number}: no sample {key[:40]!r} in {cache.path} ({len(unknown)} such lines)")
    return [key for _, key in keys]


def convert(args: Convert) -> int:
    """All samples of a cache in another codec."""
    (source,) = _open([args.cache], args.allow_incomplete)
    m = source.manifest
    parameters = codec_parameters(args.codec, args.delta)
    if (m.codec.name, m.codec.parameters) == (args.codec, parameters):
        raise UsageError(f"{args.cache}: is {describe(m)} already; expected another codec")
    quantised = m.settings.get("quantised", None if m.codec.name in EXACT else describe(m))
    if quantised and args.codec not in EXACT:
        raise UsageError(
            f"{args.cache}: its states went through {quantised}, and {args.codec} would quantise them a second time; "
            f"convert the bf16 or lossless cache they come from, or extract again"
        )
    if quantised and m.codec.name not in EXACT and not args.force:
        raise UsageError(
            f"{args.cache}: {describe(m)} is lossy; {args.codec} stores what is left of the states in more bytes and "
            f"brings nothing back; if that is what you want: --force True"
        )
    settings = {name: value for name, value in m.settings.items() if not name.startswith(f"{m.codec.name}.")}
    settings |= {"codec": args.codec, **{f"{args.codec}.{name}": value for name, value in parameters.items()}}
    settings |= {"quantised": quantised} if quantised else {}
    job = Job(
        out=args.out,
        sources=[source],
        picks=picks_of(source),
        left_out=[],
        settings=settings | _made_by("convert", [source], codec=describe(m)),
        codec=(args.codec, parameters),
    )
    return _run(job, args, f", {describe(m)} to {args.codec}")


def _open(paths: Sequence[Path], allow_incomplete: bool) -> Iterator[Cache]:
    for path in paths:
        cache = Cache(path, allow_incomplete=allow_incomplete)
        if len(cache) == 0:
            raise UsageError(f"{path}: no shard is finished yet; wait for the first")
        yield cache


def _made_by(command: str, sources: Sequence[Cache], **rule: Any) -> dict[str, Any]:
    """The setting that tells a cache made from others from one that was extracted. Sources may move: no paths."""
    rule = {name: value for name, value in rule.items() if value not in (None, "", 0, False)}
    return {"made_by": {"command": command, "sources": [source.fingerprint for source in sources], **rule}}


def _run(job: Job, args: NewCache, what: str) -> int:
    made = rewrite(job, args.shard_mib, args.threads or len(os.sched_getaffinity(0)))
    facts, size = made.dataset, sum(shard.bytes for shard in made.shards)
    print(f"{job.out}: complete, {facts['samples']:,} samples, {facts['tokens']:,} tokens, {size:,} bytes{what}")
    return 0
