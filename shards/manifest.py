"""manifest.json: what a cache is, in one file that a person can read.

It is written when extraction starts (complete: false) and again at the end (complete: true), atomically, under its own
checksum. `settings` holds every value that decides the bytes; a rerun with another value is refused by its name.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_offline.shards.command import structure
from dflash_offline.shards.errors import CorruptError, UsageError
from dflash_offline.shards.files import read_json, seal, unseal, write_json

FORMAT = 1
NAME = "manifest.json"
CONVENTION = "residual stream after layer i (0-based), before any norm; layers concatenated on the hidden axis"


@dataclass(frozen=True, kw_only=True)
class CodecInfo:
    """Which codec wrote the frames. Its calibration tensors are in codec.safetensors."""

    name: str
    version: int
    parameters: dict[str, Any]
    calibration: str
    """xxh3-64 of codec.safetensors; in every shard's schema metadata too."""


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One finished shard."""

    name: str
    """Path relative to the cache folder."""
    task: str
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a cache that is not a sample."""

    format: int = FORMAT
    complete: bool
    layer_ids: list[int]
    hidden_size: int
    convention: str = CONVENTION
    last_hidden: bool = False
    """The residual stream after the target's last layer is stored too, where the next token is supervised."""
    codec: CodecInfo
    settings: dict[str, Any]
    """Every value that decides the bytes, by dotted name."""
    target: dict[str, Any]
    """Where the target came from, its file hashes, and the hashes of the cache's own target/ files."""
    tokenizer: dict[str, Any]
    """length, eos_ids, pad_id, mask_id: what a trainer must know without loading the tokenizer."""
    generation: str
    """How the responses were made: greedy, sampled, mixed or unknown."""
    dataset: dict[str, Any]
    """Rows read, samples, tokens, skipped by reason, hash of the sorted sample keys."""
    versions: dict[str, str]
    kernels: str
    """Which implementation of each kernel produced the states; several, with "; " between, where runs differed."""
    audit: dict[str, Any] = field(default_factory=dict)
    """How many samples were checked while they were made, and the keys of those to recompute later."""
    shards: list[ShardInfo] = field(default_factory=list)
    index: dict[str, Any] = field(default_factory=dict)
    """rows and xxh3 of index.parquet."""


def shard_metadata(codec: CodecInfo, layer_ids: Sequence[int]) -> dict[str, str]:
    """What every shard's schema says of how its frames were made; a shard that says otherwise is of another cache."""
    return {
        "codec": json.dumps([codec.name, codec.version, codec.parameters], sort_keys=True),
        "calibration": codec.calibration,
        "layers": json.dumps(list(layer_ids)),
    }


def stored_metadata(manifest: Manifest) -> dict[bytes, bytes]:
    """`shard_metadata` as Arrow gives it back."""
    found = shard_metadata(manifest.codec, manifest.layer_ids)
    return {key.encode(): value.encode() for key, value in found.items()}


def write(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json atomically."""
    write_json(folder / NAME, asdict(manifest))


def dumps(manifest: Manifest) -> str:
    """The manifest as text that `loads` checks."""
    return seal(asdict(manifest))


def loads(text: bytes, where: str) -> Manifest:
    """Inverse of `dumps`. Raises CorruptError."""
    return _checked(structure(Manifest, unseal(text, where), where), where)


def read(folder: Path) -> Manifest:
    """Read manifest.json. Raises UsageError when `folder` is no cache of this format, CorruptError when damaged."""
    path = folder / NAME
    try:
        values = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        what = (
            "not a cache: it has no manifest.json"
            if folder.is_dir()
            else "no such folder"
            if not folder.exists()
            else "a file"
        )
        raise UsageError(f"{folder}: {what}; expected the output folder of `dflash-extract run`") from None
    if values.get("format") != FORMAT:
        raise UsageError(f"{path}: format {values.get('format')}, this build reads {FORMAT}; use the matching release")
    return _checked(structure(Manifest, values, str(path)), str(path))


def _checked(info: Manifest, where: str) -> Manifest:
    """Refuses what no writer of ours stores. No name may lead out of the cache: repair moves files."""
    copied = info.target.get("copied", {})
    if not info.layer_ids or min(info.layer_ids) < 0 or info.hidden_size < 1:
        raise CorruptError(f"{where}: layers {info.layer_ids} of {info.hidden_size}; expected some of at least 1")
    if not isinstance(copied, dict) or any(Path(name).name != name for name in copied):
        raise CorruptError(f"{where}: target.copied is {copied!r}; expected names of files with their hashes")
    for shard in info.shards:
        if not re.fullmatch(r"shards/[^/\0]+\.arrow", shard.name):
            raise CorruptError(f"{where}: shards has {shard.name!r}; expected shards/NAME.arrow")
    return info
