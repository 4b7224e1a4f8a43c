"""The device that is used: the one that was asked for, or what the machine has."""

import os
from pathlib import Path

from dflash_offline.shards.errors import UsageError

DRIVER = Path("/dev/nvidiactl")


def chosen_device(asked: str, other: str = "--device cpu") -> str:
    """`asked`; for auto cuda where torch finds a GPU, else cpu.

    Raises UsageError where cuda is asked for and none is visible; for auto where NVIDIA's driver is loaded and torch
    finds no GPU: nobody wants a CPU by mistake. `other`: the flag that asks for one.
    """
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device = cuda: no CUDA device is visible; use {other}")
    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if DRIVER.exists() and not hidden:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise UsageError(
            f"torch {torch.__version__}, built {built}, finds no GPU, though NVIDIA's driver is loaded; install one "
            f"built for its version of CUDA, which nvidia-smi shows, or use {other}"
        )
    return "cpu"
