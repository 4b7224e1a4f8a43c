"""What watches states: the probe before, checks on the way to the disk, the audit afterwards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import arguments, call, copy_without_shards, extract
from targets import write_target
from torch import Tensor

from dflash_offline.extract import checks, events, kernels, plan, runner
from dflash_offline.extract.config import ExtractConfig, GuardConfig, TargetConfig
from dflash_offline.extract.hybrid import HybridCapture
from dflash_offline.extract.plan import Planned
from dflash_offline.extract.runner import Runner, rows, start_runner
from dflash_offline.extract.task import run_task
from dflash_offline.shards import calibration
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.errors import UsageError
from dflash_offline.shards.frames import encode_frames
from dflash_offline.shards.writer import Identity

CPU = torch.device("cpu")
LAYERS = (1, 2, 3, 4, 5)


def made(site: Path, **changes: Any) -> Runner:
    """A runner of the site's target that audits every sample."""
    guard = GuardConfig(audit_every=1)
    config = ExtractConfig(**{"target": TargetConfig(path=str(site / "t")), "guard": guard, **changes})
    return start_runner(config, LAYERS, CPU)


class Broken:
    """A capture whose states are changed by `fault`."""

    def __init__(self, whole: Any, fault: Callable[[Tensor], Tensor]) -> None:
        self._whole, self._fault, self.hidden_size = whole, fault, whole.hidden_size

    def __call__(self, samples: Any) -> Tensor:
        return self._fault(self._whole(samples).clone())


def zeroed(states_PLD: Tensor) -> Tensor:
    states_PLD[:, 2] = 0
    return states_PLD


def doubled(states_PLD: Tensor) -> Tensor:
    states_PLD[:, 3] = states_PLD[:, 2]
    return states_PLD


def constant(states_PLD: Tensor) -> Tensor:
    states_PLD[:, 0] = states_PLD[0, 0]
    return states_PLD


def shifted(states_PLD: Tensor) -> Tensor:
    return states_PLD.roll(1, dims=1)


def late(states_PLD: Tensor) -> Tensor:
    return states_PLD.roll(1, dims=0)


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize(
    ("fault", "layer"), [(zeroed, 3), (doubled, 4), (constant, 1), (shifted, 1), (late, 1), (torch.nan_to_num, 0)]
)
def test_the_probe_refuses_states_that_are_not_the_stock_model_s(
    site: Path, batching: str, fault: Callable[[Tensor], Tensor], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B27, B31: before the first task, by layer, whatever the way of batching."""
    name, plain = ("HybridCapture", HybridCapture) if batching == "packed" else ("Capture", runner.Capture)
    monkeypatch.setattr(runner, name, lambda *args: Broken(plain(*args), fault))
    if not layer:
        distance = made(site, batching=batching).probe["distance"]  # nothing was changed
        assert len(distance) == len(LAYERS) and max(distance) < 1e-3
        return
    with pytest.raises(UsageError, match=rf"states after layer {layer} are .*% away from the stock model's"):
        made(site, batching=batching)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_the_probe_knows_how_far_bfloat16_is_from_itself(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order of roundings passes, although two batch shapes of the stock model hardly differ; a shift fails."""
    write_target(tmp_path / "t", family)
    target = TargetConfig(path=str(tmp_path / "t"), dtype="bfloat16")
    found = made(tmp_path, target=target).probe
    assert all(far <= near for far, near in zip(found["distance"], found["noise"], strict=True))
    assert 0.005 < max(found["noise"]) < 0.2
    assert family != "qwen3_5" or 0 < found["rule"][0] < 0.01
    exact = made(tmp_path, target=replace(target, dtype="float32")).probe["noise"]
    assert 1e-6 < max(exact) < 1e-3  # small here; in a random model of 62 layers 0.2 %
    name, plain = ("HybridCapture", HybridCapture) if family == "qwen3_5" else ("Capture", runner.Capture)
    monkeypatch.setattr(runner, name, lambda *args: Broken(plain(*args), shifted))
    with pytest.raises(UsageError, match="states after layer 1 are"):
        made(tmp_path, target=target)


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta rule, and nothing else, takes a row for one sample."""
    rule = kernels.delta_rule

    def leaky(q: Tensor, *rest: Tensor) -> Tensor:
        row, n = kernels._row, q.shape[1]
        whole = torch.tensor([0, n], dtype=torch.int32)
        assert row is not None
        kernels._row = replace(row, lengths=[n], cu_seqlens=whole.to(q.device), cu_seqlens_cpu=whole)
        try:
            return rule(q, *rest)
        finally:
            kernels._row = row

    monkeypatch.setattr(kernels, "delta_rule", leaky)
    monkeypatch.setattr(checks, "check_rule", lambda *_: 0.0)  # which would see it as well


@pytest.mark.parametrize(
    ("dtype", "said"),
    [("float32", "layer 1 are .* away from the stock"), ("bfloat16", "layer 1 depend on the samples beside it")],
)
def test_b29_a_leak_between_samples_is_refused(
    site: Path, dtype: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 it is less than what two batch shapes differ by."""
    target = TargetConfig(path=str(site / "t"), dtype=dtype)
    made(site, target=target)
    leak(monkeypatch)
    with pytest.raises(UsageError, match=said):
        made(site, target=target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_delta_rule_is_refused(site: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock model has the same kernel, so comparing states would not show it."""
    inner = kernels._delta_rule

    def scaled(*given: Any) -> Any:
        rule = inner(*given)
        return lambda *args, **kwargs: (1.1 * rule(*args, **kwargs)[0], None)

    monkeypatch.setattr(kernels, "_delta_rule", scaled)
    with pytest.raises(UsageError, match=r"the delta rule's kernel is 10\.\d\d% away from transformers' reference"):
        made(site, target=TargetConfig(path=str(site / "t"), dtype=dtype))
    monkeypatch.undo()
    made(site)  # which installs the right one again


def test_the_probe_passes_over_samples_that_are_not_finite(tmp_path: Path) -> None:
    """B26: a NaN for one token costs its samples; NaN for all is refused before the first task."""
    from safetensors.torch import load_file, save_file

    write_target(tmp_path / "t")
    path = tmp_path / "t" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][int(checks.probe_samples(320)[0][2])] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    assert len(made(tmp_path).probe["distance"]) == len(LAYERS)
    tensors["model.layers.3.input_layernorm.weight"][:] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="states after layer 3 are finite for no sample tried"):
        made(tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (zeroed, "states after layer 3 are all zero"),
        (doubled, "states after layers 3 and 4 are equal"),
        (constant, "states after layer 1 are the same for every token"),
    ],
)
def test_a_layer_that_breaks_later_stops_the_run(
    site: Path, tmp_path: Path, fault: Callable[[Tensor], Tensor], message: str
) -> None:
    """B27: on a sample drawn for the audit; no shard is written."""
    copy_without_shards(site, tmp_path / "c")
    found = plan.read(tmp_path / "c")
    assert found is not None
    whole = made(site)
    with pytest.raises(checks.StatesError, match=rf"sample [0-9a-f]{{32}}: {message}"):
        run_task(replace(whole, capture=Broken(whole.capture, fault)), tmp_path / "c", 0, found.tasks[0]).result()
    whole.writer.shutdown()
    assert not list((tmp_path / "c" / "shards").glob("0*"))


def test_stale_states_stop_the_run(site: Path, tmp_path: Path) -> None:
    """B27: the capture gives the states of the row before."""
    copy_without_shards(site, tmp_path / "c")
    found = plan.read(tmp_path / "c")
    assert found is not None
    whole = made(site, token_budget=1)
    kept: list[Tensor] = []

    def stale(states_PLD: Tensor) -> Tensor:
        kept.append(states_PLD)
        return torch.cat([kept[0]] * 9)[-len(states_PLD) :]

    with pytest.raises(checks.StatesError, match="has the states of sample"):
        run_task(replace(whole, capture=Broken(whole.capture, stale)), tmp_path / "c", 0, found.tasks[0]).result()


@pytest.mark.parametrize("codec", ["lossless", "ecsq"])
def test_frames_are_held_to_what_the_codec_promised(site: Path, tmp_path: Path, codec: str) -> None:
    cache = Cache(site / "cache")
    states_TLD = torch.cat([cache.read(n).states for n in range(9)]).view(-1, 5, 64)
    parameters = {"delta": 0.25} if codec == "ecsq" else {}
    calibrated = calibration.read(tmp_path, calibration.write(tmp_path, codec, parameters, states_TLD), 5, 64, False)
    states_TLD = states_TLD[:300]
    frames = encode_frames(calibrated.states, states_TLD)
    assert checks.fidelity(calibrated, frames, states_TLD, "key")
    noise = states_TLD.float().std() * torch.randn(states_TLD.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(checks.StatesError, match=r"sample key: frames of layer 0 decode to .* dB, promised: "):
        checks.fidelity(calibrated, frames, (states_TLD + noise).bfloat16(), "key")


def test_no_sample_gets_the_states_of_another(site: Path) -> None:
    """B28: by key, whatever is forwarded together and in whichever order."""
    generator = np.random.default_rng(0)
    lengths = generator.permutation(np.r_[3, 40, generator.integers(3, 40, 10)])
    samples = [_planned(n, generator.integers(6, 300, length)) for n, length in enumerate(lengths)]
    want: dict[str, Tensor] = {}
    for batching in ("packed", "padded"):
        whole = made(site, batching=batching)
        for budget in (1, 100, 16384):
            ordered = samples if batching == "packed" else sorted(samples, key=lambda s: len(s.input_ids))
            run = replace(whole, config=replace(whole.config, token_budget=budget))
            for row in rows(run, ordered):
                for sample, states in zip(row.samples, torch.split(row.states_PLD, row.lengths), strict=True):
                    assert len(states) == len(sample.input_ids) == len(sample.loss_mask)
                    first = want.setdefault(sample.identity.key, states)
                    torch.testing.assert_close(states.float(), first.float(), rtol=2**-7, atol=1e-4)
    assert len(want) == 12


def _planned(number: int, ids: Any) -> Planned:
    who = {"key": f"{number:032x}", "prompt_key": "", "id": "", "source": "", "source_row": number}
    identity = Identity(**who, finish_reason="", response="")
    return Planned(identity=identity, input_ids=ids.astype(np.int32), loss_mask=np.ones(len(ids), np.uint8))


def test_the_manifest_says_what_was_audited(site: Path, tmp_path: Path) -> None:
    """The same on every number of workers, and after any restart: it follows from the keys."""
    assert extract(*arguments(site, tmp_path / "c", **{"guard.audit-every": 2})).returncode == 0
    cache = Cache(tmp_path / "c")
    found, drawn = cache.manifest.audit, [k for k in cache.keys if int(k[:8], 16) % 2 == 0]
    assert found["checked"] == len(drawn) > 5 and found["reforward"] == sorted(cache.keys)[:16]
    counted = sum(e["audited"] for e in events.read(tmp_path / "c") if e["event"] == "done")
    assert counted == len(drawn)


@pytest.mark.parametrize("codec", ["lossless", "ecsq"])
def test_audit_recomputes_stored_samples(site: Path, tmp_path: Path, codec: str) -> None:
    assert extract(*arguments(site, tmp_path / "c", codec=codec, last_hidden="True")).returncode == 0
    done = call("audit", tmp_path / "c")
    assert done.returncode == 0 and "16 samples recomputed, 0 differ" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("allowed") == 6  # the last hidden state too


@pytest.mark.parametrize(("fault", "layers"), [(shifted, "12345"), (late, "12345"), (doubled, "4")])
def test_audit_names_samples_whose_states_are_not_the_target_s(
    site: Path, tmp_path: Path, fault: Callable[[Tensor], Tensor], layers: str
) -> None:
    """B27, B31: a cache written with a broken capture, everything that watched switched off."""
    cache = tmp_path / "c"
    copy_without_shards(site, cache)
    found = plan.read(cache)
    assert found is not None
    whole = made(site, guard=GuardConfig(audit_every=0))
    for number, task in enumerate(found.tasks):
        run_task(replace(whole, capture=Broken(whole.capture, fault)), cache, number, task).result()
    assert extract(*arguments(site, cache)).returncode == 0
    done = call("audit", cache, "--samples", 3)
    assert done.returncode == 3 and "3 samples recomputed, 3 differ" in done.stdout
    for key in sorted(Cache(cache).keys)[:3]:
        named = [line for line in done.stdout.splitlines() if line.startswith(f"sample {key}: layer ")]
        assert "".join(line.split("layer ")[1][0] for line in named) == layers


def test_audit_wants_the_target_the_cache_was_made_with(site: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "t", seed=5)
    done = call("audit", site / "cache", "--target", tmp_path / "t")
    assert done.returncode == 2 and "the cache was made with" in done.stderr and "--target" in done.stderr
