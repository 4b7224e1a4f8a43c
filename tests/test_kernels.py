"""Triton kernels against torch: in Triton's interpreter, and where there is a GPU.

Each in a process of its own: the interpreter must be chosen before triton is imported.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BITS = pytest.mark.parametrize("script", ["kernel_bits.py", "loss_bits.py", "adamw_bits.py", "fp8_bits.py"])


def run(script: str, **environment: str) -> None:
    subprocess.run([sys.executable, Path(__file__).with_name(script)], env=os.environ | environment, check=True)


@BITS
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_kernel_is_what_torch_does(script: str) -> None:
    run(script, TRITON_INTERPRET="1")


@BITS
@pytest.mark.gpu
def test_a_kernel_is_what_torch_does_on_a_gpu(script: str) -> None:
    run(script)
