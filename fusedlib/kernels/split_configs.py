"""Tile configurations of the split products. A block lies within one 128·128 tile of its factor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fusedlib.kernels.swiglu_configs import architecture


@dataclass(frozen=True)
class Config:
    """How a product is cut: [block_m, block_n] a program, block_k of the sum at a time.

    `descriptors` loads by TMA; `gluon` is Hopper's kernel with warps of fixed roles, which has its
    own tile; `waves` is how many programs of the exact kernel a multiprocessor gets.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    descriptors: bool = False
    gluon: bool = False
    waves: int = 4

    def launch(self) -> dict[str, int]:
        """The keyword arguments of a kernel's launch."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m, "num_warps": self.num_warps, "num_stages": self.num_stages,
        }  # fmt: skip


# Three tiles of fp32 live at once: the accumulator and both products of a block.
FAST = {
    80: Config(64, 64, 32, 4, 4),
    89: Config(64, 64, 32, 4, 3),
    90: Config(128, 128, 64, 8, 3, descriptors=True, gluon=True),
    100: Config(128, 128, 64, 8, 3),
}
INTERPRETER = Config(64, 32, 64, 4, 1, group_m=2)
EXACT = Config(64, 64, 16, 8, 2)


def choose(c: Tensor) -> Config:
    """The fast kernel's configuration on the device of its result."""
    return FAST[architecture(c.device)] if c.is_cuda else INTERPRETER
