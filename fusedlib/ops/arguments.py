"""Arguments: errors where they do not go together; what autocast or a compiler makes of them."""

from numbers import Integral
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from fusedlib.invariant import is_batch_invariant

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
    if not isinstance(value, (float, SupportsFloat)):  # the second takes the host 9 µs
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
ALIGNMENT = 16  # sizes that are multiples of it are even, as kernels in half precision want them


def contiguous_and_aligned(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands; those that are not contiguous or not 16-byte aligned are copied."""
    bits, whole = 0, True
    for operand in operands:
        if operand is not None:
            bits |= operand.data_ptr()
            whole = whole and operand.is_contiguous()
    return operands if whole and not bits % 16 else tuple(map(_contiguous_and_aligned, operands))


def _contiguous_and_aligned(operand: Tensor | None) -> Tensor | None:
    if operand is None:
        return None
    whole = operand.contiguous()
    return whole.clone() if whole.data_ptr() % 16 else whole


# --- autocast, and a compiler --------------------------------------------------------------------

MOST_COMPILED_TOKENS = 1024  # whose formulas Inductor compiles: see `left_to_compiler`


def is_distributed(*operands: Tensor | None) -> bool:
    """True if one is a DTensor, which has rules for torch's operators and none for ours."""
    return any(type(operand).__name__ == "DTensor" for operand in operands)


def cast_for_autocast(*operands: Tensor | None) -> Any:
    """The operands in autocast's dtype where it is on, as `torch.nn.functional.linear` has them.

    They stay as they are where one of them is in float64.
    """
    tensors = present(*operands)
    device_type = tensors[0].device.type
    if not autocast_enabled(device_type) or any(t.dtype == torch.float64 for t in tensors):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t is None else t.to(dtype) for t in operands)


def present(*operands: Tensor | None) -> list[Tensor]:
    """The operands that are not None."""
    return [t for t in operands if t is not None]


def left_to_compiler(tokens: int, fewest: int = 0) -> bool:
    """True if a compiler shall have the formula of a norm, a rotation or an MLP of so many tokens.

    Inductor launches what it compiles with less work of the host than an operator takes, which is
    called by way of Python: at 512 tokens a step of 8 layers of Qwen3-0.6B took 15.4 ms for 21.1
    (one H100). At 8,192 it took 34.3 for 32.9, for there the kernels are faster; nothing between
    was measured. A number of tokens that the compiler keeps open gets the operator, and no guard.
    """
    if not torch.compiler.is_compiling() or is_batch_invariant():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    few = statically_known_true(tokens <= MOST_COMPILED_TOKENS)
    return few and statically_known_true(tokens >= fewest)
