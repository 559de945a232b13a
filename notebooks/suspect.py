"""WRONG ON PURPOSE: the exercise of notebook `02_faster`, which asks what is wrong. No peeking."""

import torch
from torch import Tensor

_scales: dict[tuple[int, torch.Size], Tensor] = {}


def suspect(x: Tensor, scale: Tensor) -> Tensor:
    """An RMSNorm over the last dimension, with eps 1e-6."""
    key = x.data_ptr(), x.shape
    if key not in _scales:
        _scales[key] = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x * _scales[key] * scale
