"""The four operations that touch every value, and where each runs.

plain.py has them in torch and kernels.py in Triton, with the same signatures and, bit for bit, the same results.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from dflash_offline.shards.codecs import plain


def operations(tensor: Tensor) -> ModuleType:
    """quantise, restore, split and merge for `tensor`: Triton on CUDA or under TRITON_INTERPRET=1, else torch."""
    wanted = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return _kernels() if wanted else plain


@cache
def _kernels() -> ModuleType:
    # Imported late: triton costs a second, and a machine without a GPU may not have it.
    return import_module("dflash_offline.shards.codecs.kernels") if find_spec("triton") else plain
