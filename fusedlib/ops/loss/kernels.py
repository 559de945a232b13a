# ruff: noqa: N803  (compile-time arguments of kernels are in capitals)
"""A linear layer and its cross entropy as one operation; the logits never exist as a whole.

    logits = hidden Wᵀ + b, or κ tanh((hidden Wᵀ + b) / κ)            lse = log Σ_c exp(logits_c)
    loss   = w ((1 − ε) ω_y (lse − logits_y) + ε mean_c ω_c (lse − logits_c) + ζ ω_y lse²)
    d_logits_c = w s (p_c ((1 − ε) ω_y + ε mean ω + 2 ζ ω_y lse) − (1 − ε) ω_y [c = y] − ε ω_c / V)
    d_hidden = d_logits W        d_W = d_logitsᵀ hidden        d_b = Σ_tokens d_logits

with ε the label smoothing, ζ the weight of z-loss, w a token's weight, ω a class's, κ the softcap,
V the vocabulary, p = softmax(logits) and s = 1 / Σ w ω_y for a mean. A token whose y is ignored has
no loss and no gradient. With a softcap d_logits are multiplied by its derivative 1 − (logits/κ)².
Losses by token may be of logits / τ, τ the temperature; then d_logits are divided by it. They come
with the entropy of p, if it is wanted, as published for policy gradients (Mnih et al. 2016):

    H = lse − Σ_c p_c logits_c        ∂H / ∂logits_c = −p_c (log p_c + H)

| tensor                | shape                | strides, dtype                              |
|-----------------------|----------------------|---------------------------------------------|
| hidden, d_hidden      | (tokens, hidden)     | any, contiguous                             |
| weight, d_weight      | (vocabulary, hidden) | any, contiguous; d_weight fp32, see below   |
| logits of a chunk     | (rows, vocabulary)   | rows begin at multiples of 128 bytes        |
| target, token_weights | (tokens,)            | contiguous; int64, fp32                     |
| class_weights         | (vocabulary,)        | contiguous, fp32                            |
| losses, hits          | (tokens,)            | contiguous, fp32; hits: see below           |
| statistics            | (7, tokens)          | contiguous, fp32; see `STATISTICS`          |

A token is a hit (1.0, else 0.0) where y is the first of its largest logits, and not ignored.

The products are torch.mm's, over chunks of tokens; in fp32 at torch's "highest", where it pays, of
split factors (`ops.matmul.kernels`). One kernel reads a chunk's logits twice, the second time
from the L2 cache where it holds them, writes d_logits over them and the losses. Gradients are
computed in forward, where the logits are, when one is wanted; backward multiplies them by the
upstream scalar, in no time where that is 1. Nothing is read back to the host.

Losses by token have an upstream number each, so that their backward computes the logits again. Both
passes go over slices of the vocabulary with all tokens. Forward merges a slice into each row's
running maximum and sums, reading it once; backward, which knows them, reads and writes it once: a
slice's d_W and d_b are whole, and rounded as they are made; d_hidden is summed over slices in fp32.
The slices are the same, so that the same product rounds logits the same way: another one may round
a bf16 logit of 30 up by 1/8, and the gradient at a p of 1 would be 0.13 instead of 0.

Memory beside the gradients, with V the vocabulary, H the width of hidden, b the bytes of a number
and L those of a chunk's logits, rows·V·b. Where several chunks add up in half precision, or in
fp16, d_W is summed in 4·V·H bytes, rounded at the end of backward; otherwise it is rounded as it is
made. `plan` takes the fewest chunks within a budget:

| d_W                   | takes                 | "least"                | "balanced"             |
|-----------------------|-----------------------|------------------------|------------------------|
| of one chunk, no fp16 | L                     | max(L₀, 2·V·H) + 2·V·H | max(L₀, 4·V·H) + 2·V·H |
| in fp32, of halves    | max(L + 2·V·H, 4·V·H) | the same               | the same               |
| of fp32, or unwanted  | L                     | L₀                     | L₀                     |

with L₀ = LOGITS_BYTES, or one row's logits where those are more, and V rounded up as rows of logits
are. Of a budget in bytes a chunk has what d_W leaves. Losses by token take a slice's logits, and of
several slices in half precision 2·tokens·H more, 4·tokens·H at least, to sum d_hidden. A split
product holds parts as large as both its factors meanwhile, one of W's products 4·V·(rows + H)
bytes, and adds up d_W of several chunks by way of another 4·V·H.

Error bound: logits are rounded to the inputs' dtype once; in fp32 each product errs as torch's own,
or within the bound of `fusedlib.ops.matmul.kernels`. Of those logits, with M the largest of a row's
|logits| and |lse|, a loss errs by (8 + log₂ V) (1 + M) (1 + 2 ζ M) 2⁻²⁴ at most, and each p_c by
(8 + log₂ V + M) 2⁻²³ of itself. A softcap adds 20 M (1 + 2 ζ M) 2⁻²⁴ to the first, 20 M 2⁻²⁴ to
the second, and its derivative errs by (8 + 6 |x| / κ) 2⁻²⁴ of itself at a logit x before it; class
weights multiply a loss's bound by the largest of them. d_logits are rounded to the inputs' dtype
once, d_W and d_b are summed over all tokens in fp32 and rounded once, or twice where the upstream
scalar is not a power of two. In fp16 d_logits of a mean carry n/Σw, n the number of tokens, because
1/Σw would leave them below its smallest number; d_hidden · n must not pass its largest.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedlib.launch import Config, Launch, architecture, cdiv, launch_for
from fusedlib.ops.arguments import KERNEL_DTYPES
from fusedlib.ops.matmul.function import multiply, splits

LEAST, BALANCED = -2, -1  # for bytes: budgets that depend on the shapes
LOGITS_BYTES = 2**29  # smaller chunks of logits make products slower
ROW_BYTES = 128
ROWS = 128  # a chunk's rows are a multiple of a product's tile, if there are as many
# What a program has of a row at a time, and a warp of that: each of an H200's 132 multiprocessors
# has one row; on an H100 the 250 KiB of 128256 seem to leave its L2 before they are read again.
# With as many warps the code for sm_100 spills 4 to 28 registers.
BLOCK_BYTES, BLOCK_BYTES_BY_ARCHITECTURE, WARP_BYTES = 2**15, {100: 2**14}, 2**10
SCALED_BLOCK, SCALED_WARPS = 4096, 8
# Of a token, by its logits in all slices so far: their maximum m, Σ exp(logits − m), the same sum
# of exp(logits − m) (logits − m), the target's logit, Σ ω logits, the largest before the target,
# Σ ω. After the last m, log of the sum, entropy, what p is multiplied by in d_logits, loss, hit.
STATISTICS = 7
if triton.knobs.runtime.interpret:
    BLOCK_BYTES, SCALED_BLOCK = 256, 64  # small enough that a test's row has several


@triton.jit
def _softcapped(x, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """κ tanh(x / κ), or x where there is no softcap; small ones by the polynomial of Cephes."""
    if CAPPED:
        u = x * (1 / softcap)
        e = tl.exp(tl.abs(u) * -2)
        large = (1 - e) / (1 + e)
        z = u * u
        small = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
        small = ((small + 1.33314422036e-1) * z - 3.33332819422e-1) * z * u + u
        x = softcap * tl.where(tl.abs(u) < 0.625, small, tl.where(u < 0, -large, large))
    return x


@triton.jit
def _softcap_derivative(x, softcap):  # type: ignore[no-untyped-def]
    e = tl.exp(tl.abs(x) * (-2 / softcap))
    return 4 * e / ((1 + e) * (1 + e))


@triton.jit
def _loss_of_row(  # type: ignore[no-untyped-def]
    m, log_total, correct, by_label, shares, weighed, vocabulary, label_smoothing, z_loss,
    BY_CLASS: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """A row's loss, and what p is multiplied by in its d_logits; before its weight and scale."""
    lse = m + log_total
    at_label = (1 - label_smoothing) * by_label
    squared = z_loss * by_label
    loss = at_label * (m - correct + log_total) + squared * lse * lse
    average = 1.0
    if SMOOTHED:
        if BY_CLASS:
            average = weighed / vocabulary
        loss += label_smoothing * (average * m - shares / vocabulary + average * log_total)
    of_p = at_label + label_smoothing * average if BY_CLASS else 1.0
    return loss, of_p + 2 * squared * lse


@triton.jit
def _d_of_row(  # type: ignore[no-untyped-def]
    p, columns, label, class_weights, vocabulary, of_p, by_label, label_smoothing,
    BY_CLASS: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """A row's d_logits of a loss, before softcap, weight and scale; `columns` of the vocabulary."""
    share = label_smoothing / vocabulary
    if SMOOTHED and BY_CLASS:
        by = tl.load(class_weights + columns, mask=columns < vocabulary, other=0.0)
        share = share * by
    at_label = (1 - label_smoothing) * by_label
    return of_p * p - tl.where(columns == label, at_label + share, share)


@triton.jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, target, token_weights, class_weights, scale, losses, hits, vocabulary, row_stride,
    ignore_index, label_smoothing, z_loss, softcap,
    GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, BY_CLASS: tl.constexpr, SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its loss, where COUNTED whether it is a hit, where GRADIENT d_logits over logits."""
    row = tl.program_id(0)
    label = tl.load(target + row)
    logits += row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if COUNTED:
            tl.store(hits + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros((BLOCK,), dtype=logits.dtype.element_ty)
            for start in range(0, row_stride, BLOCK):
                tl.store(logits + start + lanes, zeros, mask=start + lanes < row_stride)
    else:
        # Each lane has its own maximum and sum, so that blocks need no exchange between threads.
        largest = tl.full((BLOCK,), -3.0e38, tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        shares = tl.zeros((BLOCK // 4,), dtype=tl.float32)  # 4 side by side are one thread's
        weighed = tl.zeros((BLOCK // 4,), dtype=tl.float32)
        in_vocabulary = (label >= 0) & (label < vocabulary)
        beaten = tl.zeros((BLOCK,), dtype=tl.int32)
        if COUNTED:
            own = tl.load(logits + label, mask=in_vocabulary, other=float("nan")).to(tl.float32)
            own = _softcapped(own, softcap, CAPPED)
            beaten += (own != own).to(tl.int32)
        for start in range(0, row_stride, BLOCK):
            columns = start + lanes
            # Up to the row's stride, which is a round number: loads stay 16 bytes wide.
            inside = columns < row_stride
            x = tl.load(logits + columns, mask=inside, other=0.0, eviction_policy="evict_last")
            x = _softcapped(x.to(tl.float32), softcap, CAPPED)
            x = tl.where(columns < vocabulary, x, float("-inf"))
            if COUNTED:
                ahead = (x > own) | (x != x) | ((x == own) & (columns < label))  # NaN is ahead
                beaten |= ahead.to(tl.int32)
            step = x - largest
            decay = tl.exp(-tl.abs(step))
            total = tl.where(step > 0, total * decay + 1, total + decay)
            largest = tl.maximum(largest, x)
            if SMOOTHED:
                x = tl.where(columns < vocabulary, x, 0.0)
                if BY_CLASS:
                    by = tl.load(class_weights + columns, mask=columns < vocabulary, other=0.0)
                    weighed += tl.sum(by.reshape(BLOCK // 4, 4), axis=1)
                    x *= by
                shares += tl.sum(x.reshape(BLOCK // 4, 4), axis=1)
        m = tl.max(largest)
        total = tl.sum(total * tl.exp(largest - m))
        correct = tl.load(logits + label, mask=in_vocabulary, other=float("nan")).to(tl.float32)
        correct = _softcapped(correct, softcap, CAPPED)
        by_label = 1.0
        if BY_CLASS:
            by_label = tl.load(class_weights + label, mask=in_vocabulary, other=0.0)
        loss, of_p = _loss_of_row(
            m, tl.log(total), correct, by_label, tl.sum(shares), tl.sum(weighed), vocabulary,
            label_smoothing, z_loss, BY_CLASS, SMOOTHED,
        )  # fmt: skip
        if COUNTED:
            tl.store(hits + row, 1.0 - tl.max(beaten).to(tl.float32))
        factor = tl.load(scale)
        if WEIGHTED:
            weight = tl.load(token_weights + row)
            loss *= weight
            factor *= weight
        tl.store(losses + row, loss)
        if GRADIENT:
            tl.debug_barrier()  # no logit is overwritten that another thread has yet to read
            inverse = 1 / total
            for start in range(0, row_stride, BLOCK):
                columns = start + lanes
                inside = columns < row_stride
                x = tl.load(logits + columns, mask=inside, eviction_policy="evict_first")
                x = x.to(tl.float32)
                p = tl.exp(_softcapped(x, softcap, CAPPED) - m) * inverse
                d = factor * _d_of_row(
                    p, columns, label, class_weights, vocabulary, of_p, by_label, label_smoothing,
                    BY_CLASS, SMOOTHED,
                )  # fmt: skip
                if CAPPED:
                    d *= _softcap_derivative(x, softcap)
                tl.store(logits + columns, d.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _by_token_kernel(  # type: ignore[no-untyped-def]
    logits, target, class_weights, statistics, vocabulary, first, classes, row_stride, ignore_index,
    label_smoothing, z_loss, softcap, by_temperature,
    BY_CLASS: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's logits, of a slice of the vocabulary from `first` on, merged into its statistics; the
    last slice finishes them. Those of an ignored token stay 0.
    """
    row, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    label = tl.load(target + row)
    if label != ignore_index:
        logits += row * row_stride
        statistics += row
        later, own = first > 0, label - first
        is_here = (own >= 0) & (own < classes)
        # 16 bytes side by side are one thread's, and share a maximum and sums. The first of these
        # groups goes on with the sums of the slices before.
        group: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
        groups: tl.constexpr = BLOCK // group
        none, goes_on = tl.zeros((groups,), dtype=tl.float32), tl.arange(0, groups) == 0
        largest = none + tl.load(statistics, mask=later, other=-3.0e38)
        total = tl.where(goes_on, tl.load(statistics + tokens), 0.0)
        below = tl.where(goes_on, tl.load(statistics + 2 * tokens), 0.0)
        shares = tl.where(goes_on, tl.load(statistics + 4 * tokens), 0.0)
        weighed = tl.where(goes_on, tl.load(statistics + 6 * tokens), 0.0)
        earlier = none + tl.load(statistics + 5 * tokens, mask=later, other=float("-inf"))
        correct = tl.load(logits + own, mask=is_here, other=0.0).to(tl.float32)
        correct = _softcapped(correct, softcap, CAPPED) * by_temperature
        known = tl.load(statistics + 3 * tokens, mask=later, other=float("nan"))
        correct = tl.where(is_here, correct, known)
        for start in range(0, classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < classes
            # Up to the row's stride, which is a round number: loads stay 16 bytes wide.
            x = tl.load(logits + columns, mask=columns < row_stride, other=0.0).to(tl.float32)
            x = tl.where(inside, _softcapped(x, softcap, CAPPED) * by_temperature, float("-inf"))
            if COUNTED:
                before = tl.where(columns < own, x, float("-inf")).reshape(groups, group)
                earlier = tl.maximum(earlier, tl.max(before, axis=1))
            if SMOOTHED:
                share = tl.where(inside, x, 0.0)
                if BY_CLASS:
                    by = tl.load(class_weights + first + columns, mask=inside, other=0.0)
                    weighed += tl.sum(by.reshape(groups, group), axis=1)
                    share *= by
                shares += tl.sum(share.reshape(groups, group), axis=1)
            x = x.reshape(groups, group)
            m = tl.maximum(largest, tl.max(x, axis=1))
            step, drop = x - m[:, None], largest - m
            e, decay = tl.exp(step), tl.exp(drop)
            if ENTROPY:  # Σ exp(x − m) (x − m); of a logit of -inf 0, as the limit has it
                here = tl.sum(e * tl.maximum(step, -3.0e38), axis=1)
                below = decay * (below + drop * total) + here
            total = decay * total + tl.sum(e, axis=1)
            largest = m
        m = tl.max(largest)
        drop = largest - m
        if ENTROPY:
            below = tl.sum((below + drop * total) * tl.exp(drop))
        total = tl.sum(total * tl.exp(drop))
        tl.store(statistics, m)
        if first + classes < vocabulary:
            tl.store(statistics + tokens, total)
            if ENTROPY:
                tl.store(statistics + 2 * tokens, below)
            tl.store(statistics + 3 * tokens, correct)
            if SMOOTHED:
                tl.store(statistics + 4 * tokens, tl.sum(shares))
                tl.store(statistics + 6 * tokens, tl.sum(weighed))
            if COUNTED:
                tl.store(statistics + 5 * tokens, tl.max(earlier))
        else:
            log_total, by_label = tl.log(total), 1.0
            if BY_CLASS:
                by_label = tl.load(class_weights + label, mask=correct == correct, other=0.0)
            loss, of_p = _loss_of_row(
                m, log_total, correct, by_label, tl.sum(shares), tl.sum(weighed), vocabulary,
                label_smoothing, z_loss, BY_CLASS, SMOOTHED,
            )  # fmt: skip
            tl.store(statistics + tokens, log_total)
            if ENTROPY:
                tl.store(statistics + 2 * tokens, log_total - below / total)
            tl.store(statistics + 3 * tokens, of_p)
            tl.store(statistics + 4 * tokens, loss)
            if COUNTED:  # NaN is ahead
                is_hit = (correct == m) & (tl.max(earlier) < m) & (total == total)
                tl.store(statistics + 5 * tokens, is_hit.to(tl.float32))


@triton.jit
def _by_token_backward_kernel(  # type: ignore[no-untyped-def]
    logits, target, class_weights, statistics, upstream, entropy_upstream, vocabulary, first,
    classes, row_stride, ignore_index, label_smoothing, z_loss, softcap, by_temperature,
    BY_CLASS: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK logits of a row, of a slice of the vocabulary from `first` on: d_logits over them."""
    row, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < row_stride
    logits += row * row_stride + lanes
    x = tl.load(logits, mask=inside, other=0.0).to(tl.float32)
    label = tl.load(target + row)
    statistics += row
    # Chosen from, so that no product is fused with the difference: of the largest it is 0.
    log_p = tl.where(inside, _softcapped(x, softcap, CAPPED) * by_temperature, 0.0)
    log_p = log_p - tl.load(statistics) - tl.load(statistics + tokens)
    p = tl.exp(log_p)
    by_label = 1.0
    if BY_CLASS:
        in_vocabulary = (label >= 0) & (label < vocabulary)
        by_label = tl.load(class_weights + label, mask=in_vocabulary, other=0.0)
    d = tl.load(upstream + row) * _d_of_row(
        p, first + lanes, label, class_weights, vocabulary, tl.load(statistics + 3 * tokens),
        by_label, label_smoothing, BY_CLASS, SMOOTHED,
    )  # fmt: skip
    if ENTROPY:
        entropy = tl.load(statistics + 2 * tokens)
        d -= tl.load(entropy_upstream + row) * p * (tl.maximum(log_p, -3.0e38) + entropy)
    if CAPPED:
        d *= _softcap_derivative(x, softcap)
    d = tl.where(label == ignore_index, 0.0, d * by_temperature)
    tl.store(logits, d.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_kernel(  # type: ignore[no-untyped-def]
    source, result, factor, counts, count, width, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """result = factor · source; nothing to do where they are one tensor and the factor is 1.

    Rows of `width` elements that do not count give 0 whatever the factor is.
    """
    times = tl.load(factor)
    if IN_PLACE:  # only here, so that elsewhere no load waits for the factor's
        count = tl.where(times != 1.0, count, 0)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < count).to(tl.float32) * times
    if times - times != 0.0:  # infinite or NaN, with which a 0 gives NaN
        x = tl.where(tl.load(counts + i // width, mask=i < count, other=0) != 0, x, 0.0)
    tl.store(result + i, x.to(result.dtype.element_ty), mask=i < count)


def row_stride(vocabulary: int, itemsize: int) -> int:
    """Elements from one row of a chunk's logits to the next."""
    round_to = ROW_BYTES // itemsize
    return (vocabulary + round_to - 1) // round_to * round_to


def block_and_warps(stride: int, itemsize: int, arch: int, more: bool = False) -> tuple[int, int]:
    """How a row of that stride is cut on an architecture: elements at a time, and warps.

    Of a row that is computed with more than a plain loss, half as much at a time, a quarter in
    fp32: a thread of fewer warps may have more registers, and spills none.
    """
    most = BLOCK_BYTES_BY_ARCHITECTURE.get(arch, BLOCK_BYTES) // itemsize
    most >>= itemsize // 2 if more else 0
    block = min(most, triton.next_power_of_2(stride))
    return block, max(block * itemsize // WARP_BYTES, 4)


def chunk_rows(tokens: int, vocabulary: int, itemsize: int, budget: int) -> int:
    """Tokens of a chunk: their logits take `budget` bytes at most, or are one token's."""
    most = max(budget // (row_stride(vocabulary, itemsize) * itemsize), 1)
    if tokens <= most:
        return tokens
    unit = ROWS if most >= ROWS else 1
    most = most // unit * unit
    chunks = (tokens + most - 1) // most
    return ((tokens + chunks - 1) // chunks + unit - 1) // unit * unit


class Settings(NamedTuple):
    """Numbers that decide what a loss is, and how it is computed.

    Attributes:
        ignore_index: the target whose row has no loss and no gradient.
        label_smoothing: ε, from 0 to 1.
        z_loss: ζ.
        softcap: κ, or 0 for none.
        memory: the budget of `plan`, bytes, LEAST or BALANCED.
        wants_hits: whether hits are computed.
        temperature: τ, of losses by token alone.
        wants_entropy: whether the entropy of a token's distribution is computed.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    memory: int = BALANCED
    wants_hits: bool = False
    temperature: float = 1.0
    wants_entropy: bool = False


class Plan(NamedTuple):
    """How many tokens a chunk has, what d_W is summed in, and what that takes.

    `memory` is the most bytes that exist at once beside the operands and the gradients in their
    own dtypes: a chunk's logits and what fp32 sums take more than d_W does. Not counted are some 20
    bytes a token, and the parts of split products.
    """

    rows: int
    sums: torch.dtype
    memory: int


def budget(memory: str | int) -> int:
    """The bytes that `memory` of a loss asks for, or LEAST or BALANCED."""
    if isinstance(memory, str):
        return LEAST if memory == "least" else BALANCED
    return int(memory)


def plan(tokens: int, weight: Tensor, wants_weight: bool = True, memory: int = BALANCED) -> Plan:
    """The plan of the fewest chunks within the memory.

    Args:
        tokens: of all chunks together.
        weight: (vocabulary, hidden); its shape and dtype count.
        wants_weight: whether d_W is wanted.
        memory: bytes, LEAST or BALANCED.

    Raises:
        ValueError: fewer bytes than chunks of one token take.
    """
    dtype = weight.dtype
    row_bytes = row_stride(weight.shape[0], dtype.itemsize) * dtype.itemsize
    # Sums of fp32 are 4 bytes a number and half of them more than d_W; a half-precision d_W is
    # made of them at the end, when no logits are left.
    half_sum_bytes = weight.numel() * 2 if wants_weight and dtype.itemsize == 2 else 0

    def plan_of_rows(rows: int) -> Plan:
        summed = half_sum_bytes and (rows < tokens or dtype == torch.float16)
        bytes_needed = (
            max(rows * row_bytes + half_sum_bytes, 2 * half_sum_bytes)
            if summed
            else rows * row_bytes
        )
        return Plan(rows, torch.float32 if summed else dtype, bytes_needed)

    if memory < 0:
        share = row_bytes * weight.shape[1] if half_sum_bytes else 0  # d_W's bytes, of padded rows
        logits = max(LOGITS_BYTES, share if memory == LEAST else 2 * share)
        budget = logits + share
    else:
        budget = memory
        logits = budget - half_sum_bytes
    whole = plan_of_rows(tokens)
    if whole.memory <= budget:
        return whole
    chunked = plan_of_rows(chunk_rows(tokens, weight.shape[0], dtype.itemsize, logits))
    if memory > 0 and chunked.memory > budget:
        least = min(whole.memory, plan_of_rows(1).memory)
        raise ValueError(
            f"memory must be at least {least} bytes for {tokens} tokens and {dtype} weight "
            f"{tuple(weight.shape)}, got {memory}: give more, or 'least' for the least that is fast"
        )
    return chunked


def slices(tokens: int, weight: Tensor, memory: int = BALANCED) -> Plan:
    """The plan of losses by token, over the fewest slices of the vocabulary within the memory.

    Args:
        tokens: of a slice, which are all.
        weight: (vocabulary, hidden); its shape and dtype count.
        memory: bytes, or LEAST or BALANCED for LOGITS_BYTES, or what d_hidden's sum takes.

    Returns:
        The plan, whose `rows` are the weight's in a slice, and `sums` what d_hidden is summed in.

    Raises:
        ValueError: fewer bytes than the narrowest slices take.
    """
    (vocabulary, hidden), dtype = weight.shape, weight.dtype
    unit = ROW_BYTES // dtype.itemsize
    half_sum_bytes = tokens * hidden * 2 if dtype.itemsize == 2 else 0

    def plan_of_pieces(pieces: int) -> Plan:
        summed = half_sum_bytes and pieces * unit < vocabulary
        logits = tokens * pieces * ROW_BYTES
        needed = max(logits + half_sum_bytes, 2 * half_sum_bytes) if summed else logits
        return Plan(min(pieces * unit, vocabulary), torch.float32 if summed else dtype, needed)

    pieces = cdiv(vocabulary, unit)
    budget = memory if memory > 0 else max(LOGITS_BYTES, 2 * half_sum_bytes) + half_sum_bytes
    whole = plan_of_pieces(pieces)
    if whole.memory <= budget:
        return whole
    most = max((budget - half_sum_bytes) // (tokens * ROW_BYTES), 1)
    sliced = plan_of_pieces(cdiv(pieces, cdiv(pieces, most)))
    least = whole if whole.memory < sliced.memory else sliced
    if 0 < memory < least.memory:
        raise ValueError(
            f"memory must be at least {least.memory} bytes for the losses of {tokens} tokens and "
            f"{dtype} weight {tuple(weight.shape)}, got {memory}: give more, or 'least'"
        )
    return least


def _refuse_rows(logits: Tensor, stride: int, **vectors: tuple[Tensor | None, Any]) -> None:
    """Raise where rows of logits, or vectors and the shapes that are theirs, do not fit."""
    if logits.dtype not in KERNEL_DTYPES or logits.stride() != (stride, 1):
        raise ValueError(
            f"logits {tuple(logits.shape)} must be of stride ({stride}, 1) and one of "
            f"{', '.join(map(str, KERNEL_DTYPES))}; got {logits.stride()}, {logits.dtype}"
        )
    for name, (vector, shape) in vectors.items():
        dtype = torch.int64 if name == "target" else torch.float32
        if vector is None:
            continue
        if vector.shape != shape or vector.dtype != dtype or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be {tuple(shape)}, {dtype}, contiguous; got {tuple(vector.shape)}, "
                f"{vector.dtype}, stride {vector.stride()}"
            )


def cross_entropy_rows(
    logits: Tensor, target: Tensor, token_weights: Tensor | None, class_weights: Tensor | None,
    scale: Tensor, losses: Tensor, hits: Tensor | None, settings: Settings, *, gradient: bool,
) -> None:  # fmt: skip
    """Fill the rows' losses and hits, and where `gradient` is set write d_logits over the logits.

    Args:
        logits: (rows, vocabulary), rows contiguous and `row_stride` apart.
        target: (rows,), int64. One outside the vocabulary makes its row's loss NaN.
        token_weights: (rows,), fp32, or None for ones.
        class_weights: (vocabulary,), fp32, or None for ones.
        scale: a scalar tensor, fp32: what d_logits are multiplied by.
        losses: (rows,), fp32.
        hits: (rows,), fp32, or None where they are not wanted.
        settings: of the loss.
        gradient: whether d_logits are wanted.

    Raises:
        ValueError: a shape, stride or dtype that does not fit.
    """
    rows, vocabulary = logits.shape
    stride = row_stride(vocabulary, logits.itemsize)
    _refuse_rows(
        logits, stride, target=(target, (rows,)), losses=(losses, (rows,)), hits=(hits, (rows,)),
        token_weights=(token_weights, (rows,)), class_weights=(class_weights, (vocabulary,)),
    )  # fmt: skip
    if rows == 0:
        return
    numbers = settings.ignore_index, *map(float, settings[1:4])
    constants = {
        "GRADIENT": gradient, "WEIGHTED": token_weights is not None,
        "BY_CLASS": class_weights is not None, "SMOOTHED": settings.label_smoothing != 0,
        "CAPPED": settings.softcap != 0, "COUNTED": hits is not None,
    }  # fmt: skip

    def make() -> Launch:
        arch = architecture(logits.device) if logits.is_cuda else 0
        more = constants["CAPPED"] or constants["BY_CLASS"] or constants["COUNTED"]
        block, warps = block_and_warps(stride, logits.itemsize, arch, more)
        scalars, cut = (vocabulary, stride, *numbers), {"BLOCK": block}
        config, programs = Config(num_warps=warps), (rows, 1, 1)
        return Launch(_cross_entropy_kernel, config, programs, (), scalars, constants | cut)

    # What it does not read, it is given the losses for.
    by_token = losses if token_weights is None else token_weights
    by_class, hit = (losses if given is None else given for given in (class_weights, hits))
    matrices = logits, target, by_token, by_class, scale, losses, hit
    key = "loss", rows, vocabulary, *numbers, *constants.values(), logits.dtype, logits.device
    launch_for(key, make, *matrices)(*matrices)


def by_token_rows(
    logits: Tensor, target: Tensor, class_weights: Tensor | None, statistics: Tensor, first: int,
    vocabulary: int, settings: Settings, upstream: Tensor | None = None,
    entropy_upstream: Tensor | None = None,
) -> None:  # fmt: skip
    """Merge the logits of rows, of the classes from `first` on, into the rows' statistics; or write
    d_logits over them, where an upstream is given.

    Args:
        logits: (rows, classes), rows contiguous and a multiple of ROW_BYTES apart.
        target: (rows,), int64. One outside the vocabulary makes its row's loss NaN.
        class_weights: (vocabulary,), fp32, or None for ones.
        statistics: (STATISTICS, rows), fp32; zeros, then what the slices before left in them, one
            after another from class 0 on; whole for d_logits.
        first: the class of the first column.
        vocabulary: how many classes there are.
        settings: of the loss.
        upstream: (rows,), fp32, the gradients of the losses.
        entropy_upstream: (rows,), fp32, those of the entropies, or None where there are none.

    Raises:
        ValueError: a shape, stride or dtype that does not fit.
    """
    (rows, classes), stride = logits.shape, logits.stride(0)
    _refuse_rows(
        logits, row_stride(stride, logits.itemsize), target=(target, (rows,)),
        upstream=(upstream, (rows,)), entropy_upstream=(entropy_upstream, (rows,)),
        statistics=(statistics, (STATISTICS, rows)), class_weights=(class_weights, (vocabulary,)),
    )  # fmt: skip
    if rows == 0:
        return
    numbers = vocabulary, first, classes, stride, settings.ignore_index, *map(float, settings[1:4])
    numbers = *numbers, 1 / settings.temperature
    constants: dict[str, int] = {
        "BY_CLASS": class_weights is not None, "SMOOTHED": settings.label_smoothing != 0,
        "CAPPED": settings.softcap != 0, "ENTROPY": settings.wants_entropy, "BLOCK": SCALED_BLOCK,
    }  # fmt: skip
    # What it does not read, it is given the statistics for.
    by_class = statistics if class_weights is None else class_weights
    matrices: tuple[Tensor, ...] = logits, target, by_class, statistics
    if upstream is None:
        kernel, programs = _by_token_kernel, (rows, 1, 1)
        constants["COUNTED"] = settings.wants_hits
    else:
        kernel, programs = _by_token_backward_kernel, (rows, cdiv(classes, SCALED_BLOCK), 1)
        constants["ENTROPY"] = entropy_upstream is not None
        matrices += upstream, statistics if entropy_upstream is None else entropy_upstream
    config = Config(num_warps=SCALED_WARPS)
    make = partial(Launch, kernel, config, programs, (), numbers, constants)
    key = "by token", rows, *numbers, *constants.values(), logits.dtype, logits.device
    launch_for(key, make, *matrices)(*matrices)


def fill_scaled(source: Tensor, result: Tensor, factor: Tensor, counts: Tensor) -> Tensor:
    """Compute factor · source into `result`, contiguous both, which may be the source itself.

    `counts` has a number for each row of the source, or one for all: where it is 0, so is the row.
    """
    count = source.numel()
    if count:
        constants = {"IN_PLACE": result is source, "BLOCK": SCALED_BLOCK}
        config, programs = Config(num_warps=SCALED_WARPS), (cdiv(count, SCALED_BLOCK), 1, 1)
        scalars, matrices = (count, count // counts.numel()), (source, result, factor, counts)
        make = partial(Launch, _scaled_kernel, config, programs, (), scalars, constants)
        key = "scaled", scalars, result is source, *(m.dtype for m in matrices), source.device
        launch_for(key, make, *matrices)(*matrices)
    return result


def _is_faster_split(a: Tensor, b: Tensor) -> bool:
    return splits(a, b)


def _product(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """A B, or A B + bias, in `out` if there is one."""
    if not _is_faster_split(a, b):
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    product = multiply(a, b, bias=bias)
    return product if out is None else out.copy_(product)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + A B in `dtype`, in place; A B where there is no total."""
    if _is_faster_split(a, b):
        product = multiply(a, b)
        return product if total is None else total.add_(product)
    wide: dict[str, Any] = {"out_dtype": dtype} if a.is_cuda and a.dtype != dtype else {}
    if not wide:
        a, b = a.to(dtype), b.to(dtype)
    if total is None:
        total = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
        return torch.mm(a, b, **wide, out=total)
    return torch.addmm(total, a, b, **wide, out=total)


def losses_and_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    token_weights: Tensor | None, class_weights: Tensor | None, scale: Tensor,
    wants: tuple[bool, ...], settings: Settings,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Losses and hits (tokens,), d_hidden, d_W and d_b, each but the first if it is wanted.

    The gradients are multiplied by `scale`; which of the three are wanted is in `wants`.
    """
    (tokens, _), vocabulary, dtype = hidden.shape, weight.shape[0], hidden.dtype
    wants_hidden, wants_weight, wants_bias = wants
    if target.data_ptr() % 16:  # as labels without the first: a copy costs less than Triton's start
        target = target.clone()
    rows, sums, _ = plan(tokens, weight, wants_weight, settings.memory)
    stride = row_stride(vocabulary, dtype.itemsize)
    # A split product makes its own result, which serves where rows need no padding.
    padded = stride != vocabulary or not _is_faster_split(hidden[:rows], weight.t())
    buffer = hidden.new_empty(rows if padded else 0, stride)
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    hits = torch.empty_like(losses) if settings.wants_hits else None
    d_hidden = hidden.new_empty(hidden.shape) if wants_hidden else None
    no_sum = weight.new_zeros(weight.shape, dtype=sums) if wants_weight and not tokens else None
    d_weight: Tensor | None = no_sum
    d_bias = hidden.new_zeros(vocabulary, dtype=torch.float32) if wants_bias else None
    for start in range(0, tokens, max(rows, 1)):
        part = slice(start, start + rows)
        h, weights = hidden[part], None if token_weights is None else token_weights[part]
        hit = None if hits is None else hits[part]
        out = buffer[: h.shape[0], :vocabulary] if padded else None
        logits = _product(h, weight.t(), out, bias)
        cross_entropy_rows(
            logits, target[part], weights, class_weights, scale, losses[part], hit, settings,
            gradient=any(wants),
        )  # fmt: skip
        if d_hidden is not None:
            _product(logits, weight, out=d_hidden[part])
        if wants_weight:
            d_weight = _add_product(d_weight, logits.t(), h, sums)
        if d_bias is not None:
            d_bias += logits.sum(0, dtype=torch.float32)
        del logits  # before the next chunk's are allocated
    return losses, hits, d_hidden, d_weight, d_bias


def slices_by_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, statistics: Tensor, upstream: Tensor | None, wants: list[bool],
    entropy_upstream: Tensor | None, settings: Settings,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """All slices by `by_token_rows`, and with an upstream d_hidden, d_W and d_b, each if it is in
    `wants`.

    The products are the same without an upstream and with one, so that both passes round logits
    alike.
    """
    (tokens, _), vocabulary = hidden.shape, weight.shape[0]
    wants_hidden, wants_weight, wants_bias = wants
    target = target.clone() if target.data_ptr() % 16 else target
    classes, sums, _ = slices(tokens, weight, settings.memory)
    split = _is_faster_split(hidden, weight[:classes].t())
    padded = not split or row_stride(vocabulary, hidden.itemsize) != vocabulary
    buffer = hidden.new_empty(tokens if padded else 0, row_stride(classes, hidden.itemsize))
    d_hidden: Tensor | None = None
    d_weight = weight.new_empty(weight.shape) if wants_weight else None
    d_bias = weight.new_empty(vocabulary) if wants_bias else None
    for first in range(0, vocabulary, classes):
        part = slice(first, first + classes)
        w, b = weight[part], None if bias is None else bias[part]
        out = buffer[:, : w.shape[0]] if padded else None
        logits = _product(hidden, w.t(), out, b)
        by_token_rows(
            logits, target, class_weights, statistics, first, vocabulary, settings, upstream,
            entropy_upstream,
        )  # fmt: skip
        if wants_hidden:
            d_hidden = _add_product(d_hidden, logits, w, sums)
        if d_weight is not None:
            _product(logits.t(), hidden, out=d_weight[part])
        if d_bias is not None:
            d_bias[part] = logits.sum(0, dtype=torch.float32)
        del logits, out  # before the next slice's are allocated
    del buffer  # before d_hidden's sum is rounded
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias
