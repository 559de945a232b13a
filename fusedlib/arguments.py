"""What functions and modules say of arguments of another kind than theirs."""

from numbers import Integral
from typing import SupportsFloat

from torch import Tensor


def require_tensors(*optional: str, **given: object) -> None:
    """Raise a TypeError that names the first argument that is no tensor; None where optional."""
    for name, value in given.items():
        if not isinstance(value, Tensor) and (value is not None or name not in optional):
            kind = "" if value is None else f"the {type(value).__name__} "
            raise TypeError(f"{name} must be a torch.Tensor, got {kind}{value!r:.60}")


def require_number(name: str, value: object) -> None:
    """Raise a ValueError where a setting is no number."""
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"{name} must be a number, got {value!r:.60}")


def require_size(name: str, value: object) -> None:
    """Raise a ValueError where a width is no whole number of at least 1."""
    if not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
