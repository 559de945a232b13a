"""The MLP's products in fp32 at torch's "highest": each of split factors where that pays."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fusedlib.launch import PlannedLaunch, contiguous_layout, without_memory
from fusedlib.ops.linear.route import is_faster_split
from fusedlib.ops.linear.split import mm
from fusedlib.ops.linear.split.product import SplitProduct, split_product_of_stored
from fusedlib.ops.mlp.problem import MLPProblem
from fusedlib.ops.mlp.products import (
    EITHER_SAVE,
    TORCH_FP32_PRODUCTS,
    GateUpMultiplication,
    Multiplication,
    Products,
)


def _split_if_faster(
    plain: Multiplication, a_transposed: bool = False, b_transposed: bool = False
) -> Multiplication:
    """A product A B, split if that is faster; otherwise `plain`, torch's own, computes it."""
    transposed = a_transposed, b_transposed

    def product(a: Tensor, b: Tensor) -> Tensor:
        if not is_faster_split(
            a.shape[a_transposed], b.shape[not b_transposed], a.shape[not a_transposed]
        ):
            return plain(a, b)
        if mm.is_operator_visible(a, b):
            left, right = a.t() if a_transposed else a, b.t() if b_transposed else b
            return mm.split_mm_operator(left, right)
        return split_product_of_stored(a, b, transposed)

    return product


def _split_gate_up_if_faster(plain: GateUpMultiplication, transposed: bool) -> GateUpMultiplication:
    """A product with the weights of gate and up, split if that is faster.

    A pair is split as one matrix, so that its product has the bits of a packed weight's.
    """
    by_packed = _split_if_faster(lambda a, b: plain(a, b, None), b_transposed=transposed)

    def product(a: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
        if w_up is None:
            return by_packed(a, w_gate)
        wide, hidden = 2 * w_gate.shape[0], w_gate.shape[1]
        if not is_faster_split(a.shape[0], *((wide, hidden) if transposed else (hidden, wide))):
            return plain(a, w_gate, w_up)
        if mm.is_operator_visible(a, w_gate, w_up):
            return mm.split_mm_gate_up(a, w_gate, w_up, transposed)
        return split_product_of_stored(a, w_gate, (False, transposed), w_up)

    return product


class SplitProducts(Products):
    """Products of an MLP in fp32 at "highest"."""

    def launches(self, problem: MLPProblem) -> Iterator[PlannedLaunch]:
        """The launches of the six products of an MLP, as if all of them were split."""
        tokens, hidden, inner = problem.sizes
        sizes = (tokens, hidden), (tokens, inner), (tokens, 2 * inner), (2 * inner, hidden)
        layouts = [contiguous_layout(size, problem.dtype) for size in (*sizes, (hidden, inner))]
        x, h, gate_up, w_gate_up, w_down = without_memory(*layouts)
        for rows, upstream, weight in ((x, gate_up, w_gate_up), (h, x, w_down)):
            forms = {"y": (rows, weight, (False, True)), "d_x": (upstream, weight, (False, False)),
                     "d_w": (upstream, rows, (True, False))}  # fmt: skip
            for name, (a, b, transposed) in forms.items():
                for launch, matrices in SplitProduct(problem.device, a, b, transposed).launches(
                    a, b
                ):
                    kernel = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
                    words = f"{kernel.replace('_', ' ')} of {name}"
                    yield PlannedLaunch(words, EITHER_SAVE, launch, matrices)


SPLIT_PRODUCTS = SplitProducts(
    gate_up=_split_gate_up_if_faster(TORCH_FP32_PRODUCTS.gate_up, transposed=True),
    y=_split_if_faster(TORCH_FP32_PRODUCTS.y, b_transposed=True),
    dh=_split_if_faster(TORCH_FP32_PRODUCTS.dh),
    d_x=_split_gate_up_if_faster(TORCH_FP32_PRODUCTS.d_x, transposed=False),
    d_w_gate_up=_split_if_faster(TORCH_FP32_PRODUCTS.d_w_gate_up, a_transposed=True),
    d_w_down=_split_if_faster(TORCH_FP32_PRODUCTS.d_w_down, a_transposed=True),
    splits=True,
)
