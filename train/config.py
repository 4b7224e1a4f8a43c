"""Settings of `dflash-train`. Imports only the standard library, so that `--help` answers at once.

A field that may be None has None as its default: TOML cannot say null, so any other default could not be undone there.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the drafter. What is not given follows the target."""

    layers: int = 5
    """Decoder layers of the drafter."""
    block_size: int = 16
    """Tokens of a block: one anchor and block_size - 1 drafted slots."""
    layer_ids: tuple[int, ...] | None = None
    """Target layers to read, a subset of the cache's; None: all of them, in the cache's order."""
    sliding_window: int | None = None
    """Window of the sliding layers, the query itself counted (2048 in the published 27B drafter); None: no window."""
    layer_types: tuple[LayerType, ...] | None = None
    """One type a layer; None: all full, or with a window all sliding but the last."""
    intermediate_size: int | None = None
    """Width of the MLP; None: the target's."""
    heads: int | None = None
    """Query heads; None: the target's, or 32 where the target's head_dim is above 128."""
    kv_heads: int | None = None
    """Key and value heads; None: the target's, or 8 where the target's head_dim is above 128."""
    head_dim: int | None = None
    """Width of a head; None: the target's, or 128 where the target's is above 128."""
    init: Path | None = None
    """Drafter folder, published or exported, whose weights to start from; None: random ones."""
    mask_token_id: int | None = None
    """Token that stands for an undrafted slot; None: known for the family, else the tokenizer's, else an unused id."""

    def __post_init__(self) -> None:
        _at_least("model.layers", self.layers, 1)
        _at_least("model.block_size", self.block_size, 2)
        for name in ("sliding_window", "intermediate_size", "heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None:
                _at_least(f"model.{name}", value, 1)
        if self.layer_ids is not None and (not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids)):
            raise ValueError(f"model.layer_ids: expected distinct layers, found {list(self.layer_ids)}")
        if self.layer_types is not None:
            if len(self.layer_types) != self.layers:
                raise ValueError(
                    f"model.layer_types: expected one for each of model.layers = {self.layers}, "
                    f"found {len(self.layer_types)}"
                )
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                raise ValueError("model.layer_types has a sliding_attention layer; expected model.sliding_window too")
        all_full = self.layers == 1 if self.layer_types is None else "sliding_attention" not in self.layer_types
        if self.sliding_window is not None and all_full:
            raise ValueError(
                f"model.sliding_window = {self.sliding_window}: no layer has it; expected a sliding_attention layer in "
                "model.layer_types, or no window"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples are seen, and how they are laid out in rows."""

    caches: tuple[Path, ...] = ()
    """Further caches of the same target, mixed with `cache`."""
    weights: tuple[float, ...] | None = None
    """Times that the samples of each cache are seen an epoch, `cache` first; None: once."""
    row_tokens: int = 3072
    """Tokens of a row. Longer samples are cut here."""
    row_anchors: int = 512
    """Anchor slots of a row, shared by its samples by length."""
    rows_per_step: int = 8
    """Rows of one optimizer step, over all ranks; a multiple of the number of ranks."""
    fraction: float = 1.0
    """Part of the training samples to use; smaller parts are subsets of larger ones."""
    val_fraction: float = 0.02
    """Part of the prompts held out for evaluation."""
    feature_noise: float = 0.0
    """Uniform noise in [-feature_noise, feature_noise] on every value of the states in training."""
    threads: int = 2
    """Threads that read and decode samples, a rank."""
    rows_ahead: int = 4
    """Rows prepared ahead of the step that needs them, a rank."""

    def __post_init__(self) -> None:
        _finite("data.", self)
        _at_least("data.row_tokens", self.row_tokens, 2)
        for name in ("row_anchors", "rows_per_step", "threads", "rows_ahead"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        if self.weights is not None and (len(self.weights) != 1 + len(self.caches) or min(self.weights) <= 0):
            raise ValueError(
                f"data.weights: expected a number > 0 for each of {1 + len(self.caches)} caches, found {self.weights}"
            )
        if not 0 < self.fraction <= 1:
            raise ValueError(f"data.fraction: expected 0 < fraction <= 1, found {self.fraction}")
        if self.feature_noise < 0:
            raise ValueError(f"data.feature_noise: expected a number >= 0, found {self.feature_noise}")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"data.val_fraction: expected 0 <= val_fraction < 1, found {self.val_fraction}")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised. Weights of slots and losses of slots may both be mixtures."""

    decay: float = 1.0
    """Part of exp(-(k - 1) / gamma) in the weight of slot k."""
    dpace: float = 0.0
    """Part of the D-PACE weight, the slot's share in the expected accepted length, in the weight of slot k."""
    kd: float = 0.0
    """Part of the divergence from the target's distribution in the loss of a slot; the rest is cross entropy with the
    recorded token. Needs a cache with the last hidden state."""
    gamma: float | None = None
    """Slots over which the decay falls by e; None: 7 for blocks of 16, 5 for 10, 4 for 8 and lines between."""
    dpace_alpha: float = 0.5
    """How far D-PACE's probabilities are drawn to 1."""
    dpace_divisor: Literal["weights", "blocks", "samples"] = "weights"
    """What D-PACE's sum is divided by: its weights (a mean), supervised blocks, or supervised samples."""
    chunk: int = 1024
    """Slots whose logits exist at one time."""

    def __post_init__(self) -> None:
        _finite("loss.", self)
        if self.decay < 0 or self.dpace < 0 or self.decay + self.dpace == 0:
            raise ValueError(
                f"loss.decay and loss.dpace: expected numbers >= 0, not both 0, found {self.decay} and {self.dpace}"
            )
        for name in ("kd", "dpace_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"loss.{name}: expected a part between 0 and 1, found {getattr(self, name)}")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"loss.gamma: expected a positive number, found {self.gamma}")
        _at_least("loss.chunk", self.chunk, 1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How fp32 weights follow their gradients. Patterns are of tensor names, such as fc.* or layers.0.self_attn.*."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices, its steps scaled to AdamW's size, and AdamW for the gains."""
    lr: float = 6e-4
    """Highest learning rate."""
    warmup_ratio: float = 0.04
    """Part of all steps over which the rate rises linearly."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: half a cosine down, or constant and at the end linearly down."""
    decay_ratio: float = 0.2
    """Part of all steps over which a wsd schedule falls."""
    min_lr_ratio: float = 0.0
    """Rate of the last step, as a part of lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW moments."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices; norm gains have none."""
    no_decay: tuple[str, ...] = ()
    """Patterns of matrices without weight decay."""
    freeze: tuple[str, ...] = ()
    """Patterns of tensors that stay as they are."""
    ema: float | None = None
    """Decay a step of an average of the weights, 0.999 for instance, which is then what is measured and exported; None:
    no average."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    epochs: int = 6
    """Times that every sample is seen."""
    max_steps: int | None = None
    """End after this many optimizer steps; the schedule then ends there too."""

    def __post_init__(self) -> None:
        _finite("optim.", self)
        if self.lr <= 0 or self.clip <= 0:
            raise ValueError(f"optim.lr and optim.clip: expected positive numbers, found {self.lr} and {self.clip}")
        for name in ("warmup_ratio", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optim.{name}: expected a part between 0 and 1, found {getattr(self, name)}")
        if not 0 < self.decay_ratio <= 1:
            raise ValueError(f"optim.decay_ratio: expected a part above 0, found {self.decay_ratio}")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"optim.warmup_ratio = {self.warmup_ratio} and decay_ratio = {self.decay_ratio}: "
                "expected at most 1 together, so that wsd falls from its highest rate"
            )
        for name in ("muon_momentum", "ema"):
            if not 0 <= (getattr(self, name) or 0) < 1:
                raise ValueError(f"optim.{name}: expected a number in [0, 1), found {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas: expected two numbers in [0, 1), found {self.betas}")
        if self.weight_decay < 0:
            raise ValueError(f"optim.weight_decay: expected a number >= 0, found {self.weight_decay}")
        # AdamW multiplies float32 tensors by these.
        if self.lr * max(self.weight_decay, 1 / (1 - self.betas[0])) > 3e38:
            raise ValueError(
                f"optim.lr = {self.lr}, weight_decay = {self.weight_decay}, betas = {self.betas}: "
                "expected steps that float32 can hold"
            )
        _at_least("optim.epochs", self.epochs, 1)
        if self.max_steps is not None:
            _at_least("optim.max_steps", self.max_steps, 1)


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """When checkpoints are written. The end of a run and a stop signal always write one."""

    every: int = 500
    """Optimizer steps between checkpoints."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Save, and keep besides, the step with the highest held-out tau; needs validate.every."""
    asynchronous: bool = True
    """Train on while a checkpoint is written, from a copy in the host's memory."""

    def __post_init__(self) -> None:
        _at_least("save.every", self.every, 1)
        _at_least("save.keep_last", self.keep_last, 1)


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """Evaluation on held-out samples while training."""

    every: int = 0
    """Optimizer steps between evaluations; 0: none."""
    samples: int = 64
    """Held-out samples used."""

    def __post_init__(self) -> None:
        _at_least("validate.every", self.every, 0)
        _at_least("validate.samples", self.samples, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a drafter from a cache."""

    cache: Path = Path("cache")
    """Cache folder, as written by dflash-extract."""
    # Not `run`: torchrun takes `--run` for an abbreviation of its own `--run-path`, wherever it stands.
    run_dir: Path = Path("run")
    """Folder of this run: settings, metrics, checkpoints. Continued when it exists."""
    seed: int = 0
    """Of initial weights, rows and anchors."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: cuda where there is one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products (weights and optimizer state are always float32); auto: float32 on the CPU, else bfloat16."""
    recompute: bool = False
    """Keep no activations of the layers and compute them again in the backward pass: less memory, a slower step."""
    log_every: int = 10
    """Optimizer steps between printed lines; metrics.jsonl has every step."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Also show the metrics there, every log_every steps; wandb is offline unless WANDB_MODE says otherwise."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)

    def __post_init__(self) -> None:
        _at_least("log_every", self.log_every, 1)
        _at_least("seed", self.seed, 0, below=2**63)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure acceptance by the serving walk over a cache."""

    run_dir: Path | None = None
    """Run whose checkpoint is measured."""
    step: int | None = None
    """Step of the run: a kept checkpoint, or 0 for the untrained weights; None: the newest."""
    best: bool = False
    """Use the kept checkpoint with the highest held-out tau."""
    drafter: Path | None = None
    """Exported or published drafter folder, instead of a run."""
    cache: Path | None = None
    """Cache to measure on; None: the run's."""
    split: Literal["val", "train", "all"] = "val"
    """Which samples: held out, trained on, or all."""
    val_fraction: float | None = None
    """Part of the prompts held out; None: the run's."""
    samples: int | None = None
    """Use at most this many samples; None: all of the split."""
    temperature: float | None = None
    """Also work out tau for a server that samples at this temperature; needs a cache with the last hidden state."""
    draft_ms: float | None = None
    """Milliseconds of drafting a block, for a modelled speed-up; with verify_ms."""
    verify_ms: float | None = None
    """Milliseconds of the target's pass over a block."""
    target_ms: float | None = None
    """Milliseconds of the target's pass over one token; None: as long as over a block."""
    resamples: int = 1000
    """Bootstrap resamples for the interval."""
    seed: int = 0
    """Of the bootstrap."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU where there is one. The CPU computes in float32."""
    out: Path | None = None
    """JSON file to write; None: RUN/eval/step-N-SPLIT.json and the like, or DRAFTER/eval.json."""

    def __post_init__(self) -> None:
        _finite("", self)
        _at_least("seed", self.seed, 0, below=2**63)
        if (self.run_dir is None) == (self.drafter is None):
            raise ValueError("expected either --run-dir RUN or --drafter FOLDER")
        if self.drafter is not None and self.cache is None:
            raise ValueError("--drafter needs --cache CACHE")
        if self.drafter is not None and self.split != "all" and self.val_fraction is None:
            raise ValueError(f"--drafter with --split {self.split} needs --val-fraction; or use --split all")
        if self.drafter is not None and (self.step is not None or self.best):
            raise ValueError("--step and --best go with --run-dir, not with --drafter")
        _one_step(self.step, self.best)
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction: expected 0 <= val_fraction < 1, found {self.val_fraction}")
        for name in ("samples", "resamples"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("temperature", "draft_ms", "verify_ms", "target_ms"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name}: expected a number > 0, found {value}")
        if (self.draft_ms is None) != (self.verify_ms is None) or (self.target_ms and not self.verify_ms):
            raise ValueError("a modelled speed-up needs both --draft-ms and --verify-ms")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a checkpoint as a Hugging Face folder that dflash, vLLM and SGLang load."""

    run_dir: Path = Path("run")
    """Run whose checkpoint is exported."""
    step: int | None = None
    """Step of the run: a kept checkpoint, or 0 for the untrained weights; None: the newest."""
    best: bool = False
    """Use the kept checkpoint with the highest held-out tau."""
    out: Path = Path("drafter")
    """New folder to write; with check, one that is there is read and not written."""
    check: bool = False
    """Load the folder back with the PyPI package dflash, and compare it with the cache and the trainer's own drafts."""
    cache: Path | None = None
    """Cache to check against; None: the run's."""

    def __post_init__(self) -> None:
        _one_step(self.step, self.best)


def _one_step(step: int | None, best: bool) -> None:
    if best and step is not None:
        raise ValueError(f"expected either --best or --step {step}")


def _at_least(name: str, value: int, least: int, below: int = 2**31) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value}")
    if value >= below:
        raise ValueError(f"{name}: expected less than {below}, found {value}")


def _finite(prefix: str, settings: object) -> None:
    """Before any bound: nan is on neither side of one, and inf is above every least value."""
    for name, value in vars(settings).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{prefix}{name}: expected finite numbers, found {value}")
