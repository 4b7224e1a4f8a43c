"""What a GPU gives: the rate that every measured step is put beside."""

import time

import torch


def gemm_rate(seconds: float) -> float:
    """TFLOP/s of 8192^3 bf16 products of normal numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        count += 10
    return 2 * 8192**3 * count / (time.perf_counter() - begin) / 1e12
