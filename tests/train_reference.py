"""A tiny cache on disk, and plain references for the fast paths of `train`.

Shapes: T tokens, A anchors, K block, D hidden, V vocabulary, L layers.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_offline.shards import calibration, index, manifest
from dflash_offline.shards.cache import TARGET_FOLDER, Cache
from dflash_offline.shards.files import file_hash
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import last_positions, prompt_key, sample_key
from dflash_offline.shards.writer import Identity, ShardWriter
from dflash_offline.train import checkpoint
from dflash_offline.train.config import LossConfig, ModelConfig
from dflash_offline.train.masks import Blocks
from dflash_offline.train.model import Drafter, RMSNorm, Target, new_drafter
from dflash_offline.train.spec import DrafterSpec, derive
from dflash_offline.train.state import State

torch.set_num_threads(1)  # tensors are tiny, and threads that wait for each other are slow on a busy machine
V, D, LAYERS = 97, 32, (1, 3, 5)
EOS, PAD, LENGTH = 90, 91, 92
TARGET_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 4096,
}
TOKENIZER = {"length": LENGTH, "eos_ids": [EOS], "pad_id": PAD, "mask_id": None}
TARGET_27B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    "max_position_embeddings": 262144,
}
TOKENIZER_27B = {"length": 248077, "eos_ids": [248044, 248046], "pad_id": 248044, "mask_id": None}


def spec(**model: Any) -> DrafterSpec:
    """Spec of a small drafter."""
    return derive(ModelConfig(**{"layers": 2, "block_size": 6, **model}), TARGET_CONFIG, LAYERS, TOKENIZER, V)


def drafter(seed: int = 0, **model: Any) -> Drafter:
    """A small drafter whose attention is far from uniform and whose gains are not 1."""
    made = new_drafter(spec(**model), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def target_tensors(seed: int = 7) -> dict[str, Tensor]:
    """Embedding, head and norm of the tiny target."""
    generator = torch.Generator().manual_seed(seed)
    embed, head = (torch.randn(V, D, generator=generator).bfloat16() for _ in range(2))
    return {"embed_tokens": embed, "lm_head": head * D**-0.5, "norm": torch.ones(D).bfloat16()}


def target() -> Target:
    """The tiny target as training holds it."""
    tensors = target_tensors()
    return Target(tensors["embed_tokens"], tensors["lm_head"].float(), RMSNorm(D, 1e-6).requires_grad_(False))


def chats(count: int, seed: int = 0, longest: int = 40) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, mask) of chats whose responses follow a rule, some in two turns."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        ids: list[int] = []
        mask: list[int] = []
        for _ in range(1 + i % 2):
            prompt = rng.integers(0, 80, rng.integers(3, 9)).tolist()
            response = [int(rng.integers(0, 80))]
            for _ in range(int(rng.integers(4, longest))):
                response.append((7 * response[-1] + 3) % 80)
            ids += [*prompt, *response, EOS]
            mask += [0] * len(prompt) + [1] * (len(response) + 1)
        out.append((np.array(ids, np.int32), np.array(mask, np.uint8)))
    return out


def states_of(ids: np.ndarray) -> Tensor:
    """Stand-in states [T, L * D]: they tell the tokens so far, and something of their order."""
    embed = target_tensors()["embed_tokens"].float()[torch.from_numpy(ids.astype(np.int64))]
    past = embed.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
    return torch.cat([embed, past, embed.roll(1, 0)], dim=1).bfloat16()


def last_hidden_of(ids: np.ndarray, mask: np.ndarray) -> Tensor:
    """Stand-in last hidden states [N, D]: the target's head sees the next token in them, not with certainty."""
    following = torch.from_numpy(ids.astype(np.int64))[last_positions(mask) + 1]
    return (target_tensors()["lm_head"].float()[following] * 30).bfloat16()


def make_cache(
    folder: Path,
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    generation: str = "greedy",
    last_hidden: bool = False,
    codec: str = "bf16",
    **config: Any,
) -> Cache:
    """A complete cache on disk, as extraction would leave it."""
    (folder / "shards").mkdir(parents=True)
    (folder / TARGET_FOLDER).mkdir()
    last = last_hidden_of(*samples[0]) if last_hidden else None
    info = calibration.write(folder, codec, {}, states_of(samples[0][0]).view(-1, len(LAYERS), D), last)
    coder = calibration.read(folder, info, len(LAYERS), D, last_hidden)
    save_file(target_tensors(), folder / TARGET_FOLDER / "target.safetensors")
    (folder / TARGET_FOLDER / "config.json").write_text(json.dumps(TARGET_CONFIG | config))
    with ShardWriter(folder / index.shard_name(0), task="0" * 32, metadata={}, last_hidden=last_hidden) as writer:
        for i, (ids, mask) in enumerate(samples):
            identity = Identity(
                key=sample_key(ids, mask),
                prompt_key=prompt_key(ids, mask),
                id=str(i),
                source="made",
                source_row=i,
                finish_reason="stop",
                response=generation,
            )
            frames = encode_frames(coder.states, states_of(ids).view(-1, len(LAYERS), D))
            last_frames = encode_frames(coder.last, last_hidden_of(ids, mask)[:, None]) if coder.last else []
            writer.append(identity, ids, mask, frames, last_frames)
    shards = index.scan(folder)
    index.publish(
        folder,
        manifest.Manifest(
            complete=True,
            layer_ids=list(LAYERS),
            hidden_size=D,
            last_hidden=last_hidden,
            codec=info,
            settings={"made": len(samples)},
            target={"copied": {p.name: file_hash(p) for p in (folder / TARGET_FOLDER).iterdir()}},
            tokenizer=TOKENIZER,
            generation=generation,
            dataset={"keys": str(sorted(sample_key(*s) for s in samples))},
            versions={},
            kernels="none",
            shards=[shard for shard, _ in shards],
        ),
        index.build(shards),
    )
    return Cache(folder)


def brute_visible(anchors: list[int], starts: list[int], size: int, context: int, window: int | None) -> Tensor:
    """The mask, one pair at a time, in the words of the reference."""
    out = torch.zeros(len(anchors) * size, context + len(anchors) * size, dtype=torch.bool)
    for j, (anchor, start) in enumerate(zip(anchors, starts, strict=True)):
        for o in range(size):
            for t in range(context):
                near = window is None or t >= anchor + o - (window - 1)
                out[j * size + o, t] = start <= t < anchor and near
            for o2 in range(size):
                near = window is None or (o2 <= o and o - o2 < window)
                out[j * size + o, context + j * size + o2] = near
    return out


def plain_loss(
    config: LossConfig,
    output_AKD: Tensor,
    head_VD: Tensor,
    label_AK: Tensor,
    supervised_AK: Tensor,
    samples: int = 1,
    teacher_AKD: Tensor | None = None,
) -> tuple[Tensor, float]:
    """The loss slot by slot with all logits, in the words of the papers: (sum, divisor)."""
    total, divisor = output_AKD.sum() * 0, 0.0
    for a in range(output_AKD.shape[0]):
        slots = supervised_AK[a].nonzero()[:, 0].tolist()
        losses, confident = {}, {}
        for k in slots:
            logits = head_VD.float() @ output_AKD[a, k].float()
            losses[k] = -logits.log_softmax(0)[label_AK[a, k]]
            confident[k] = (1 - config.dpace_alpha) * math.exp(-float(losses[k].detach())) + config.dpace_alpha
            if teacher_AKD is not None:
                wanted = (head_VD.float() @ teacher_AKD[a, k].float()).softmax(0)
                divergence = (wanted * (wanted.log() - logits.log_softmax(0))).sum()
                losses[k] = (1 - config.kd) * losses[k] + config.kd * divergence
        for k in slots:
            decay = config.decay * math.exp(-(k - 1) / (config.gamma or math.nan))
            pace = config.dpace * sum(math.prod(confident[i] for i in slots if i <= m) for m in slots if m >= k)
            total = total + (decay + pace) * losses[k]
            divisor += decay + (pace if config.dpace_divisor == "weights" else 0)
        divisor += config.dpace * bool(slots) * (config.dpace_divisor == "blocks")
    return total, divisor + config.dpace * samples * (config.dpace_divisor == "samples")


def one_block(made: Drafter, frozen: Target, ids: np.ndarray, states: Tensor, anchor: int) -> Tensor:
    """Output [K, D] of a single block with the training mask and nothing else in the row."""
    size = made.spec.block_size
    token = torch.full((1, size), made.spec.mask_token_id)
    token[0, 0] = int(ids[anchor])
    blocks = Blocks(torch.tensor([anchor]), torch.tensor([0]), size)
    return made(states, torch.arange(len(states)), frozen.embedding_VD[token], blocks)[0]


def files_of(state: State) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint of `state` holds."""
    files: dict[str, dict[str, torch.Tensor]] = {checkpoint.MODEL: {}, checkpoint.OPTIMIZER: {}}
    for file, name, tensor in state.items():
        files.setdefault(file, {})[name] = tensor
    return files
