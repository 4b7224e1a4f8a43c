"""`python specforge_curve.py FOLDER`: twenty steps of SpecForge's own DFlash module on what FOLDER holds.

FOLDER: config.json of the drafter, weights.safetensors (its first weights), target.safetensors (embedding and head),
steps.safetensors (`step.name`: ids, mask, states, anchors and which of them are real, of a padded batch), and run.json
(loss type, gamma, rates, clip). Prints losses and gradient norms as JSON. Runs where `specforge` can be imported.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel  # type: ignore[import-not-found]
from specforge.modeling.draft.dflash import DFlashDraftModel  # type: ignore[import-not-found]
from transformers import Qwen3Config

torch.set_num_threads(1)
folder = Path(sys.argv[1])
run, steps = json.loads((folder / "run.json").read_text()), load_file(folder / "steps.safetensors")
config = Qwen3Config.from_json_file(folder / "config.json")
config._attn_implementation = "sdpa"
draft = DFlashDraftModel(config).float()
draft.load_state_dict(load_file(folder / "weights.safetensors"))
target = load_file(folder / "target.safetensors")
embed = torch.nn.Embedding.from_pretrained(target["embed_tokens"].float())
head = torch.nn.Linear(*target["lm_head"].shape[::-1], bias=False)
head.weight = torch.nn.Parameter(target["lm_head"].float(), requires_grad=False)
model = OnlineDFlashModel(
    draft, head, embed, mask_token_id=draft.mask_token_id, block_size=draft.block_size, attention_backend="sdpa",
    loss_decay_gamma=run["gamma"], loss_type=run["loss_type"],
)  # fmt: skip
optimizer = torch.optim.AdamW(draft.parameters(), weight_decay=0.0)
out = []
for step, rate in enumerate(run["rates"]):
    given = {name: steps[f"{step}.{name}"] for name in ("ids", "mask", "states", "anchors", "real")}
    model._sample_anchor_positions = lambda *_, given=given: (given["anchors"], given["real"].bool())
    loss, accuracy, _ = model(given["ids"], given["states"].float(), given["mask"].float())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), run["clip"])
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    out.append({"loss": float(loss.detach()), "grad_norm": float(norm), "accuracy": float(accuracy)})
print(json.dumps(out))
