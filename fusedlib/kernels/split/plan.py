"""The whole MLP in fp32 where some of its products are of split factors and others are torch's.

The launches and allocations of a split product took an H200's host 75 µs when looked up anew, and
take 25 from a plan, where torch's product takes 17.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedlib.kernels import split, swiglu_calls
from fusedlib.kernels.backward_order import Multiplication, Multiply
from fusedlib.kernels.cublas_plan import CublasPlan
from fusedlib.kernels.swiglu_configs import precision_of


class Shape(NamedTuple):
    """C = A B, its sizes, and which factors are stored transposed."""

    m: int
    n: int
    k: int
    turned: tuple[bool, bool] = (False, False)

    @property
    def pays(self) -> bool:
        """Whether it is better split than torch's."""
        return split.split_pays(self.m, self.n, self.k)


def shapes_of(tokens: int, hidden: int, inner: int) -> dict[str, Shape]:
    """The products of the MLP by what they give."""
    return {
        "gate_up": Shape(tokens, 2 * inner, hidden, (False, True)),
        "y": Shape(tokens, hidden, inner, (False, True)),
        "dh": Shape(tokens, inner, hidden),
        "d_x": Shape(tokens, hidden, 2 * inner),
        "d_w_gate_up": Shape(2 * inner, hidden, tokens, (True, False)),
        "d_w_down": Shape(hidden, inner, tokens, (True, False)),
    }


def some_split(tokens: int, hidden: int, inner: int) -> bool:
    """Whether a product of such an MLP is better split than torch's."""
    return any(shape.pays for shape in shapes_of(tokens, hidden, inner).values())


def _turned(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.t(), b)


# Each of both factors as they are stored.
TORCH: dict[str, Multiplication] = {
    "gate_up": swiglu_calls._gate_up, "y": linear, "dh": torch.mm, "d_x": torch.mm,
    "d_w_gate_up": _turned, "d_w_down": _turned,
}  # fmt: skip


class SplitPlan(CublasPlan):
    """The MLP at the sizes of these operands, fp32 at torch's "highest"."""

    def __init__(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
        super().__init__(x, w_gate_up, w_down)
        self._fused_forward = False
        made: dict[str, Multiplication] = {
            name: split.Product(shape.turned) if shape.pays else TORCH[name]
            for name, shape in shapes_of(*self.sizes[1:]).items()
        }
        self._to_gate_up, self._to_y, self._to_dh = made["gate_up"], made["y"], made["dh"]
        self._multiply = Multiply(made["d_x"], made["d_w_gate_up"], made["d_w_down"])

    def fits(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> bool:
        """As any plan, and at torch's "highest" alone."""
        return super().fits(x, w_gate_up, w_down) and precision_of(x) == "ieee"

    def takes(self, dy: Tensor, saved: tuple[Tensor | None, ...]) -> bool:
        """As any plan, at torch's "highest" alone.

        Nor where a dispatch mode or a subclass would see the products as operators.
        """
        if torch._C._len_torch_dispatch_stack() or type(dy) is not Tensor:
            return False
        return precision_of(dy) == "ieee" and super().takes(dy, saved)
