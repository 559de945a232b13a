"""The MLP's products in fp32 at torch's "highest": each of split factors where that pays."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fusedlib.launch import PlannedLaunch, contiguous_layout, without_memory
from fusedlib.ops.matmul.function import SplitProduct, multiply, splits
from fusedlib.ops.mlp.problem import MLPProblem
from fusedlib.ops.mlp.products import EITHER_SAVE, TORCH_FP32_PRODUCTS, Products


def _y(h: Tensor, w_down: Tensor) -> Tensor:
    return multiply(h, w_down, (False, True))


def _d_weight(upstream: Tensor, rows: Tensor) -> Tensor:
    return multiply(upstream, rows, (True, False))


# A pair is split as one matrix, so that its product has the bits of a packed weight's.


def _gate_up(x: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    if not splits(x, w_gate, (False, True), w_up):
        return TORCH_FP32_PRODUCTS.gate_up(x, w_gate, w_up)
    return multiply(x, w_gate, (False, True), lower_half=w_up)


def _d_x(d_gate_up: Tensor, w_gate: Tensor, w_up: Tensor | None) -> Tensor:
    if not splits(d_gate_up, w_gate):
        return TORCH_FP32_PRODUCTS.d_x(d_gate_up, w_gate, w_up)
    return multiply(d_gate_up, w_gate, lower_half=w_up)


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
            for name, (a, b, turned) in forms.items():
                for launch, matrices in SplitProduct(problem.device, a, b, turned, False).launches(
                    a, b
                ):
                    kernel = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
                    words = f"{kernel.replace('_', ' ')} of {name}"
                    yield PlannedLaunch(words, EITHER_SAVE, launch, matrices)


SPLIT_PRODUCTS = SplitProducts(_gate_up, _y, multiply, _d_x, _d_weight, _d_weight, splits=True)
