"""Settings of `dflash-extract`. Every value that decides the bytes is compared on a rerun; the rest is free."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Place = Annotated[Path, tyro.conf.Positional]


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
    fp8: Literal["dequantise", "native"] = "dequantise"
    """How a checkpoint in FP8 is multiplied: in the compute type, or native, in FP8 as a server does (Hopper GPUs)."""

    def __post_init__(self) -> None:
        if self.features < 1:
            raise ValueError(f"target.features is {self.features}, expected at least 1")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a row's fields are called; empty: the usual names are tried."""

    id: str = ""
    messages: str = ""
    """A list of messages, as OpenAI or ShareGPT have them."""
    prompt: str = ""
    """Text or a list of messages, answered by `response`."""
    response: str = ""
    """Text or a list of messages."""
    reasoning: str = ""
    """The thinking before `response`."""
    system: str = ""
    tools: str = ""
    text: str = ""
    """Text that needs no template."""
    response_start: str = ""
    """The character of `text` at which supervision starts."""
    input_ids: str = ""
    loss_mask: str = ""
    finish_reason: str = ""
    response_mode: str = ""
    """How this row's response was made: greedy, sampled at T, unknown."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The chats, and how they become token ids."""

    files: tuple[Path, ...] = ()
    """JSONL (also .gz, .zst), JSON, Parquet or Arrow files, globs of them, or folders, also those saved by datasets."""
    hub: str = ""
    """Instead of files: a dataset of the Hugging Face hub, `org/name`; needs the extra `hub`."""
    hub_config: str = ""
    """Which of the hub dataset's configurations."""
    hub_revision: str = ""
    """Which of its revisions; a commit hash is best."""
    split: str = ""
    """Which split of a folder or hub dataset."""
    limit: int = 0
    """Read so many rows; 0: all."""
    shuffle_seed: int | None = None
    """Which rows `limit` takes: by default the first, with a seed a random draw. The file's order stays."""
    fields: Fields = field(default_factory=Fields)
    template: Path | None = None
    """A chat template file to use instead of the tokenizer's own."""
    enable_thinking: bool | None = None
    """Passed to the chat template; unset: the template's own default."""
    preserve_thinking: bool | None = None
    """Passed to the chat template; unset: the template's own default."""
    template_args: str = ""
    """Further arguments of the chat template, a JSON object."""
    supervise: Literal["all", "last"] = "all"
    """Which assistant turns count."""
    max_length: int = 4096
    """Longer samples are cut; states are causal, so what is kept is exact."""
    too_long: Literal["cut", "skip"] = "cut"
    """What happens to samples beyond max_length."""
    min_supervised: int = 2
    """Samples with fewer supervised tokens are skipped."""
    duplicates: Literal["sample", "prompt"] = "sample"
    """What may be there only once: a sample, or even its prompt. The first row stays."""
    strict: bool = False
    """Refuse the dataset when any row would be skipped."""
    generation: Literal["greedy", "sampled", "unknown"] = "unknown"
    """How the responses were made by this target; decides what an offline acceptance length means."""
    workers: int = 0
    """Processes that render and tokenise; 1: this one; 0: one a core for large datasets, this one for small."""
    rows_cache: Path | None = None
    """Where rendered rows are kept, so that a rerun need not render them again; unset: CACHE/plan/rows, for large
    datasets. May be deleted at any time."""

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("min_supervised", 1), ("limit", 0), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} is {getattr(self, name)}, expected at least {least}")
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """What the chat template is given beside messages and tools."""
        try:
            more = json.loads(self.template_args or "{}")
        except ValueError as error:
            raise ValueError(f"data.template_args is not JSON ({error})") from None
        if not isinstance(more, dict):
            raise ValueError(f"data.template_args is {self.template_args}, expected a JSON object")
        named = {n: getattr(self, n) for n in ("enable_thinking", "preserve_thinking")}
        return {**more, **{name: value for name, value in named.items() if value is not None}}


@dataclass(frozen=True, kw_only=True)
class EcsqConfig:
    """The lossy codec."""

    delta: float = 2**-3.5
    """The step. Doubling it saves a bit a value and costs 6 dB; 0.0884 is 5.6 bits, 0.5 is 3.2 bits."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.delta <= 2:
            raise ValueError(f"ecsq.delta is {self.delta}, expected 0.01 to 2")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """How a run watches over itself. None of this changes a state that is stored."""

    hang: float = 600.0
    """Seconds without a row done after which a worker is ended and its task given again; 0: never."""
    hang_start: float = 1800.0
    """The same before a worker's first row: loading the target and compiling kernels take longer."""
    preflight: Literal["refuse", "warn", "off"] = "refuse"
    """What follows when GPU memory or disk room seem too small."""
    probe: bool = True
    """Compare the states of a few short samples with those of the stock model before the first task."""
    audit_every: int = 64
    """One sample of so many has its states checked and its frames decoded again; 0: none."""
    reforward: int = 16
    """Samples that `dflash-extract audit` recomputes from the target, drawn by key."""

    def __post_init__(self) -> None:
        for name in ("hang", "hang_start", "audit_every", "reforward"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"guard.{name} is {getattr(self, name)}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """One extraction run."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cache: Path = Path()
    """Output folder."""
    roots: tuple[Path, ...] = ()
    """Folders on other disks for the shards; each goes to the one with most room, and the cache holds links to them."""
    codec: Literal["lossless", "bf16", "ecsq", "fp8"] = "lossless"
    """How states are stored: lossless 10.7 bits a value, bf16 16, ecsq 5.6 (lossy), fp8 7 (lossy, for comparison)."""
    ecsq: EcsqConfig = field(default_factory=EcsqConfig)
    last_hidden: bool = False
    """Store the residual stream after the target's last layer too, where the next token is supervised: for KD losses
    and probabilistic tau. The target then runs all of its layers."""
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
    gpus: Literal["all", "free"] = "all"
    """free: only those of `devices` that no other process uses and that have memory enough."""
    engine: Literal["processes", "ray"] = "processes"
    """ray: the workers are actors of a Ray cluster that shares the cache folder; needs the extra `ray`."""
    task_slice: str = ""
    """Of several machines that share the cache folder: `prepare` first, once, then `0/N` to `N-1/N` side by side, then
    a run without it completes the cache and does what is missing."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    allow_slow: bool = False
    """Run on a GPU although a fast kernel is missing."""
    dry_run: bool = False
    """Only read the dataset and say what the run would take: tokens, bytes, hours, and whether they fit."""
    rate: float = 0.0
    """Tokens a second and device, for the hours of a dry run; 0: not known."""

    def __post_init__(self) -> None:
        for name in ("shard_mib", "token_budget", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        self.share()

    def share(self) -> tuple[int, int] | None:
        """`task_slice` as (i, N); None without one, and for `prepare`."""
        if self.task_slice in ("", "prepare"):
            return None
        i, _, n = self.task_slice.partition("/")
        if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
            raise ValueError(f"task_slice is {self.task_slice}, expected prepare, or i/N with i from 0 to N - 1")
        return int(i), int(n)

    def codec_parameters(self) -> dict[str, Any]:
        """The settings of the chosen codec."""
        return asdict(self.ecsq) if self.codec == "ecsq" else {}


@dataclass(frozen=True, kw_only=True)
class PreviewConfig(ExtractConfig):
    """What to look at before a run; the rest is as for `run`."""

    samples: int = 3
    """Samples to print."""
    rows: int = 1000
    """Rows to read; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples", "rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Which cache to look at."""

    cache: Place
    """The cache folder."""
    minutes: float = 10.0
    """The rate is that of so many last minutes."""
    events: int = 5
    """Last events to print."""


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """What is compared with the target."""

    cache: Place
    """The cache folder."""
    target: str = ""
    """Where the target is now; empty: where it was."""
    device: str = "auto"
    """auto: the first GPU, else the CPU."""
    samples: int = 0
    """Recompute so many of the stored draw; 0: all of it."""
    allow_slow: bool = False
    """Run on a GPU although a fast kernel is missing."""
