"""Small synthetic caches for tests, written by the real writer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from dflash_offline.shards import calibration, index, manifest
from dflash_offline.shards.cache import TARGET_FOLDER
from dflash_offline.shards.files import file_hash
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import last_positions, prompt_key, sample_key
from dflash_offline.shards.sample import Sample
from dflash_offline.shards.writer import Identity, ShardWriter

LAYERS, HIDDEN, VOCAB = (1, 2, 3), 32, 64


def write_cache(
    folder: Path,
    samples: int,
    tokens: int | None = None,
    per_shard: int = 100,
    codec: str = "lossless",
    complete: bool = True,
    seed: int = 0,
    last_hidden: bool = False,
) -> list[Sample]:
    """A cache of random samples (8 to 40 tokens unless `tokens` is given; the last two thirds supervised)."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    for name in ("shards", TARGET_FOLDER):
        (folder / name).mkdir(parents=True)
    written = []
    for _ in range(samples):
        n = tokens or int(rng.integers(8, 40))
        ids = rng.integers(0, VOCAB - 4, n).astype(np.int32)
        mask = (np.arange(n) >= n // 3).astype(np.uint8)
        states = torch.randn(n, len(LAYERS) * HIDDEN, generator=generator).to(torch.bfloat16)
        rows = len(last_positions(mask))
        last = torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16) if last_hidden else None
        key = sample_key(ids, mask)
        written.append(Sample(key=key, input_ids=ids, loss_mask=mask, states=states, last_hidden=last))
    measured = torch.cat([s.states for s in written]).view(-1, len(LAYERS), HIDDEN)
    last = torch.cat([s.last_hidden for s in written if s.last_hidden is not None]) if last_hidden else None
    info = calibration.write(folder, codec, {}, measured, last)
    made = calibration.read(folder, info, len(LAYERS), HIDDEN, last_hidden)
    metadata = manifest.shard_metadata(info, LAYERS)
    for shard, start in enumerate(range(0, samples, per_shard)):
        with ShardWriter(
            folder / index.shard_name(shard), task=f"{shard:032x}", metadata=metadata, last_hidden=last_hidden
        ) as writer:
            for i, s in enumerate(written[start : start + per_shard], start):
                who = Identity(
                    key=s.key,
                    prompt_key=prompt_key(s.input_ids, s.loss_mask),
                    id=f"id-{i}",
                    source="data.jsonl",
                    source_row=i,
                    finish_reason="stop",
                    response="greedy",
                )
                frames = encode_frames(made.states, s.states.view(-1, len(LAYERS), HIDDEN))
                last_frames = encode_frames(made.last, s.last_hidden[:, None]) if last_hidden else ()
                writer.append(who, s.input_ids, s.loss_mask, frames, last_frames)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    config.save_pretrained(folder / TARGET_FOLDER)
    table = {n: torch.randn(VOCAB, HIDDEN, generator=generator).to(torch.bfloat16) for n in ("embed_tokens", "lm_head")}
    save_file({**table, "norm": torch.ones(HIDDEN).to(torch.bfloat16)}, folder / TARGET_FOLDER / "target.safetensors")
    shards = index.scan(folder)
    draft = manifest.Manifest(
        complete=False,
        layer_ids=list(LAYERS),
        hidden_size=HIDDEN,
        last_hidden=last_hidden,
        codec=info,
        settings={"codec": codec},
        target={"copied": {p.name: file_hash(p) for p in (folder / TARGET_FOLDER).iterdir()}},
        tokenizer={"length": VOCAB - 2, "eos_ids": [0], "pad_id": 1, "mask_id": None},
        generation="greedy",
        dataset={"samples": samples},
        versions={},
        kernels="none",
    )
    if complete:
        index.publish(folder, replace(draft, shards=[s for s, _ in shards]), index.build(shards))
    else:
        manifest.write(folder, draft)
    return written
