"""What a run will do, worked out and checked before anything is written or computed."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.files import file_hash
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.export import WEIGHTS, check_start
from dflash_offline.train.hf import to_config
from dflash_offline.train.mix import Mix
from dflash_offline.train.model import Drafter
from dflash_offline.train.plan import Ints, Plan, anchor_slots, chosen, held_out, in_key_order, make_plan
from dflash_offline.train.rows import RowBuilder, column_index
from dflash_offline.train.spec import DrafterSpec, derive
from dflash_offline.train.state import State


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of `config` on an opened cache."""

    config: TrainConfig
    cache: Mix
    spec: DrafterSpec
    plan: Plan
    steps: int
    """Optimizer steps of the whole run."""
    slots: Ints
    """Anchors that each sample of the cache brings to its row."""
    validation: list[int]
    """Held-out samples that are measured while training."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a run and its checkpoints belong to, besides the settings."""
        init = self.config.model.init
        start = {"init": file_hash(init / WEIGHTS)} if init else {}
        return {"cache_fingerprint": self.cache.fingerprint, "drafter": to_config(self.spec), **start}

    def builder(self) -> RowBuilder:
        """Builder of this run's rows."""
        data = self.config.data
        return RowBuilder(
            samples=self.cache,
            slots=self.slots,
            spec=self.spec,
            layers=column_index(self.cache.layer_ids, self.spec.layer_ids),
            row_tokens=data.row_tokens,
            row_anchors=data.row_anchors,
            seed=self.config.seed,
            noise=data.feature_noise,
            last_hidden=self.config.loss.kd > 0,
        )

    def describe(self) -> str:
        """One line on what will be trained on."""
        rows, data = next(epoch for epoch in self.plan.epochs if epoch.rows), self.config.data
        tokens = self.cache.tokens[rows.members]
        full = np.minimum(tokens, data.row_tokens).sum() / (rows.rows * data.row_tokens)
        held = int((held_out(self.cache.prompt_keys, data.val_fraction) & self.cache.new).sum())
        twice = len(self.cache) - int(self.cache.new.sum())
        return (
            f"{len(rows.members)} samples an epoch of {len(self.cache)}, {held} held out"
            + (f", {twice} in two caches" if twice else "")
            + f" ({int((tokens > data.row_tokens).sum())} cut at {data.row_tokens} tokens), {rows.rows} rows "
            f"{full:.0%} full, {self.steps} steps, mask token {self.spec.mask_token_id}"
        )


def prepare(config: TrainConfig, world: int) -> Job:
    """Open the cache and plan the run on `world` ranks. Raises UsageError for whatever does not fit."""
    data = config.data
    if data.rows_per_step % world:
        raise UsageError(
            f"data.rows_per_step = {data.rows_per_step} cannot be dealt to {world} ranks; expected a multiple"
        )
    cache = Mix([config.cache, *data.caches])
    if config.loss.kd and (without := [part.path for part in cache.caches if not part.manifest.last_hidden]):
        raise UsageError(
            f"{without[0]}: does not store the target's last hidden state, which loss.kd = {config.loss.kd} needs; "
            "extract again with it, or set loss.kd = 0"
        )
    rows = cache.target_config.get("vocab_size")
    if rows is None:
        raise UsageError(f"{config.cache}: target config.json has no vocab_size")
    spec = derive(config.model, cache.target_config, cache.layer_ids, cache.tokenizer_facts, int(rows))
    if (longest := data.row_tokens + spec.block_size) > spec.max_position_embeddings:
        raise UsageError(
            f"data.row_tokens = {data.row_tokens} and a block reach position {longest}, the target's "
            f"max_position_embeddings is {spec.max_position_embeddings}; expected shorter rows"
        )
    check_start(config.model, spec)
    with torch.device("meta"):
        State.of(Drafter(spec), config.optim)  # refuses what fits no tensor
    val = held_out(cache.prompt_keys, data.val_fraction)
    validation = in_key_order(cache.keys, val & cache.new & (cache.anchors > 0), config.validate.samples)
    if config.validate.every and not validation:
        raise UsageError(
            f"validate.every = {config.validate.every}, but no sample is held out at data.val_fraction = "
            f"{data.val_fraction}; expected a larger part, or validate.every = 0"
        )
    weights = np.array(data.weights or [1.0] * len(cache.caches))[cache.part]
    plan = make_plan(
        np.where(~val & cache.new & chosen(cache.keys, data.fraction), weights, 0.0),
        cache.keys,
        cache.tokens,
        cache.anchors,
        row_tokens=data.row_tokens,
        row_anchors=data.row_anchors,
        rows_per_step=data.rows_per_step,
        seed=config.seed,
        epochs=config.optim.epochs,
        most_steps=config.optim.max_steps,
    )
    return Job(
        config=config,
        cache=cache,
        spec=spec,
        plan=plan,
        steps=min(plan.steps, config.optim.max_steps or plan.steps),
        slots=anchor_slots(cache.tokens, cache.anchors, data.row_tokens, data.row_anchors),
        validation=validation,
    )
