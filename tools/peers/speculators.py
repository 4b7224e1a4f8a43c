"""speculators' training data: a folder saved by `datasets`, and hidden_states/hs_<row>.safetensors inside it.

    rows    input_ids, loss_mask: list; seq_len
    files   token_ids      int64 [T]
            hidden_states  bf16 [T, L + 1, D]; or float8_e4m3fn with hidden_states_scales f32 [T, 1, 1]

Layers: the ids given to launch_vllm.py are vLLM's, the stream that enters layer id, so ours are id - 1: its converter
of z-lab checkpoints, whose ids are as ours, adds 1. The last of the L + 1 is vLLM's output of the last layer before the
norm; its trainer splits it off. Fp8 is taken back as its own reader does: value and scale rounded to bf16, then
multiplied in bf16. Rows without a file, or whose file has other ids, it leaves out.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_offline.extract.dataset import SkipRow
from dflash_offline.shards.errors import UsageError
from dflash_offline.tools.peers.contract import (
    PeerCache,
    PeerSample,
    Shape,
    given_layers,
    ids_and_mask,
)

_SCALES = "hidden_states_scales"
_DTYPES = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}


def open_cache(folder: Path, shape: Shape) -> PeerCache:
    """The rows of `folder`, in order."""
    given = given_layers(shape, "speculators")
    rows = _rows(folder)

    def sample(number: int) -> PeerSample:
        path = folder / "hidden_states" / f"hs_{number}.safetensors"
        if not path.is_file():
            raise SkipRow("no_states", f"{path} is missing")
        ids, mask = (
            torch.tensor(rows.column(name)[number].values.to_numpy(zero_copy_only=False))
            for name in ("input_ids", "loss_mask")
        )
        ids_T, mask_T = ids_and_mask(ids, mask, folder / f"row {number}")
        wanted = [len(ids), len(given) + 1, shape.hidden]
        with _open(path) as file:
            fp8 = _SCALES in file.keys()  # noqa: SIM118
            kinds = {"hidden_states": ("F8_E4M3" if fp8 else "BF16", wanted)} | (
                {_SCALES: ("F32", [len(ids), 1, 1])} if fp8 else {}
            )
            for name in ("token_ids", *kinds):
                if name not in file.keys():  # noqa: SIM118
                    raise UsageError(f"{path}: no {name}; found {', '.join(file.keys())}")
            for name, (kind, size) in kinds.items():
                part = file.get_slice(name)
                if part.get_dtype() != kind or part.get_shape() != size:
                    found = f"{part.get_dtype()} {part.get_shape()}"
                    raise UsageError(f"{path}: {name} is {found}, expected {kind} {size}")
            if not torch.equal(file.get_tensor("token_ids").long(), ids.long()):
                raise SkipRow("token_ids_differ", f"{path} has other token_ids than row {number}")
        return PeerSample(
            place=str(path.relative_to(folder)),
            id=str(number),
            input_ids=ids_T,
            loss_mask=mask_T,
            states=lambda: _read(path, fp8, slice(0, len(given))),
            last_hidden=lambda: _read(path, fp8, len(given)),
        )

    return PeerCache(layers=tuple(i - 1 for i in given), count=len(rows), sample=sample)


def _read(path: Path, fp8: bool, layers: slice | int) -> Tensor:
    with _open(path) as file:
        states: Tensor = file.get_slice("hidden_states")[:, layers]
        if fp8:
            scales: Tensor = file.get_tensor(_SCALES)
            states = states.to(torch.bfloat16) * scales.to(torch.bfloat16).reshape(-1, *[1] * (states.dim() - 1))
    return states


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not a whole safetensors file ({error}); generate it again") from None


def _rows(folder: Path) -> pa.Table:
    """The Arrow stream files that state.json lists, mapped."""
    state = folder / "state.json"
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    except FileNotFoundError:
        raise UsageError(f"{folder}: no state.json; expected a folder saved by datasets, with hidden_states/") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{state}: not the state of a saved dataset ({error})") from None
    tables = []
    for path in (folder / name for name in names):
        try:
            tables.append(pa.ipc.open_stream(pa.memory_map(str(path))).read_all())
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"{path}: not a whole Arrow stream ({reason}); prepare the data again") from None
        for name in ("input_ids", "loss_mask"):
            found = tables[-1].schema
            if name not in found.names or not _is_integers(found.field(name).type):
                raise UsageError(f"{path}: columns are {found.names}; expected integer lists input_ids and loss_mask")
    if not sum(map(len, tables)):
        raise UsageError(f"{folder}: no rows")
    return pa.concat_tables([table.select(["input_ids", "loss_mask"]) for table in tables])


def _is_integers(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return lists and (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type))
