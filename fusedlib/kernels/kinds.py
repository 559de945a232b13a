"""What `route` hands to a plan: what it is for, and which way it goes."""

from __future__ import annotations

from typing import NamedTuple

import torch

APART, TILES, ROLES = "apart", "tiles", "roles"


class Kind(NamedTuple):
    """All that a plan depends on; of the tokens their class alone."""

    device: torch.device
    dtype: torch.dtype
    precision: str
    tokens: int
    hidden: int
    inner: int


class Ways(NamedTuple):
    """A row of the table; `few` and `split` say whose the products are."""

    path: str
    forward: str
    backward: str
    few: bool = False
    split: bool = False
