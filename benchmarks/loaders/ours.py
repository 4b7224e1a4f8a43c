"""Our cache of the benchmark's samples: two threads read it into reused memory.

    python ours.py ours|ours-bf16 write|read SAMPLES FOLDER

`ours` ends with verified quantised planes, what a GPU de-quantises; `ours-bf16` de-quantises on the processor too.
"""

import queue
import random
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from peers import BATCH, HIDDEN, LAYER_IDS, LAYERS, WORKERS, Reader, Sample, measure
from torch import Tensor

from dflash_offline.shards import calibration
from dflash_offline.shards.build import Entry, Part, build, claim
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.keys import prompt_key, sample_key
from dflash_offline.shards.manifest import Manifest
from dflash_offline.shards.writer import Identity

CALIBRATION_TOKENS = 4096
PREFETCH = 8


def write(folder: Path, data: Iterator[Sample]) -> None:
    """Codec ecsq at its default step, calibrated on the first tokens; two shards, a thread each."""
    torch.set_num_threads(1)
    every = list(data)
    states_TLD = torch.cat([states[:, :LAYERS] for _, _, states in every[:16]])[:CALIBRATION_TOKENS]

    def entries(half: list[Sample]) -> Iterator[Entry]:
        for ids, mask, states in half:
            ids_T, mask_T = ids.numpy().astype(np.int32), mask.numpy().astype(np.uint8)
            who = Identity(
                key=sample_key(ids_T, mask_T),
                prompt_key=prompt_key(ids_T, mask_T),
                id="",
                source="benchmark",
                source_row=0,
                finish_reason="stop",
                response="unknown",
            )
            frames = encode_frames(codec, states[:, :LAYERS].contiguous())
            yield Entry(identity=who, input_ids=ids_T, loss_mask=mask_T, frames=frames)

    with claim(folder):
        info = calibration.write(folder, "ecsq", {}, states_TLD)
        codec = calibration.read(folder, info, LAYERS, HIDDEN, last_hidden=False).states
        draft = Manifest(
            complete=False,
            layer_ids=LAYER_IDS,
            hidden_size=HIDDEN,
            codec=info,
            settings={},
            target={},
            tokenizer={},
            generation="unknown",
            dataset={},
            versions={},
            kernels="none",
        )
        parts = [Part(task=f"{i:032x}", samples=lambda half=every[i::2]: entries(half)) for i in range(2)]
        build(folder, draft, parts, WORKERS)


def read(folder: Path, states: bool) -> Reader:
    """PREFETCH samples ahead; a buffer goes back to the pool when its batch was counted."""
    torch.set_num_threads(1)
    cache = Cache(folder)
    codec = cache.codec
    # Planes of ecsq at the default step are a byte a value, and the scales.
    room = int(cache.tokens.max()) * LAYERS * (HIDDEN + 4) + (1 << 16)
    pool: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(PREFETCH + BATCH):
        pool.put(torch.zeros(room, dtype=torch.uint8))

    def load(number: int) -> tuple[int, Tensor]:
        buffer = pool.get()
        encoded = cache.read_encoded(number, lambda size: buffer[:size])
        if states:
            assert encoded.decode(codec).states.dtype == torch.bfloat16
        return len(encoded.input_ids), buffer

    def epoch(number: int) -> Iterator[int]:
        order = list(range(len(cache)))
        random.Random(number).shuffle(order)
        with ThreadPoolExecutor(WORKERS) as threads:
            waiting = iter(order)
            ahead: list[Future[tuple[int, Tensor]]] = [threads.submit(load, i) for i in islice(waiting, PREFETCH)]
            while ahead:
                batch = [ahead.pop(0).result() for _ in range(min(BATCH, len(ahead)))]
                for _, buffer in batch:
                    pool.put(buffer)
                ahead += [threads.submit(load, i) for i in islice(waiting, len(batch))]
                yield sum(tokens for tokens, _ in batch)

    return epoch


if __name__ == "__main__":
    name, phase = sys.argv[1:3]
    # The two rows read one cache.
    measure(
        "dflash-offline", phase, Path(sys.argv[3]), Path(sys.argv[4]), write, lambda f: read(f, name == "ours-bf16")
    )
