"""Settings of `dflash-extract`. Every value that decides the bytes is compared on a rerun; the rest is free."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The model whose hidden states are cached."""

    path: str = ""
    """Folder of a Hugging Face checkpoint, or a hub id."""
    revision: str | None = None
    """Hub revision; a commit hash is best."""
    layers: tuple[int, ...] = ()
    """Layers to capture, 0-based; empty: `features` layers by the DFlash rule."""
    features: int = 5
    """How many layers the rule picks when `layers` is empty."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto is bfloat16 on a GPU and float32 on the CPU. States are stored from bfloat16."""

    def __post_init__(self) -> None:
        if self.features < 1:
            raise ValueError(f"target.features is {self.features}, expected at least 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The chats, and how they become token ids."""

    files: tuple[Path, ...] = ()
    """JSONL files: a row has `messages` (role, content), or `input_ids` with `loss_mask`."""
    max_length: int = 4096
    """Longer samples are cut; states are causal, so what is kept is exact."""
    enable_thinking: bool | None = None
    """Passed to the chat template; unset: the template's own default."""
    preserve_thinking: bool | None = None
    """Passed to the chat template; unset: the template's own default."""
    generation: Literal["greedy", "sampled", "unknown"] = "unknown"
    """How the responses were made by this target; decides what an offline acceptance length means."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"data.max_length is {self.max_length}, expected at least 2")


@dataclass(frozen=True, kw_only=True)
class EcsqConfig:
    """The lossy codec."""

    delta: float = 2**-3.5
    """The step. Doubling it saves a bit a value and costs 6 dB; 0.0884 is 5.6 bits, 0.5 is 3.2 bits."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.delta <= 2:
            raise ValueError(f"ecsq.delta is {self.delta}, expected 0.01 to 2")


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """One extraction run."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cache: Path = Path()
    """Output folder."""
    codec: Literal["lossless", "bf16", "ecsq", "fp8"] = "lossless"
    """How states are stored: lossless 10.7 bits a value, bf16 16, ecsq 5.6 (lossy), fp8 7 (lossy, for comparison)."""
    ecsq: EcsqConfig = field(default_factory=EcsqConfig)
    shard_mib: int = 2048
    """Approximate size of a shard; also the work a crash can cost, per worker."""
    batching: Literal["packed", "padded"] = "packed"
    """Packed: samples in one row, kept apart by the kernels. Padded: right-padded rows."""
    token_budget: int = 16384
    """Tokens of one target forward."""
    workers: int = 1
    """Processes on the CPU, one thread each; on GPUs there is one process per device."""
    devices: str = "auto"
    """auto: every visible GPU, else the CPU; or `cpu`, or a list such as `cuda:0,cuda:2`."""
    allow_slow: bool = False
    """Run on a GPU although a fast kernel is missing."""

    def __post_init__(self) -> None:
        for name in ("shard_mib", "token_budget", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    def codec_parameters(self) -> dict[str, Any]:
        """The settings of the chosen codec."""
        return asdict(self.ecsq) if self.codec == "ecsq" else {}
