"""Before a run: which devices, what else is on them, whether target and shards will fit. It ends no process of others.

GPU memory and processes are asked of NVML, because torch would open every GPU to answer.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dflash_offline.extract import forecast, kernels
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.runner import compute_dtype
from dflash_offline.extract.target import Target
from dflash_offline.extract.weights import loaded_bytes
from dflash_offline.shards.command import say
from dflash_offline.shards.device import chosen_device
from dflash_offline.shards.errors import UsageError

PACKAGES = ("dflash-offline", "torch", "transformers", "pyarrow", "zstandard", "fla-core", "flash-qla", "triton")
_CONTEXT = 1 << 30
"""What CUDA and the kernels' own buffers take of a GPU."""


def versions() -> dict[str, str]:
    """Of everything that may change a state's low bits."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # running from a source tree, or an optional package
        return "not installed"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What NVML says of a GPU."""

    device: str
    name: str
    free: int
    total: int
    others: list[tuple[int, int | None]]
    """Process ids on it, and their bytes where NVML tells."""

    def __str__(self) -> str:
        users = ", ".join(f"pid {pid} holds {'?' if n is None else f'{n:,}'} bytes" for pid, n in self.others)
        return f"{self.device} ({self.name}): {self.free:,} of {self.total:,} bytes free; {users or 'no process on it'}"


def choose_devices(config: ExtractConfig) -> list[str]:
    """One device a worker."""
    names = config.devices.split(",")
    if config.devices == "auto":
        gpus = chosen_device("auto", "--devices cpu") == "cuda"
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if gpus else ["cpu"]
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise UsageError(f"devices: {name!r} is no device; expected cpu or cuda:N") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"devices: {name} is not there; {torch.cuda.device_count()} GPUs are visible")
    return names * config.workers if names == ["cpu"] else names


def check_devices(config: ExtractConfig, devices: list[str], target: Target, layers: Sequence[int]) -> list[str]:
    """The devices to use, after a look at each GPU. Prints what it finds.

    Raises UsageError when one has too little memory (see guard.preflight), or none is free and only free ones may be.
    """
    if config.guard.preflight == "off" and config.gpus == "all":
        return devices
    gpus = look(devices)
    if not gpus:
        if config.gpus == "free":
            raise UsageError("gpus is free, but which are free is not known; name them with --devices")
        return devices
    need = memory_need(config, target, layers, torch.device(devices[0]))
    for gpu in gpus:
        say(f"{gpu}; about {need:,} are needed")
    small = [gpu for gpu in gpus if gpu.free < need]
    if config.gpus == "free":
        chosen = [gpu.device for gpu in gpus if gpu not in small and not gpu.others]
        if not chosen:
            raise UsageError(f"no GPU is free with {need:,} bytes: {'; '.join(map(str, gpus))}")
        return chosen
    if small:
        _object(
            config, f"about {need:,} bytes are needed: {'; '.join(map(str, small))}; use --gpus free, other --devices "
            f"or a smaller --token-budget"
        )  # fmt: skip
    return devices


def check_rows(config: ExtractConfig, devices: Sequence[str], target: Target, layers: int) -> None:
    """Raises UsageError when the codec, or a kernel on a GPU, would count a row's values beyond 32 bits."""
    c = target.config
    limit = (2**32 - 1) // (layers * c.hidden_size)
    if devices[0].startswith("cuda") and kernels.has_delta_rule(target.model_type):
        # The widest that a delta rule's kernels step over, signed: what the convolution reads.
        read = 2 * c.linear_num_key_heads * c.linear_key_head_dim + c.linear_num_value_heads * c.linear_value_head_dim
        limit = min(limit, (2**31 - 1) // read)
    most, name = max((config.token_budget, "token_budget"), (config.data.max_length, "data.max_length"))
    if most > limit:
        raise UsageError(f"{name} = {most}: expected at most {limit}: a row's values are counted in 32 bits")


def check_disk(config: ExtractConfig, target: Target, layers: int, tokens: int) -> None:
    """Prints what is needed and free.

    Raises UsageError when the planned tokens, and embedding and head beside them, will not fit (see guard.preflight).
    """
    if config.guard.preflight == "off":
        return
    # Which tokens are supervised is not known without reading the plan: all are counted, a sixth too much at most.
    need = forecast.shard_bytes(config, layers, target.config.hidden_size, tokens, tokens)
    say(
        f"shards: about {need:,} bytes, {forecast.stored_bytes(config):,} of them there; "
        f"{forecast.listed(forecast.shard_disks(config))}"
    )
    if found := forecast.shortage(config, target, need):
        _object(config, found)


def _object(config: ExtractConfig, message: str) -> None:
    if config.guard.preflight == "refuse":
        raise UsageError(f"{message}; or --guard.preflight warn")
    say(f"warning: {message}")


def memory_need(config: ExtractConfig, target: Target, layers: Sequence[int], device: torch.device) -> int:
    """Bytes of weights and of a row's activations, the states on their way to the disk among them; an estimate.

    Activations per token: about 4 MLP widths and 12 hidden widths live at once, and five times what is captured.
    """
    c, dtype = target.config, compute_dtype(config, device)
    captured = [*layers, *([c.num_hidden_layers - 1] if config.last_hidden else [])]
    token = dtype.itemsize * (4 * c.intermediate_size + 12 * c.hidden_size) + 10 * len(captured) * c.hidden_size
    return loaded_bytes(target, max(captured), dtype) + token * config.token_budget + _CONTEXT


def look(devices: Sequence[str]) -> list[Gpu]:
    """What NVML says of the GPUs among `devices`; nothing, with the reason printed, where it cannot be asked."""
    wanted = [device for device in devices if device.startswith("cuda")]
    if not wanted:
        return []
    try:
        import pynvml as nvml
    except ImportError:
        say("GPU memory and other processes are not checked: pip install nvidia-ml-py")
        return []
    try:
        nvml.nvmlInit()
        return [_gpu(nvml, device) for device in wanted]
    except nvml.NVMLError as error:
        say(f"GPU memory and other processes are not checked: {error}")
        return []


def _gpu(nvml: Any, device: str) -> Gpu:
    handle = _handle(nvml, torch.device(device).index or 0)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    found = [*nvml.nvmlDeviceGetComputeRunningProcesses(handle), *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]
    others = {process.pid: process.usedGpuMemory for process in found if process.pid != os.getpid()}
    name = nvml.nvmlDeviceGetName(handle)
    return Gpu(
        device=device,
        name=name.decode() if isinstance(name, bytes) else name,
        free=memory.free,
        total=memory.total,
        others=sorted(others.items()),
    )


def _handle(nvml: Any, index: int) -> Any:
    """NVML counts all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if not visible:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    chosen = visible[index]
    return nvml.nvmlDeviceGetHandleByIndex(int(chosen)) if chosen.isdigit() else nvml.nvmlDeviceGetHandleByUUID(chosen)
