"""What is ordinary in a layer: which tokens, and the mean and spread of every channel over them.

A few tokens of a layer (attention sinks) carry massive values in a few channels. They say nothing about the rest, so
they are left out of the statistics, and so is a lone outlier of a channel.
"""

import torch
from torch import Tensor

MASSIVE_NORM = 4.0
"""A token is ordinary while its norm is at most this many times the median norm of its layer."""
LONE_OUTLIER = 16.0
"""A value further than this from its channel's mean, in standard deviations, is left out of a second estimate."""
LIMIT = 2.0**100
"""Statistics are kept within [1 / LIMIT, LIMIT], where neither they nor their reciprocals overflow or are flushed."""


def ordinary(states_TD: Tensor) -> Tensor:
    """Bool [T]: the layer's tokens without massive ones. All-zero tokens do not count for the median."""
    norm_T = states_TD.double().norm(dim=1)
    alive_T = norm_T > 0
    return norm_T <= MASSIVE_NORM * norm_T[alive_T].median() if alive_T.any() else ~alive_T


def statistics(states_TD: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 mean and spread [D] of one layer's channels over its ordinary tokens; the spread is never zero.

    Its floor keeps constant channels safe: 2^-9 of the mean is about the rounding of bf16 itself, so that a constant
    which moves by one bf16 step later moves by a few spreads; 2^-24 of the layer's rms serves channels that were zero.
    """
    x_TD = states_TD[ordinary(states_TD)].double()
    mean_D, spread_D = x_TD.mean(dim=0), x_TD.std(dim=0, correction=0)
    near_TD = (x_TD - mean_D).abs() <= LONE_OUTLIER * spread_D
    count_D = near_TD.sum(dim=0)
    mean_D = (x_TD * near_TD).sum(dim=0) / count_D
    spread_D = (((x_TD - mean_D).square() * near_TD).sum(dim=0) / count_D).sqrt()
    rms = x_TD.square().mean().sqrt()
    if len(x_TD) < 2:
        # One token has no spread: until there is more, its size stands for it.
        mean_D, spread_D = torch.zeros_like(mean_D), rms.expand_as(spread_D)
    spread_D = torch.maximum(spread_D, torch.maximum(mean_D.abs() * 2.0**-9, rms * 2.0**-24))
    spread_D = torch.where(spread_D > 0, spread_D, 1.0)
    return mean_D.clamp(-LIMIT, LIMIT).float(), spread_D.clamp(1 / LIMIT, LIMIT).float()
