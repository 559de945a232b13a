# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""The part of a split product that wants the fp32 matrices themselves: found and computed anew.

A tile of C = A B is wanting where

- a pair of the tiles that it is made of lacks the certificate of `fusedlib.kernels.split`;
- its sums have fewer than `LEAST_TERMS` terms that are not short: one term's parts err by up to
  2⁻²¹, which only a sum over many makes small;
- its sums have fewer than k / `LEAST_HEARD` terms that are heard, and IEEE arithmetic rounds for
  those alone;
- a row of A or a column of B may have fewer than `LEAST_OF_ROW` nonzero elements, beside others
  that are full. It has at least the fewest of each tile without a gap; where all have gaps, at
  least the fewest of one;
- a pair of tiles is of one sign, both: what tensor cores cut off, and what is rounded as the sum
  grows, adds up to more than IEEE arithmetic errs where cuBLAS shares a sum among programs.

Terms are counted where tiles' factors are within 2⁻¹³ of the largest along the sum: what is further
below is not heard.

In the first case and the last, if no tile is deep, Hopper's kernel computes it in thirds
(`split_thirds`); here it gets the flag that asks for it. But of one sign both must be plain: where
few terms make most of a sum thirds fall as short, and without low parts IEEE sums may be exact. Any
other is summed in fp64 where that has tensor cores, else in IEEE fp32, a K block at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.kernels import split_configs
from fusedlib.kernels.launch import Launch, kept_launch, multiprocessors
from fusedlib.kernels.split import TILE
from fusedlib.kernels.split_words import words

try:
    from fusedlib.kernels import split_thirds
except (ImportError, AttributeError):  # Gluon is experimental: other releases may name it otherwise
    split_thirds = None  # type: ignore[assignment]

# H200, errors in norm of 256, 1024 and 4096 terms with nine of ten zero: 1.1e-7, 1.4e-7 and 2.3e-7,
# cuBLAS 0.9e-7, 1.8e-7 and 3.6e-7, so 26 terms are too few. With one of 32 tokens large and the
# others 2⁻¹² to 2⁻²⁰ of it, 16 to 64 terms of 512 to 2048: a third of cuBLAS's at most.
LEAST_TERMS = 64
# Of 1500·2900 results of 4100 terms, which cuBLAS shares among programs, with six of seven zero,
# the largest element erred 1.33 times as much as cuBLAS's; with 13 of 14 at 2⁻²⁵ of the others,
# 2.25 times in thirds of long spans.
LEAST_HEARD = 3
# Of 512 to 2048 terms, the largest element's error over cuBLAS's: 1.1 to 1.6 with one element, 0.8
# to 1.2 with eight; in thirds 0.5 and 0.8, and 1.5 where cuBLAS shares the sums.
LEAST_OF_ROW = 32
# What a word says of a tile whose elements are all near the largest.
FULL = tl.constexpr(-1 << 24)
ONE_SIGN = tl.constexpr(1 << 23)

_words = triton.jit(words)


@triton.jit
def _fewest(words, length, of_row, beside):  # type: ignore[no-untyped-def]
    """The fewest elements of a row in tiles without a gap, added up, and in any of the others."""
    level = tl.where(length > 0, (words >> 30) & 0x3, 2)
    of_row += tl.where(level == 1, 8, tl.where(level == 3, 32, 0))
    return of_row, tl.minimum(beside, level)


@triton.jit
def _has_few(of_row, beside, OF_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a row may have fewer elements than OF_ROW; level 2 is of many, but for a gap."""
    of_row = tl.sum(of_row, axis=1)
    return tl.where(of_row > 0, of_row, tl.min(beside, axis=1) * 64) < OF_ROW


@triton.jit
def _words_of(  # type: ignore[no-untyped-def]
    a_words, a_step, b_words, b_step, tile, k_tiles, other: tl.constexpr
):  # fmt: skip
    """Both factors' words at tiles of the sum, `other` past its end; and the biased exponent of the
    product of their factors.
    """
    a = tl.load(a_words[:, None] + tile * a_step, mask=tile < k_tiles, other=other)
    b = tl.load(b_words[:, None] + tile * b_step, mask=tile < k_tiles, other=other)
    return a, b, (a & 0x7F) + (b & 0x7F)


@triton.jit
def _few(  # type: ignore[no-untyped-def]
    a_words, a_step, b_words, b_step, k, largest,
    LOOKED: tl.constexpr, TILES: tl.constexpr, TERMS: tl.constexpr, HEARD: tl.constexpr,
    OF_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For each of LOOKED blocks of C, whether its sums have few terms."""
    k_tiles = tl.cdiv(k, TILE)
    near = tl.zeros((LOOKED, TILES), tl.int32)
    heard, counted = tl.zeros_like(near), tl.zeros_like(near)
    of_a, of_b = tl.zeros_like(near), tl.zeros_like(near)
    beside_a, beside_b = tl.zeros_like(near) + 2, tl.zeros_like(near) + 2
    for start in range(0, k_tiles, TILES):
        tile = start + tl.arange(0, TILES)[None, :]
        a, b, factor = _words_of(a_words, a_step, b_words, b_step, tile, k_tiles, 0)
        length = tl.maximum(tl.minimum(k - tile * TILE, TILE), 0)
        beside = tl.where(factor >= largest[:, None] - 13, length, 0)
        counted += beside
        near += ((a >> 24) & 0xF) * ((b >> 24) & 0xF) * beside >> 8
        heard += beside << (((a >> 28) & 0x3) + ((b >> 28) & 0x3))
        of_a, beside_a = _fewest(a, length, of_a, beside_a)
        of_b, beside_b = _fewest(b, length, of_b, beside_b)
    few = _has_few(of_a, beside_a, OF_ROW) | _has_few(of_b, beside_b, OF_ROW)
    near, counted = tl.sum(near, axis=1), tl.sum(counted, axis=1)
    few |= near < TERMS
    return few | (tl.sum(heard, axis=1) < counted * 64 // HEARD)  # shares in 8ths, of both


@triton.jit
def _short(words, others):  # type: ignore[no-untyped-def]
    """What the certificate wants to be less than 128, of one factor's faint elements."""
    second = (words >> 15) & 0x7F
    short = tl.where(second > 0, second + ((others >> 7) & 0x7F), 0)
    return tl.where(second < 127, short, 128)


@triton.jit
def _wanting(  # type: ignore[no-untyped-def]
    a_words, a_step, b_words, b_step, k,
    LOOKED: tl.constexpr, TILES: tl.constexpr, TERMS: tl.constexpr, HEARD: tl.constexpr,
    OF_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For each of LOOKED blocks of C: 0 if it is accurate as the parts give it, 1 if it would be in
    thirds, else 2.
    """
    k_tiles = tl.cdiv(k, TILE)
    worst = tl.zeros((LOOKED, TILES), tl.int32)
    deep, sparse, largest = tl.zeros_like(worst), tl.zeros_like(worst), tl.zeros_like(worst)
    signs = tl.zeros_like(worst)
    for start in range(0, k_tiles, TILES):
        tile = start + tl.arange(0, TILES)[None, :]
        # What lies outside is certified and full.
        a, b, factor = _words_of(a_words, a_step, b_words, b_step, tile, k_tiles, FULL)
        worst = tl.maximum(worst, tl.maximum(_short(a, b), _short(b, a)))
        largest = tl.maximum(largest, factor)
        deep |= (a | b) & 0x4000
        both = a & b
        sparse |= (both & FULL) ^ FULL
        # ONE_SIGN if both are of one and plain, half as much again if not plain.
        of_one = both & ONE_SIGN
        signs = tl.maximum(signs, of_one | ((of_one & ~(both << 1)) >> 1))
    signs = tl.max(signs, axis=1)
    lacking = (tl.max(worst, axis=1) >= 128) | (signs > 0)
    few = signs > ONE_SIGN
    if (tl.max((sparse != 0).to(tl.int32)) > 0) | (k < 2 * TILE):
        few |= _few(
            a_words, a_step, b_words, b_step, k, tl.max(largest, axis=1),
            LOOKED, TILES, TERMS, HEARD, OF_ROW, TILE,
        )  # fmt: skip
    return tl.where(few | (lacking & (tl.max(deep, axis=1) > 0)), 2, lacking.to(tl.int32))


@triton.jit
def _exact_block(  # type: ignore[no-untyped-def]
    a, b, c, row, column, m, n, k, a_row, a_column, b_row, b_column, one,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    i, j, s = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_K)
    a += row.to(tl.int64) * a_row
    b += column.to(tl.int64) * b_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if DOUBLE else tl.float32)
    for left_over in range(k, 0, -BLOCK_K):
        inside = s < left_over
        left = tl.load(
            a + (i * a_row + s[None, :] * a_column), mask=(i < m - row) & inside[None, :], other=0.0
        )  # fmt: skip
        right = tl.load(
            b + (s[:, None] * b_row + j * b_column), mask=inside[:, None] & (j < n - column),
            other=0.0,
        )  # fmt: skip
        if DOUBLE:
            acc = tl.dot(left.to(tl.float64), right.to(tl.float64), acc, out_dtype=tl.float64)
        else:
            # `one` keeps the compiler from folding the addition into the product: accumulate.py.
            acc = tl.fma(tl.dot(left, right, input_precision="ieee"), one, acc)
        a += BLOCK_K * a_column
        b += BLOCK_K * b_row
    c += row.to(tl.int64) * n + column
    tl.store(c + (i * n + j), acc.to(tl.float32), mask=(i < m - row) & (j < n - column))


@triton.jit(do_not_specialize=("m", "n", "k"))
def _exact_product_kernel(  # type: ignore[no-untyped-def]
    a, b, a_tiles, b_tiles, flags, c,
    m, n, k, a_row, a_column, b_row, b_column, one,
    A_ALONG: tl.constexpr, B_ALONG: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LOOKED: tl.constexpr, TILES: tl.constexpr, TERMS: tl.constexpr, HEARD: tl.constexpr,
    OF_ROW: tl.constexpr, THIRDS: tl.constexpr, DOUBLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Looks at LOOKED blocks at once: mostly, that is all there is to do.

    A tile's blocks go to as many programs, so that a few wanting tiles keep the device busy.
    """
    column_tiles, k_tiles = tl.cdiv(n, TILE), tl.cdiv(k, TILE)
    across: tl.constexpr = TILE // BLOCK_N
    each: tl.constexpr = across * (TILE // BLOCK_M)
    blocks, programs = tl.cdiv(m, TILE) * column_tiles * each, tl.num_programs(0)
    which = tl.arange(0, LOOKED)
    for first in range(tl.program_id(0), blocks, programs * LOOKED):
        block = tl.minimum(first + which * programs, blocks - 1)
        tile = block // each
        a_words, a_step = _words(a_tiles, tile // column_tiles, tl.cdiv(m, TILE), k_tiles, A_ALONG)
        b_words, b_step = _words(b_tiles, tile % column_tiles, column_tiles, k_tiles, B_ALONG)
        wanting = _wanting(
            a_words, a_step, b_words, b_step, k, LOOKED, TILES, TERMS, HEARD, OF_ROW, TILE
        )
        wanting = tl.where(first + which * programs < blocks, wanting, 0)
        if THIRDS:
            tl.store(flags + tile, (wanting == 1).to(tl.int32), mask=block % each == 0)
            wanting -= wanting & 1
        if tl.max(wanting) > 0:
            for nth in range(LOOKED):
                if tl.sum(tl.where(which == nth, wanting, 0)) > 0:
                    chosen = first + nth * programs
                    its_tile, part = chosen // each, chosen % each
                    row = its_tile // column_tiles * TILE + part // across * BLOCK_M
                    column = its_tile % column_tiles * TILE + part % across * BLOCK_N
                    if (row < m) & (column < n):
                        _exact_block(
                            a, b, c, row, column, m, n, k, a_row, a_column, b_row, b_column, one,
                            BLOCK_M, BLOCK_N, BLOCK_K, DOUBLE,
                        )  # fmt: skip


class Mending(NamedTuple):
    """What mends a product of some sizes: who looks, and who computes in thirds, if anyone."""

    look: Launch
    thirds: Launch | None

    def __call__(
        self, a: Tensor, b: Tensor, a_tiles: Tensor, b_tiles: Tensor, flags: Tensor, c: Tensor
    ) -> None:
        """Compute the wanting tiles of C (m, n) anew: see `mend`."""
        self.look(a, b, a_tiles, b_tiles, flags, c)
        if self.thirds is not None:
            self.thirds(a, b, a_tiles, b_tiles, flags, c)


def mend(
    c: Tensor, a: Tensor, b: Tensor, a_tiles: Tensor, b_tiles: Tensor, turned: tuple[bool, bool]
) -> None:
    """Compute the wanting tiles of C (m, n) anew.

    Args:
        c: contiguous.
        a: (m, k) fp32, any strides.
        b: (k, n), likewise.
        a_tiles: what is known of the tiles of A, which were split transposed if `turned`.
        b_tiles: the same of B.
        turned: whether A, whether B.
    """
    flags = c.new_empty(flags_of(*c.shape), dtype=torch.int32)
    operands = a, b, a_tiles, b_tiles, flags, c
    mending(turned, *operands)(*operands)


def flags_of(m: int, n: int) -> tuple[int, int]:
    """How many flags C (m, n) wants: its tile rows and columns."""
    return triton.cdiv(m, TILE), triton.cdiv(n, TILE)


def mending(turned: tuple[bool, bool], *operands: Tensor) -> Mending:
    """What mends the product of these: A (m, k), B (k, n), their tiles, flags and C."""
    a, b, c = operands[0], operands[1], operands[-1]
    sizes = *c.shape, a.shape[1]
    strides = *a.stride(), *b.stride()
    thirds = split_thirds is not None and split_thirds.takes(c)

    def made() -> Launch:
        return _launch(c, (*sizes, *strides, 1.0), turned, thirds)

    look = kept_launch(made, ("exact product", sizes, strides, turned, c.device), *operands)
    return Mending(look, split_thirds.thirds_launch(turned, *operands) if thirds else None)


def _launch(
    c: Tensor, scalars: tuple[float, ...], turned: tuple[bool, bool], thirds: bool
) -> Launch:
    config = split_configs.EXACT
    blocks = math.prod(flags_of(*c.shape)) * TILE**2 // (config.block_m * config.block_n)
    programs = min(blocks, split_configs.EXACT_PROGRAMS * multiprocessors(c.device))
    looked, tiles = split_configs.look(c)
    constants = {
        "A_ALONG": int(turned[0]), "B_ALONG": int(not turned[1]), "LOOKED": looked,
        "TILES": tiles, "TERMS": LEAST_TERMS, "HEARD": LEAST_HEARD, "OF_ROW": LEAST_OF_ROW,
        "THIRDS": thirds, "DOUBLE": split_configs.double(c), "TILE": TILE,
    }  # fmt: skip
    return Launch(_exact_product_kernel, config, (programs, 1, 1), (), scalars, constants)
