"""Model-Optimizer's dumped conversations: a torch.save dictionary a file.

    input_ids, loss_mask   int64 [T]
    aux_hidden_states      bf16 [T, L * D]
    hidden_states          bf16 [T, D], the last one
    conversation_id

Three scripts write this, and a file does not say which. compute_hidden_states_hf.py takes hidden_states[id + 1], the
stream after layer id as ours; its last hidden state is after the final norm, so it is not read, and an id of the last
layer is refused, since HF norms that one too. compute_hidden_states_vllm.py hands the same ids to vLLM, where id means
the stream that enters layer id: after layer id - 1. Its last hidden state is before the norm. How the third,
compute_hidden_states_trtllm.py, counts was not found out, so its dumps are not offered.
"""

from functools import partial
from pathlib import Path

import torch

from dflash_offline.shards.errors import UsageError
from dflash_offline.tools.peers.contract import (
    PeerCache,
    PeerSample,
    Shape,
    expect,
    field,
    given_layers,
    ids_and_mask,
    load_pt,
    numbered,
)


def _open(folder: Path, shape: Shape, vllm: bool) -> PeerCache:
    given = given_layers(shape, "Model-Optimizer")
    if not vllm and shape.depth - 1 in given:
        raise UsageError(f"layers: {shape.depth - 1} is the last layer, whose state this dump holds only normed")
    layers = tuple(i - 1 for i in given) if vllm else given
    files = numbered(list(folder.rglob("*.pt")), folder, ".pt files")

    def sample(number: int) -> PeerSample:
        path = files[number]
        values = load_pt(path)
        if "loss_mask" not in values:
            raise UsageError(f"{path}: no loss_mask; dump again with --answer-only-loss")
        ids, mask = ids_and_mask(field(values, "input_ids", path), field(values, "loss_mask", path), path)
        states, last = field(values, "aux_hidden_states", path), field(values, "hidden_states", path)
        expect(states, [len(ids), len(given) * shape.hidden], [torch.bfloat16], "aux_hidden_states", path)
        expect(last, [len(ids), shape.hidden], [torch.bfloat16], "hidden_states", path)
        return PeerSample(
            place=str(path.relative_to(folder)),
            id=str(values.get("conversation_id", path.stem)),
            input_ids=ids,
            loss_mask=mask,
            states=lambda: states.reshape(-1, len(given), shape.hidden),
            last_hidden=(lambda: last) if vllm else None,
        )

    return PeerCache(layers=layers, count=len(files), sample=sample)


open_hf, open_vllm = partial(_open, vllm=False), partial(_open, vllm=True)
