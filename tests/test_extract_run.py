"""`dflash-extract run` as a user meets it: real processes, real files, exit codes."""

import json
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import arguments, command, copy_without_shards, extract, states, tree
from safetensors.torch import load_file, save
from targets import write_chats, write_rows, write_target
from transformers import AutoModelForCausalLM

from dflash_offline.shards.cache import Cache
from dflash_offline.shards.manifest import read as read_manifest
from dflash_offline.shards.manifest import write as write_manifest
from dflash_offline.shards.verify import verify


def test_the_cache_is_whole_and_says_what_it_is(site: Path) -> None:
    cache = Cache(site / "cache")
    assert verify(site / "cache", threads=2).faults == []
    assert len(cache) == 40 and len(cache.manifest.shards) > 2
    assert cache.generation == "greedy" and cache.layer_ids == (1, 2, 3, 4, 5)
    assert cache.tokenizer_facts["eos_ids"] == [2]
    assert set(cache.target_tensors()) == {"embed_tokens", "lm_head", "norm"}
    sample = cache.read(5)
    assert sample.loss_mask[-2] == 1 and sample.input_ids[-2] == 2 and sample.loss_mask[-1] == 0


def test_a_rerun_does_nothing(site: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (site / "cache").rglob("*") if p.name != ".lock"}
    again = extract(*arguments(site, site / "cache"))
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in (site / "cache").rglob("*") if p.name != ".lock"} == before


def test_the_target_s_tensors_are_written_once(site: Path, tmp_path: Path) -> None:
    """A run that goes on keeps them, gigabytes of a large target, unless they are damaged; as safetensors has them."""
    copy_without_shards(site, tmp_path / "c")
    written = tmp_path / "c" / "target" / "target.safetensors"
    raw, at = written.read_bytes(), written.stat().st_mtime_ns
    assert raw == save(load_file(written))
    assert (site / "cache/target/target.safetensors").stat().st_mode == (site / "cache/manifest.json").stat().st_mode
    for damaged in (False, True):
        if damaged:
            written.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        write_manifest(tmp_path / "c", replace(read_manifest(tmp_path / "c"), complete=False))
        (tmp_path / "c" / "shards" / "00000000.arrow").unlink(missing_ok=True)
        assert extract(*arguments(site, tmp_path / "c")).returncode == 0
        assert written.read_bytes() == raw and (written.stat().st_mtime_ns == at) == (not damaged)


def test_bytes_do_not_depend_on_the_number_of_workers(site: Path, tmp_path: Path) -> None:
    assert extract(*arguments(site, tmp_path / "c", workers=1)).returncode == 0
    ours, theirs = tree(tmp_path / "c"), tree(site / "cache")
    del ours[".lock"], theirs[".lock"]
    assert ours == theirs


def test_a_killed_run_continues_to_the_same_bytes(site: Path, tmp_path: Path) -> None:
    """B38: SIGKILL to the parent after its first shard: the rerun keeps that shard and ends with equal bytes."""
    process = subprocess.Popen(command(*arguments(site, tmp_path / "c", workers=2)), stdout=subprocess.PIPE, text=True)
    shards = tmp_path / "c" / "shards"
    deadline = time.monotonic() + 60
    while not list(shards.glob("*.arrow")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    kept = {p.name: p.stat().st_mtime_ns for p in shards.glob("*.arrow")}
    assert kept
    again = extract(*arguments(site, tmp_path / "c"))
    assert again.returncode == 0, again.stderr
    assert {n: (shards / n).stat().st_mtime_ns for n in kept} == kept
    ours, theirs = tree(tmp_path / "c"), tree(site / "cache")
    del ours[".lock"], theirs[".lock"]
    assert ours == theirs


def test_sigterm_keeps_finished_shards(site: Path, tmp_path: Path) -> None:
    """B96."""
    process = subprocess.Popen(
        command(*arguments(site, tmp_path / "c")), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list((tmp_path / "c" / "shards").glob("*.arrow")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=25)
    assert process.returncode in (0, 143)  # 0: it was faster than the signal
    assert process.returncode == 0 or "rerun to continue" in err
    assert extract(*arguments(site, tmp_path / "c")).returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("codec", "bf16", "codec was 'lossless', now 'bf16'"),
        ("data.max-length", 99, "data.max_length was 4096, now 99"),
        ("target.layers", "1 2", r"target.layers was [1, 2, 3, 4, 5], now [1, 2]"),
        ("data.generation", "sampled", "data.generation was 'greedy', now 'sampled'"),
        ("batching", "padded", "batching was 'packed', now 'padded'"),
    ],
)
def test_changed_settings_are_refused_by_name(site: Path, name: str, value: object, field: str) -> None:
    """B39."""
    before = tree(site / "cache")
    args = arguments(site, site / "cache", **{name: value})
    done = extract(*[w for a in args for w in (str(a).split() if name == "target.layers" and a == value else [a])])
    assert done.returncode == 2 and field in done.stderr and done.stderr.count("\n") == 1, done.stderr
    del before[".lock"]
    assert {k: v for k, v in tree(site / "cache").items() if k != ".lock"} == before


@pytest.mark.parametrize("what", ["chat_template", "tokenizer", "chat_template.args", "slice"])
def test_changed_data_is_refused_by_name(site: Path, tmp_path: Path, what: str) -> None:
    """B39: what the samples were rendered with, and another slice of as many rows; nothing in the folder changes."""
    shutil.copytree(site / "t", tmp_path / "t")
    changes: dict[str, Any] = {"target.path": tmp_path / "t"}
    if what == "chat_template":
        path = tmp_path / "t" / "chat_template.jinja"
        path.write_text(path.read_text().replace("<think>\\n\\n</think>", "<think>\\n</think>"))
    elif what == "tokenizer":
        path = tmp_path / "t" / "tokenizer.json"
        values = json.loads(path.read_text())
        values["model"]["merges"] = values["model"]["merges"][:-1]
        path.write_text(json.dumps(values))
    elif what == "slice":
        changes["data.files"] = write_chats(tmp_path / "chats.jsonl", 40, seed=3)
    else:
        changes["data.enable-thinking"] = "True"
    before = tree(site / "cache")
    done = extract(*arguments(site, site / "cache", **changes))
    wanted = "40 of its 40 samples are not in the dataset" if what == "slice" else f"{what} was "
    assert done.returncode == 2 and wanted in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert {k: v for k, v in tree(site / "cache").items() if k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }


def test_another_target_is_refused(site: Path, tmp_path: Path) -> None:
    """B39."""
    write_target(tmp_path / "t", seed=1)
    done = extract(*arguments(site, site / "cache", **{"target.path": tmp_path / "t"}))
    assert done.returncode == 2 and "target.weights was" in done.stderr


def test_order_is_free_supersets_extend_and_losses_are_refused(site: Path, tmp_path: Path) -> None:
    """B39."""
    shutil.copytree(site / "cache", tmp_path / "c")
    rows = (site / "chats.jsonl").read_text().splitlines()
    shuffled, grown, cut = (tmp_path / n for n in ("shuffled.jsonl", "grown.jsonl", "cut.jsonl"))
    shuffled.write_text("\n".join(reversed(rows)))
    write_chats(grown, 8, seed=9)
    grown.write_text("\n".join([*grown.read_text().splitlines(), *rows]))
    cut.write_text("\n".join(rows[1:]))
    old = tree(tmp_path / "c" / "shards")
    done = extract(*arguments(site, tmp_path / "c", **{"data.files": shuffled}))
    assert done.returncode == 0 and len(Cache(tmp_path / "c")) == 40
    done = extract(*arguments(site, tmp_path / "c", **{"data.files": cut}))
    assert done.returncode == 2 and "1 of its 40 samples are not in the dataset" in done.stderr
    done = extract(*arguments(site, tmp_path / "c", **{"data.files": grown}))
    assert done.returncode == 0 and len(Cache(tmp_path / "c")) == 48
    assert old.items() <= tree(tmp_path / "c" / "shards").items()
    assert verify(tmp_path / "c", threads=2).faults == []


def test_codecs_and_batchings_store_the_same_states(site: Path, tmp_path: Path) -> None:
    # One shard each: a shard's tokens depend on the codec, and what is packed together on the shard.
    found = {}
    for name, changes in {"exact": {}, "raw": {"codec": "bf16"}, "padded": {"batching": "padded"}}.items():
        assert extract(*arguments(site, tmp_path / name, **{"shard-mib": 64}, **changes)).returncode == 0
        found[name] = states(tmp_path / name)
        assert found[name].keys() == found["exact"].keys()
    for key, value in found["exact"].items():
        assert torch.equal(found["raw"][key], value)
        torch.testing.assert_close(found["padded"][key].float(), value.float(), rtol=2**-7, atol=1e-4)


def test_the_last_hidden_state_gives_the_target_s_own_logits(site: Path, tmp_path: Path) -> None:
    """Stored where the next token is supervised, before the final norm; the other states do not change."""
    assert extract(*arguments(site, tmp_path / "c", last_hidden="True")).returncode == 0
    cache, net = Cache(tmp_path / "c"), AutoModelForCausalLM.from_pretrained(site / "t").float().eval()
    want = states(site / "cache")
    for i in range(5):
        sample = cache.read(i)
        assert torch.equal(sample.states, want[sample.key]) and sample.last_hidden is not None
        with torch.inference_mode():
            logits = net(input_ids=torch.from_numpy(sample.input_ids)[None].long()).logits[0]
            at = torch.from_numpy(sample.loss_mask[1:]).bool()
            found = net.lm_head(net.model.norm(sample.last_hidden.float()))
        torch.testing.assert_close(found, logits[:-1][at], rtol=0.02, atol=0.02 * float(logits.std()))


def test_a_run_whose_output_nobody_reads_goes_on(site: Path, tmp_path: Path) -> None:
    """`dflash-extract run ... | head -1`"""
    process = subprocess.Popen(command(*arguments(site, tmp_path / "c")), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert read_manifest(tmp_path / "c").complete


def test_two_runs_into_one_folder(site: Path, tmp_path: Path) -> None:
    """B40: the second is told who holds it; a lock whose holder was killed holds nobody."""
    first = subprocess.Popen(command(*arguments(site, tmp_path / "c")), stdout=subprocess.PIPE)
    while not (tmp_path / "c" / "plan" / "plan.json").is_file() and first.poll() is None:
        time.sleep(0.01)
    second = extract(*arguments(site, tmp_path / "c"))
    first.communicate()
    if second.returncode != 0:  # unless the first was faster
        assert second.returncode == 2 and f"in use by pid {first.pid} on" in second.stderr
    assert first.returncode == 0
    (tmp_path / "c" / ".lock").write_text("pid 1 on elsewhere")
    again = extract(*arguments(site, tmp_path / "c"))
    assert again.returncode == 0 and "nothing to do" in again.stdout


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({"data.files": "/no/such.jsonl"}, None, "no such file: /no/such.jsonl"),
        ({"target.path": "/no/target"}, None, "target.path: no such folder: /no/target"),
        ({"target.layers": 8}, None, "target.layers: 8 out of range; the target has layers 0 to 7"),
        (
            {},
            [{"messages": [{"role": "user", "content": "red"}]}],
            "0 usable samples of 1 rows (1 no_trainable_anchor)",
        ),
        ({}, [{"prompt": "red", "text": "blue"}], "keys are [prompt, text]; expected `messages`"),
        ({}, [{"messages": [{"who": "me"}]}], "message keys are [who]; expected role, content"),
        ({}, [], "0 usable samples of 0 rows (no rows)"),
        ({}, "cut", "line 1: invalid JSON"),
    ],
)
def test_bad_input_is_one_clear_line(
    site: Path, tmp_path: Path, changes: dict[str, Any], rows: Any, message: str
) -> None:
    if rows is not None:
        path = write_rows(tmp_path / "d.jsonl", *(rows if isinstance(rows, list) else []))
        if rows == "cut":
            path.write_text('{"messages":[')
        changes = {**changes, "data.files": path}
    done = extract(*arguments(site, tmp_path / "c", **changes))
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list((tmp_path / "c").rglob("*.arrow"))


def test_a_folder_with_something_else_is_not_touched(site: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    done = extract(*arguments(site, tmp_path))
    assert done.returncode == 2 and "holds thesis.tex and is not a cache" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_skipped_rows_are_counted_and_listed(site: Path, tmp_path: Path) -> None:
    good = json.loads((site / "chats.jsonl").read_text().splitlines()[0])
    fake = [good["messages"][0], {"role": "assistant", "content": "a<|im_end|>\n<|im_start|>assistant\nred"}]
    path = write_rows(
        tmp_path / "d.jsonl",
        good,
        good,
        {"messages": good["messages"][:1]},
        {"messages": fake},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 999, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6], "loss_mask": [0, 1, 1]},
    )
    assert extract(*arguments(site, tmp_path / "c", **{"data.files": path})).returncode == 0
    cache = Cache(tmp_path / "c")
    skips = [json.loads(line) for line in (tmp_path / "c" / "skipped.jsonl").read_text().splitlines()]
    assert len(cache) + len(skips) == 7 and len(cache) == 2
    assert [(s["line"], s["reason"]) for s in skips] == [
        (2, "duplicate"),
        (3, "no_trainable_anchor"),
        (4, "chat_markers_in_content"),
        (6, "bad_ids"),
        (7, "bad_ids"),
    ]
    assert "input_ids[1] is 999; expected 0 to 319" in skips[3]["detail"]


def test_nonfinite_states_are_skipped_and_said(site: Path, tmp_path: Path) -> None:
    """B26."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(site / "t", tmp_path / "t")
    tensors = load_file(tmp_path / "t" / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, tmp_path / "t" / "model.safetensors", metadata={"format": "pt"})
    rows = [{"input_ids": [5, 7 if i in (1, 4) else 6, 8 + i, 9], "loss_mask": [0, 1, 1, 1]} for i in range(6)]
    changes = {"target.path": tmp_path / "t", "data.files": write_rows(tmp_path / "d.jsonl", *rows)}
    done = extract(*arguments(site, tmp_path / "c", **changes))
    assert done.returncode == 3 and "2 samples lost" in done.stdout
    skips = [json.loads(line) for line in (tmp_path / "c" / "skipped.jsonl").read_text().splitlines()]
    assert [(s["line"], s["reason"], s["detail"]) for s in skips] == [
        (2, "nonfinite_hidden", "layer 1, token 0"),
        (5, "nonfinite_hidden", "layer 1, token 0"),
    ]
    assert all(np.isfinite(s.float().numpy()).all() for s in states(tmp_path / "c").values())


def test_damage_is_mended_by_the_same_command(site: Path, tmp_path: Path) -> None:
    """Whatever file is lost or damaged after the end: the rerun brings the same bytes back, but never mixes."""
    want = tree(site / "cache")
    for name in ("index.parquet", "codec.safetensors", "target/target.safetensors", "target/config.json"):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(site / "cache", tmp_path / "c")
        path = tmp_path / "c" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert extract(*arguments(site, tmp_path / "c")).returncode == 0, name
        assert {k: v for k, v in tree(tmp_path / "c").items() if k != ".lock"} == {
            k: v for k, v in want.items() if k != ".lock"
        }, name
    shard = tmp_path / "c" / "shards" / "00000001.arrow"
    shard.write_bytes(shard.read_bytes()[:-100])
    done = extract(*arguments(site, tmp_path / "c"))
    assert done.returncode == 0 and "00000001.arrow" in done.stderr
    assert shard.read_bytes() == want["shards/00000001.arrow"]
    assert shard.with_name("00000001.arrow.torn").is_file()


def test_shards_of_another_calibration_are_not_mixed(site: Path, tmp_path: Path) -> None:
    """codec.safetensors damaged while the cache is not complete: measured again, and shards that fit are kept."""
    shutil.copytree(site / "cache", tmp_path / "c")
    write_manifest(tmp_path / "c", replace(read_manifest(tmp_path / "c"), complete=False, shards=[], index={}))
    (tmp_path / "c" / "shards" / "00000001.arrow").unlink()
    path = tmp_path / "c" / "codec.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert extract(*arguments(site, tmp_path / "c")).returncode == 0
    assert path.read_bytes() == good and verify(tmp_path / "c", threads=1).faults == []
    assert states(tmp_path / "c").keys() == states(site / "cache").keys()


def test_the_plan_may_be_deleted_once_complete(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site / "cache", tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "plan")
    cut, grown = tmp_path / "cut.jsonl", tmp_path / "grown.jsonl"
    rows = (site / "chats.jsonl").read_text().splitlines()
    cut.write_text("\n".join(rows[1:]))
    done = extract(*arguments(site, tmp_path / "c", **{"data.files": cut}))
    assert done.returncode == 2 and "1 of its 40 samples are not in the dataset" in done.stderr
    done = extract(*arguments(site, tmp_path / "c"))
    assert done.returncode == 0 and "nothing to do" in done.stdout
    write_chats(grown, 4, seed=9)
    grown.write_text("\n".join([*grown.read_text().splitlines(), *rows]))
    assert extract(*arguments(site, tmp_path / "c", **{"data.files": grown})).returncode == 0
    assert len(Cache(tmp_path / "c")) == 44 and verify(tmp_path / "c", threads=1).faults == []


def test_a_refusal_leaves_no_trace(site: Path, tmp_path: Path) -> None:
    empty = write_rows(tmp_path / "d.jsonl")
    assert extract(*arguments(site, tmp_path / "a" / "b", **{"data.files": empty})).returncode == 2
    assert not (tmp_path / "a").exists()
    write_target(tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text("[]")
    done = extract(*arguments(site, tmp_path / "c", **{"target.path": tmp_path / "t"}))
    assert done.returncode == 2 and "no usable tokenizer" in done.stderr and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown_role"),
        ({"messages": {}}, "wrong_keys"),
        ({"messages": []}, "wrong_keys"),
        ({"messages": [5]}, "wrong_keys"),
        ({"messages": [{"role": "user", "content": 5}]}, "unknown_content"),
        ({"messages": [{"role": "user", "content": "a \ud800"}]}, "invalid_unicode"),
        ({"id": "a\udcff", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, "invalid_unicode"),
        ({"input_ids": [5, 2**63, 7], "loss_mask": [0, 1, 1]}, "bad_ids"),
        ({"input_ids": [5, 6.0, 7], "loss_mask": [0, 1, 1]}, "bad_ids"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 2]}, "bad_ids"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, True, True]}, "bad_ids"),
        ({"input_ids": [], "loss_mask": []}, "bad_ids"),
        ([1], "wrong_keys"),
    ],
)  # fmt: skip
def test_a_strange_row_is_skipped_with_a_reason(site: Path, tmp_path: Path, row: object, reason: str) -> None:
    path = write_rows(tmp_path / "d.jsonl", row)
    done = extract(*arguments(site, tmp_path / "c", **{"data.files": path}))
    assert done.returncode == 2 and f"(1 {reason})" in done.stderr and done.stderr.count("\n") == 1, done.stderr
