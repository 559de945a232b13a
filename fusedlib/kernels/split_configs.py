"""Configurations of the split products. A block lies within one 128·128 tile of its factor."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from fusedlib.kernels.swiglu_configs import Config, architecture


@dataclass(frozen=True)
class Warps:
    """What a kernel whose tiles are fixed is started with, and its other constants."""

    num_warps: int
    constants: tuple[tuple[str, int], ...] = ()
    descriptors: bool = False

    def launch(self) -> dict[str, int]:
        """The keyword arguments of a kernel's launch."""
        return {"num_warps": self.num_warps, **dict(self.constants)}


# Four tiles of fp32 live at once: both products of a block, the sum of a span, and of all. Hopper
# has a kernel of its own, with warps of fixed roles: `split_hopper`.
FAST = {
    80: Config(64, 64, 32, 4, 4),
    89: Config(64, 64, 32, 4, 3),
    90: Config(128, 64, 64, 8, 3),
    100: Config(128, 64, 64, 8, 3),  # 128·128 spills
}
# K blocks that are summed before they join C: a rounding is as large as the sum is by then. Where
# cuBLAS shares a sum among programs, so that its own are short, the largest element of ours was
# worse from 14,000 terms on, and of so many results nowhere. Half as many: 1 to 8 % of k = 10240.
SPAN = 128
SHARED_RESULTS = 2**24
EXACT = Config(64, 32, 16, 4, 1)  # 168 registers: three programs hide each other's loads
EXACT_PROGRAMS = 3  # a multiprocessor
# Blocks of C, and tiles of their sums, that it looks at together. 16 blocks spill on sm_80.
LOOK = {80: (8, 32), 89: (16, 32), 90: (16, 32), 100: (16, 32)}
# Where fp64 has a tensor core that runs at fp32's own rate, and Triton reaches it.
DOUBLE = (80, 90)
# Rows of a tile at a time. H200, 8192·4096: 3.34 TB/s of 3.89 that a copy has; 2.78 with 16 rows,
# 2.74 with 16 warps, 2.42 with 4 warps and 16 rows.
SPLIT = Warps(8, (("CHUNK", 32),))

# There fewer operations are faster, whatever their size.
INTERPRETER = Config(64, 32, 64, 4, 1, group_m=2)
INTERPRETED_SPLIT = Warps(8, (("CHUNK", 128),))


def fast(c: Tensor) -> Config:
    """The product's configuration on the device of its result."""
    return FAST[architecture(c.device)] if c.is_cuda else INTERPRETER


def span(c: Tensor, k: int, block_k: int) -> int:
    """How many terms of a sum over k are summed before they join C: `SPAN` blocks of block_k, or
    fewer where that makes spans alike, since the longest errs most. All where cuBLAS has no shorter
    sums.
    """
    spans = triton.cdiv(k, SPAN * block_k) if c.numel() < SHARED_RESULTS else 1
    return triton.cdiv(k, max(spans, 1) * block_k) * block_k


def look(c: Tensor) -> tuple[int, int]:
    """`LOOK` on the device of a result; the interpreter's is Hopper's."""
    return LOOK[architecture(c.device) if c.is_cuda else 90]


def splitting(source: Tensor) -> Warps:
    """The split's configuration on the device of its source."""
    return SPLIT if source.is_cuda else INTERPRETED_SPLIT


def double(c: Tensor) -> bool:
    """Whether the exact kernel sums in fp64 on that device."""
    return not c.is_cuda or architecture(c.device) in DOUBLE
