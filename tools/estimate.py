"""`dflash-shards estimate`: what a cache will weigh, by codec, before a target has run; and what one weighs."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline.extract.layers import choose_layers
from dflash_offline.shards import index
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.codecs import nominal_bits
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.frames import FRAME_TOKENS
from dflash_offline.tools.config import Estimate

CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("lossless", {}),
    ("fp8", {}),
    *(("ecsq", {"delta": delta}) for delta in (2.0**-3.5, 0.125, 0.25, 0.5, 1.0)),
]
"""The codecs and steps worth a comparison."""
SIDE_BYTES = 5
"""Of a token beside its states: id and mask."""


def label(name: str, parameters: dict[str, Any]) -> str:
    """A codec and its step."""
    return " ".join([name, *(f"{value:.4g}" for value in parameters.values())])


def stored_bits(cache: Cache) -> tuple[float, float | None]:
    """Bits a value of all states as stored, and of all last hidden states (None: not stored), from frame sizes alone.

    Headers, scales, escapes and checksums are counted. The cache has at least one sample.
    """
    table = index.load(cache.path, cache.manifest, ranges=True)
    lengths = table.column("frame_lengths").combine_chunks()
    # Not those of `cache`: where extraction goes on, there are more samples by now.
    tokens, supervised = (table.column(name).to_numpy() for name in ("tokens", "supervised"))
    starts, sizes = lengths.offsets.to_numpy(), lengths.values.to_numpy()
    middles = starts[:-1] - (-tokens // FRAME_TOKENS)  # a sample's frames, then those of its last hidden states
    total = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    values = int(tokens.sum()) * cache.hidden_size
    states = 8 * int((total[middles] - total[starts[:-1]]).sum()) / (values * len(cache.layer_ids))
    last = 8 * int((total[starts[1:]] - total[middles]).sum())
    # Stored where the next token is supervised: every supervised token but one at the very start of a sample.
    return states, last / max(int(supervised.sum()) * cache.hidden_size, 1) if cache.manifest.last_hidden else None


def estimate(args: Estimate) -> int:
    """Print bits, bytes and hours by codec."""
    layers, hidden, share = args.layers or 5, args.hidden or 5120, args.last_hidden or 0.0
    rows = [(label(*choice), bits := nominal_bits(*choice), bits) for choice in CHOICES]
    if args.source is not None:
        cache = Cache(args.source, allow_incomplete=True)
        if len(cache) == 0:
            raise UsageError(f"{args.source}: no finished samples yet; expected some to measure")
        layers, hidden = len(cache.layer_ids), cache.hidden_size
        states, last = stored_bits(cache)
        if last is not None and args.last_hidden is None:
            share = float(cache.supervised.sum() / cache.tokens.sum())
        codec = cache.manifest.codec
        rows.append((f"{label(codec.name, codec.parameters)}, measured", states, states if last is None else last))
    elif args.target is not None:
        config = _config(args.target)
        hidden = config["hidden_size"]
        layers = len(choose_layers((), layers, config["num_hidden_layers"]))
    shown = f" and the last hidden state of {share:.1%} of them" if share else ""
    print(
        f"{args.tokens:,} tokens of {layers} layers x {hidden:,}{shown}; ids and mask are {SIDE_BYTES} bytes a token\n"
    )
    speed = f"hours at {args.gb_per_second:g} GB/s"
    print(f"{'codec':24} {'bits':>6} {'bytes a token':>14} {'TB':>10} {speed:>18}")
    for name, bits, last in rows:
        each = (layers * bits + share * last) * hidden / 8 + SIDE_BYTES
        total = args.tokens * each
        hours = total / (args.gb_per_second * 3.6e12)
        print(f"{name:24} {bits:6.2f} {each:14,.0f} {total / 1e12:10,.3f} {hours:18,.2f}")
    return 0


def _config(folder: Path) -> dict[str, int]:
    """hidden_size and num_hidden_layers of the text model in `folder`."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        return {name: int(config[name]) for name in ("hidden_size", "num_hidden_layers")}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: {found}; expected a checkpoint's hidden_size and num_hidden_layers") from None
