"""Several caches of one target as one: samples of the first cache, then of the second, and so on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.calibration import Calibrated
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.frames import allocate_bytes
from dflash_offline.shards.sample import Encoded, Sample
from dflash_offline.train.plan import Ints


class Mix:
    """One or more open caches. A sample that an earlier cache has too is not used; codecs may differ."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open the caches at `paths`. Raises UsageError where they are not of the same target, layers and tokenizer."""
        self.caches = [Cache(path) for path in paths]
        for other in self.caches[1:]:
            _check_same(self.caches[0], other)
        self._codecs: dict[tuple[int, torch.device], Calibrated] = {}
        first = self.caches[0]
        self.path, self.layer_ids, self.hidden_size = first.path, first.layer_ids, first.hidden_size
        self.tokenizer_facts, self.target_config = first.tokenizer_facts, first.target_config

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def keys(self) -> list[str]:
        """Content key of every sample."""
        return [key for cache in self.caches for key in cache.keys]

    @cached_property
    def prompt_keys(self) -> list[str]:
        """Prompt key of every sample."""
        return [key for cache in self.caches for key in cache.prompt_keys]

    @cached_property
    def tokens(self) -> Ints:
        """Length of every sample [N]."""
        return np.concatenate([cache.tokens for cache in self.caches])

    @cached_property
    def anchors(self) -> Ints:
        """Eligible anchors of every sample [N]."""
        return np.concatenate([cache.anchors for cache in self.caches])

    @cached_property
    def part(self) -> Ints:
        """Which cache every sample is of [N]."""
        return np.repeat(np.arange(len(self.caches)), [len(cache) for cache in self.caches])

    @cached_property
    def new(self) -> NDArray[np.bool_]:
        """Samples that no earlier cache has [N]."""
        seen: set[str] = set()
        return np.array([key not in seen and not seen.add(key) for key in self.keys])  # type: ignore[func-returns-value]

    @cached_property
    def fingerprint(self) -> str:
        """Identity of what is trained on, in the order of the caches."""
        return "+".join(cache.fingerprint for cache in self.caches)

    @property
    def generation(self) -> str:
        """How the responses were made: greedy, sampled, mixed or unknown."""
        ways = {cache.generation for cache in self.caches}
        return ways.pop() if len(ways) == 1 else "mixed"

    def target_tensors(self) -> dict[str, Tensor]:
        """embed_tokens, lm_head and norm of the target."""
        return self.caches[0].target_tensors()

    def read(self, number: int) -> Sample:
        """Read and decode one sample."""
        return self.open(number).decode(torch.device("cpu"))

    def open(self, number: int, pinned: bool = False) -> "Undecoded":
        """Read one sample, without de-quantising it; into memory that a GPU copies from, if `pinned`."""
        part = int(self.part[number])
        cache = self.caches[part]
        allocate = _pinned if pinned else allocate_bytes
        encoded = cache.read_encoded(number - int(np.searchsorted(self.part, part)), allocate)
        return Undecoded(encoded, partial(self._codec, part))

    def _codec(self, part: int, device: torch.device) -> Calibrated:
        if (part, device) not in self._codecs:
            self._codecs[part, device] = self.caches[part].codec.to(device)
        return self._codecs[part, device]


@dataclass(frozen=True)
class Undecoded:
    """A sample in the planes of its cache's codec."""

    encoded: Encoded
    codec: Callable[[torch.device], Calibrated]

    @property
    def key(self) -> str:  # noqa: D102
        return self.encoded.key

    @property
    def input_ids(self) -> NDArray[np.int32]:  # noqa: D102
        return self.encoded.input_ids

    @property
    def loss_mask(self) -> NDArray[np.uint8]:  # noqa: D102
        return self.encoded.loss_mask

    def decode(self, device: torch.device) -> Sample:
        """De-quantise on `device`."""
        return self.encoded.decode(self.codec(device))


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)  # from a pool that knows when a copy is done


def _check_same(first: Cache, other: Cache) -> None:
    expected, found = dict(_identity(first)), dict(_identity(other))
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise UsageError(
                f"{other.path}: {name} is {found.get(name)}, of {first.path} {expected.get(name)}; "
                "caches that are mixed are of one target, its layers and its tokenizer"
            )


def _identity(cache: Cache) -> Iterator[tuple[str, Any]]:
    """What states mean, by name."""
    m = cache.manifest
    yield from {"layer_ids": m.layer_ids, "hidden_size": m.hidden_size, "convention": m.convention}.items()
    yield from ((f"tokenizer.{name}", value) for name, value in m.tokenizer.items())
    yield from ((f"target.{name}", value) for name, value in (m.target.get("files") or {}).items())
    yield "target.copied.target.safetensors", m.target["copied"].get("target.safetensors")
