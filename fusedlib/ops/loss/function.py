"""The loss of a language model as a function of its last hidden states, and log-probabilities of
tokens: fused, else PyTorch.

The kernels run for bf16, fp16 and fp32 on NVIDIA GPUs from compute capability 8.0 on. Elsewhere,
in float64, and under transforms of `torch.func` and forward-mode differentiation, the same lines
run in plain PyTorch, where the logits exist as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from fusedlib.compat import is_transformed
from fusedlib.launch import has_kernels
from fusedlib.ops.arguments import (
    KERNEL_DTYPES,
    autocast_enabled,
    cast_for_autocast,
    is_distributed,
    is_whole,
    require_number,
    require_tensors,
    shape_of,
)

MEMORY_PLANS = ("least", "balanced")
REDUCTIONS = ("mean", "sum", "none")


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
            gradient of the loss is infinite or NaN; of int64.
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
            1 in 2004. Forward and backward of hidden 2048 take 23.3, 20.9 to 22.4 and 19.2 ms (one
            H100): the default gives up a tenth of the time for a quarter of the memory. d_W is
            summed in fp32 and rounded once whatever the plan. Plain PyTorch, which stores the
            logits as a whole, does not look at it.

    Returns:
        A scalar, or (...) with reduction "none"; fp32, or float64 of such inputs.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes, devices or numbers that do not go together, operands that are
            sparse or nested, or less memory than the kernels can do with.
    """
    return _loss_and_accuracy(
        hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap, reduction,
        token_weights, class_weights, memory, wants_accuracy=False,
    )[0]  # fmt: skip


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
    settings = (linear_cross_entropy.__kwdefaults__ or {}) | settings
    return _loss_and_accuracy(hidden, weight, target, **settings, wants_accuracy=True)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *,
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    entropy: bool = True, ignore_index: int = -100,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Log-probabilities of chosen tokens and the entropy of each distribution, the logits never
    stored as a whole: of a policy's training by GRPO, PPO and the like.

        p = softmax(z)    z = softcap(hidden Wᵀ + b) / temperature    H = −Σ_c p_c log p_c

    Both have gradients, computed from the logits once more, without a second derivative. All but
    the logits, which have the inputs' dtype, is fp32; bounds of errors stand in
    `fusedlib.ops.loss.kernels`. Beside operands and gradients the kernels take the logits of a
    slice of the vocabulary, LOGITS_BYTES (512 MiB) or twice what d_hidden takes, and in backward an
    fp32 sum of d_hidden. d_W is summed in fp32 and rounded once.

    In TRL 1.16, whose trainers ask one function for log-probabilities, GRPO's, RLOO's and others'
    have these from now on:

        import trl.trainer.utils as trl
        theirs = trl._ChunkedLogProbFunction
        class Fused:
            @staticmethod
            def apply(hidden, weight, bias, tokens, temperature, rows, softcap, scale, outputs):
                given = hidden, weight, bias, tokens, temperature, rows, softcap, scale, outputs
                if scale != 1 or {*outputs} - {"log_probs", "entropy"}:
                    return theirs.apply(*given)
                weight, bias = (t if t is None else t.to(hidden.dtype) for t in (weight, bias))
                settings = dict(bias=bias, temperature=temperature, softcap=softcap)
                computed = fusedlib.linear_log_probs(
                    hidden, weight, tokens, **settings, entropy="entropy" in outputs)
                return *computed, None, None, None
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
        entropy: whether entropies are computed.
        ignore_index: the token of places whose log-probability and entropy are 0, with a gradient
            of 0; of int64.

    Returns:
        Log-probabilities and entropies in nats, (...) both, or None without entropies; fp32, or
        float64 of such inputs. A logit of -inf adds nothing to an entropy.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, dtypes, devices or numbers that do not go together, or operands that are
            sparse or nested.
    """
    require_tensors("bias", hidden=hidden, weight=weight, tokens=tokens, bias=bias)
    _check(hidden, weight, bias, tokens=tokens)
    _check_numbers(ignore_index, 0.0, 0.0, softcap, "none", "balanced", temperature)
    matrix, weight, bias, labels = _matrices(hidden, weight, bias, tokens)
    settings = int(ignore_index), 0.0, 0.0, float(softcap or 0)
    losses, _, entropies = _by_token(
        matrix, weight, bias, labels, None, *settings, "balanced", False, float(temperature),
        bool(entropy),
    )  # fmt: skip
    log_probs = (0.0 - losses).reshape(tokens.shape)  # of an ignored token 0, and not -0
    return log_probs, entropies.reshape(tokens.shape) if entropy else None


def _loss_and_accuracy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, reduction: str,
    token_weights: Tensor | None, class_weights: Tensor | None, memory: str | int,
    wants_accuracy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The second result has no meaning where no accuracy is wanted."""
    require_tensors(
        "bias", "token_weights", "class_weights", hidden=hidden, weight=weight, target=target,
        bias=bias, token_weights=token_weights, class_weights=class_weights,
    )  # fmt: skip
    _check(hidden, weight, bias, token_weights, class_weights, target=target)
    _check_numbers(ignore_index, label_smoothing, z_loss, softcap, reduction, memory)
    ignore_index = int(ignore_index)
    matrix, weight, bias, labels = _matrices(hidden, weight, bias, target)
    accurate = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    weights, by_class = (
        None if given is None else given.reshape(-1).to(accurate).contiguous()
        for given in (token_weights, class_weights)
    )
    settings = ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0)
    valid = labels != ignore_index
    if weights is not None:  # what an ignored token's is, nobody reads
        weights = weights.where(valid, 0)

    def total() -> Tensor:
        """What a mean divides by."""
        if weights is None and by_class is None:
            return valid.sum(dtype=accurate)
        each = valid.to(accurate) if weights is None else weights
        if by_class is not None:  # an index out of range is an error of the loss itself
            each = each * by_class[labels.where(valid, 0).clamp(0, by_class.shape[0] - 1)]
        return each.sum()

    enabled = torch.is_grad_enabled()
    by_token = reduction == "none" or (enabled and weights is not None and weights.requires_grad)
    if not by_token and _runs_kernels(matrix, weight, bias):
        from fusedlib.ops.loss import kernels
        from fusedlib.ops.loss import operator as ops

        wants = [enabled and t is not None and t.requires_grad for t in (matrix, weight, bias)]
        budget = kernels.budget(memory)
        if budget > 0:  # too little is an error of the call; else nobody asks how many tokens
            kernels.plan(matrix.shape[0], weight, wants[1], budget)
        loss, hits, *_ = ops.LOSS.operator(
            matrix, weight, bias, labels, by_class, weights,
            total() if reduction == "mean" else None, wants, *settings, budget, wants_accuracy,
            1.0, False,
        )  # fmt: skip
        return loss, hits.sum() / valid.sum() if wants_accuracy else hits
    losses, hits, _ = _by_token(
        matrix, weight, bias, labels, by_class, *settings, memory, wants_accuracy, 1.0, False
    )
    if weights is not None:
        losses = losses * weights
    if reduction == "none":
        return losses.reshape(target.shape), hits.reshape(target.shape if wants_accuracy else -1)
    loss = losses.sum() / (total() if reduction == "mean" else 1)
    return loss, hits.sum() / valid.sum() if wants_accuracy else hits


def _matrices(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The operands by autocast's rules, hidden (tokens, hidden) and target (tokens,)."""
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    hidden, weight, *biases = cast_for_autocast(*operands)
    matrix, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).contiguous()
    return matrix, weight, biases[0] if biases else None, labels


def _runs_kernels(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    supported = hidden.dtype in KERNEL_DTYPES and has_kernels(hidden.device)
    return supported and not is_transformed() and not is_distributed(hidden, weight, bias)


def _by_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, memory: str | int, wants_hits: bool, temperature: float, wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses, hits and entropies (tokens,); the latter two have no meaning where not wanted."""
    operands = hidden, weight, bias, target, class_weights
    numbers, wanted = (ignore_index, label_smoothing, z_loss, softcap), (temperature, wants_entropy)
    if not _runs_kernels(hidden, weight, bias):
        return _plain(*operands, *numbers, wants_hits, *wanted)
    from fusedlib.ops.loss import kernels
    from fusedlib.ops.loss import operator as ops

    budget = kernels.budget(memory)
    if budget > 0:  # as there
        kernels.slices(hidden.shape[0], weight, budget)
    losses, hits, entropies, _ = ops.LOSS_BY_TOKEN.operator(
        *operands, *numbers, budget, wants_hits, *wanted
    )
    return losses, hits, entropies


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, wants_hits: bool, temperature: float, wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_by_token` in plain PyTorch."""
    logits = linear(hidden, weight, bias)
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1:
        logits = logits / temperature
    losses = cross_entropy(
        logits, target, class_weights, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    valid = target != ignore_index
    if z_loss:
        squares = torch.logsumexp(logits, dim=-1).square()
        if class_weights is not None:
            squares = squares * class_weights[target.where(valid, 0)]
        losses = losses + z_loss * squares.masked_fill(~valid, 0)
    hits = logits.argmax(-1) == target if wants_hits else valid
    entropies = losses
    if wants_entropy:
        log_p = torch.log_softmax(logits, -1)
        entropies = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1)
        entropies = entropies.masked_fill(~valid, 0)
    return losses, (hits & valid).float(), entropies


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_weights: Tensor | None = None,
    class_weights: Tensor | None = None, **target: Tensor,
) -> None:  # fmt: skip
    """Raise where operands do not go together; `target` are the class numbers, by their name."""
    ((labels_name, labels),) = target.items()
    if hidden.ndim == 0:
        raise ValueError("hidden must be (..., hidden), got a scalar")
    width, tokens = hidden.shape[-1], tuple(hidden.shape[:-1])
    if width == 0:
        raise ValueError(
            f"hidden must be (..., hidden) with a width of at least 1, got {shape_of(hidden)}"
        )
    if weight.ndim != 2 or weight.shape[1] != width or weight.shape[0] == 0:
        raise ValueError(
            f"weight must be (vocabulary, {width}) for hidden {shape_of(hidden)}; "
            f"got {shape_of(weight)}"
        )
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {labels_name: (labels, tokens)}
    if bias is not None:
        expected["bias"] = bias, (weight.shape[0],)
    if token_weights is not None:
        expected["token_weights"] = token_weights, tokens
    if class_weights is not None:
        expected["class_weights"] = class_weights, (weight.shape[0],)
        if class_weights.requires_grad:
            raise ValueError("class_weights must not require a gradient: the loss has none for it")
    for name, (tensor, shape) in expected.items():
        if shape_of(tensor) != shape:
            raise ValueError(f"{name} must be {shape}, got {shape_of(tensor)}")
    if labels.dtype != torch.int64:
        raise ValueError(f"{labels_name} must be torch.int64, class numbers; got {labels.dtype}")
    named = {"hidden": hidden, "weight": weight} | {n: t for n, (t, _) in expected.items()}
    for name, tensor in named.items():
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}")
        if name == labels_name:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point dtype, got {tensor.dtype}")
        same = tensor.dtype == hidden.dtype or name in ("token_weights", "class_weights")
        if not same and not autocast_enabled(hidden.device.type):
            raise ValueError(
                f"{name} is {tensor.dtype}, hidden is {hidden.dtype}: they must have one "
                "floating-point dtype, or run under autocast"
            )


def _check_numbers(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None,
    reduction: str, memory: str | int, temperature: float = 1.0,
) -> None:  # fmt: skip
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
    try:
        smooth, squared = 0 <= label_smoothing <= 1, 0 <= z_loss < float("inf")
        capped = softcap is None or 0 < softcap < float("inf")
        tempered = 0 < temperature < float("inf")
    except TypeError:
        require_number("label_smoothing", label_smoothing)
        require_number("z_loss", z_loss)
        require_number("temperature", temperature)
        require_number("softcap", softcap)
        raise
    if not smooth:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}")
    if not squared:
        raise ValueError(f"z_loss must be finite and not negative, got {z_loss!r}")
    if not capped:
        raise ValueError(f"softcap must be None, or finite and above 0, got {softcap!r}")
    if not tempered:
        raise ValueError(f"temperature must be finite and above 0, got {temperature!r}")
