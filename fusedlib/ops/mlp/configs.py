"""Tile configurations of the kernels in `tiles.py`, and which one a call gets. The tiles of the
Hopper kernels are fixed, 128 by 128 and 128 by 256, in `hopper/kernel.py`.

A configuration belongs to an architecture, and is for half precision: in fp32 the interpreter alone
multiplies by these kernels. `tests/test_kernels_ahead.py` compiles every entry for its
architecture: nothing spilled, shared memory within the card's. Those of 9.0 were measured on an
H200, those of other cards nowhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusedlib.launch import Config, architecture
from fusedlib.ops.arguments import FEW_TOKENS

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

MAX_PROJECTION_TOKENS = 1024  # the most tokens whose q, k and v one launch may give
ALIGNMENT = 16


# On an H200 a program a multiprocessor reads weights fastest, all its shared memory in flight: the
# smallest tile of which there are no more than ONE_WAVE. 64 tokens, captured in a graph with a
# cold L2, µs, here and by cuBLAS's product and a pointwise kernel: forward at 512, 2048, 4096, 8192
# and 16384: 7.1, 12.7, 28.4, 76.6, 261 and 9.0, 14.8, 31.3, 78.6, 261; backward: 8.2, 12.5, 22.9,
# 47.7, 146 and 9.2, 13.3, 21.8, 48.2, 137. By pointers: two descriptors cost more than a launch.
ONE_WAVE = 132
FEW_TOKENS_CONFIGS = {
    ("forward", 90): (
        Config(64, 16, 128, 4, 6), Config(64, 32, 128, 4, 6), Config(64, 64, 64, 4, 6),
    ),
    ("backward", 90): (
        Config(64, 16, 128, 4, 6), Config(64, 32, 128, 4, 6), Config(64, 64, 128, 8, 5),
    ),
}  # fmt: skip
# For more tokens, as long as all tiles run at once: so many programs, and the tiles from small to
# large. One H100, the same, µs; forward here, by cuBLAS for a packed weight, and for a pair:
#
# | tokens | 512·2048         | 1024·4096        | 2048·8192        | 4096·14336        |
# |--------|------------------|------------------|------------------|-------------------|
# | 128    | 6.2, 7.3, 10.6   | 10.9, 12.6, 15.6 | 36.7, 37.5, 40.2 | 96.9, 96.9, 100.2 |
# | 256    | 6.6, 8.1, 11.1   | 13.6, 14.3, 18.2 | 41.4, 42.1, 45.0 |                   |
# | 512    | 8.9, 10.0, 13.5  | 20.8, 20.3, 23.3 |                  |                   |
#
# Backward, where two programs share a multiprocessor, here and by cuBLAS: 512 tokens at 512·2048
# 8.2 and 9.4, 256 at 1024·4096 11.5 and 12.3, 128 at 2048·8192 25.1 and 26.8; with twice as many
# 24.2 and 16.9 at 1024·4096, 40.1 and 31.4 at 2048·8192.
ONE_WAVE_CONFIGS: dict[tuple[str, int], tuple[int, tuple[Config, ...]]] = {
    ("forward", 90): (
        ONE_WAVE,
        (Config(64, 64, 64, 4, 6), Config(128, 64, 64, 8, 5), Config(128, 128, 64, 8, 4)),
    ),
    ("backward", 90): (2 * ONE_WAVE, (Config(64, 64, 64, 4, 6, descriptors=True),)),
}


def few_tokens_configs(direction: str, arch: int) -> tuple[Config, ...]:
    """The configurations for at most FEW_TOKENS tokens, from small to large.

    No taller than those, and more, smaller programs than for many.
    """
    table = FORWARD if direction == "forward" else BACKWARD
    config = table[arch]
    small = replace(config, block_m=FEW_TOKENS, block_n=32, num_warps=4, persistent=False)
    return FEW_TOKENS_CONFIGS.get((direction, arch), (small,))


def smallest_config(
    configs: tuple[Config, ...], tokens: int, *widths: int, programs: int = ONE_WAVE
) -> Config:
    """The smallest that cuts (tokens, width) into at most so many tiles; else the largest.

    None is larger than 64 columns of all tokens: a wide weight is read faster by more programs.
    """
    usable = [c for c in configs if tokens > _max_oversized_tokens(c)]
    return next((c for c in usable if count_tiles(c, tokens, *widths) <= programs), usable[-1])


def count_tiles(config: Config, tokens: int, *widths: int) -> int:
    """How many tiles cover (tokens, width) of each of the widths."""
    return -(-tokens // config.block_m) * sum(-(-width // config.block_n) for width in widths)


def _max_oversized_tokens(config: Config) -> int:
    """Up to so many tokens the tile is larger than 64 columns of them all."""
    return config.block_m * config.block_n // 64 - 64


def one_wave_lengths(direction: str, arch: int, inner: int) -> list[int]:
    """The most tokens that each tile of ONE_WAVE_CONFIGS covers in one wave, ascending."""
    programs, configs = ONE_WAVE_CONFIGS.get((direction, arch), (0, ()))
    most = [programs // max(-(-inner // c.block_n), 1) * c.block_m for c in configs]
    ends = {*most, *map(_max_oversized_tokens, configs)}
    return sorted(end for end in ends if FEW_TOKENS < end <= max(most))


def choose_config(
    direction: str, device: torch.device, tokens: int, hidden: int, inner: int
) -> Config:
    """The configuration of a kernel that multiplies x or dy (tokens, hidden): "forward" is gate and
    up, "backward" dy Wd.
    """
    if device.type != "cuda":
        return INTERPRETER
    if hidden % ALIGNMENT or inner % ALIGNMENT:
        return UNALIGNED
    arch = architecture(device)
    if tokens <= FEW_TOKENS:
        return smallest_config(few_tokens_configs(direction, arch), tokens, inner)
    if tokens <= max(one_wave_lengths(direction, arch, inner), default=0):
        programs, configs = ONE_WAVE_CONFIGS[direction, arch]
        return smallest_config(configs, tokens, inner, programs=programs)
    return (FORWARD if direction == "forward" else BACKWARD)[arch]
