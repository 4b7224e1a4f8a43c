"""Makes the small caches beside this file with the code of the projects themselves, and what their own readers say.

    PEER_PYTHON make.py specforge | specforge-gz       specforge 0.2.0: its capture layout, torch.save as its script
    PEER_PYTHON make.py speculators | speculators-fp8  speculators, hs-connectors 0.9.0, datasets 5.2.0: its quantiser
    PEER_PYTHON make.py modelopt SCRIPTS               nvidia-modelopt 0.47.0; SCRIPTS is collect_hidden_states of
                                                       Model-Optimizer a2fbac7: its script on a tiny model
    PEER_PYTHON make.py deepspec                       DeepSpec afdfa7c on PYTHONPATH: its writer

Each folder gets expected.safetensors: ids_0, mask_0, states_0 and, where the project's reader gives it, last_0, ... as
that reader returned them. Legend: T tokens, L layers, D hidden.
"""

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
LAYERS, HIDDEN, LENGTHS = [1, 2], 16, (6, 9, 12)

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Read = list[dict[str, torch.Tensor]]


def samples() -> list[Sample]:
    """ids [T], mask [T], states bf16 [T, L + 1, D] of uneven size: a large channel, a zero, a token of zeros."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for n in LENGTHS:
        states = torch.randn(n, len(LAYERS) + 1, HIDDEN, generator=generator)
        states[..., 3] *= 300
        states[..., 5] = 0
        states[1] = 0
        ids = torch.randint(3, 300, (n,), generator=generator)
        out.append((ids, (torch.arange(n) >= n // 3).long(), states.bfloat16()))
    return out


def specforge(out: Path, packed: bool = False) -> Read:
    """Its DFlash layout; read by its file store."""
    from specforge.algorithms.common import dflash_family_data as family
    from specforge.algorithms.dflash.providers import algorithm_providers
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    layout = algorithm_providers().offline[0].capture_layout
    folder = out / "rows_0-2000"
    folder.mkdir()
    for i, (ids, mask, states) in enumerate(samples()):
        values = {
            "input_ids": ids.clone(),
            "loss_mask": mask.clone(),
            "aux_hidden_states": states[:, :-1].flatten(1)[None].clone(),
            "last_hidden_states": states[None, :, -1].clone(),
        }
        path = folder / f"data_{i}.ckpt{'.gz' if packed else ''}"
        if packed:
            with gzip.open(path, "wb", compresslevel=6) as file:
                torch.save(layout.materialize(values), file)
        else:
            torch.save(layout.materialize(values), path)
    store, normalise = LocalFeatureStore(), family.build_offline_normalizer(1 << 20)
    refs = family.build_offline_reader("dflash", str(out), run_id="t", ttt_length=1, max_len=1 << 20).read()
    found = [normalise(store.get(ref)[0]) for ref in refs]
    return [{"ids": f["input_ids"][0], "mask": f["loss_mask"][0], "states": f["hidden_states"][0]} for f in found]


def speculators(out: Path, fp8: bool = False) -> Read:
    """Rows by datasets, files by safetensors as vLLM's connector writes them; read by its ArrowDataset."""
    from datasets import Dataset
    from hs_connectors import fp8_utils
    from hs_connectors.transfer import FileTransfer, FP8Transfer
    from speculators.train.data import ArrowDataset

    made = samples()
    rows = {"input_ids": [s[0].tolist() for s in made], "loss_mask": [s[1].tolist() for s in made]}
    Dataset.from_dict({**rows, "seq_len": list(LENGTHS)}).with_format("torch").save_to_disk(str(out))
    folder = out / "hidden_states"
    folder.mkdir()
    for i, (ids, _, states) in enumerate(made):
        values = {"hidden_states": states, "token_ids": ids}
        if fp8:
            values["hidden_states"], values[fp8_utils.SCALES_KEY] = fp8_utils.quantize_tensor_to_fp8(states)
        save_file(values, folder / f"hs_{i}.safetensors")
    transfer = (FP8Transfer if fp8 else FileTransfer)(folder)
    dataset = ArrowDataset(max_len=1 << 20, datapath=out, transfer=transfer, on_missing="raise")
    found = [dataset[i] for i in range(len(dataset))]
    names = {"ids": "input_ids", "mask": "loss_mask", "states": "hidden_states", "last": "verifier_last_hidden_states"}
    return [{short: f[name] for short, name in names.items()} for f in found]


def modelopt(out: Path) -> Read:
    """Its script over chats with a tiny Llama; that it means the output of layer id is checked here."""
    from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset
    from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(HERE.parents[1]))
    from targets import tokenizer

    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1)
    template = (
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content if m.role == 'assistant' }}"
        "{% endgeneration %}{{ m.content if m.role == 'user' }}{% endfor %}"
    )
    chats = [("the red stone", "blue river and copy"), ("next day", "seven eight nine"), ("what is", "a list of green")]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        LlamaForCausalLM(config).bfloat16().save_pretrained(work / "model")
        tokenizer().save_pretrained(work / "model")
        (work / "template").write_text(template)
        lines = [
            {
                "conversation_id": f"chat-{i}",
                "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}],
            }
            for i, (q, a) in enumerate(chats)
        ]
        (work / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        script = Path(sys.argv[2]) / "compute_hidden_states_hf.py"
        flags = ["--aux-layers", ",".join(map(str, LAYERS)), "--answer-only-loss", "--max-seq-len", "64"]
        places = ["--model", work / "model", "--input-data", work / "chats.jsonl", "--output-dir", out]
        subprocess.run([sys.executable, script, *places, *flags, "--chat-template", work / "template"], check=True)
        dataset = OfflineSupervisedDataset([str(p) for p in sorted(out.glob("*.pt"))], answer_only_loss=True)
        found = [dataset[i] for i in range(len(dataset))]
        net = AutoModel.from_pretrained(work / "model", dtype="auto")
        for f in found:
            taken: list[torch.Tensor] = []
            hooks = [
                net.layers[i].register_forward_hook(lambda m, a, output, taken=taken: taken.append(output[0]))
                for i in LAYERS
            ]
            with torch.inference_mode():
                net(f["input_ids"][None])
            for hook in hooks:
                hook.remove()
            streams = torch.cat([t.reshape(-1, HIDDEN) for t in taken], 1)
            assert torch.equal(streams, f["aux_hidden_states"]), "not the stream after layer id"
    names = {"ids": "input_ids", "mask": "loss_mask", "states": "aux_hidden_states", "last": "base_model_hidden_states"}
    return [{short: f[name] for short, name in names.items()} for f in found]


def deepspec(out: Path) -> Read:
    """Two ranks, small shards; read by its CacheDataset."""
    from deepspec.data import target_cache_dataset as cache

    out.rmdir()
    cache.prepare_target_cache_output_dir(str(out))
    summaries = []
    for rank, part in enumerate((samples()[:2], samples()[2:])):
        folder = out / "_tmp" / f"rank_{rank}"
        folder.mkdir()
        writer = cache.LocalTargetCacheWriter(rank_dir=str(folder), max_shard_bytes=1000)
        for i, (ids, mask, states) in enumerate(part):
            writer.write_sample(
                sample_id=i,
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                loss_mask=mask,
                target_hidden_states=states[:, :-1].flatten(1),
                target_last_hidden_states=states[:, -1],
            )
        writer.close()
        names = list(writer.local_shard_files)
        summary = cache.LocalCacheWriteSummary(rank, 2 * rank, 2 * rank + len(part), len(part), len(names), names)
        summaries.append(summary.to_json())
    shard_map, shards = cache.build_global_target_cache_shard_map(summaries)
    for rank, summary in enumerate(summaries):
        folder = out / "_tmp" / f"rank_{rank}"
        cache.rename_local_target_cache_shards(
            output_dir=str(out), rank_dir=str(folder), summary=summary, shard_map=shard_map
        )
    count = cache.finalize_target_cache_index(output_dir=str(out), summaries=summaries, shard_map=shard_map)
    manifest = cache.build_target_cache_manifest(
        num_samples=count, shards=shards, target_layer_ids=LAYERS, hidden_size=HIDDEN
    )
    cache.write_target_cache_manifest(output_dir=str(out), manifest=manifest)
    cache.cleanup_target_cache_tmp_dir(str(out))
    dataset = cache.CacheDataset(str(out))
    found = [dataset[i] for i in range(len(dataset))]
    names = {
        "ids": "input_ids",
        "mask": "loss_mask",
        "states": "target_hidden_states",
        "last": "target_last_hidden_states",
    }
    return [{short: f[name] for short, name in names.items()} for f in found]


FORMATS: dict[str, Callable[..., Any]] = {
    "specforge": specforge,
    "specforge-gz": lambda out: specforge(out, packed=True),
    "speculators": speculators,
    "speculators-fp8": lambda out: speculators(out, fp8=True),
    "modelopt": modelopt,
    "deepspec": deepspec,
}

if __name__ == "__main__":
    place = HERE / sys.argv[1]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    read = FORMATS[sys.argv[1]](place)
    expected = {f"{name}_{i}": value.contiguous().clone() for i, f in enumerate(read) for name, value in f.items()}
    save_file(expected, place / "expected.safetensors")
