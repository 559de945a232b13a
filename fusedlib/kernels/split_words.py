# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""What a product wants to know of a 128·128 tile of a factor, in 32 bits along rows and along
columns: how the words of `fusedlib.kernels.split` are made and where they lie. From the lowest bit:

    bits   field
    7      the exponent of its factor 2ᵉ, biased by `BIAS`
    7      first share, at most 127, which no certificate tells from 128
    1      whether it is deep
    7      second share; 127 is of no certificate
    1      whether it is plain
    1      whether it is of one sign
    4      share of elements that are not short, in 16ths
    2      share of elements that are heard: 1/8, 1/4, 1/2 or all
    2      fewest nonzero elements of a segment: 3 at least 32; 2 so but for segments of zeros;
           1 at least 8, and there is no segment of zeros; 0 less
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of a factor's exponent in a word, less than in fp32: two add up to fp32's with 1.
BIAS = tl.constexpr(64)


def words(tiles, outer_tile, outer_tiles, k_tiles, ALONG: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a product wants to know of a row of tiles of A or a column of B: the first word, and the
    step to the next along the sum, which runs along rows (0) or columns (1) as they are stored.

    Of both languages: `triton.jit` and `gluon.jit` take it.
    """
    if ALONG == 0:
        first, step = tiles + outer_tile * k_tiles * 2, 2
    else:
        first, step = tiles + (outer_tile * 2 + 1), outer_tiles * 2
    return first, step


@triton.jit
def kind(nonzero, negative):  # type: ignore[no-untyped-def]
    """Of a segment, in a byte each: whether it has no elements, fewer than 8, fewer than 32, and
    whether it is of one sign: of at least 16, at most three eighths have the other.
    """
    short = tl.where(nonzero < 8, 1 << 8, tl.where(nonzero < 32, 1 << 16, 0))
    other = tl.minimum(negative, nonzero - negative)
    # Negative, so that 128 of them fit.
    one_sign = tl.where((8 * other <= 3 * nonzero) & (nonzero >= 16), -(1 << 24), 0)
    return tl.where(nonzero == 0, 1, short + one_sign)


@triton.jit
def add_up(near, nonzero, kinds):  # type: ignore[no-untyped-def]
    """The sums of each over segments, by one reduction."""
    both = near | (nonzero << 16)  # at most 2¹⁴ each
    sums = tl.sum(both.to(tl.int64) | (kinds.to(tl.int64) << 32))
    both = sums.to(tl.int32)
    return both & 0xFFFF, both >> 16, (sums >> 32).to(tl.int32)


@triton.jit
def terms_of(near, heard, kinds, segments, length, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last 9 bits of a tile's word, of its elements and the sum of its segments' kinds."""
    filled = TILE - (kinds & 0xFF)
    half = tl.maximum(filled * length, 1)
    near = tl.where(filled > 0, tl.minimum((near * 32 + half) // (half * 2), 15), 15)
    share = tl.where(filled > 0, (heard * 32 + half) // (half * 2), 16)
    share = (share > 3).to(tl.int32) + (share > 6).to(tl.int32) + (share > 13).to(tl.int32)
    gap = (filled < segments).to(tl.int32)
    under_8, under_32 = (kinds >> 8) & 0xFF, (kinds >> 16) & 0xFF
    fewest = tl.where(under_8 > 0, 0, tl.where(under_32 > 0, 1, 3) - gap)
    one_sign = -(kinds >> 24) * 4 >= tl.maximum(filled, 1) * 3
    return one_sign.to(tl.int32) | (near << 1) | (share << 5) | (fewest << 7)


@triton.jit
def word_of(  # type: ignore[no-untyped-def]
    first, second, terms, length, power, usable, deep, low, peaked, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile's word, of its shares in elements of a segment of that length."""
    if not EVEN:
        first = (first * 128 + length - 1) // length
        second = (second * 128 + length - 1) // length
    first = tl.where(usable, tl.minimum(first, 127), 127)
    second = tl.where(usable, tl.minimum(second, 127), 127)
    shares = (first << 7) | (deep << 14) | (second << 15)
    plain = low & ~(peaked & terms)
    return (power - BIAS) | shares | (plain << 22) | (terms << 23)
