"""What `route` hands to a plan: what it is for, and which way it goes."""

from __future__ import annotations

from typing import NamedTuple

import torch

UNFUSED, TILED, WARP_SPECIALIZED = "apart", "tiles", "roles"


class MLPProblem(NamedTuple):
    """All that a plan depends on; of the tokens their class alone.

    `down`: there is a down projection. `pair`: gate and up have a weight each, none packed.
    """

    device: torch.device
    dtype: torch.dtype
    precision: str
    tokens: int
    hidden: int
    inner: int
    down: bool = True
    pair: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, hidden and inner."""
        return self.tokens, self.hidden, self.inner


class Route(NamedTuple):
    """A row of the table; `few` and `split` say whose the products are."""

    path: str
    forward: str
    backward: str
    few: bool = False
    split: bool = False
