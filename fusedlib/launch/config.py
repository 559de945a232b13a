"""How kernels are cut into tiles and how many warps run a program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How one kernel is cut into tiles.

    A program computes [block_m, block_n] of each of its products, `block_k` of the sum at a time,
    `num_stages` blocks in flight; `group_m` row tiles share their weight blocks in the L2 cache.
    `persistent` starts one program a multiprocessor; `descriptors` loads the factors by TMA.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    persistent: bool = False
    descriptors: bool = False

    def launch(self) -> dict[str, int]:
        """The keyword arguments of a kernel's launch."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m, "num_warps": self.num_warps, "num_stages": self.num_stages,
            "DESCRIPTORS": self.descriptors,
        }  # fmt: skip
