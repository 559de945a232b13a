"""The MLP's products in fp32 at torch's "highest": each of split factors where that pays."""

from __future__ import annotations

from torch import Tensor

from fusedlib.kernels.products import FP32, Multiplication, Products
from fusedlib.kernels.split import mm
from fusedlib.kernels.split.product import stored_product


def _where_it_pays(
    plain: Multiplication, a_turned: bool = False, b_turned: bool = False
) -> Multiplication:
    """A B of A and B as they are stored, transposed if turned; `plain` is how torch computes it."""
    turned = a_turned, b_turned

    def product(a: Tensor, b: Tensor) -> Tensor:
        if not mm.split_pays(a.shape[a_turned], b.shape[not b_turned], a.shape[not a_turned]):
            return plain(a, b)
        if mm.watched(a, b):
            left, right = a.t() if a_turned else a, b.t() if b_turned else b
            return mm.split_mm_operator(left, right)
        return stored_product(a, b, turned)

    return product


PRODUCTS = Products(
    gate_up=_where_it_pays(FP32.gate_up, b_turned=True),
    y=_where_it_pays(FP32.y, b_turned=True),
    dh=_where_it_pays(FP32.dh),
    d_x=_where_it_pays(FP32.d_x),
    d_w_gate_up=_where_it_pays(FP32.d_w_gate_up, a_turned=True),
    d_w_down=_where_it_pays(FP32.d_w_down, a_turned=True),
    splits=True,
)
