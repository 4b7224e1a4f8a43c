"""How close lossy states are to the real ones, in dB, per layer. Legend: T tokens, L layers, D hidden."""

import torch
from torch import Tensor


def snr(states_TLD: Tensor, lossy_TLD: Tensor) -> Tensor:
    """[L]: energy of the states over energy of the error. A few channels hold most energy, so it hides the others."""
    x_TLD, error_TLD = _with_error(states_TLD, lossy_TLD)
    return _decibel(x_TLD.square().sum(dim=(0, 2)) / error_TLD.square().sum(dim=(0, 2)))


def chan_snr(states_TLD: Tensor, lossy_TLD: Tensor) -> Tensor:
    """[L]: every channel's error by that channel's own variance, averaged: a lost channel shows whatever its size.

    A constant channel has no variance to compare with: it is left out when it is exact, else the result is -inf.
    """
    x_TLD, error_TLD = _with_error(states_TLD, lossy_TLD)
    noise_LD = error_TLD.square().mean(dim=0) / x_TLD.var(dim=0, correction=0)  # 0 / 0 is nan: left out
    return _decibel(1 / noise_LD.nanmean(dim=1))


def _with_error(states_TLD: Tensor, lossy_TLD: Tensor) -> tuple[Tensor, Tensor]:
    x_TLD = states_TLD.double()
    return x_TLD, lossy_TLD.double() - x_TLD


def _decibel(ratio: Tensor) -> Tensor:
    return 10 * torch.log10(ratio)
