"""The whole MLP in fp32 where some of its products are of split factors and others are torch's.

That is where one of its matrices is narrow: tokens·hidden below 2²² leaves y and d_x to torch
(`split_product.LEAST_RESULTS`), so every model of less than 4096 wide at 1024 tokens. There the
device needs 60 to 120 µs a product, and three launches and five allocations took the host 60.
Where all products are split the device hides that, and a backward pass shares its splits
(`split_mlp`) instead of going by a plan.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusedlib.kernels import split, split_exact, split_product, swiglu_calls
from fusedlib.kernels.backward_order import Multiply
from fusedlib.kernels.cublas_plan import CublasPlan
from fusedlib.kernels.few_tokens_plan import _allocator, _laid_out
from fusedlib.kernels.launch import Launch
from fusedlib.kernels.split import TILE, Split
from fusedlib.kernels.swiglu_configs import precision_of


class SplitPlan(CublasPlan):
    """The MLP at the sizes of these operands, fp32 at torch's "highest"."""

    def __init__(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
        super().__init__(x, w_gate_up, w_down)
        device, tokens, hidden, inner = self.sizes
        self._fused_forward = False
        made = partial(_multiplication, device)
        to_gate_up = made(tokens, 2 * inner, hidden, turned_b=True)
        to_y = made(tokens, hidden, inner, turned_b=True)
        to_dh = made(tokens, inner, hidden)
        d_x = made(tokens, hidden, 2 * inner)
        d_w_gate_up = made(2 * inner, hidden, tokens, turned_a=True)
        d_w_down = made(hidden, inner, tokens, turned_a=True)
        self._to_gate_up = to_gate_up or swiglu_calls._gate_up
        self._to_y, self._to_dh = to_y or self._to_y, to_dh or self._to_dh
        plain = self._multiply
        self._multiply = Multiply(
            d_x or plain.d_x, d_w_gate_up or plain.d_w_gate_up, d_w_down or plain.d_w_down
        )
        self._shares = None not in (to_dh, d_x, d_w_gate_up, d_w_down)
        self.splits = any((to_gate_up, to_y, to_dh, d_x, d_w_gate_up, d_w_down))

    def fits(self, x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> bool:
        """As any plan, and at torch's "highest" alone."""
        return super().fits(x, w_gate_up, w_down) and precision_of(x) == "ieee"

    def takes(self, dy: Tensor, saved: tuple[Tensor | None, ...]) -> bool:
        """As any plan, where not all products are split, and at torch's "highest" alone."""
        return not self._shares and precision_of(dy) == "ieee" and super().takes(dy, saved)


def _multiplication(
    device: torch.device, m: int, n: int, k: int, *, turned_a: bool = False, turned_b: bool = False
) -> PlannedProduct | None:
    """C (m, n) of split factors, or None where torch's product is better."""
    if not split_product.split_pays(m, n, k):
        return None
    return PlannedProduct(device, (m, n, k), (turned_a, turned_b))


class PlannedProduct:
    """C = A B of split factors at one set of sizes, as `split_product.split_mm` has it.

    Args:
        device: the current one, at every call.
        sizes: (m, n, k).
        turned: whether A is stored as (k, m), whether B as (n, k).
    """

    def __init__(
        self, device: torch.device, sizes: tuple[int, int, int], turned: tuple[bool, bool]
    ) -> None:
        m, n, k = sizes
        self.turned, self._k, self._new = turned, k, _allocator(device)
        stored = (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)
        tiles = [tuple(-(-size // TILE) for size in shape) for shape in stored]
        self._laid = (
            *(_laid_out((2 * TILE * r, TILE * c), torch.float16) for r, c in tiles),
            *(_laid_out((r, c, 2), torch.int32) for r, c in tiles),
            _laid_out((m, n), torch.float32),
        )
        self._launches: tuple[Launch, Launch, Launch] | None = None

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """C of both factors as they are stored: contiguous, fp32, at 16-byte aligned addresses."""
        new = self._new
        a_parts, b_parts, a_tiles, b_tiles, c = [new(*laid) for laid in self._laid]
        if self._launches is None:
            self._launches = self._made(a, b, a_parts, b_parts, a_tiles, b_tiles, c)
        splitting, multiplying, mending = self._launches
        splitting(a, b, a_parts, b_parts, a_tiles, b_tiles)
        multiplying(a_parts, b_parts, a_tiles, b_tiles, c)
        mending(a, b, a_tiles, b_tiles, c)
        return c

    def _made(self, a: Tensor, b: Tensor, *others: Tensor) -> tuple[Launch, Launch, Launch]:
        a_parts, b_parts, a_tiles, b_tiles, c = others
        both = Split(a, a_parts, a_tiles), Split(b, b_parts, b_tiles)
        left, right = (t.mT if turned else t for t, turned in zip((a, b), self.turned, strict=True))
        return (
            split.splitting_launch(*both, True),
            split_product.product_launch(self._k, self.turned, *others),
            split_exact.mending_launch(self.turned, left, right, a_tiles, b_tiles, c),
        )
