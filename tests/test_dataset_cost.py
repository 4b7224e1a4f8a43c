"""What planning a dataset costs in memory, and reading a planned sample in time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from qwen import take
from targets import tokenizer, write_rows
from test_dataset import chat, tiny

from dflash_offline.extract.plan import Samples


def test_a_planned_sample_is_found_in_microseconds(tmp_path: Path) -> None:
    taken = take(tmp_path, tiny(), write_rows(tmp_path / "d.jsonl", *(chat(n) for n in range(2000))), task_tokens=1000)
    planned = Samples(tmp_path, taken.plan)
    order = np.random.default_rng(0).permutation(len(planned))
    for n in order:
        ids, mask = planned[n]
        assert np.array_equal(ids, taken.samples[n][0]) and np.array_equal(mask, taken.samples[n][1])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for n in order:
            planned[n]
        times.append((time.perf_counter() - start) / len(order))
    assert len(taken.plan.tasks) > 20 and min(times) < 50e-6
    with pytest.raises(IndexError):
        planned[len(planned)]


_MEASURE = """
import json, sys
from pathlib import Path
from dflash_offline.extract.config import DataConfig
from dflash_offline.extract.intake import make_plan
from dflash_offline.extract.render import open_renderer
folder, counts, size = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
for count in counts:
    path, cache = folder / f"{count}.jsonl", folder / str(count)
    with path.open("w") as file:
        for n in range(count):
            row = {"prompt": f"next {n}", "response": "stone river"}
            file.write(json.dumps(row) + "\\n")
            if size:
                file.write(json.dumps({**row, "prompt": "stone " * (size // 6)}) + "\\n")
    (cache / "plan").mkdir(parents=True)
    data = DataConfig(files=(path,), workers=1)
    plan = make_plan(cache, data, {}, open_renderer(folder, 320, data), 100_000, False)
    assert sum(t.samples for t in plan.tasks) == count, plan.skipped
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) / 1024)  # ru_maxrss would be at least that of the process that started this one
"""


def memory(folder: Path, counts: list[int], size: int = 0) -> list[float]:
    """Peak MB after planning so many rows of some 20 tokens, each with one of `size` characters, in one process."""
    tokenizer().save_pretrained(folder)
    words = [sys.executable, "-c", _MEASURE, str(folder), json.dumps(counts), str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return [float(line) for line in done.stdout.splitlines() if line.replace(".", "").isdigit()]


@pytest.mark.parametrize(("few", "many"), [(5_000, 25_000), pytest.param(10_000, 1_000_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path, few: int, many: int) -> None:
    before, after = memory(tmp_path, [few, many])
    print(f"{before:.0f} MB for {few:,} rows, {after:.0f} MB for {many:,}")
    assert after - before < (200 if many == 1_000_000 else 25)


@pytest.mark.parametrize("rows", [5, pytest.param(400, marks=pytest.mark.slow)])
def test_b25_long_texts_in_little_memory(tmp_path: Path, rows: int) -> None:
    """B25: rows of 6 MB between short ones are skipped by rule and do not pile up in a batch, nor does one of 40 MB."""
    assert max(memory(tmp_path, [rows], 6_000_000)) < 1000
    if rows > 5:
        assert max(memory(tmp_path, [1], 40_000_000)) < 1000
