"""Tile configurations of the SwiGLU kernels, and which one a call gets.

A configuration belongs to an architecture, and is for half precision: in fp32 the interpreter alone
multiplies by these kernels. `tests/test_kernels_ahead.py` compiles every entry for its
architecture: nothing spilled, shared memory within the card's. Those of 9.0 were measured on an
H200, those of other cards nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

# Bytes of shared memory that one program may have, by architecture. 8.6, 8.9 and 12.x have the
# least, so that unknown cards are treated as 8.9.
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
SMALLEST = 89


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


# Two accumulators of [block_m, block_n] live at once, so the tile is half of a plain product's.
FORWARD = {
    80: Config(128, 64, 32, 8, 4),
    89: Config(128, 64, 32, 8, 4),
    90: Config(128, 128, 64, 8, 4, persistent=True, descriptors=True),
    100: Config(128, 128, 64, 8, 3),
}

# One accumulator, and an epilogue that reads two tiles and writes three.
BACKWARD = {
    80: Config(128, 128, 32, 8, 3),
    89: Config(128, 128, 32, 8, 3),
    90: Config(128, 128, 64, 8, 4, persistent=True, descriptors=True),
    100: Config(128, 128, 64, 8, 3),
}

# No product: a thread has 16 bytes of a row in each half of the tile.
POINTWISE = Config(16, 128, 16, 4, 1)

# Rows that do not start at multiples of 16 elements are read an element at a time, which takes an
# address each: only a small tile has the registers, on every architecture.
UNALIGNED = Config(64, 64, 32, 8, 2)

# Small enough that a test's shape has several tiles each way.
INTERPRETER = Config(32, 32, 32, 4, 1, group_m=2)

FEW_TOKENS = 64
ALIGNMENT = 16


# On an H200 a program a multiprocessor reads weights fastest, all its shared memory in flight: the
# narrowest tile of which there are no more than FEW_PROGRAMS. 64 tokens, captured in a graph with a
# cold L2, µs, here and by cuBLAS's product and a pointwise kernel: forward at 512, 2048, 4096, 8192
# and 16384: 7.1, 12.7, 28.4, 76.6, 261 and 9.0, 14.8, 31.3, 78.6, 261; backward: 8.2, 12.5, 22.9,
# 47.7, 146 and 9.2, 13.3, 21.8, 48.2, 137. By pointers: two descriptors cost more than a launch.
FEW_PROGRAMS = 132
FEW = {
    ("forward", 90): (
        Config(FEW_TOKENS, 16, 128, 4, 6), Config(FEW_TOKENS, 32, 128, 4, 6),
        Config(FEW_TOKENS, 64, 64, 4, 6),
    ),
    ("backward", 90): (
        Config(FEW_TOKENS, 16, 128, 4, 6), Config(FEW_TOKENS, 32, 128, 4, 6),
        Config(FEW_TOKENS, 64, 128, 8, 5),
    ),
}  # fmt: skip


def few_tokens(direction: str, arch: int) -> tuple[Config, ...]:
    """What there is for at most FEW_TOKENS tokens, from narrow to wide.

    No taller than those, and more, smaller programs than for many.
    """
    table = FORWARD if direction == "forward" else BACKWARD
    config = table[arch]
    small = replace(config, block_m=FEW_TOKENS, block_n=32, num_warps=4, persistent=False)
    return FEW.get((direction, arch), (small,))


def narrowest(configs: tuple[Config, ...], width: int) -> Config:
    """The narrowest that cuts `width` columns into tiles that all run at once; else the widest."""
    at_once = (c for c in configs if width <= FEW_PROGRAMS * c.block_n)
    return next(at_once, configs[-1])


def forward_config(x: Tensor, inner: int) -> Config:
    """The forward kernel's configuration for x (tokens, hidden)."""
    return _choose("forward", x, inner)


def backward_config(dy: Tensor, inner: int) -> Config:
    """The backward kernel's for dy (tokens, hidden), when it computes dy Wd."""
    return _choose("backward", dy, inner)


def precision_of(like: Tensor) -> str:
    """How torch multiplies fp32; "ieee" for other dtypes.

    "tf32" at `torch.set_float32_matmul_precision` "high" and "medium" (which torch on CUDA does not
    tell apart) and where `torch.backends.cuda.matmul.fp32_precision` says so.
    """
    if like.dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _choose(direction: str, like: Tensor, inner: int) -> Config:
    if not like.is_cuda:
        return INTERPRETER
    tokens, hidden = like.shape
    if hidden % ALIGNMENT or inner % ALIGNMENT:
        return UNALIGNED
    arch = architecture(like.device)
    if tokens <= FEW_TOKENS:
        return narrowest(few_tokens(direction, arch), inner)
    return (FORWARD if direction == "forward" else BACKWARD)[arch]


@cache
def architecture(device: torch.device) -> int:
    """The table's key for a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    known = {(8, 0): 80, (9, 0): 90, (10, 0): 100, (10, 3): 100}
    return known.get((major, minor), SMALLEST)
