"""Errors for arguments of a wrong type: tensors, numbers, sizes."""

from numbers import Integral
from typing import SupportsFloat

import torch
from torch import Tensor

STRIDED = torch.strided  # looked up once: a call's look at every operand costs the host 0.1 µs


def require_tensors(*optional: str, **given: object) -> None:
    """Raise where an argument is no dense tensor with strides; it may be None where optional.

    Raises:
        TypeError: an argument that is no tensor; it names the first.
        ValueError: a sparse or nested one, or of another layout without strides.
    """
    for name, value in given.items():
        dense = getattr(value, "layout", None) is STRIDED and not value.is_nested  # type: ignore[attr-defined]
        if not dense and (value is not None or name not in optional):
            _refuse(name, value)


def _refuse(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        kind = "" if value is None else f"the {type(value).__name__} "
        raise TypeError(f"{name} must be a torch.Tensor, got {kind}{value!r:.60}")
    kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
    raise ValueError(f"{name} must be a dense tensor with strides, got {kind}")


def require_number(name: str, value: object) -> None:
    """Raise a ValueError where a setting is no number."""
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"{name} must be a number, got {value!r:.60}")


def require_size(name: str, value: object) -> None:
    """Raise a ValueError where a width is no whole number of at least 1."""
    if not is_whole(value) or int(value) < 1:  # type: ignore[call-overload]
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r:.60}")


def is_whole(value: object) -> bool:
    """True for a whole number, also NumPy's or one that torch.export keeps open; no bool."""
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)
