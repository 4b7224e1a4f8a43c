"""What needs a CUDA device: `pytest -m gpu` on a machine with one, and flash-linear-attention installed."""

import json
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import capture, write_chats, write_target
from test_extract_fp8 import write_fp8
from test_extract_guard import leak
from train_reference import chats, make_cache

from dflash_offline.extract.config import DataConfig, ExtractConfig, TargetConfig
from dflash_offline.extract.run import run as extract
from dflash_offline.extract.runner import start_runner
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError
from dflash_offline.train import checkpoint
from dflash_offline.train.config import DataConfig as TrainData
from dflash_offline.train.config import ModelConfig, OptimConfig, SaveConfig, TrainConfig
from dflash_offline.train.flex import FlexView
from dflash_offline.train.log import read_metrics
from dflash_offline.train.loop import train
from dflash_offline.train.masks import Blocks, KeyValue, View

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = (1, 3, 6)


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (n,), generator=generator, dtype=torch.int32) for n in (33, 67, 130, 5, 257)]


def distances(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    """Relative L2 distance of each layer over all samples."""
    a, b = (torch.cat([s.float().cpu() for s in x]) for x in (found, wanted))
    return [float((a[:, i] - b[:, i]).norm() / b[:, i].norm()) for i in range(len(LAYERS))]


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_states_on_the_gpu_equal_those_on_the_cpu(tmp_path: Path, family: str, batching: str) -> None:
    """bf16 on the GPU is no further from fp32 on the CPU than twice what bf16 of another batch shape is."""
    write_target(tmp_path / "t", family)
    wanted = capture(tmp_path / "t", LAYERS)(samples())
    hybrid = family == "qwen3_5" and batching == "packed"
    run = capture(tmp_path / "t", LAYERS, batching, hybrid, torch.bfloat16, "cuda")
    together, alone = run(samples()), [run([s])[0] for s in samples()]
    noise, found = distances(alone, wanted), distances(together, wanted)
    print(f"{family} {batching}: single {noise}, together {found}")
    assert all(f < 2 * n + 1e-3 for f, n in zip(found, noise, strict=True))
    assert max(noise) < 0.15  # random weights amplify rounding over depth


def test_fp8_products_on_the_gpu_equal_those_on_the_cpu(tmp_path: Path) -> None:
    """As above, with the noise that rounding to FP8 makes of it; one product is held to fp32 in fp8_bits.py."""
    write_fp8(tmp_path / "t", (128, 128), wide=4)
    wanted = capture(tmp_path / "t", LAYERS, use="native")(samples())
    run = capture(tmp_path / "t", LAYERS, hybrid=True, dtype=torch.bfloat16, device="cuda", use="native")
    noise, found = distances([run([s])[0] for s in samples()], wanted), distances(run(samples()), wanted)
    print(f"native: single {noise}, together {found}")
    assert all(f < 2 * n + 1e-3 for f, n in zip(found, noise, strict=True)) and max(noise) < 0.4


def test_extract_and_train_on_the_gpu(tmp_path: Path) -> None:
    write_target(tmp_path / "t")
    data = DataConfig(files=(write_chats(tmp_path / "d.jsonl", 30),), generation="greedy")
    config = ExtractConfig(target=TargetConfig(path=str(tmp_path / "t")), data=data, cache=tmp_path / "c", shard_mib=1)
    assert extract(config) == 0
    assert "fla" in Cache(tmp_path / "c").manifest.kernels
    losses: dict[tuple[str, str], list[float]] = {}
    for device, precision in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        run_dir = tmp_path / f"{device}-{precision}"
        settings = TrainConfig(
            cache=tmp_path / "c",
            run_dir=run_dir,
            device=device,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            model=ModelConfig(layers=2, block_size=8, sliding_window=16),
            data=TrainData(row_tokens=256, row_anchors=32, rows_per_step=2, val_fraction=0.0),
            optim=OptimConfig(epochs=1, max_steps=4),
        )
        assert train(settings) == 0
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        losses[device, precision] = [json.loads(line)["loss"] for line in lines]
    print(losses)
    assert losses["cuda", "float32"] == pytest.approx(losses["cpu", "float32"], rel=1e-5)
    assert losses["cuda", "bfloat16"] == pytest.approx(losses["cpu", "float32"], rel=5e-3)


@pytest.mark.parametrize("window", [None, 100])
def test_attention_in_tiles_is_that_of_the_plain_mask(window: int | None) -> None:
    """Outputs and gradients: no further from fp32 than the plain mask's own bf16."""
    start = torch.tensor([0] * 9 + [200] * 20 + [0] * 3)
    anchor = torch.cat([torch.arange(20, 200, 20), torch.arange(210, 510, 15), torch.zeros(3)]).long()
    blocks, generator = Blocks(anchor, start, 16).to(torch.device("cuda")), torch.Generator().manual_seed(0)
    given = [
        torch.randn(n, rows, 64, generator=generator) for n, rows in ((8, 512), (2, 512), (2, 512), (2, 512), (2, 512))
    ]
    weight = torch.randn(8, 512, 64, generator=generator).cuda()

    def answer(view: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to("cuda", dtype).requires_grad_() for x in given]
        out = view.attend(leaves[0], KeyValue(*leaves[1:3]), KeyValue(*leaves[3:]))
        return [x.float() for x in (out, *torch.autograd.grad((out * weight).sum(), leaves))]

    exact = answer(View(blocks, window), torch.float32)
    plain, tiled = (answer(v, torch.bfloat16) for v in (View(blocks, window), FlexView(blocks, 512, window)))
    for a, b, c in zip(exact, plain, tiled, strict=True):
        assert (c - a).norm() <= 1.5 * (b - a).norm() + 1e-3 * a.norm()


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With the compile cache that the first run filled; and a run is the same twice."""
    cache = make_cache(tmp_path / "cache", chats(40)).path

    def run(name: str, *ends: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
        for end in ends:
            settings = TrainConfig(
                cache=cache,
                run_dir=tmp_path / name,
                device="cuda",
                model=ModelConfig(layers=2, block_size=8, sliding_window=16, head_dim=16),  # flex attention's least
                data=TrainData(row_tokens=256, row_anchors=32, rows_per_step=2, val_fraction=0.0),
                optim=OptimConfig(epochs=9, max_steps=8),
                save=SaveConfig(every=1, keep_last=9),
            )
            assert train(settings) == 0
            for step in range(end + 1, 9):  # as if it had been killed before these
                shutil.rmtree(tmp_path / name / "checkpoints" / f"step-{step:08d}")
        lines = [(line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / name)]
        found = checkpoint.newest(tmp_path / name / "checkpoints")[0]
        assert found is not None
        return lines, found.load(checkpoint.MODEL, torch.device("cpu"))

    whole, twice, again = run("a", 8), run("b", 8), run("c", 3, 8)
    for lines, weights in (twice, again):
        assert lines == whole[0]
        assert all(torch.equal(whole[1][name], weights[name]) for name in weights)


def test_b29_a_leak_between_samples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "t")
    config = ExtractConfig(target=TargetConfig(path=str(tmp_path / "t")), cache=tmp_path / "c")
    print(start_runner(config, LAYERS, torch.device("cuda")).probe)
    leak(monkeypatch)
    with pytest.raises(UsageError, match="depend on the samples beside it"):
        start_runner(config, LAYERS, torch.device("cuda"))


def test_b34_a_gpu_without_fast_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there and its extension is broken; allowed, the manifest says what ran."""
    write_target(tmp_path / "t")
    (tmp_path / "stub" / "fla").mkdir(parents=True)
    (tmp_path / "stub" / "fla" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path / "stub")  # workers get the path of their parent
    data = DataConfig(files=(write_chats(tmp_path / "d.jsonl", 10),))
    config = ExtractConfig(target=TargetConfig(path=str(tmp_path / "t")), data=data, cache=tmp_path / "c")
    with pytest.raises(UsageError, match="undefined symbol: _ZN3c10"):
        extract(config)
    assert extract(replace(config, allow_slow=True)) == 0
    assert "delta_rule: torch reference" in Cache(tmp_path / "c").manifest.kernels


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bytes_do_not_depend_on_the_number_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on when kernels run; and a worker of the second GPU has nothing on the first."""
    write_target(tmp_path / "t")
    data = DataConfig(files=(write_chats(tmp_path / "d.jsonl", 300),))
    config = ExtractConfig(
        target=TargetConfig(path=str(tmp_path / "t")), data=data, cache=tmp_path / "both", shard_mib=1
    )
    seen, ended = set[tuple[str, str]](), threading.Event()

    def watch() -> None:
        query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
        while not ended.wait(0.2):
            lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
            seen.update((uuid, pid) for uuid, pid in (line.split(", ") for line in lines))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert extract(config) == 0
    finally:
        ended.set()
        thread.join()
    events = map(json.loads, (tmp_path / "both" / "events.jsonl").read_text().splitlines())
    pids = {e["device"]: str(e["worker"]) for e in events if e["event"] == "worker"}
    print(pids, seen)
    assert set(pids) == {"cuda:0", "cuda:1"}
    cards = [{uuid for uuid, pid in seen if pid == one} for one in pids.values()]
    if all(cards):  # in some sandboxes nvidia-smi has other pids
        assert sum(map(len, cards)) == len(set.union(*cards)) == 2
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert extract(replace(config, cache=tmp_path / "one", devices="cuda:0")) == 0
    shards = sorted(path.name for path in (tmp_path / "one" / "shards").iterdir())
    assert len(shards) > 3
    for name in shards:
        assert (tmp_path / "one" / "shards" / name).read_bytes() == (tmp_path / "both" / "shards" / name).read_bytes()
