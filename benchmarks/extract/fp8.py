"""FP8 at the 27B shapes, dequantised and native: every product alone, and whole rows; speed, split, distance of states.

    python benchmarks/extract/fp8.py --out FILE.json

Both targets have the same random weights, in blocks of 128 x 128; the narrow gates of the delta rule stay in bfloat16.
Nothing is written; the rate of rows to shards is lower by the cost of writing (run.py).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import shapes
import torch
from run import BUDGET, split
from torch import Tensor, nn

from dflash_offline.extract import checks, fp8, fp8_kernels, kernels
from dflash_offline.extract.forward import batches
from dflash_offline.extract.hybrid import HybridCapture

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import milliseconds

BLOCK = (128, 128)
PRODUCTS = {
    "q k v and z": (16384, 5120),
    "q, gate, k and v": (14336, 5120),
    "out": (5120, 6144),
    "gate and up": (34816, 5120),
    "down": (5120, 17408),
}


def quantised(weight_OI: Tensor) -> fp8.Matrix:
    """As a checkpoint has it."""
    rows, columns = weight_OI.shape
    blocks = weight_OI.float().view(rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax(dim=(1, 3)) / fp8.LARGEST
    values_OI = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return fp8.Matrix(values_OI=values_OI, scale=scale, block=BLOCK)


def alone(name: str) -> dict[str, Any]:
    """One product of a row."""
    rows, columns = PRODUCTS[name]
    weight_OI = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5
    x_PI = torch.randn(BUDGET, columns, device="cuda", dtype=torch.bfloat16)
    matrix, flop = quantised(weight_OI), 2 * BUDGET * rows * columns
    plain, native = milliseconds(lambda: x_PI @ weight_OI.t()), milliseconds(lambda: fp8.product(x_PI, matrix))
    return {
        "product": name,
        "bf16 ms": plain,
        "bf16 TFLOP/s": flop / plain / 1e9,
        "fp8 ms": native,
        "fp8 TFLOP/s": flop / native / 1e9,
        "of it quantising ms": milliseconds(lambda: fp8_kernels.quantise(x_PI)),
    }


def target(native: bool) -> Any:
    """Weights of blocks, in FP8 or as the bfloat16 that they mean."""
    model = shapes.decoder("sdpa", torch.device("cuda"))
    for name, module in list(model.named_modules()):
        if not (isinstance(module, nn.Linear) and fp8.is_whole(module.weight.shape, BLOCK)):
            continue
        matrix = quantised(module.weight)
        if native:
            linear = fp8.Linear((0, 0), BLOCK)
            linear.weight = nn.Parameter(matrix.values_OI, requires_grad=False)
            linear.weight_scale_inv = nn.Parameter(matrix.scale, requires_grad=False)
            model.set_submodule(name, linear)
        else:
            module.weight.data = fp8.dequantise(name, matrix.values_OI, matrix.scale, BLOCK).bfloat16()
    return model


@torch.inference_mode()
def rows(native: bool, lengths: list[list[int]]) -> tuple[dict[str, Any], Tensor]:
    """Tokens/s over whole rows, and the states of the first row's first sample."""
    model = target(native)
    torch.cuda.reset_peak_memory_stats()
    used = kernels.install(model.config, torch.device("cuda"), False, hybrid=True)
    capture = HybridCapture(model, shapes.FEATURES, torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    packed = [[torch.randint(248000, (n,), generator=generator, dtype=torch.int32) for n in row] for row in lengths]
    begun = time.perf_counter()
    states_TLD = capture(packed[0])[: lengths[0][0]].cpu()
    for row in packed[1:]:
        capture(row)
    torch.cuda.synchronize()
    result: dict[str, Any] = {"kernels": used, "first pass s": time.perf_counter() - begun}
    result["weights GB"] = torch.cuda.memory_allocated() / 1e9
    spent = milliseconds(lambda: [capture(row) for row in packed], 2)
    result["tokens/s"] = sum(map(sum, lengths)) / spent * 1e3
    result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    result["split of a row"] = {"tokens": sum(lengths[0]), **split(lambda: capture(packed[0]))}
    return result, states_TLD


def main() -> None:
    """Products, then rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    drawn = shapes.lengths(200)
    lengths = [[drawn[i] for i in row] for row in batches(drawn, BUDGET, False)[:3]]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def tell(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        args.out.write_text(json.dumps(found, indent=1))

    tell("distance of a product from fp32", checks.check_product(BLOCK, torch.device("cuda"), torch.bfloat16))
    tell("products", [alone(name) for name in PRODUCTS])
    states = []
    for native in (False, True):
        torch.cuda.empty_cache()
        result, states_TLD = rows(native, lengths)
        tell("native" if native else "dequantised", result)
        states.append(states_TLD)
    tell("distance of the states, by layer", checks.relative(*states))


if __name__ == "__main__":
    main()
