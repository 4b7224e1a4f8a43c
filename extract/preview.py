"""`dflash-extract preview`: what the target would see, before any GPU is used."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dflash_offline.extract.config import PreviewConfig
from dflash_offline.extract.intake import Intake
from dflash_offline.extract.render import open_renderer
from dflash_offline.extract.sources import with_files
from dflash_offline.extract.target import open_target

_SHOWN = 2000
"""Tokens of a sample to print at most."""
_BAR = 50


def preview(config: PreviewConfig) -> int:
    """Print samples with supervised tokens marked, the lengths, and an example of each reason to skip."""
    data = with_files(config.data)
    data = replace(data, limit=min(filter(None, (data.limit, config.rows)), default=0))
    target = open_target(config.target.path, config.target.revision)
    renderer = open_renderer(target.folder, target.config.vocab_size, data)
    intake = Intake(data=data, renderer=renderer)
    lengths: list[int] = []
    for batch in intake.samples():
        if len(lengths) < config.samples:
            _show(batch.slice(0, config.samples - len(lengths)), renderer.tokenizer)
        lengths += pc.list_value_length(batch.column("input_ids")).to_pylist()
    print("\n".join(["tokens a sample", *_histogram(lengths)]))
    for reason, example in intake.examples.items():
        print(f"skipped {intake.skipped[reason]} {reason}, such as {example}")
    print(intake.summary())
    return 0


def _show(batch: pa.RecordBatch, tokenizer: Any) -> None:
    for row in batch.to_pylist():
        ids, mask = row["input_ids"], row["loss_mask"]
        print(f"{row['source']} line {row['source_row'] + 1}  id {row['id'] or '-'}  key {row['key']}")
        print(f"{len(ids)} tokens, {sum(mask)} supervised, finish {row['finish_reason']}, response {row['response']}\n")
        print(marked(tokenizer, ids[:_SHOWN], mask[:_SHOWN], sys.stdout.isatty()))
        print(f"... {len(ids) - _SHOWN} tokens more\n" if len(ids) > _SHOWN else "")


def marked(tokenizer: Any, ids: Sequence[int], mask: Sequence[int], color: bool) -> str:
    """The text, with each run of supervised tokens in green, or between guillemets where there is no colour."""
    on, off = ("\x1b[32m", "\x1b[0m") if color else ("«", "»")
    parts, start = [], 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            text = tokenizer.decode(ids[start:i])
            parts.append(f"{on}{text}{off}" if mask[start] else text)
            start = i
    return "".join(parts)


def _histogram(lengths: Sequence[int]) -> list[str]:
    """A line for each doubling of the length."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    return [
        f"  {'up to':>7} {2**power:>7,} {count:>9,} {'#' * round(_BAR * count / max(counts))}"
        for power, count in enumerate(counts)
        if power >= powers.min()
    ]
