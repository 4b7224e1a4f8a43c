"""The delta rule alone at the 27B shapes, by flash_qla and by fla: time, distance from fp32, the same bits again.

    python benchmarks/extract/rule.py --out FILE.json

Rows are 20 samples of the dataset's lengths, four of 8,192 tokens, and one sample alone, which flash_qla computes in
another way.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import shapes
import torch
import torch.nn.functional as F
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from run import BUDGET
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash_offline.extract.forward import batches

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import milliseconds

KEYS, VALUES, WIDTH = 16, 48, 128


def heads(lengths: list[int], generator: torch.Generator) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v; and the rest by name."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(1, sum(lengths), *shape, device="cuda", generator=generator)

    q, k = (F.normalize(noise(KEYS, WIDTH), dim=-1).bfloat16() for _ in range(2))
    rate = torch.empty(VALUES, device="cuda").uniform_(0.01, 16, generator=generator)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    gates = {"g": -rate * F.softplus(noise(VALUES)), "beta": noise(VALUES).sigmoid().bfloat16()}
    return [q, k, noise(VALUES, WIDTH).bfloat16()], {**gates, "cu_seqlens": cu.cuda(), "cu_seqlens_cpu": cu}


def reference(qkv: list[Tensor], gates: dict[str, Any], n: int) -> Tensor:
    """The first sample in fp32."""
    rule: Any = modeling_qwen3_5.torch_chunk_gated_delta_rule
    q, k, v = (x[:, :n].float() for x in qkv)
    q, k = (x.repeat_interleave(VALUES // KEYS, dim=2) for x in (q, k))
    out: Tensor = getattr(rule, "__wrapped__", rule)(q, k, v, g=gates["g"][:, :n], beta=gates["beta"][:, :n].float())[0]
    return out[0]


@torch.inference_mode()
def main() -> None:
    """Time both on every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    generator, found = torch.Generator("cuda").manual_seed(0), []
    lengths = shapes.lengths(400)
    usual = [lengths[i] for i in batches(lengths[:200], BUDGET, False)[0]]
    for samples in (usual, [8192] * 4, [12000], [4096]):
        qkv, gates = heads(samples, generator)
        wanted = reference(qkv, gates, samples[0])
        for rule, on in (("flash_qla", "1"), ("fla", "0")):
            os.environ["FLA_FLASH_QLA"] = on  # asked at every call
            begun = time.perf_counter()
            out = chunk_gated_delta_rule(*qkv, **gates)[0]
            torch.cuda.synchronize()
            first = time.perf_counter() - begun
            spent = milliseconds(partial(chunk_gated_delta_rule, *qkv, **gates))
            again = chunk_gated_delta_rule(*qkv, **gates)[0]
            far = (out[0, : samples[0]].float() - wanted).norm() / wanted.norm()
            found.append(
                {"rule": rule, "tokens": sum(samples), "samples": len(samples), "ms": spent}
                | {"first call s": first, "distance": float(far), "again": torch.equal(out, again)}
            )
            print(json.dumps(found[-1]), flush=True)
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
