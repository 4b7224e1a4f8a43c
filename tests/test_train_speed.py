"""What makes steps fast and tells where their time goes; on the CPU that it changes nothing else."""

import hashlib
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from train_reference import chats, drafter, make_cache, target

from dflash_offline.train.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from dflash_offline.train.feed import compiles
from dflash_offline.train.flops import head_flops, peak, row_flops
from dflash_offline.train.job import prepare
from dflash_offline.train.loop import train
from dflash_offline.train.masks import Blocks
from dflash_offline.train.model import Drafter, Edges, Linear, block_inputs
from dflash_offline.train.optim import Gradients
from dflash_offline.train.parallel import Ranks
from dflash_offline.train.precision import copies, refresh, rounded
from dflash_offline.train.rows import clocks
from dflash_offline.train.state import State
from dflash_offline.train.tally import Tally
from dflash_offline.train.waits import Waits


def gradient(
    master: Drafter,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    edges: Edges | None = None,
) -> torch.Tensor:
    """Flat, of something that all outputs of a row take part in."""
    frozen, generator = target(), torch.Generator().manual_seed(1)
    states = torch.randn(50, master.fc.in_features, generator=generator).bfloat16()
    blocks = Blocks(torch.tensor([5, 20, 44]), torch.tensor([0, 10, 10]), master.spec.block_size)
    inputs = block_inputs(frozen.embedding_VD, torch.tensor([1, 2, 3]), master.spec.block_size, 7)
    gradients = Gradients(master)
    out = rounded(master, dtype)(states, torch.arange(50), inputs, blocks, None, edges, recompute)
    (out.float() * torch.randn(out.shape, generator=generator)).sum().backward()
    return gradients.flat


def test_rounded_weights_gather_their_gradients_in_fp32() -> None:
    """As autocast would, but for the rounding of every weight's gradient."""
    master = drafter(sliding_window=8)
    exact = gradient(master)
    found = gradient(master, torch.bfloat16)
    assert found.dtype == torch.float32 and (found - exact).norm() < 0.03 * exact.norm()
    assert (found.bfloat16().float() != found).float().mean() > 0.9  # was never rounded


def test_the_first_gradient_of_a_step_is_stored_and_further_ones_are_added() -> None:
    """Whatever was there before. What no row reaches is zero in the end."""
    torch.manual_seed(0)
    state = State.of(drafter(), OptimConfig(), torch.bfloat16)
    layer, x = state.working.layers[0].mlp.down_proj, torch.randn(3, state.drafter.spec.intermediate_size).bfloat16()  # type: ignore[union-attr, index]
    once = x.float().sum(dim=0).expand(layer.weight.shape)
    for rows in (2, 1, 0):
        state.gradients.flat.fill_(7)
        state.clear()
        for _ in range(rows):
            layer(x).sum().backward()
        state.settle()
        torch.testing.assert_close(layer.sink.total, rows * once)
        assert not sum(
            p.grad.abs().sum() for n, p in state.drafter.named_parameters() if n != "layers.0.mlp.down_proj.weight"
        )  # type: ignore[union-attr]


def test_all_gains_may_be_frozen_in_bf16() -> None:
    state = State.of(drafter(), OptimConfig(freeze=("*norm*",)), torch.bfloat16)
    state.clear()


def test_fp32_weights_that_drift_by_less_than_rounding_are_seen_where_every_rank_steps_all() -> None:
    state = State.of(drafter(), OptimConfig(optimizer="muon"), torch.bfloat16)
    before = state.hash()
    state.drafter.fc.weight.data[0, 0] += 1e-6
    assert not torch.equal(state.hash(), before)


def test_a_rounded_copy_follows_the_weights() -> None:
    master = drafter()
    Gradients(master)
    assert rounded(master, torch.float32) is master
    copy = rounded(master, torch.bfloat16)
    with torch.no_grad():
        for p in master.parameters():
            p.add_(1)
    refresh(copies(copy, master))
    for a, b in zip(copy.parameters(), master.parameters(), strict=True):
        assert torch.equal(a, b.to(a.dtype))
    matrices = [m for m in copy.modules() if isinstance(m, Linear)]
    assert len(matrices) == 1 + 7 * len(master.layers) and all(m.weight.dtype == torch.bfloat16 for m in matrices)


def test_layers_computed_again_give_the_same_gradients() -> None:
    master = drafter(sliding_window=8)
    assert torch.equal(gradient(master, recompute=True), gradient(master))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_part_is_reached_when_its_gradients_are_complete(recompute: bool) -> None:
    """What is added up over the ranks at that moment is what the whole backward pass leaves there."""
    master = drafter()
    parts, seen = master.parts(), []
    assert sorted(name for part in parts for name in part) == sorted(name for name, _ in master.named_parameters())
    parameters = dict(master.named_parameters())

    def reached() -> None:
        seen.append({name: parameters[name].grad.clone() for name in parts[len(seen)]})  # type: ignore[union-attr]

    used: list[int] = []
    gradient(master, recompute=recompute, edges=Edges(lambda: used.append(len(seen)), reached))
    assert len(seen) == len(parts) - 1
    assert used[: len(parts)] == [0] * len(parts)  # computed again, layers are told of once more
    for part in seen:
        for name, value in part.items():
            assert torch.equal(value, parameters[name].grad) and value.any(), name  # type: ignore[arg-type]


def test_operations_of_the_published_drafter() -> None:
    """Against the sum over the tensors: every weight meets every slot, or every token, three times."""
    made = drafter()
    spec, tokens, slots = made.spec, 50, 24
    total = 0
    for name, p in made.named_parameters():
        if p.ndim == 2:
            times = slots if name != "fc.weight" else 0
            times += tokens if name.split(".")[-2] in ("k_proj", "v_proj") else 0
            total += 2 * p.numel() * (3 * times + (2 * tokens if name == "fc.weight" else 0))
    assert row_flops(spec, tokens, slots) == total
    assert head_flops(spec, 10) == 2 * 2 * 10 * spec.vocab_size * spec.hidden_size


ONE = Ranks(0, 1, torch.device("cpu"))


def waited(
    waits: Waits, data: float, steps: int = 1, warm: bool = True, others: tuple[float, ...] = (), **loader: float
) -> None:
    """Steps of `data` seconds of waiting and one of work."""
    for _ in range(steps):
        entry = {"seconds": {"data": data, "forward": 1.0}, "loader_seconds": loader}
        waits.add(entry, [waits.last, *others], warm)


def test_waiting_is_told_with_its_cause() -> None:
    waits = Waits(ONE, DataConfig(threads=1))
    waited(waits, 5.0, decode=1.0, disk=0.1, warm=False)
    assert waits.report() is None and waits.last == 0
    waited(waits, 0.25, decode=0.3, disk=0.1, steps=10)
    assert waits.report() == (
        "waited for data 20% of the last 10 steps; 75% of the loader's time went to decoding: raise data.threads, and "
        "data.rows_ahead to no less, as far as there are cores"
    )
    waited(waits, 0.01, decode=1.0)
    assert waits.report() is None


@pytest.mark.parametrize(
    ("threads", "ahead", "loader", "part", "cause"),
    [
        (8, 8, {"disk": 4.0, "cores": 1.0, "decode": 2.0, "copy": 0.1}, 51, "reading"),
        (8, 8, {"disk": 0.0, "cores": 6.0, "decode": 2.0, "copy": 0.0}, 75, "waiting for a core"),
        (2, 9, {"disk": 0.4, "cores": 0.0, "decode": 1.2, "copy": 0.2}, 60, "decoding"),
        (2, 9, {"disk": 0.4, "cores": 0.0, "decode": 1.2, "copy": 0.9}, 53, "copying"),
        (4, 9, {"disk": 0.4, "cores": 0.0, "decode": 1.2, "copy": 0.6}, 60, "copying"),
        (4, 2, {"disk": 0.4, "cores": 0.0, "decode": 1.2, "copy": 0.6}, 43, "decoding"),
    ],
)
def test_the_cause_is_what_the_slower_threads_do(
    threads: int, ahead: int, loader: dict[str, float], part: int, cause: str
) -> None:
    """Several read and decode at a time, no more than rows are read ahead; one copies."""
    waits = Waits(ONE, DataConfig(threads=threads, rows_ahead=ahead))
    waited(waits, 0.25, **loader)
    assert f"; {part}% of the loader's time went to {cause}" in (waits.report() or "")


def test_the_rank_that_waits_longest_speaks() -> None:
    """The others' waits for it count as a slow sum over the ranks."""
    said = []
    for rank, data in enumerate((0.1, 0.3, 0.2)):
        waits, last = Waits(Ranks(rank, 3, torch.device("cpu")), DataConfig()), [0.0] * 3
        for _ in range(2):
            seconds = {"seconds": {"data": data, "forward": 1.0}, "loader_seconds": {"disk": 1.0}}
            waits.add(seconds, last, warm=True)
            last = [0.1, 0.3, 0.2]
            assert waits.last == last[rank]
        said.append(waits.report())
    assert said[0] is said[2] is None and said[1] is not None
    assert said[1].startswith(
        "rank 1: waited for data 23% of the last 2 steps; 100% of the loader's time went to reading"
    )


def test_what_ranks_waited_travels_in_the_sums_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "sum", lambda _, tensor: tensor)
    found = Tally(4, torch.device("cpu")).collect(Ranks(1, 3, torch.device("cpu")), 0.5)
    assert found["waited"] == [0, 0.5, 0] and found["supervised"] == found["hits"] == [0, 0, 0] and found["stops"] == 0


def test_a_thread_without_a_core_does_not_wait_for_a_disk() -> None:
    """Three threads on one core, each of which has enough to do."""
    found: list[list[float]] = []

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread
        begun, data = clocks(), bytes(1 << 20)
        while clocks()[1] - begun[1] < 0.1:
            hashlib.sha256(data)  # lets go of the interpreter lock
        found.append([now - then for now, then in zip(clocks(), begun, strict=True)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, worked, queued = map(sum, zip(*found, strict=True))
    assert worked < 0.6 * wall and queued > 0.8 * (wall - worked)


def test_a_thread_that_sleeps_has_no_need_of_a_core() -> None:
    begun = clocks()
    time.sleep(0.1)
    wall, worked, queued = (now - then for now, then in zip(clocks(), begun, strict=True))
    assert wall >= 0.1 and worked < 0.05 and queued < 0.05


def test_what_reading_a_row_cost_is_split_three_ways(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(TrainConfig(cache=cache, run_dir=tmp_path / "run"), 1)
    for after, found in (((10.0, 2.0, 5.0), (3.0, 5.0, 2.0)), ((10.0, 6.0, 5.0), (0.0, 5.0, 6.0))):
        times = iter([(0.0, 0.0, 0.0), after])
        monkeypatch.setattr("dflash_offline.train.rows.clocks", lambda times=times: next(times))
        seconds = job.builder().read(np.array([0]), np.array([0])).fields["seconds"]
        assert seconds == dict(zip(("disk", "cores", "decode"), found, strict=True))


def test_where_the_kernel_does_not_tell_nothing_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (b"", b"1\n", b"a b c"):
        monkeypatch.setattr(Path, "read_bytes", lambda _, said=said: said)
        assert clocks()[2] == 0
    monkeypatch.undo()
    monkeypatch.setattr("dflash_offline.train.rows.Path", lambda _: Path("/nonexistent/schedstat"))
    assert clocks()[2] == 0


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9e12),
        ("NVIDIA RTX 6000 Ada Generation", None),
    ],
)
def test_what_the_maker_promises_of_a_device(name: str, found: float | None) -> None:
    assert peak(name) == found


def test_the_long_first_step_is_announced_on_a_gpu_alone() -> None:
    assert "20 to 40 s" in compiles(torch.device("cuda")) and not compiles(torch.device("cpu"))


def test_a_run_in_bf16_and_recomputed_learns_as_one_in_fp32(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", chats(12)).path
    found = {}
    for precision, recompute in (("float32", False), ("float32", True), ("bfloat16", True)):
        config = TrainConfig(
            cache=cache, run_dir=tmp_path / f"{precision}-{recompute}", precision=precision, recompute=recompute,  # type: ignore[arg-type]
            model=ModelConfig(layers=2, block_size=6), data=DataConfig(row_tokens=100, row_anchors=40, rows_per_step=2),
            optim=OptimConfig(max_steps=5, lr=3e-3),
        )  # fmt: skip
        assert train(config) == 0
        lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
        found[precision, recompute] = [line["loss"] for line in lines]
        assert all(line["tflops"] > 0 and {"disk", "cores", "decode"} == set(line["loader_seconds"]) for line in lines)
    plain, again, short = found.values()
    assert plain == again and short == pytest.approx(plain, rel=2e-3) and short != plain
