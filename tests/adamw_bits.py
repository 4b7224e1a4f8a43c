"""AdamW in one pass against torch's: on a GPU, or under TRITON_INTERPRET=1 on the CPU."""

import os

import torch
from torch import nn

from dflash_offline.train.adamw import AdamW

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SHAPES = [(50, 70), (1,), (2048,), (33,)]


def weights(seed: int) -> list[nn.Parameter]:
    """Some, with gradients of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]
    for number, p in enumerate(made):
        p.grad = torch.empty_like(p)
        p.grad.copy_(torch.randn(p.shape, generator=generator) * 10.0 ** (3 * number - 6))
    return made


def main() -> None:
    """Three steps; the rounded copies are of the new weights."""
    ours, theirs = weights(0), weights(0)
    copies = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in ours[:2]}
    one, other = (
        kind(
            [{"params": w[:2], "weight_decay": 0.1}, {"params": w[2:], "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
        )
        for kind, w in ((AdamW, ours), (torch.optim.AdamW, theirs))
    )
    for number in range(3):
        scale = 0.3 + number
        one.apply(scale, ours[:1], copies)  # as where the first is sent meanwhile
        one.apply(scale, ours[1:], copies)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad * scale
        other.step()
        for a, b in zip(ours, theirs, strict=True):
            for x, y in ((a, b), *((one.state[a][n], other.state[b][n]) for n in ("exp_avg", "exp_avg_sq"))):
                assert (x - y).abs().max() <= 1e-6 * y.abs().max()
        for p, copy in copies.items():
            if DEVICE == "cuda":
                assert torch.equal(copy, p.detach().bfloat16())
            torch.testing.assert_close(copy.float(), p.detach(), rtol=2**-7, atol=0)  # the interpreter cuts
        assert float(one.state[ours[0]]["step"]) == number + 1
    print("one pass equals torch's AdamW")


if __name__ == "__main__":
    main()
