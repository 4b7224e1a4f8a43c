"""SpecForge's offline features: rows_0-2000/data_0.ckpt (or .ckpt.gz), a torch.save dictionary a sample.

    input_ids, loss_mask   int64 [T]
    hidden_states          bf16 [1, T, L * D] or [T, L * D]

Layers: its draft config's `target_layer_ids` are decoder layers from 0 and mean the stream after the layer, as ours:
its `extract_context_feature` reads hidden_states[id + 1], and SGLang's set_dflash_layers_to_capture adds the 1. The
files do not say them. It saves batches padded to their longest row, and no attention mask: `trim` takes the padding
off. DSpark's extra target_last_hidden_states are not read: nothing says whether they are normed.
"""

from pathlib import Path

import torch

from dflash_offline.shards.errors import UsageError
from dflash_offline.tools.peers.contract import (
    PeerCache,
    PeerSample,
    Shape,
    describe,
    expect,
    field,
    given_layers,
    ids_and_mask,
    load_pt,
    numbered,
)


def open_cache(folder: Path, shape: Shape) -> PeerCache:
    """All feature files under `folder`, however it is divided."""
    layers = given_layers(shape, "SpecForge")
    found = [p for p in folder.rglob("*") if p.name.endswith((".ckpt", ".ckpt.gz"))]
    files = numbered(found, folder, ".ckpt or .ckpt.gz files")

    def sample(number: int) -> PeerSample:
        path = files[number]
        values = load_pt(path)
        ids, mask = ids_and_mask(field(values, "input_ids", path), field(values, "loss_mask", path), path)
        states = field(values, "hidden_states", path)
        if states.dim() == 3:
            if len(states) != 1:
                raise UsageError(f"{path}: hidden_states is {describe(states)}, expected one sample")
            states = states[0]
        expect(states, [len(ids), len(layers) * shape.hidden], [torch.bfloat16], "hidden_states", path)
        return PeerSample(
            place=str(path.relative_to(folder)),
            id=path.name.split(".")[0],
            input_ids=ids,
            loss_mask=mask,
            states=lambda: states.reshape(-1, len(layers), shape.hidden),
        )

    return PeerCache(layers=layers, count=len(files), sample=sample)
