# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""fp32 products on tensor cores, from two fp16 parts a factor, scaled along the sum.

For C = A B of A (m, k) and B (k, n), with the sums over k of row i and column j,

    |error| ≤ (18 + k/4096) 2⁻²² Σ|a||b| + 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|)

and inf and nan are where IEEE arithmetic has them, unless a term or partial sum overflows that the
true sum does not. IEEE fp32's own bound is 2⁻²² k/4 Σ|a||b|. Sums that fp32 holds come out exact if
the factors fit in fp16.

**Parts.** A factor has lines, the rows of A and the columns of B, each as long as the sum. A line
is scaled span by span, of 1024 terms, so that a factor is read once and split at once. With the e
that brings the largest magnitude of a span into [2¹⁴, 2¹⁵) when it is multiplied by 2⁻ᵉ, an element
becomes

    v = a 2⁻ᵉ        high = fp16(v)        low = fp16(v − high)        a ≈ 2ᵉ (high + low)

which errs by 2⁻²³ of the element, or 2⁻³⁹ of its span's largest where that is more: where the
element is below 2⁻¹⁶ of it. A span whose largest is below 2⁻¹¹² has e = −126 and loses nothing, as
fp32 itself is no finer there.

A nonzero element has a nonzero high part, of 2⁻²⁴ at least; one that is not finite has high = ±2¹⁵
and low = ±inf or nan. So high(A) low(B) + low(A) high(B) + high(A) high(B) is inf or nan where IEEE
arithmetic has them: inf by a nonzero number is inf of its sign, inf by 0 nan.

A span's 2ᵉ is stored as two factors, for with another's it may be no number of fp32, and a sum
times it none where the sum times both is one: 2^⌊e/2⌋ and 2^⌈e/2⌉, whose last bit is set if some
element has more bits than fp16.

**Product.**

    block = high(A) low(B) + low(A) high(B) + high(A) high(B)      over 64 terms, on the tensor core
    span  = Σ block, of 16 blocks          C = Σ 2ᵉ span, with the sum of a row's and a column's e

The tensor core adds 16 terms at a time, keeps 26 bits of the largest and cuts off the rest, so the
small products come first. A block falls short by 0.9e-7 of itself for normal numbers and 2e-7 for
positive ones (H200). Where both lines have elements of more than fp16's bits a span's factor is
therefore the next number above 2ᵉ, 1 + 2⁻²³ times as large; of integers and the like, whose sums
may be exact, it is not.

**Error**, in units of 2⁻²² Σ|a||b|, at most: 2 of the parts, of which low(A) low(B), left out, is
one; 10.5 cut off, 17 numbers 2⁻²⁵ of the largest each and a result 2⁻²³ of itself, four times a
block; k/4096 + 4 of rounding spans and their sum, ½ of the factor and ¼ of the result. Together
18 + k/4096, and 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|) of elements that are small in their span, the
largest being that of each span. Below 2⁻¹²⁶ a span's rounding is 2⁻¹⁵⁰ at most. Older tensor cores
add eight terms and keep 25 bits: 30 + k/4096 there.

| matrix   | shape, of sizes that are filled up to multiples of TILE | strides, dtype              |
|----------|---------------------------------------------------------|-----------------------------|
| source   | as it is; its rows may lie in two tensors, half in each | rows contiguous, fp32       |
| parts    | (2·rows, columns), the high rows above the low ones     | contiguous, fp16            |
| factors  | (2·spans, lines)                                        | contiguous, the bits, int32 |
| c        | (programs that share a sum, m, n)                       | contiguous, fp32            |
"""

import triton
import triton.language as tl

from fusedlib.ops.blocks import tile_position


@triton.jit
def _span_factors(magnitudes, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of both factors of each span along an axis, and 2⁻ᵉ, of magnitudes' bits.

    As integers magnitudes are in the same order, inf and nan above all numbers.
    """
    biased = tl.max(magnitudes, axis=axis) >> 23
    has_more_bits = (tl.max(magnitudes & 0x1FFF, axis=axis) != 0).to(tl.int32)
    e = tl.maximum(biased - 141, -126)
    scale = ((127 - e) << 23).to(tl.float32, bitcast=True)
    # Beside inf and nan no share of a sum may overflow, whatever it is.
    e = tl.where(biased == 255, -60, e)
    half = e >> 1
    return (half + 127) << 23, ((e - half + 127) << 23) | has_more_bits, scale


@triton.jit
def _parts(a, scale):  # type: ignore[no-untyped-def]
    v = a * scale
    least = tl.where(a == 0.0, 0.0, 5.9604644775390625e-08)  # 2⁻²⁴
    high = tl.minimum(tl.maximum(tl.abs(v), least), 32768.0)
    high = tl.where(a < 0.0, -high, high).to(tl.float16)
    return high, (v - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _block(source, lower_half, i, j, rows, columns, stride, upper_rows):  # type: ignore[no-untyped-def]
    """Rows i and columns j of a matrix, zeros outside."""
    first = tl.where(i < upper_rows, source, lower_half - upper_rows.to(tl.int64) * stride)
    places = i.to(tl.int64)[:, None] * stride + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(first[:, None] + places, mask=inside, other=0.0)


@triton.jit(do_not_specialize=("rows", "upper_rows"))
def _split_kernel(  # type: ignore[no-untyped-def]
    source, lower_half, parts, factors, rows, columns, stride, upper_rows,
    BY_COLUMNS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A program has a span of some LINES, which are rows, or columns."""
    height: tl.constexpr = SPAN if BY_COLUMNS else LINES
    width: tl.constexpr = LINES if BY_COLUMNS else SPAN
    tall, wide = tl.cdiv(rows, TILE) * TILE, tl.cdiv(columns, TILE) * TILE
    blocks = tl.cdiv(wide, width)
    row, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i, j = row * height + tl.arange(0, height), column * width + tl.arange(0, width)
    a = _block(source, lower_half, i, j, rows, columns, stride, upper_rows)
    magnitudes = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if BY_COLUMNS:
        first, second, scale = _span_factors(magnitudes, 0)
        factors += 2 * row.to(tl.int64) * wide + j
        tl.store(factors, first, mask=j < wide)
        tl.store(factors + wide, second, mask=j < wide)
        scale = scale[None, :]
    else:
        first, second, scale = _span_factors(magnitudes, 1)
        factors += 2 * column.to(tl.int64) * tall + i
        tl.store(factors, first, mask=i < tall)
        tl.store(factors + tall, second, mask=i < tall)
        scale = scale[:, None]
    high, low = _parts(a, scale)
    places = i.to(tl.int64)[:, None] * wide + j[None, :]
    inside = (i < tall)[:, None] & (j < wide)[None, :]
    tl.store(parts + places, high, mask=inside)
    tl.store(parts + tall.to(tl.int64) * wide + places, low, mask=inside)


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    parts, row, column, width,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """[HEIGHT, WIDTH] at (row, column) of a part, which is stored transposed if TRANSPOSED."""
    if TRANSPOSED:
        i, j = column + tl.arange(0, WIDTH), row + tl.arange(0, HEIGHT)
        block = tl.load(parts + i.to(tl.int64)[:, None] * width + j[None, :]).T
    else:
        i, j = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
        block = tl.load(parts + i.to(tl.int64)[:, None] * width + j[None, :])
    return block


@triton.jit
def _low_part(parts, rows, columns, TRANSPOSED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low part of op(A) (rows, columns), and how wide the parts are stored."""
    row_tiles, column_tiles = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    width = (row_tiles if TRANSPOSED else column_tiles) * TILE
    return parts + (row_tiles * TILE).to(tl.int64) * (column_tiles * TILE), width


@triton.jit(do_not_specialize=("m", "k", "k_per_split"))  # a binary for every number of tokens
def _split_product_kernel(  # type: ignore[no-untyped-def]
    a_high, b_high, a_factors, b_factors, c, m, n, k, k_per_split,
    A_T: tl.constexpr, B_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = tile_position(
        tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M
    )
    row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
    a_low, a_width = _low_part(a_high, m, k, A_T, TILE)
    b_low, b_width = _low_part(b_high, k, n, B_T, TILE)
    i, j = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    a_lines, b_lines = tl.cdiv(m, TILE) * TILE, tl.cdiv(n, TILE) * TILE
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros_like(acc)
    begin = tl.multiple_of(tl.program_id(1) * k_per_split, BLOCK_K)
    end = tl.minimum(begin + k_per_split, k)
    for start in range(begin, end, BLOCK_K):
        ah = _part(a_high, row, start, a_width, BLOCK_M, BLOCK_K, A_T)
        al = _part(a_low, row, start, a_width, BLOCK_M, BLOCK_K, A_T)
        bh = _part(b_high, start, column, b_width, BLOCK_K, BLOCK_N, B_T)
        bl = _part(b_low, start, column, b_width, BLOCK_K, BLOCK_N, B_T)
        acc += tl.dot(ah, bh, tl.dot(al, bh, tl.dot(ah, bl)))
        if (start + BLOCK_K) % SPAN == 0 or start + BLOCK_K >= end:
            span = start // SPAN
            a1 = tl.load(a_factors + 2 * span * a_lines + i)[:, None]
            a2 = tl.load(a_factors + (2 * span + 1) * a_lines + i)[:, None]
            b1 = tl.load(b_factors + 2 * span * b_lines + j)[None, :]
            b2 = tl.load(b_factors + (2 * span + 1) * b_lines + j)[None, :]
            # A row's and a column's together: a large one alone may take the sum out of the range.
            acc *= a1.to(tl.float32, bitcast=True) * b1.to(tl.float32, bitcast=True)
            second = (b2 & (a2 | -2)).to(tl.float32, bitcast=True)
            total += acc * ((a2 & -2).to(tl.float32, bitcast=True) * second)
            acc = tl.zeros_like(acc)
    inside = (i < m)[:, None] & (j < n)[None, :]
    c += tl.program_id(1).to(tl.int64) * m * n
    tl.store(c + i.to(tl.int64)[:, None] * n + j[None, :], total, mask=inside)
