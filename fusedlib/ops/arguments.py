"""Errors for arguments: tensors, numbers and sizes, and operands that do not go together."""

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


def require_alike(*of_any_dtype: str, **named: Tensor | None) -> None:
    """Raise a ValueError where operands have not one device and one floating-point dtype.

    Under autocast dtypes may differ, and those of `of_any_dtype` everywhere.
    """
    (first, x), *_ = named.items()
    assert x is not None
    cast = autocast_enabled(x.device.type)
    for name, operand in named.items():
        if operand is None:
            continue
        dtype = operand.dtype
        if operand.device != x.device:
            raise ValueError(f"{name} is on {operand.device}, {first} on {x.device}")
        if not dtype.is_floating_point or (dtype.itemsize == 1 and not cast):
            raise ValueError(f"{name} must be fp16, bf16, fp32 or float64, got {dtype}")
        if dtype != x.dtype and not cast and name not in of_any_dtype:
            raise ValueError(
                f"{name} is {dtype}, {first} is {x.dtype}: they must have one floating-point "
                "dtype, or run under autocast"
            )


def autocast_enabled(device_type: str) -> bool:
    """True if autocast is on for devices of that type."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape as a plain tuple, for messages."""
    return tuple(tensor.shape)


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


def refuse_outside(positions: Tensor, length: int) -> None:
    """Raise an IndexError that names the first position outside tables of so many rows."""
    outside = positions[(positions < 0) | (positions >= length)]
    if outside.numel():
        raise IndexError(
            f"position {outside[0].item()} is outside the tables cos and sin of {length} rows: "
            "each must be at least 0 and smaller than that"
        )


HALF_DTYPES = (torch.bfloat16, torch.float16)


KERNEL_DTYPES = (*HALF_DTYPES, torch.float32)  # that the library's kernels take


FEW_TOKENS = 64
