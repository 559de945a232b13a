"""The two values that a plan is made of: the MLP's problem, and the route that it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

UNFUSED, TILED, WARP_SPECIALIZED = "apart", "tiles", "roles"


class MLPProblem(NamedTuple):
    """An MLP on operands of certain sizes and dtype: all that a plan depends on.

    Attributes:
        device: where all operands lie.
        dtype: of all operands.
        precision: how torch multiplies fp32, "ieee" or "tf32".
        tokens: rows of x; the plan serves their whole class of lengths.
        hidden: columns of x.
        inner: columns of h, the intermediate size.
        down: there is a down projection.
        pair: gate and up have a weight each, none packed.
        activation: of gate, one of ACTIVATIONS.
    """

    device: torch.device
    dtype: torch.dtype
    precision: str
    tokens: int
    hidden: int
    inner: int
    down: bool = True
    pair: bool = False
    activation: str = "silu"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, hidden and inner."""
        return self.tokens, self.hidden, self.inner


class Route(NamedTuple):
    """A row of the table in `route`.

    Attributes:
        path: its name.
        forward: how gate, up and h are computed: UNFUSED, TILED or WARP_SPECIALIZED.
        backward: how d(gate|up) is computed, likewise.
        few: the plain matrix products are those of `few_tokens`.
        split: they are those of `split`; otherwise torch's.
    """

    path: str
    forward: str
    backward: str
    few: bool = False
    split: bool = False
