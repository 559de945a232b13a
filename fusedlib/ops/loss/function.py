"""The loss of a language model as a function of its last hidden states, and log-probabilities of
tokens: fused for bf16, fp16 and fp32 on NVIDIA GPUs from compute capability 8.0 on, else PyTorch,
where the logits exist as a whole. `kernels` beside this has the formulas and error bounds.

The products are torch.mm's, over chunks of tokens; in fp32 at torch's "highest", where it pays, of
split factors (`ops.matmul.kernels`). Gradients are computed in forward, where the logits are, when
one is wanted; backward multiplies them by the upstream scalar, in no time where that is 1.

Ignored tokens are left out before the first product where that spares enough (`SKIP_FROM`). To
know how many there are the host waits for the device, where a product is long, no CUDA graph is
captured and no compiler traces; else nothing is read back to it.

Losses by token have an upstream number each, so that their backward computes the logits again. Both
passes go over slices of the vocabulary with all tokens; a slice's d_W and d_b are whole, and
rounded as they are made; d_hidden is summed over slices in fp32. The slices are the same, so that
the same product rounds logits the same way: another one may round a bf16 logit of 30 up by 1/8, and
the gradient at a p of 1 would be 0.13 instead of 0.

Kept for backward are the gradients themselves, as forward left them; of losses by token the
operands, and statistics of each token. Backward writes over the gradients where nobody else can see
them: the graph is not retained, and no saved-tensor hooks were set in the forward.

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
bytes, and adds up d_W of several chunks by way of another 4·V·H. Where ignored tokens are left out
the hidden states of the others are copied, b·H a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedlib import reference
from fusedlib.compat import (
    assert_async,
    dispatch_mode_count,
    is_capturing,
    is_transformed,
    retains_graph,
    saved_tensor_hooks,
)
from fusedlib.invariant import is_batch_invariant
from fusedlib.launch import (
    INTERPRETED,
    Config,
    Launch,
    architecture,
    cdiv,
    has_kernels,
    launch_for,
    next_power_of_2,
)
from fusedlib.op import call_prepared, declare, operator, save_operands
from fusedlib.ops.arguments import (
    KERNEL_DTYPES,
    cast_for_autocast,
    is_distributed,
    is_whole,
    require_alike,
    require_number,
    require_tensors,
    shape_of,
)
from fusedlib.ops.matmul.function import multiply, splits

MEMORY_PLANS = ("least", "balanced")
REDUCTIONS = ("mean", "sum", "none")
LEAST, BALANCED = -2, -1  # for bytes: budgets that depend on the shapes
INVARIANT = -3  # "balanced", and slices of as many classes whatever the tokens
INVARIANT_CLASSES = 2**15
LOGITS_BYTES = 2**29  # smaller chunks of logits make products slower
ROW_BYTES = 128
ROWS = 128  # a chunk's rows are a multiple of a product's tile, if there are as many
# What a program has of a row at a time, and a warp of that: each of an H200's 132 multiprocessors
# has one row; on an H100 the 250 KiB of 128256 seem to leave its L2 before they are read again.
# With as many warps the code for sm_100 spills 4 to 28 registers.
BLOCK_BYTES, BLOCK_BYTES_BY_ARCHITECTURE, WARP_BYTES = 2**15, {100: 2**14}, 2**10
SCALED_BLOCK, SCALED_WARPS = 4096, 8
STATISTICS = 7  # of a token
# FLOPs of a product that ignored tokens must have to be left out, 0.15 ms; of a product with ten
# times as many the host asks. With 5 % ignored 1.1e12 in all took 6 % longer, 4.3e12 4 % less.
SKIP_FROM = 1e11
if INTERPRETED:
    BLOCK_BYTES, SCALED_BLOCK = 256, 64  # small enough that a test's row has several

Shape = tuple[int, ...]


class Settings(NamedTuple):
    """Numbers that decide what a loss is, and how it is computed."""

    ignore_index: int = -100
    label_smoothing: float = 0.0  # ε
    z_loss: float = 0.0  # ζ
    softcap: float = 0.0  # κ, or 0 for none
    memory: int = BALANCED  # the budget of `plan`, bytes, LEAST or BALANCED
    wants_hits: bool = False
    temperature: float = 1.0  # τ, of losses by token alone
    wants_entropy: bool = False  # of losses by token alone
    wants_logsumexp: bool = False  # the same


class TokenScores(NamedTuple):
    """What `linear_log_probs` gives of each token, (...) all; None of what was not asked for.

    Attributes:
        log_probs: log p of the chosen token, fp32, or float64 of such inputs.
        entropy: −Σ p log p of its distribution, in nats.
        logsumexp: log Σ exp of its logits after temperature and softcap.
        is_largest: whether the chosen token is the first of those with the largest logit, as
            `argmax` has it; bool, without a gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    is_largest: Tensor | None = None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *,
    bias: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    token_weights: Tensor | None = None, class_weights: Tensor | None = None,
    memory: str | int = "balanced",
) -> Tensor:  # fmt: skip
    """cross_entropy(linear(hidden, weight, bias), target), the logits never stored as a whole.

    A token's loss is its cross entropy as torch's, plus z_loss · logsumexp(logits)². All but the
    logits, which have the inputs' dtype, is fp32. What errors are promised stands in
    `fusedlib.ops.loss.kernels`. The gradients of a mean or a sum are computed with it;
    they have no second derivative.

    Args:
        hidden: (..., hidden), hidden at least 1.
        weight: (vocabulary, hidden).
        target: (...), int64, each in [0, vocabulary) or ignore_index. Others are an error: on a GPU
            one of the device, as torch's own, which comes with a later call.
        bias: (vocabulary,).
        ignore_index: the target of tokens that have no loss and no gradient, also where the
            gradient of the loss is infinite or NaN; of int64. Where products are long theirs are
            not computed: with half of the tokens ignored both passes take half of the time.
        label_smoothing: ε from 0 to 1, as torch's.
        z_loss: weight of the squared logsumexp.
        softcap: κ of logits κ tanh(logits / κ), as Gemma 2's; rounded to fp32 only.
        reduction: "none" gives a loss a token, and computes the logits again in backward; "sum"
            their sum; "mean" divides it by the number of tokens not ignored, or by the sum of their
            weights. Over no tokens it is NaN, as torch's.
        token_weights: (...), what each token's loss is multiplied by; of an ignored token anything.
            Where it wants a gradient the logits are computed again in backward.
        class_weights: (vocabulary,), as the `weight` of torch's cross_entropy; that of a token's
            target multiplies its z-loss too. It has no gradient.
        memory: what the kernels may take beside operands and gradients. Logits are computed in
            chunks of tokens, as few as fit: fewer are faster. "least": chunks as large as the
            weight (512 MiB at least); "balanced": twice that in half precision; or a number of
            bytes. With 8192 tokens and a vocabulary of 128256 in bf16, of hidden 2048: "least" 4
            chunks in 1002 MiB, "balanced" 2 in 1503, 1 from 2004 on; of hidden 4096 all plans take
            1 in 2004. The default is what a step wants: of Llama-3.2-1B's, 4 × 2,048 tokens, one
            chunk would take 0.4 % off the time and add 5.9 % to the activations' memory (one H200).
            d_W is summed in fp32 and rounded once whatever the plan. Plain PyTorch, which stores
            the logits as a whole, does not look at it.

    Returns:
        A scalar, or (...) with reduction "none"; fp32, or float64 of such inputs.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes, devices or numbers that do not go together, operands that are
            sparse or nested, or less memory than the kernels can do with.
    """
    operands = hidden, weight, target, bias, token_weights, class_weights
    numbers = ignore_index, label_smoothing, z_loss, softcap, reduction, memory
    loss: Tensor = call_prepared(_prepare, operands, "target", *numbers)[0]
    return loss


def linear_cross_entropy_and_accuracy(
    hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` with its settings, and the accuracy of the tokens' predictions.

    Returns:
        The loss, and the share of the tokens not ignored whose target is the first of the largest
        logits, as `argmax` gives it; with reduction "none" 1.0 or 0.0 for each token, 0.0 for one
        that is ignored. The accuracy is fp32 and has no gradient; over no tokens it is NaN.

    Raises:
        TypeError: an unknown setting, or an operand that is no tensor.
        ValueError: as `linear_cross_entropy`.
    """
    given = linear_cross_entropy.__kwdefaults__ or {}
    if unknown := settings.keys() - given.keys():
        raise TypeError(f"no such setting: {', '.join(unknown)}; there are {', '.join(given)}")
    given = given | settings
    operands = [given.pop(name) for name in ("bias", "token_weights", "class_weights")]
    operands = [hidden, weight, target, *operands]
    computed = call_prepared(_prepare, operands, "target", *given.values(), True)
    loss, accuracy = computed[:2]
    return loss, accuracy


def linear_log_probs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *,
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, entropy: bool = True, logsumexp: bool = False,
    is_largest: bool = False, ignore_index: int = -100,
) -> TokenScores:  # fmt: skip
    """Log-probabilities of chosen tokens, and what else trainers log of each distribution, by one
    pass, the logits never stored as a whole: of a policy's training by GRPO, PPO and the like.

        p = softmax(z)    z = softcap(logit_scale · (hidden Wᵀ + b)) / temperature

    Log-probabilities, entropies and logsumexps have gradients, computed from the logits once more,
    without a second derivative. All but the logits, which have the inputs' dtype, is fp32; bounds
    of errors stand in `fusedlib.ops.loss.kernels`. Beside operands and gradients the kernels take
    the logits of a slice of the vocabulary, LOGITS_BYTES (512 MiB) or twice what d_hidden takes,
    and in backward an fp32 sum of d_hidden. d_W is summed in fp32 and rounded once.

    In TRL 1.16, whose trainers ask one function for log-probabilities, GRPO's, RLOO's and others'
    have these from now on:

        import trl.trainer.utils as trl
        theirs = trl._ChunkedLogProbFunction
        class Fused:
            @staticmethod
            def apply(hidden, weight, bias, tokens, temperature, rows, softcap, scale, outputs):
                given = hidden, weight, bias, tokens, temperature, rows, softcap, scale, outputs
                if {*outputs} - {"log_probs", "entropy"}:
                    return theirs.apply(*given)
                weight, bias = (t if t is None else t.to(hidden.dtype) for t in (weight, bias))
                settings = dict(temperature=temperature, softcap=softcap, logit_scale=scale)
                computed = fusedlib.linear_log_probs(
                    hidden, weight, tokens, bias=bias, **settings, entropy="entropy" in outputs)
                return *computed[:2], None, None, None
        trl._ChunkedLogProbFunction = Fused

    The products are in hidden's dtype, which may be another than the head's
    (`cast_lm_head_to_fp32`), as TRL's own are.

    Args:
        hidden: (..., hidden), hidden at least 1.
        weight: (vocabulary, hidden).
        tokens: (...), int64, each in [0, vocabulary) or ignore_index. Others are an error: on a GPU
            one of the device, which comes with a later call.
        bias: (vocabulary,).
        temperature: what logits are divided by, after the softcap.
        softcap: κ of logits κ tanh(logits / κ), as Gemma 2's; rounded to fp32 only.
        logit_scale: what logits are multiplied by, before the softcap, as Cohere's.
        entropy: whether entropies are computed; `logsumexp` and `is_largest` the same.
        ignore_index: the token of places of which all is 0 or False, with a gradient of 0; of
            int64. Long products of theirs are not computed, as by `linear_cross_entropy`.

    Returns:
        `TokenScores` of (...) each. A logit of -inf adds nothing to an entropy.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes, devices or numbers that do not go together, or operands that are
            sparse or nested.
    """
    operands = hidden, weight, tokens, bias, None, None
    if logit_scale != 1:  # κ tanh(s x / κ) is s κ' tanh(x / κ') with κ' = κ / s
        require_number("logit_scale", logit_scale)
        if not 0 < logit_scale < inf:
            raise ValueError(f"logit_scale must be finite and above 0, got {logit_scale!r}")
        checked_settings(ignore_index, softcap=softcap, temperature=temperature)
        softcap = softcap if softcap is None else softcap / logit_scale
        temperature /= logit_scale
    numbers = ignore_index, 0.0, 0.0, softcap, "none", "balanced", is_largest, temperature
    computed = call_prepared(_prepare, operands, "tokens", *numbers, entropy, logsumexp)
    losses, hits, entropies, sums = computed
    # 0 - x: of an ignored token 0, and not -0
    return TokenScores(0.0 - losses, entropies, sums, None if hits is None else hits.bool())


def _prepare(
    eager: bool, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None,
    token_weights: Tensor | None, class_weights: Tensor | None, of_labels: str, *numbers: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Check a call, whose labels are called so, and what `checked_settings` takes of it."""
    _check(of_labels, hidden, weight, labels, bias, token_weights, class_weights)
    runs = has_kernels(hidden.device) and not is_transformed()
    runs = runs and not is_distributed(hidden, weight, bias)
    asks = eager and 2 * hidden.numel() * weight.shape[0] >= 10 * SKIP_FROM
    return partial(_loss, checked_settings(*numbers), numbers[4], runs, asks)


def _loss(
    settings: Settings, reduction: str, runs: bool, asks: bool, hidden: Tensor, weight: Tensor,
    target: Tensor, bias: Tensor | None, token_weights: Tensor | None,
    class_weights: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The loss and, if they are wanted, the accuracy, the tokens' entropies and logsumexps, by the
    kernels if they run. If it `asks` how many tokens count, enough others are left out.
    """
    hidden, weight, bias = cast_for_autocast(hidden, weight, bias)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).contiguous()
    accurate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    weights, by_class = (
        None if given is None else given.reshape(-1).to(accurate).contiguous()
        for given in (token_weights, class_weights)
    )
    valid = labels != settings.ignore_index
    if weights is not None:  # what an ignored token's is, nobody reads
        weights = weights.where(valid, 0)
    total = None  # what a mean divides by
    if reduction == "mean" and weights is None and by_class is None:
        total = valid.sum(dtype=accurate)
    elif reduction == "mean":
        each = valid.to(accurate) if weights is None else weights
        if by_class is not None:  # an index out of range is an error of the loss itself
            each = each * by_class[labels.where(valid, 0).clamp(0, by_class.shape[0] - 1)]
        total = each.sum()
    has_graph = torch.is_grad_enabled()
    by_token = reduction == "none" or (has_graph and weights is not None and weights.requires_grad)
    runs = runs and hidden.dtype in KERNEL_DTYPES
    wants = [has_graph and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    if runs and settings.memory > 0:  # too little is an error of the call
        if by_token:
            slices(hidden.shape[0], weight, settings.memory)
        else:
            plan(hidden.shape[0], weight, wants[1], settings.memory)
    at: Tensor | None = None  # where the tokens are that count, if others are left out
    if runs and asks and not (hidden.is_cuda and is_capturing()):
        counted = valid.nonzero()[:, 0]
        spared = 2 * (len(valid) - len(counted)) * weight.numel()
        if spared > 0 and spared >= SKIP_FROM:
            at = counted
            hidden, labels = hidden.index_select(0, at), labels[at]
    if runs and not by_token:
        if at is not None and weights is not None:
            weights = weights[at]
        operands = hidden, weight, bias, labels, by_class, weights, total
        loss, hits, *_ = LOSS(*operands, wants, *settings)
        return loss, hits.sum() / valid.sum() if settings.wants_hits else None, None, None
    if runs:
        computed = LOSS_BY_TOKEN(hidden, weight, bias, labels, by_class, *settings)[:4]
        if at is not None:  # of the others all is 0
            computed = tuple(
                None if one is None else one.new_zeros(len(valid)).index_copy(0, at, one)
                for one in computed
            )
    else:
        computed = reference.token_losses(
            hidden, weight, labels, bias=bias, class_weights=by_class, hits=settings.wants_hits,
            ignore_index=settings.ignore_index, label_smoothing=settings.label_smoothing,
            z_loss=settings.z_loss, softcap=settings.softcap, temperature=settings.temperature,
            entropy=settings.wants_entropy, sums=settings.wants_logsumexp,
        )  # fmt: skip
    losses, hits, *others = computed
    losses = losses if weights is None else losses * weights
    if reduction != "none":
        loss = losses.sum() if total is None else losses.sum() / total
        return loss, hits.sum() / valid.sum() if settings.wants_hits else None, None, None
    shape = target.shape
    wanted = settings.wants_hits, settings.wants_entropy, settings.wants_logsumexp
    outputs = zip((hits, *others), wanted, strict=True)  # an operator's None is an empty tensor
    hits, entropies, sums = (t.reshape(shape) if want else None for t, want in outputs)
    return losses.reshape(shape), hits, entropies, sums


def _check(
    of_labels: str, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None,
    token_weights: Tensor | None = None, class_weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise where operands do not go together; `of_labels` is what the caller calls the labels."""
    named = {"hidden": hidden, "weight": weight, of_labels: labels}
    others = {"bias": bias, "token_weights": token_weights, "class_weights": class_weights}
    require_tensors(*others, **named, **others)
    width, tokens = shape_of(hidden)[-1:], shape_of(hidden)[:-1]
    if width in ((), (0,)):
        raise ValueError(
            f"hidden must be (..., hidden) with a width of at least 1, got {shape_of(hidden)}"
        )
    if weight.ndim != 2 or weight.shape[1:] != width or weight.shape[0] == 0:
        raise ValueError(
            f"weight must be (vocabulary, {width[0]}) for hidden {shape_of(hidden)}; "
            f"got {shape_of(weight)}"
        )
    classes = shape_of(weight)[:1]
    shapes = {of_labels: tokens, "bias": classes, "token_weights": tokens, "class_weights": classes}
    for name, tensor in ({of_labels: labels} | others).items():
        if tensor is not None and shape_of(tensor) != shapes[name]:
            raise ValueError(f"{name} must be {shapes[name]}, got {shape_of(tensor)}")
    if class_weights is not None and class_weights.requires_grad:
        raise ValueError("class_weights must not require a gradient: the loss has none for it")
    if labels.dtype != torch.int64:
        raise ValueError(f"{of_labels} must be torch.int64, class numbers; got {labels.dtype}")
    if labels.device != hidden.device:
        raise ValueError(f"{of_labels} is on {labels.device}, hidden on {hidden.device}")
    require_alike("token_weights", "class_weights", hidden=hidden, weight=weight, **others)


def checked_settings(
    ignore_index: int, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, reduction: str = "none", memory: str | int = "balanced",
    wants_hits: bool = False, temperature: float = 1.0, wants_entropy: bool = False,
    wants_logsumexp: bool = False,
) -> Settings:  # fmt: skip
    """The settings of a user's numbers; raises a ValueError where one is none or out of range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    is_byte_count = is_whole(memory) and int(memory) > 0
    if not is_byte_count and not (isinstance(memory, str) and memory in MEMORY_PLANS):
        raise ValueError(
            "memory must be 'least', 'balanced' or a whole number of bytes of at least 1, "
            f"got {memory!r:.60}"
        )
    if not is_whole(ignore_index):
        raise ValueError(f"ignore_index must be a whole number, got {ignore_index!r:.60}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be an int64, got {ignore_index}")
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "temperature": temperature}
    for name, number in (numbers if softcap is None else numbers | {"softcap": softcap}).items():
        require_number(name, number)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}")
    if not 0 <= z_loss < inf:
        raise ValueError(f"z_loss must be finite and not negative, got {z_loss!r}")
    if not 0 < temperature < inf:
        raise ValueError(f"temperature must be finite and above 0, got {temperature!r}")
    if softcap is not None and not 0 < softcap < inf:
        raise ValueError(f"softcap must be None, or finite and above 0, got {softcap!r}")
    budget = int(memory) if is_byte_count else LEAST if memory == "least" else BALANCED
    if budget < 0 and is_batch_invariant():
        budget = INVARIANT
    return Settings(
        int(ignore_index), float(label_smoothing), float(z_loss), float(softcap or 0), budget,
        bool(wants_hits), float(temperature), bool(wants_entropy), bool(wants_logsumexp),
    )  # fmt: skip


# --- how many tokens, or classes, at a time ------------------------------------------------------


class Plan(NamedTuple):
    """How many tokens a chunk has, or classes a slice; what d_W, or d_hidden, is summed in; and
    what that takes.

    `memory` is the most bytes that exist at once beside the operands and the gradients in their
    own dtypes: the logits and what fp32 sums take more than such a gradient does. Not counted are
    some 20 bytes a token, and the parts of split products.
    """

    rows: int
    sums: torch.dtype
    memory: int

    @classmethod
    def of(
        cls, rows: int, logits: int, half_sum_bytes: int, summed: bool, dtype: torch.dtype
    ) -> Plan:
        """Sums of fp32 are 4 bytes a number and half of them more than the gradient, which in half
        precision is made of them at the end, when no logits are left.
        """
        if not (summed and half_sum_bytes):
            return cls(rows, dtype, logits)
        return cls(rows, torch.float32, max(logits + half_sum_bytes, 2 * half_sum_bytes))


def row_stride(vocabulary: int, itemsize: int) -> int:
    """Elements from one row of a chunk's logits to the next."""
    round_to = ROW_BYTES // itemsize
    return (vocabulary + round_to - 1) // round_to * round_to


def plan(tokens: int, weight: Tensor, wants_weight: bool = True, memory: int = BALANCED) -> Plan:
    """The plan of the fewest chunks within the memory: bytes, LEAST or BALANCED.

    Raises:
        ValueError: fewer bytes than chunks of one token take.
    """
    dtype = weight.dtype
    row_bytes = row_stride(weight.shape[0], dtype.itemsize) * dtype.itemsize
    half_sum_bytes = weight.numel() * 2 if wants_weight and dtype.itemsize == 2 else 0

    def of_rows(rows: int) -> Plan:
        summed = rows < tokens or dtype == torch.float16
        return Plan.of(rows, rows * row_bytes, half_sum_bytes, summed, dtype)

    if memory < 0:
        share = row_bytes * weight.shape[1] if half_sum_bytes else 0  # d_W's bytes, of padded rows
        logits = max(LOGITS_BYTES, share if memory == LEAST else 2 * share)
        budget = logits + share
    else:
        budget = memory
        logits = budget - half_sum_bytes
    whole = of_rows(tokens)
    if whole.memory <= budget:
        return whole
    rows, most = tokens, max(logits // row_bytes, 1)
    if rows > most:
        unit = ROWS if most >= ROWS else 1
        chunks = cdiv(tokens, most // unit * unit)
        rows = cdiv(cdiv(tokens, chunks), unit) * unit
    chunked = of_rows(rows)
    if memory > 0 and chunked.memory > budget:
        least = min(whole.memory, of_rows(1).memory)
        raise ValueError(
            f"memory must be at least {least} bytes for {tokens} tokens and {dtype} weight "
            f"{tuple(weight.shape)}, got {memory}: give more, or 'least' for the least that is fast"
        )
    return chunked


def slices(tokens: int, weight: Tensor, memory: int = BALANCED) -> Plan:
    """The plan of losses by token, over the fewest slices of the vocabulary within the memory:
    bytes, or LEAST or BALANCED for LOGITS_BYTES, or what d_hidden's sum takes; or INVARIANT.

    Raises:
        ValueError: fewer bytes than the narrowest slices take.
    """
    (vocabulary, hidden), dtype = weight.shape, weight.dtype
    unit = ROW_BYTES // dtype.itemsize
    half_sum_bytes = tokens * hidden * 2 if dtype.itemsize == 2 else 0

    def of_pieces(pieces: int) -> Plan:
        classes, logits = min(pieces * unit, vocabulary), tokens * pieces * ROW_BYTES
        return Plan.of(classes, logits, half_sum_bytes, classes < vocabulary, dtype)

    pieces = cdiv(vocabulary, unit)
    if memory == INVARIANT:
        return of_pieces(min(pieces, INVARIANT_CLASSES // unit))
    budget = memory if memory > 0 else max(LOGITS_BYTES, 2 * half_sum_bytes) + half_sum_bytes
    whole = of_pieces(pieces)
    if whole.memory <= budget:
        return whole
    most = max((budget - half_sum_bytes) // (tokens * ROW_BYTES), 1)
    sliced = of_pieces(cdiv(pieces, cdiv(pieces, most)))
    least = whole if whole.memory < sliced.memory else sliced
    if 0 < memory < least.memory:
        raise ValueError(
            f"memory must be at least {least.memory} bytes for the losses of {tokens} tokens and "
            f"{dtype} weight {tuple(weight.shape)}, got {memory}: give more, or 'least'"
        )
    return least


# --- forward and backward ------------------------------------------------------------------------


def loss_fwd(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, token_weights: Tensor | None, total: Tensor | None,
    wants: list[bool], settings: Settings,
) -> tuple[
    Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor
]:  # fmt: skip
    """The sum of the losses, over `total` if there is one, its gradients, and their factor.

    Returns:
        loss, fp32; hits (tokens,), if wanted; a scalar, and d_hidden, d_W and d_b, each if it is in
        `wants` (of hidden, weight, bias), whose product with the scalar is the gradient; and which
        tokens are not ignored. The scalar is 0 where all are.
    """
    (tokens, _), vocabulary, dtype = hidden.shape, weight.shape[0], hidden.dtype
    wants_hidden, wants_weight, wants_bias = wants
    valid = target != settings.ignore_index
    _check_targets(target, valid, vocabulary)
    factor = scale = valid.any().to(torch.float32)
    if total is not None:
        scale = total.reciprocal()
        if dtype == torch.float16:  # d_logits of weights that are 1 in the mean, then 1/n
            count = valid.sum(dtype=torch.float32)
            scale, factor = count / total, factor / count.clamp_min(1)
    target = _aligned(target)
    rows, sums, _ = plan(tokens, weight, wants_weight, settings.memory)
    stride = row_stride(vocabulary, dtype.itemsize)
    # A split product makes its own result, which serves where rows need no padding.
    padded = stride != vocabulary or not splits(hidden[:rows], weight.t())
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
    loss = losses.sum() if total is None else losses.sum() / total
    return loss, hits, factor, d_hidden, d_weight, d_bias, valid


def by_token_fwd(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, settings: Settings,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Losses and, if wanted, hits, entropies and logsumexps (tokens,), fp32; and the tokens'
    statistics.
    """
    _check_targets(target, target != settings.ignore_index, weight.shape[0])
    statistics = hidden.new_zeros(STATISTICS, hidden.shape[0], dtype=torch.float32)
    operands = hidden, weight, bias, target, class_weights, statistics
    by_token_slices(*operands, None, [False] * 3, None, None, settings)
    hits = statistics[5].clone() if settings.wants_hits else None
    entropies = statistics[2].clone() if settings.wants_entropy else None
    sums = statistics[0] + statistics[1] if settings.wants_logsumexp else None
    return statistics[4].clone(), hits, entropies, sums, statistics


def by_token_slices(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, statistics: Tensor, upstream: Tensor | None, wants: list[bool],
    entropy_upstream: Tensor | None, sum_upstream: Tensor | None, settings: Settings,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """All slices by `by_token_rows`, by the same products without an upstream and with one; then
    d_hidden, d_W and d_b, each if it is in `wants`.
    """
    (tokens, _), vocabulary = hidden.shape, weight.shape[0]
    wants_hidden, wants_weight, wants_bias = wants
    target = _aligned(target)
    classes, sums, _ = slices(tokens, weight, settings.memory)
    split = splits(hidden, weight[:classes].t())
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
            entropy_upstream, sum_upstream,
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


def _check_targets(target: Tensor, valid: Tensor, vocabulary: int) -> None:
    """Raise on the device, as torch's own loss does, where a target is no class; nobody waits."""
    assert_async(
        (((target >= 0) & (target < vocabulary)) | ~valid).all(),
        f"a target or token is neither in [0, {vocabulary}) nor ignore_index",
    )


def _aligned(target: Tensor) -> Tensor:
    """As labels without the first are not: a copy costs less than Triton's start."""
    return target.clone() if target.data_ptr() % 16 else target


def _product(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """A B, or A B + bias, in `out` if there is one."""
    if not splits(a, b):
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    product = multiply(a, b, bias=bias)
    return product if out is None else out.copy_(product)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + A B in `dtype`, in place; A B where there is no total."""
    if splits(a, b):
        product = multiply(a, b)
        return product if total is None else total.add_(product)
    wide: dict[str, Any] = {"out_dtype": dtype} if a.is_cuda and a.dtype != dtype else {}
    if not wide:
        a, b = a.to(dtype), b.to(dtype)
    if total is None:
        total = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
        return torch.mm(a, b, **wide, out=total)
    return torch.addmm(total, a, b, **wide, out=total)


def block_and_warps(stride: int, itemsize: int, arch: int, more: bool = False) -> tuple[int, int]:
    """How a row of that stride is cut on an architecture: elements at a time, and warps.

    Of a row that is computed with more than a plain loss, half as much at a time, a quarter in
    fp32: a thread of fewer warps may have more registers, and spills none.
    """
    most = BLOCK_BYTES_BY_ARCHITECTURE.get(arch, BLOCK_BYTES) // itemsize
    most >>= itemsize // 2 if more else 0
    block = min(most, next_power_of_2(stride))
    return block, max(block * itemsize // WARP_BYTES, 4)


def cross_entropy_rows(
    logits: Tensor, target: Tensor, token_weights: Tensor | None, class_weights: Tensor | None,
    scale: Tensor, losses: Tensor, hits: Tensor | None, settings: Settings, *, gradient: bool,
) -> None:  # fmt: skip
    """Fill the losses and hits of logits (rows, vocabulary), `row_stride` apart, and where
    `gradient` is set write d_logits over them.
    """
    rows, vocabulary = logits.shape
    stride = row_stride(vocabulary, logits.itemsize)
    numbers = settings.ignore_index, *settings[1:4]
    constants = {
        "GRADIENT": gradient, "WEIGHTED": token_weights is not None,
        "BY_CLASS": class_weights is not None, "SMOOTHED": settings.label_smoothing != 0,
        "CAPPED": settings.softcap != 0, "COUNTED": hits is not None,
    }  # fmt: skip

    def make() -> Launch:
        from fusedlib.ops.loss.kernels import _cross_entropy_kernel

        arch = architecture(logits.device) if logits.is_cuda else 0
        more = constants["CAPPED"] or constants["BY_CLASS"] or constants["COUNTED"]
        block, warps = block_and_warps(stride, logits.itemsize, arch, more)
        scalars, cut = (vocabulary, stride, *numbers), {"BLOCK": block}
        config, programs = Config(num_warps=warps), (rows, 1, 1)
        return Launch(_cross_entropy_kernel, config, programs, scalars, constants | cut)

    # What it does not read, it is given the losses for.
    by_token = losses if token_weights is None else token_weights
    by_class, hit = (losses if given is None else given for given in (class_weights, hits))
    matrices = logits, target, by_token, by_class, scale, losses, hit
    key = "loss", rows, vocabulary, *numbers, *constants.values(), logits.dtype, logits.device
    launch_for(key, make, *matrices)(*matrices)


def by_token_rows(
    logits: Tensor, target: Tensor, class_weights: Tensor | None, statistics: Tensor, first: int,
    vocabulary: int, settings: Settings, upstream: Tensor | None = None,
    entropy_upstream: Tensor | None = None, sum_upstream: Tensor | None = None,
) -> None:  # fmt: skip
    """Merge the logits of rows, of the classes from `first` on, into the rows' statistics; or write
    d_logits over them, where an upstream of the losses is given, and maybe those of the entropies
    and logsumexps.
    """
    (rows, classes), stride = logits.shape, logits.stride(0)
    if rows == 0:
        return
    numbers = (
        vocabulary, first, classes, stride, settings.ignore_index, *settings[1:4],
        1 / settings.temperature,
    )  # fmt: skip
    constants: dict[str, int] = {
        "BY_CLASS": class_weights is not None, "SMOOTHED": settings.label_smoothing != 0,
        "CAPPED": settings.softcap != 0, "ENTROPY": settings.wants_entropy, "BLOCK": SCALED_BLOCK,
    }  # fmt: skip
    # What it does not read, it is given the statistics for.
    by_class = statistics if class_weights is None else class_weights
    matrices: tuple[Tensor, ...] = logits, target, by_class, statistics
    programs = rows, 1, 1
    if upstream is None:
        constants["COUNTED"] = settings.wants_hits
    else:
        programs = rows, cdiv(classes, SCALED_BLOCK), 1
        others = entropy_upstream, sum_upstream
        constants |= {"ENTROPY": others[0] is not None, "SUMMED": others[1] is not None}
        matrices += upstream, *(statistics if t is None else t for t in others)

    def make() -> Launch:
        from fusedlib.ops.loss import kernels

        forward, backward = kernels._by_token_kernel, kernels._by_token_backward_kernel
        kernel, config = forward if upstream is None else backward, Config(num_warps=SCALED_WARPS)
        return Launch(kernel, config, programs, numbers, constants)

    way = "by token" if upstream is None else "by token, backward"
    key = way, rows, *numbers, *constants.values(), logits.dtype, logits.device
    launch_for(key, make, *matrices)(*matrices)


def fill_scaled(source: Tensor, result: Tensor, factor: Tensor, counts: Tensor) -> Tensor:
    """Compute factor · source into `result`, contiguous both, which may be the source itself.

    `counts` has a number for each row of the source, or one for all: where it is 0, so is the row.
    """
    count = source.numel()
    if count:
        scalars, matrices = (count, count // counts.numel()), (source, result, factor, counts)

        def make() -> Launch:
            from fusedlib.ops.loss.kernels import _scaled_kernel

            constants = {"IN_PLACE": result is source, "BLOCK": SCALED_BLOCK}
            config, programs = Config(num_warps=SCALED_WARPS), (cdiv(count, SCALED_BLOCK), 1, 1)
            return Launch(_scaled_kernel, config, programs, scalars, constants)

        key = "scaled", scalars, result is source, *(m.dtype for m in matrices), source.device
        launch_for(key, make, *matrices)(*matrices)
    return result


# --- as operators --------------------------------------------------------------------------------


def _shapes(hidden: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    _, target, *_, wants, settings = others
    sums = torch.float32
    if wants[1] and weight.dtype == torch.bfloat16:  # else nobody asks how many tokens there are
        sums = plan(hidden.shape[0], weight, memory=settings.memory).sums
    shapes = (hidden.shape, hidden.dtype), (weight.shape, sums), (weight.shape[:1], torch.float32)
    gradients = (
        hidden.new_empty(shape, dtype=dtype) if want else None
        for (shape, dtype), want in zip(shapes, wants, strict=True)
    )
    one = hidden.new_empty((), dtype=torch.float32)
    hits = one.new_empty(hidden.shape[0]) if settings.wants_hits else None
    return one, hits, torch.empty_like(one), *gradients, torch.empty_like(target, dtype=torch.bool)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[0].dtype
    ctx.owns_gradients = saved_tensor_hooks(False) is None
    # Hits, if there are any; by the others a graph leads to all operands.
    ctx.mark_non_differentiable(*(t for t in output[1:2] if t is not None))
    ctx.save_for_backward(*output[2:])


def _gradients(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The gradients of hidden, weight and bias."""
    if upstream is None:
        return (None,) * len(ctx.needs_input_grad)
    factor, *unscaled, valid = ctx.saved_tensors
    times, counts = factor * upstream, (valid, factor, factor)  # of d_W and d_b all rows or none
    gradients = [
        _scaled_gradient(ctx, d, times, own) if want else None
        for d, own, want in zip(unscaled, counts, ctx.needs_input_grad[:3], strict=True)
    ]
    return *gradients, *(None,) * (len(ctx.needs_input_grad) - 3)


def _scaled_gradient(ctx: Any, unscaled: Tensor, factor: Tensor, counts: Tensor) -> Tensor:
    """factor · kept in the inputs' dtype, over what was kept if it may be."""
    if type(unscaled) is not Tensor or dispatch_mode_count():
        return SCALED(unscaled, factor, counts, ctx.dtype)
    if not ctx.owns_gradients or unscaled.dtype != ctx.dtype or retains_graph():
        return _scaled(unscaled, factor, counts, ctx.dtype)
    unscaled = unscaled.detach()
    return fill_scaled(unscaled, unscaled, factor, counts)


def _scaled(source: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """`fill_scaled` of a new tensor of `dtype`."""
    return fill_scaled(source, _unscaled(source, factor, counts, dtype), factor, counts)


def _unscaled(source: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    return source.new_empty(source.shape, dtype=dtype)


def _shapes_by_token(hidden: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    settings = others[-1]
    losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    wanted = settings.wants_hits, settings.wants_entropy, settings.wants_logsumexp
    optional = (torch.empty_like(losses) if want else None for want in wanted)
    return losses, *optional, losses.new_empty(STATISTICS, hidden.shape[0])


def _shapes_by_token_backward(
    hidden: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor | None, ...]:  # fmt: skip
    shapes, wants = (hidden.shape, weight.shape, weight.shape[:1]), others[-4]
    return tuple(hidden.new_empty(s) if w else None for s, w in zip(shapes, wants, strict=True))


def _setup_context_by_token(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    _, hits, entropies, sums, statistics = output
    ctx.settings = Settings(*inputs[5:])
    constant = (
        hits, statistics, None if ctx.settings.wants_entropy else entropies,
        None if ctx.settings.wants_logsumexp else sums,
    )  # fmt: skip
    ctx.mark_non_differentiable(*(t for t in constant if t is not None))
    save_operands(ctx, inputs[:5], statistics)


def _gradients_by_token(
    backward: Any, ctx: Any, upstream: Tensor | None, _: None, entropy_upstream: Tensor | None,
    sum_upstream: Tensor | None, __: None,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of hidden, weight and bias."""
    nothing = (None,) * len(ctx.needs_input_grad)
    further = [t if t is None else t.contiguous() for t in (entropy_upstream, sum_upstream)]
    present = [t for t in (upstream, *further) if t is not None]
    if not present:
        return nothing
    upstream = torch.zeros_like(present[0]) if upstream is None else upstream.contiguous()
    operands, wants = ctx.saved_tensors, list(ctx.needs_input_grad[:3])
    gradients = backward(*operands, upstream, wants, *further, *ctx.settings)
    finished = (d if want else None for d, want in zip(gradients, wants, strict=True))
    return *finished, *nothing[3:]


def _product_flops(hidden: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(hidden) * weight[0]


def _flops(hidden: Shape, weight: Shape, *others: Any, **_: Any) -> int:
    """With the gradients that a forward computes, or with the logits that a backward does again."""
    wants = others[5]  # of both operators
    return _product_flops(hidden, weight) * (1 + wants[0] + wants[1])


SCALED = operator("scaled", _scaled, _unscaled)
LOSS = declare(
    "linear_cross_entropy", loss_fwd, _shapes, setup_context=_setup_context, gradients=_gradients,
    flops=_flops,
)  # fmt: skip
LOSS_BY_TOKEN = declare(
    "linear_cross_entropy_by_token", by_token_fwd, _shapes_by_token,
    setup_context=_setup_context_by_token, gradients=_gradients_by_token,
    backward=(by_token_slices, _shapes_by_token_backward), flops=_product_flops,
    backward_flops=_flops,
)  # fmt: skip
