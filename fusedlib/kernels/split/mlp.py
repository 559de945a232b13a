"""The MLP's products in fp32 at torch's "highest": each of split factors where that pays."""

from __future__ import annotations

from torch import Tensor

from fusedlib.kernels.host.products import FP32, Multiplication, MultiplicationByGateUp, Products
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


def _by_gate_up(plain: MultiplicationByGateUp, turned: bool) -> MultiplicationByGateUp:
    """The same by the weights of gate and up. A pair is split as if it were one matrix: its parts,
    and so the product, are those of a packed weight.
    """
    by_packed = _where_it_pays(lambda a, b: plain(a, b, None), b_turned=turned)

    def product(a: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
        if w_up is None:
            return by_packed(a, w_gate)
        wide, hidden = 2 * w_gate.shape[0], w_gate.shape[1]
        if not mm.split_pays(a.shape[0], *((wide, hidden) if turned else (hidden, wide))):
            return plain(a, w_gate, w_up)
        if mm.watched(a, w_gate, w_up):
            return mm.split_mm_gate_up(a, w_gate, w_up, turned)
        return stored_product(a, w_gate, (False, turned), w_up)

    return product


PRODUCTS = Products(
    gate_up=_by_gate_up(FP32.gate_up, turned=True),
    y=_where_it_pays(FP32.y, b_turned=True),
    dh=_where_it_pays(FP32.dh),
    d_x=_by_gate_up(FP32.d_x, turned=False),
    d_w_gate_up=_where_it_pays(FP32.d_w_gate_up, a_turned=True),
    d_w_down=_where_it_pays(FP32.d_w_down, a_turned=True),
    splits=True,
)
