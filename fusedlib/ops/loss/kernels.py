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

    H = lse − Σ_c p_c logits_c        ∂H / ∂logits_c = −p_c (log p_c + H)        ∂lse = p_c

| tensor                   | shape             | strides, dtype                                   |
|--------------------------|-------------------|--------------------------------------------------|
| logits, d_logits         | (rows, classes)   | rows contiguous, begin at multiples of 128 bytes |
| target                   | (rows,)           | contiguous, int64; of no class: its loss is NaN  |
| token_weights, upstreams | (rows,)           | contiguous, fp32                                 |
| class_weights            | (vocabulary,)     | contiguous, fp32                                 |
| losses, hits             | (rows,)           | contiguous, fp32                                 |
| scale                    | ()                | fp32: s                                          |
| statistics               | (7, rows)         | contiguous, fp32                                 |

A token is a hit (1.0, else 0.0) where y is the first of its largest logits, and not ignored.

The products are torch's: `function` beside this has them. `_cross_entropy_kernel` reads whole rows
twice, the second time from the L2 cache where it holds them, writes d_logits over them, and the
losses. Of losses by token, each with an upstream number, `_by_token_kernel` merges the logits of a
slice of the vocabulary into each row's running maximum and sums, reading them once;
`_by_token_backward_kernel`, which knows these, reads and writes a slice once.

Statistics of a row, by its logits in all slices so far, zeros before the first: their maximum m,
Σ exp(logits − m), the same sum of exp(logits − m) (logits − m), the target's logit, Σ ω logits, the
largest before the target, Σ ω. After the last: m, log of the sum, entropy, what p is multiplied by
in d_logits, loss, hit.

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

import triton
import triton.language as tl


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
    logits, target, class_weights, statistics, upstream, entropy_upstream, sum_upstream, vocabulary,
    first, classes, row_stride, ignore_index, label_smoothing, z_loss, softcap, by_temperature,
    BY_CLASS: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    SUMMED: tl.constexpr, BLOCK: tl.constexpr,
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
    if SUMMED:
        d += tl.load(sum_upstream + row) * p
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
