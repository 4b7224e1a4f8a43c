"""The kernel of the loss against torch: on a GPU, or under TRITON_INTERPRET=1 on the CPU."""

import os

import torch

from dflash_offline.train.loss import plain_losses
from dflash_offline.train.loss_kernel import losses

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

# Triton's interpreter cuts where a GPU rounds to bf16.
for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):
    for slots, size in ((1, 5), (7, 4096), (3, 10_001), (0, 9)):
        generator = torch.Generator().manual_seed(size)
        logits, teacher = (torch.randn(slots, size, generator=generator).mul(4).to(DEVICE, dtype) for _ in range(2))
        logits[:, 3], teacher[:, 0] = 30.0, -80.0
        label = torch.randint(0, size, (slots,), generator=generator).to(DEVICE)
        label[:1] = size - 1
        for other, kd in ((None, 0.0), (None, 0.3), (teacher, 0.3), (teacher, 1.0)):
            ours, torchs = logits.clone(), logits.clone()
            found, wanted = losses(ours, label, other, kd), plain_losses(torchs, label, other, kd)
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-5)
            torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=1e-6)
tied = torch.zeros(1, 9000, device=DEVICE)
assert losses(tied, torch.tensor([2], device=DEVICE), None, 0.0)[2].item() == 0
