"""What benchmarks on a GPU share: matrix rate, time by kind of kernel, and the shapes of Qwen3.6-27B."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

TARGET = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000000},
    "max_position_embeddings": 262144,
}
"""Of its config.json, what a drafter needs to know."""


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


def milliseconds(work: Callable[[], Any], times: int = 10) -> float:
    """Of the device, a call of `work`, after one that is not counted."""
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def by_kind(kernels: Mapping[str, float], kinds: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Milliseconds by name -> by kind, the first one that has a word of the name, and the largest 25."""
    found, names = Counter[str](), Counter[str]()
    for name, ms in kernels.items():
        kind = next((k for k, words in kinds.items() if any(w in name for w in words)), "other")
        found[kind] += ms  # type: ignore[assignment]
        names[f"{kind}: {name[:70]}"] += ms  # type: ignore[assignment]
    by, largest = ({n: round(ms, 3) for n, ms in c.most_common(k)} for c, k in ((found, None), (names, 25)))
    return {"kernels ms": round(sum(kernels.values()), 3), "by kind": by, "largest": largest}
