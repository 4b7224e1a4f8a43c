"""Settings of the `dflash-shards` commands. Imports nothing heavy, so that `--help` answers at once."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dflash_offline.extract.config import DataConfig, EcsqConfig

Place = Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class OneCache:
    """A cache folder."""

    cache: Place
    """The cache folder."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """What to check."""

    cache: Place
    """The cache folder."""
    sample: float = 1.0
    """Share of every shard's samples to read, chosen at random; all other files are always checked."""
    seed: int = 0
    """Chooses the samples."""

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1 or self.seed < 0:
            raise ValueError(f"sample is {self.sample} and seed {self.seed}; expected a share above 0, a seed from 0")


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What to mend."""

    cache: Place
    """The cache folder."""
    dry_run: bool = False
    """Say what would be done, and change nothing."""
    delete: bool = False
    """Delete damaged shards when what is sound in them was taken over, instead of keeping them as NAME.torn."""


@dataclass(frozen=True, kw_only=True)
class Ls:
    """Which samples to list."""

    cache: Place
    """The cache folder."""
    limit: int = 20
    """Lines to print; 0 prints all."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Show:
    """Which sample to show."""

    cache: Place
    """The cache folder."""
    key: Annotated[str, tyro.conf.Positional]
    """The sample's key, or the beginning of it."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Which caches to compare."""

    first: Place
    """A cache folder."""
    second: Place
    """Another one."""
    limit: int = 10
    """Samples to name of each kind."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What to measure."""

    cache: Place
    """The cache folder; it may still be being written."""
    samples: int = 32
    """Samples whose states are read, chosen at random, spread over the shards; 0 reads the index only."""
    seed: int = 0
    """Chooses the samples."""
    codecs: bool = False
    """Also measure what other codecs would give on these states; the cache must be exact (lossless or bf16)."""
    html: Path | None = None
    """Write the report with plots into this file; it needs no server and no network. Needs matplotlib."""

    def __post_init__(self) -> None:
        if self.samples < 0 or self.seed < 0:
            raise ValueError(f"samples is {self.samples} and seed {self.seed}, expected 0 or more")
        if self.codecs and not self.samples:
            raise ValueError("codecs needs samples to measure; expected samples of 1 or more")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Which runs to compare."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or of sweeps, which stand for their trials."""
    html: Path | None = None
    """Write table and plots into this file; it needs no server and no network. Needs matplotlib."""
    png: Path | None = None
    """Write the plots into this image. Needs matplotlib."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How much is stored, and of what shape: 5 layers of 5,120 unless said otherwise."""

    tokens: int
    """Tokens to store."""
    layers: int | None = None
    """How many layers."""
    hidden: int | None = None
    """Width of a layer."""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A cache: its layers and width, and its measured bits as a row more."""
    target: Path | None = None
    """A checkpoint folder, whose config.json says the width."""
    last_hidden: float | None = None
    """Share of the tokens whose last hidden state is stored too: the supervised share. Unset: none, or the cache's."""
    gb_per_second: float = 2.0
    """Speed of the disks, for the hours."""

    def __post_init__(self) -> None:
        given = [name for name, value in (("from", self.source), ("target", self.target)) if value is not None]
        if len(given) == 2 or (given and self.hidden is not None) or (self.source and self.layers is not None):
            raise ValueError(f"{given[0]} gives the shape; expected no other --from, --target, --hidden or --layers")
        for name in ("tokens", "layers", "hidden"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if self.last_hidden is not None and not 0 <= self.last_hidden <= 1:
            raise ValueError(f"last_hidden is {self.last_hidden}, expected a share from 0 to 1")
        if not 0 < self.gb_per_second < math.inf:
            raise ValueError(f"gb_per_second is {self.gb_per_second}, expected more than 0")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to time."""

    cache: Place
    """The cache folder."""
    threads: int = 0
    """Threads beside the run with one; 0: one a core."""
    samples: int = 64
    """Samples to time, spread over the shards; fewer when they would take more than 1 GiB."""

    def __post_init__(self) -> None:
        if self.threads < 0 or self.samples < 1:
            raise ValueError(f"threads is {self.threads}, samples {self.samples}; expected threads >= 0, samples >= 1")


@dataclass(frozen=True, kw_only=True)
class NewCache:
    """Where a new cache goes. The caches it is made from are only read."""

    out: Path
    """Folder of the new cache. The same command finishes what was interrupted."""
    shard_mib: int = 2048
    """Approximate size of a shard."""
    threads: int = 0
    """Shards written at a time; 0: one a core."""
    allow_incomplete: bool = False
    """Take the finished shards of caches that are still being written."""

    def __post_init__(self) -> None:
        if self.shard_mib < 1 or self.threads < 0:
            raise ValueError(f"shard_mib is {self.shard_mib}, threads {self.threads}; expected at least 1 and 0")


@dataclass(frozen=True, kw_only=True)
class Merge(NewCache):
    """What to merge."""

    caches: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Two or more cache folders of one target and codec, in the order of the new cache's samples."""


@dataclass(frozen=True, kw_only=True)
class Split(NewCache):
    """Which samples to take: those that pass every condition given."""

    cache: Place
    """The cache folder."""
    fraction: float | None = None
    """About this share of the prompts, with all of their samples; a larger share holds all of a smaller one."""
    seed: int = 0
    """Which prompts the fraction takes."""
    keys: Path | None = None
    """A file of sample keys, one a line."""
    source: str = ""
    """Samples of dataset files whose name contains this."""
    limit: int = 0
    """The first so many samples of those chosen; 0: all."""
    rest: bool = False
    """Take what the same command without this leaves out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise ValueError(f"fraction is {self.fraction}, expected between 0 and 1")
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}, expected 0 or more")
        if self.fraction is None and self.keys is None and not self.source and not self.limit:
            raise ValueError("no condition; expected one or more of --fraction, --keys, --source, --limit")


@dataclass(frozen=True, kw_only=True)
class Convert(NewCache):
    """What to convert, and into what."""

    cache: Place
    """The cache folder."""
    codec: Literal["lossless", "bf16", "ecsq", "fp8"]
    """How the new cache stores states."""
    delta: float | None = None
    """The step of ecsq; unset: that of `dflash-extract run`."""
    force: bool = False
    """Store lossy states as lossless or bf16; what was lost stays lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        codec_parameters(self.codec, self.delta)


@dataclass(frozen=True, kw_only=True)
class Import:
    """What to import, and how to store it."""

    source: Place
    """The other project's cache; only read."""
    out: Path
    """Folder of the new cache. The same command finishes what was interrupted."""
    format: Literal["specforge", "speculators", "modelopt-hf", "modelopt-vllm", "deepspec"]
    """Whose it is; Model-Optimizer's two dump scripts count layers differently."""
    target: str
    """The target's checkpoint folder or hub id: the cache gets its embedding, head and tokenizer."""
    layers: tuple[int, ...] = ()
    """The layer ids as they were given to that project; DeepSpec's are in its manifest."""
    codec: Literal["lossless", "bf16", "ecsq", "fp8"] = "lossless"
    """How the new cache stores states."""
    delta: float | None = None
    """The step of ecsq; unset: that of `dflash-extract run`."""
    last_hidden: bool = False
    """Store the last hidden state too; speculators and modelopt-vllm hold it before the final norm, as it must be."""
    generation: Literal["greedy", "sampled", "unknown"] = "unknown"
    """How the responses were made by this target."""
    trim: bool = False
    """Leave out what follows a sample's last supervised token, such as the padding that SpecForge stores."""
    shard_mib: int = 2048
    """Approximate size of a shard."""
    threads: int = 0
    """Shards written at a time; 0: one a core."""

    def __post_init__(self) -> None:
        if self.shard_mib < 1 or self.threads < 0:
            raise ValueError(f"shard_mib is {self.shard_mib}, threads {self.threads}; expected at least 1 and 0")
        codec_parameters(self.codec, self.delta)


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to export."""

    cache: Place
    """The cache folder."""
    out: Path
    """Folder of the files. The same command finishes what was interrupted."""
    limit: int = 0
    """The first so many samples; 0: all."""
    threads: int = 0
    """Samples written at a time; 0: one a core."""

    def __post_init__(self) -> None:
        if self.limit < 0 or self.threads < 0:
            raise ValueError(f"limit is {self.limit}, threads {self.threads}; expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Regenerate:
    """Whose prompts to answer, and how."""

    out: Path
    """JSONL of the answered chats. The same command continues what was interrupted."""
    data: DataConfig = field(default_factory=DataConfig)
    """The prompts; their answers are made anew. Also enable_thinking and other template arguments."""
    server: str = "http://localhost:8000/v1"
    """An OpenAI-compatible server that serves the target. OPENAI_API_KEY is sent when it is set."""
    model: str = ""
    """The served model; empty: the only one."""
    temperature: float = 0.0
    """0: greedy, as offline acceptance wants it. Recorded with each answer."""
    top_p: float = 1.0
    seed: int | None = None
    """For sampling, where the server supports it."""
    max_tokens: int = 4096
    """Of an answer; a longer one is dropped."""
    keep_truncated: bool = False
    """Keep answers that were cut at max_tokens; the end token that the template adds is then not supervised."""
    turns: Literal["last", "all"] = "last"
    """The last prompt after the dataset's own history, or every prompt in turn after the target's own answers."""
    concurrency: int = 64
    """Requests at a time."""
    timeout: float = 1800.0
    """Seconds to wait for an answer."""
    tries: int = 5
    """Requests for an answer before it is left to a rerun."""
    pause: float = 1.0
    """Seconds before the second try; doubled each time."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "concurrency", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.timeout <= 0 or self.pause < 0:
            raise ValueError("temperature, top_p, timeout or pause is out of range")


@dataclass(frozen=True, kw_only=True)
class Live:
    """What to decode, and with which target and drafter."""

    cache: Place
    """The cache folder; it gives the target's embedding, head and tokenizer, and prompts unless others are given."""
    drafter: Path
    """Exported or published drafter folder."""
    target: str = ""
    """The target's checkpoint folder; empty: where the cache was made from."""
    val_fraction: float = 0.02
    """Part of the cache's prompts that training held out, as in data.val_fraction; 1: all of them."""
    samples: int = 50
    """Prompts at most."""
    prompts: Path | None = None
    """Prompts from this JSONL instead: messages, prompt or input_ids a line."""
    thinking: bool | None = None
    """Render those prompts with enable_thinking; unset: as the cache's were."""
    max_new_tokens: int = 256
    """Tokens of a response that are decoded, or compared where the cache recorded it."""
    near_tie: float = 0.5
    """Logits of the target this close may come out either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute: float32 on the CPU, bfloat16 on a GPU."""
    out: Path | None = None
    """JSON file to write too."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.max_new_tokens < 2 or self.near_tie < 0 or not 0 < self.val_fraction <= 1:
            raise ValueError(
                f"samples is {self.samples}, max_new_tokens {self.max_new_tokens}, near_tie {self.near_tie}, "
                f"val_fraction {self.val_fraction}; expected at least 1, 2 and 0, and a part above 0"
            )


def codec_parameters(codec: str, delta: float | None) -> dict[str, float]:
    """The settings of a codec. Raises ValueError for a step that it does not have."""
    if delta is not None and codec != "ecsq":
        raise ValueError(f"delta is {delta}, but {codec} has no step; expected it with --codec ecsq")
    if codec != "ecsq":
        return {}
    return asdict(EcsqConfig() if delta is None else EcsqConfig(delta=delta))
