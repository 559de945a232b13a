"""The whole MLP in fp32 where some of its products are of split factors and others are torch's.

That is where one of its matrices is narrow: tokens·hidden below 2²² leaves y and d_x to torch
(`split_product.LEAST_RESULTS`), as at 1024 tokens in every model that is less than 4096 wide. There
the device needs some 85 µs a split product; its three launches and five allocations took an H200's
host 75 µs when looked up anew, and take 25 from a plan, where torch's product takes 17.
Where all products are split the device hides that, and a backward pass shares its splits
(`split_mlp`) instead of going by a plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedlib.kernels import split, split_exact, split_product, swiglu_calls
from fusedlib.kernels.backward_order import Multiplication, Multiply
from fusedlib.kernels.cublas_plan import CublasPlan
from fusedlib.kernels.few_tokens_plan import _allocator, _laid_out
from fusedlib.kernels.launch import Launch
from fusedlib.kernels.split import TILE, Split
from fusedlib.kernels.swiglu_configs import precision_of


class Product(NamedTuple):
    """C = A B, its sizes, and which factors are stored transposed."""

    m: int
    n: int
    k: int
    turned: tuple[bool, bool] = (False, False)

    @property
    def pays(self) -> bool:
        """Whether it is better split than torch's."""
        return split_product.split_pays(self.m, self.n, self.k)


def products_of(tokens: int, hidden: int, inner: int) -> dict[str, Product]:
    """The products of the MLP by what they give."""
    return {
        "gate_up": Product(tokens, 2 * inner, hidden, (False, True)),
        "y": Product(tokens, hidden, inner, (False, True)),
        "dh": Product(tokens, inner, hidden),
        "d_x": Product(tokens, hidden, 2 * inner),
        "d_w_gate_up": Product(2 * inner, hidden, tokens, (True, False)),
        "d_w_down": Product(hidden, inner, tokens, (True, False)),
    }


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
        device, *sizes = self.sizes
        self._fused_forward = False
        made = {n: _made(n, p, device) for n, p in products_of(*sizes).items()}
        self._to_gate_up, self._to_y, self._to_dh = made["gate_up"], made["y"], made["dh"]
        self._multiply = Multiply(made["d_x"], made["d_w_gate_up"], made["d_w_down"])
        backward = self._to_dh, *self._multiply
        self._shares = all(isinstance(each, PlannedProduct) for each in backward)

    def fits(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> bool:
        """As any plan, and at torch's "highest" alone."""
        return super().fits(x, w_gate_up, w_down) and precision_of(x) == "ieee"

    def takes(self, dy: Tensor, saved: tuple[Tensor | None, ...]) -> bool:
        """As any plan, at torch's "highest" alone, and where not all products are split.

        Nor where a dispatch mode or a subclass would see the products as operators.
        """
        if self._shares or torch._C._len_torch_dispatch_stack() or type(dy) is not Tensor:
            return False
        return precision_of(dy) == "ieee" and super().takes(dy, saved)


def some_split(tokens: int, hidden: int, inner: int) -> bool:
    """Whether a product of such an MLP is better split than torch's."""
    return any(p.pays for p in products_of(tokens, hidden, inner).values())


def _made(name: str, product: Product, device: torch.device) -> Multiplication:
    return PlannedProduct(device, product) if product.pays else TORCH[name]


class PlannedProduct:
    """C = A B of split factors at one set of sizes, as `split_product.split_mm` has it.

    Args:
        device: the current one, at every call.
        product: its sizes, and how the factors are stored.
    """

    def __init__(self, device: torch.device, product: Product) -> None:
        m, n, k, turned = product
        self.turned, self._k, self._new = turned, k, _allocator(device)
        stored = (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)
        tiles = [tuple(-(-size // TILE) for size in shape) for shape in stored]
        self._laid = (
            *(_laid_out((2 * TILE * r, TILE * c), torch.float16) for r, c in tiles),
            *(_laid_out((r, c, 2), torch.int32) for r, c in tiles),
            _laid_out(split_exact.flags_of(m, n), torch.int32),
            _laid_out((m, n), torch.float32),
        )
        self._launches: tuple[Launch, Launch, split_exact.Mending] | None = None

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """C of both factors as they are stored: contiguous, fp32, at 16-byte aligned addresses."""
        new = self._new
        a_parts, b_parts, a_tiles, b_tiles, flags, c = [new(*laid) for laid in self._laid]
        if self._launches is None:
            self._launches = self._made(a, b, a_parts, b_parts, a_tiles, b_tiles, flags, c)
        splitting, multiplying, mending = self._launches
        splitting(a, b, a_parts, b_parts, a_tiles, b_tiles)
        multiplying(a_parts, b_parts, a_tiles, b_tiles, c)
        mending(a, b, a_tiles, b_tiles, flags, c)
        return c

    def _made(
        self, a: Tensor, b: Tensor, *others: Tensor
    ) -> tuple[Launch, Launch, split_exact.Mending]:
        a_parts, b_parts, a_tiles, b_tiles, flags, c = others
        both = Split(a, a_parts, a_tiles), Split(b, b_parts, b_tiles)
        left, right = (t.mT if turned else t for t, turned in zip((a, b), self.turned, strict=True))
        parts = a_parts, b_parts, a_tiles, b_tiles, c
        return (
            split.splitting_launch(*both, True),
            split_product.product_launch(self._k, self.turned, *parts),
            split_exact.mending(self.turned, left, right, a_tiles, b_tiles, flags, c),
        )
