"""The MLP's products in fp32 at torch's "highest": each of split factors where that pays."""

from __future__ import annotations

from torch import Tensor

from fusedlib.kernels.host.products import (
    TORCH_FP32_PRODUCTS,
    GateUpMultiplication,
    Multiplication,
    Products,
)
from fusedlib.kernels.split import mm
from fusedlib.kernels.split.product import split_product_of_stored


def _split_if_faster(
    plain: Multiplication, a_turned: bool = False, b_turned: bool = False
) -> Multiplication:
    """A B of A and B as they are stored, transposed if turned; `plain` is how torch computes it."""
    turned = a_turned, b_turned

    def product(a: Tensor, b: Tensor) -> Tensor:
        if not mm.is_faster_split(a.shape[a_turned], b.shape[not b_turned], a.shape[not a_turned]):
            return plain(a, b)
        if mm.is_operator_visible(a, b):
            left, right = a.t() if a_turned else a, b.t() if b_turned else b
            return mm.split_mm_operator(left, right)
        return split_product_of_stored(a, b, turned)

    return product


def _split_gate_up_if_faster(plain: GateUpMultiplication, turned: bool) -> GateUpMultiplication:
    """The same by the weights of gate and up. A pair is split as if it were one matrix: its parts,
    and so the product, are those of a packed weight.
    """
    by_packed = _split_if_faster(lambda a, b: plain(a, b, None), b_turned=turned)

    def product(a: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
        if w_up is None:
            return by_packed(a, w_gate)
        wide, hidden = 2 * w_gate.shape[0], w_gate.shape[1]
        if not mm.is_faster_split(a.shape[0], *((wide, hidden) if turned else (hidden, wide))):
            return plain(a, w_gate, w_up)
        if mm.is_operator_visible(a, w_gate, w_up):
            return mm.split_mm_gate_up(a, w_gate, w_up, turned)
        return split_product_of_stored(a, w_gate, (False, turned), w_up)

    return product


SPLIT_PRODUCTS = Products(
    gate_up=_split_gate_up_if_faster(TORCH_FP32_PRODUCTS.gate_up, turned=True),
    y=_split_if_faster(TORCH_FP32_PRODUCTS.y, b_turned=True),
    dh=_split_if_faster(TORCH_FP32_PRODUCTS.dh),
    d_x=_split_gate_up_if_faster(TORCH_FP32_PRODUCTS.d_x, turned=False),
    d_w_gate_up=_split_if_faster(TORCH_FP32_PRODUCTS.d_w_gate_up, a_turned=True),
    d_w_down=_split_if_faster(TORCH_FP32_PRODUCTS.d_w_down, a_turned=True),
    splits=True,
)
