"""Split products as a function and as an operator."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.compat import dispatch_mode_count
from fusedlib.op import operator
from fusedlib.ops.linear.route import is_faster_split
from fusedlib.ops.linear.split.product import split_product, split_product_of_stored

Shape = tuple[int, ...]


def split_mm(a: Tensor, b: Tensor) -> Tensor:
    """A B (m, n) of fp32 A (m, k) and B (k, n), split here; torch's own product where small.

    A factor stored transposed is taken as it lies; other strides are copied.

    Raises:
        ValueError: a factor that is not a float32 matrix, or sizes and devices that do not fit.
    """
    fits = a.ndim == 2 == b.ndim and a.shape[1] == b.shape[0] and a.device == b.device
    if not fits or a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError(
            "A must be (m, k) and B (k, n), float32 on one device, got "
            f"{a.dtype} {tuple(a.shape)} on {a.device} and {b.dtype} {tuple(b.shape)} on {b.device}"
        )
    if not is_faster_split(a.shape[0], b.shape[1], a.shape[1]):
        return torch.mm(a, b)
    return split_product(a, b)


def _multiply_gate_up(a: Tensor, w_gate: Tensor, w_up: Tensor, transposed: bool) -> Tensor:
    """A B, split, of A (m, k) and the rows of w_gate above those of w_up: they are B (k, n),
    or Bᵀ if transposed. All contiguous, fp32, on one device; the weights of one shape.
    """
    a, w_gate, w_up = (t.contiguous() for t in (a, w_gate, w_up))
    return split_product_of_stored(a, w_gate, (False, transposed), w_up)


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _shape_of_gate_up(a: Tensor, w_gate: Tensor, w_up: Tensor, transposed: bool) -> Tensor:
    return a.new_empty((a.shape[0], 2 * w_gate.shape[0] if transposed else w_gate.shape[1]))


def _flops(a: Shape, b: Shape, **_: Any) -> int:
    return 2 * prod(a) * b[1]


def _flops_of_gate_up(a: Shape, w_gate: Shape, w_up: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * (prod(w_gate) + prod(w_up))


# For torch.compile and whatever else watches operators. They have no gradient: those who call them
# do so where nobody asks for one.
split_mm_operator = operator("split_mm", split_mm, _shape, flops=_flops)
split_mm_gate_up = operator(
    "split_mm_gate_up", _multiply_gate_up, _shape_of_gate_up, flops=_flops_of_gate_up
)


def is_operator_visible(*factors: Tensor) -> bool:
    """True if a dispatch mode, a compiler or a subclass would see products as operators."""
    if dispatch_mode_count() or torch.compiler.is_compiling():
        return True
    return any(type(t) is not Tensor and type(t) is not Parameter for t in factors)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`split_mm`, as an operator where one is seen."""
    return split_mm_operator(a, b) if is_operator_visible(a, b) else split_mm(a, b)
