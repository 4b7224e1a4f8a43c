"""One other project's cache of the benchmark's samples, written and read by that project's own code.

    PEER_PYTHON peers.py PEER write|read SAMPLES FOLDER

Runs under the interpreter that has the project installed, so it imports nothing of ours. Prints one JSON line.
Legend: T tokens, L layers, D hidden.
"""

import gzip
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from safetensors import safe_open

LAYERS, HIDDEN, VOCAB = 5, 5120, 49152
BATCH, WORKERS, LONGEST, EPOCHS = 4, 2, 768, 4
LAYER_IDS = [1, 8, 14, 20, 27]

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Reader = Callable[[int], Iterator[int]]


def samples(path: Path) -> Iterator[Sample]:
    """ids [T], mask [T], states bf16 [T, L + 1, D], the last hidden state at the end; ids are never 0."""
    with safe_open(path, "pt") as file:
        ids, mask, states = (file.get_slice(name) for name in ("ids", "mask", "states"))
        at = 0
        for n in file.get_tensor("lengths").tolist():
            yield ids[at : at + n], mask[at : at + n], states[at : at + n]
            at += n


def write_specforge(folder: Path, data: Iterator[Sample], packed: bool = False) -> None:
    """As scripts/prepare_hidden_states.py saves a DFlash sample (the script is not in the wheel)."""
    rows = folder / "rows_0-2000"
    rows.mkdir()
    for i, (ids, mask, states) in enumerate(data):
        values = {"input_ids": ids, "loss_mask": mask, "hidden_states": states[:, :LAYERS].flatten(1)[None].clone()}
        if packed:
            with gzip.open(rows / f"data_{i}.ckpt.gz", "wb", compresslevel=6) as file:
                torch.save(values, file)
        else:
            torch.save(values, rows / f"data_{i}.ckpt")


def read_specforge(folder: Path) -> Reader:
    """Its threads, its store, its collator."""
    from specforge.algorithms.common import dflash_family_data as family
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    refs = family.build_offline_reader("dflash", str(folder), run_id="b", ttt_length=1, max_len=LONGEST).read()

    def epoch(number: int) -> Iterator[int]:
        random.Random(number).shuffle(refs)
        loader = FeatureDataLoader(
            LocalFeatureStore(),
            refs=refs,
            batch_size=BATCH,
            collate_fn=family.build_collator(),
            per_sample_transform=family.build_offline_normalizer(LONGEST),
            strategy="dflash",
            num_workers=WORKERS,
        )
        for batch in loader:
            yield int((batch.tensors["input_ids"] != 0).sum())

    return epoch


def write_speculators(folder: Path, data: Iterator[Sample], fp8: bool = False) -> None:
    """Arrow rows and a safetensors file a sample, as its data generation leaves them."""
    from datasets import Dataset
    from hs_connectors import fp8_utils
    from safetensors.torch import save_file

    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    files = []
    for ids, mask, states in data:
        values = {"hidden_states": states.contiguous(), "token_ids": ids}
        if fp8:
            values["hidden_states"], values[fp8_utils.SCALES_KEY] = fp8_utils.quantize_tensor_to_fp8(states)
        files.append(folder / f"hs_{len(files)}.safetensors")
        save_file(values, files[-1])
        for name, value in zip(rows, (ids.tolist(), mask.tolist(), len(ids)), strict=True):
            rows[name].append(value)
    Dataset.from_dict(rows).with_format("torch").save_to_disk(str(folder / "arrow"))
    (folder / "arrow" / "hidden_states").mkdir()
    for path in files:
        path.rename(folder / "arrow" / "hidden_states" / path.name)


def read_speculators(folder: Path, fp8: bool = False) -> Reader:
    """Its multipack sampler and spawned workers; one sample in forty is its validation split."""
    from hs_connectors.transfer import FileTransfer, FP8Transfer
    from speculators.train.dataloader import create_train_val_loaders

    transfer = (FP8Transfer if fp8 else FileTransfer)(folder / "arrow" / "hidden_states")
    loader, _ = create_train_val_loaders(
        data_path=str(folder / "arrow"),
        total_seq_len=LONGEST * BATCH,
        hidden_states_dtype=torch.bfloat16,
        transfer=transfer,
        vllm_endpoint="http://localhost",
        on_missing="raise",
        verifier_name_or_path="none",
        request_timeout=1,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=HIDDEN,
        num_target_layers=LAYERS,
        num_workers=WORKERS,
        prefetch_factor=4,
        preprocess=None,
        train_data_ratio=0.98,
    )

    def epoch(number: int) -> Iterator[int]:
        loader.batch_sampler.set_epoch(number)
        for batch in loader:
            yield int((batch["document_ids"] >= 0).sum())

    return epoch


def torch_reader(dataset: Any, collate: Any, count: Callable[[Any], torch.Tensor]) -> Reader:
    """A DataLoader whose workers outlive the epoch."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        prefetch_factor=4,
        collate_fn=collate,
        persistent_workers=True,
    )
    return lambda number: (int(count(batch)) for batch in loader)


def write_modelopt(folder: Path, data: Iterator[Sample]) -> None:
    """As collect_hidden_states/compute_hidden_states_hf.py saves a conversation (not in the wheel)."""
    for i, (ids, mask, states) in enumerate(data):
        values = {
            "input_ids": ids,
            "hidden_states": states[:, LAYERS].clone(),
            "aux_hidden_states": states[:, :LAYERS].flatten(1).clone(),
            "conversation_id": str(i),
            "loss_mask": mask,
        }
        torch.save(values, folder / f"{i}.pt")


def read_modelopt(folder: Path) -> Reader:
    """Its dataset and collator, which pads to the training length."""
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = [str(p) for p in sorted(folder.glob("*.pt"))]
    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    return torch_reader(dataset, EagleOfflineDataCollator(LONGEST), lambda b: (b["input_ids"] != 0).sum())


def write_deepspec(folder: Path, data: Iterator[Sample]) -> None:
    """One rank, one shard."""
    from deepspec.data import target_cache_dataset as cache

    folder.rmdir()
    cache.prepare_target_cache_output_dir(str(folder))
    rank = folder / "_tmp" / "rank_0"
    rank.mkdir()
    writer = cache.AsyncTargetCacheWriter(rank_dir=str(rank), max_shard_bytes=64 << 30)
    count = 0
    for ids, mask, states in data:
        writer.write_sample(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            loss_mask=mask,
            target_hidden_states=states[:, :LAYERS].flatten(1),
            target_last_hidden_states=states[:, LAYERS],
        )
        count += 1
    writer.close()
    names = list(writer.local_shard_files)
    summary = cache.LocalCacheWriteSummary(0, 0, count, count, len(names), names).to_json()
    shard_map, shards = cache.build_global_target_cache_shard_map([summary])
    cache.rename_local_target_cache_shards(
        output_dir=str(folder), rank_dir=str(rank), summary=summary, shard_map=shard_map
    )
    cache.finalize_target_cache_index(output_dir=str(folder), summaries=[summary], shard_map=shard_map)
    manifest = cache.build_target_cache_manifest(
        num_samples=count, shards=shards, target_layer_ids=LAYER_IDS, hidden_size=HIDDEN
    )
    cache.write_target_cache_manifest(output_dir=str(folder), manifest=manifest)
    cache.cleanup_target_cache_tmp_dir(str(folder))


def read_deepspec(folder: Path) -> Reader:
    """Its memory-mapped dataset and collator."""
    from deepspec.data import target_cache_dataset as cache

    return torch_reader(cache.CacheDataset(str(folder)), cache.CacheCollator(), lambda b: b["attention_mask"].sum())


def write_automodel(folder: Path, data: Iterator[Sample]) -> None:
    """Shards of 16 samples, padded to the training length as its producer does."""
    from nemo_automodel.components.datasets.llm import dspark_cache as cache

    batch: list[list[torch.Tensor]] = [[], [], [], []]
    count = shard = 0

    def flush() -> None:
        nonlocal shard
        cache.write_shard(str(folder), shard, dict(zip(cache.CACHE_KEYS, map(torch.stack, batch), strict=True)))
        shard += 1
        for column in batch:
            column.clear()

    for ids, mask, states in data:
        for column, value in zip(batch, (ids, mask, states[:, :LAYERS].flatten(1), states[:, LAYERS]), strict=True):
            column.append(torch.cat([value, value.new_zeros(LONGEST - len(value), *value.shape[1:])]))
        count += 1
        if len(batch[0]) == 16:
            flush()
    if batch[0]:
        flush()
    manifest = cache.build_cache_manifest(
        target_model="none",
        target_model_type="llama",
        target_text_config=SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=30),
        seq_length=LONGEST,
        dtype="bf16",
        num_samples=count,
        shard_size=16,
        target_layer_ids=LAYER_IDS,
        train_data_path="none",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256="none",
    )
    cache.write_manifest(str(folder), {**manifest, "complete": True})


def read_automodel(folder: Path) -> Reader:
    """Its DSpark cache; its DFlash recipe trains online only."""
    from nemo_automodel.components.datasets.llm import dspark_cache as cache

    loader = cache.build_cached_dspark_dataloader(
        cache_dir=str(folder), batch_size=BATCH, shuffle=True, num_workers=WORKERS
    )
    return lambda number: (int((batch["input_ids"] != 0).sum()) for batch in loader)


PEERS: dict[str, tuple[str, Callable[..., None], Callable[..., Reader]]] = {
    "specforge": ("specforge", write_specforge, read_specforge),
    "specforge-gz": ("specforge", lambda f, d: write_specforge(f, d, packed=True), read_specforge),
    "speculators": ("speculators", write_speculators, read_speculators),
    "speculators-fp8": (
        "speculators",
        lambda f, d: write_speculators(f, d, fp8=True),
        lambda f: read_speculators(f, fp8=True),
    ),
    "modelopt": ("nvidia-modelopt", write_modelopt, read_modelopt),
    "deepspec": ("deepspec", write_deepspec, read_deepspec),
    "automodel": ("nemo-automodel", write_automodel, read_automodel),
}


def cpu_seconds() -> float:
    """CPU time of this process and its workers so far; true on a busy machine too."""
    whole = psutil.Process()
    used = [p.cpu_times() for p in (whole, *whole.children(recursive=True))]
    # Workers that have ended are in the parent's account of its children.
    return sum(t.user + t.system for t in used) + used[0].children_user + used[0].children_system


def measure(package: str, phase: str, path: Path, folder: Path, write: Callable[..., None], read: Any) -> None:
    """Write the samples, or read EPOCHS times over; print what it took."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = ""
    result: dict[str, Any] = {"version": found, "torch": torch.__version__}
    begin = time.perf_counter()
    if phase == "write":
        folder.mkdir(parents=True)
        write(folder, samples(path))
        result["seconds"] = time.perf_counter() - begin
    else:
        epoch = read(folder)
        result["epochs"] = []
        for number in range(EPOCHS):
            begin, used = time.perf_counter(), cpu_seconds()
            tokens = sum(epoch(number))
            seconds, used = time.perf_counter() - begin, cpu_seconds() - used
            result["epochs"].append({"tokens": tokens, "seconds": seconds, "cpu seconds": used})
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    package_name, writer_of, reader_of = PEERS[sys.argv[1]]
    measure(package_name, sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), writer_of, reader_of)
