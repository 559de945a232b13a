"""The loss of a language model as a function of its last hidden states: fused, else PyTorch.

The kernels run for bf16, fp16 and fp32 on NVIDIA GPUs from compute capability 8.0 on. Elsewhere,
in float64, and under transforms of `torch.func` and forward-mode differentiation, the same lines
run in plain PyTorch, where the logits exist as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from fusedlib.launch.device import has_kernels
from fusedlib.launch.internals import is_transformed
from fusedlib.ops.arguments import (
    KERNEL_DTYPES,
    is_whole,
    require_number,
    require_tensors,
    shape_of,
)
from fusedlib.ops.call_context import autocast_enabled, cast_for_autocast, is_distributed

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
        ignore_index: the target of tokens that have no loss and no gradient; of int64.
        label_smoothing: ε from 0 to 1, as torch's.
        z_loss: weight of the squared logsumexp.
        softcap: κ of logits κ tanh(logits / κ), as Gemma 2's; rounded to fp32 only.
        reduction: "none" gives a loss a token, and computes the logits again in backward; "sum"
            their sum; "mean" divides it by the number of tokens not ignored, or by the sum of their
            weights. Over no tokens it is NaN, as torch's.
        token_weights: (...), what each token's loss is multiplied by. Where it wants a gradient the
            logits are computed again in backward.
        class_weights: (vocabulary,), as the `weight` of torch's cross_entropy; that of a token's
            target multiplies its z-loss too. It has no gradient.
        memory: what the kernels may take beside operands and gradients. Logits are computed in
            chunks of tokens, as few as fit: fewer are faster. "least": chunks as large as the
            weight (512 MiB at least); "balanced": twice that in half precision; or a number of
            bytes. With 8192 tokens and a vocabulary of 128256 in bf16, of hidden 2048: "least" 4
            chunks in 1002 MiB, "balanced" 2 in 1503, 1 from 2004 on; of hidden 4096 all plans take
            1 in 2004. d_W is summed in fp32 and rounded once whatever the plan. Plain PyTorch,
            which stores the logits as a whole, does not look at it.

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
    _check(hidden, weight, target, bias, token_weights, class_weights)
    _check_numbers(ignore_index, label_smoothing, z_loss, softcap, reduction, memory)
    ignore_index = int(ignore_index)
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    hidden, weight, *biases = cast_for_autocast(*operands)
    bias = biases[0] if biases else None
    matrix, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).contiguous()
    accurate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    weights, by_class = (
        None if given is None else given.reshape(-1).to(accurate).contiguous()
        for given in (token_weights, class_weights)
    )
    settings = ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0)
    valid = labels != ignore_index

    def total() -> Tensor:
        """What a mean divides by."""
        if weights is None and by_class is None:
            return valid.sum(dtype=accurate)
        each = valid.to(accurate) if weights is None else weights.masked_fill(~valid, 0)
        if by_class is not None:  # an index out of range is an error of the loss itself
            each = each * by_class[labels.where(valid, 0).clamp(0, by_class.shape[0] - 1)]
        return each.sum()

    if not _runs_kernels(hidden) or is_distributed(hidden, weight, bias):
        losses, hits = _plain(matrix, weight, bias, labels, by_class, *settings, wants_accuracy)
    else:
        from fusedlib.ops.loss import kernels
        from fusedlib.ops.loss import operator as ops

        enabled = torch.is_grad_enabled()
        wants = [enabled and t is not None and t.requires_grad for t in (matrix, weight, bias)]
        if isinstance(memory, str):
            memory = kernels.LEAST if memory == "least" else kernels.BALANCED
        else:  # too little is an error before anything is computed
            memory = int(memory)
            kernels.plan(matrix.shape[0], weight, wants[1], memory)
        if reduction != "none" and not (enabled and weights is not None and weights.requires_grad):
            loss, hits, *_ = ops.linear_cross_entropy(
                matrix, weight, bias, labels, by_class, weights,
                total() if reduction == "mean" else None, wants, *settings, memory, wants_accuracy,
            )  # fmt: skip
            return loss, hits.sum() / valid.sum() if wants_accuracy else hits
        losses, hits = ops.linear_cross_entropy_by_token(
            matrix, weight, bias, labels, by_class, *settings, memory, wants_accuracy
        )
    if weights is not None:
        losses = losses * weights
    if reduction == "none":
        return losses.reshape(target.shape), hits.reshape(target.shape if wants_accuracy else -1)
    loss = losses.sum() / (total() if reduction == "mean" else 1)
    return loss, hits.sum() / valid.sum() if wants_accuracy else hits


def _runs_kernels(hidden: Tensor) -> bool:
    supported = hidden.dtype in KERNEL_DTYPES and has_kernels(hidden.device)
    return supported and not is_transformed()


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    class_weights: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, wants_hits: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses, and hits if wanted, (tokens,)."""
    logits = linear(hidden, weight, bias)
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
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
    return losses, (hits & valid).float()


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    token_weights: Tensor | None, class_weights: Tensor | None,
) -> None:  # fmt: skip
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
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {"target": (target, tokens)}
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
    if target.dtype != torch.int64:
        raise ValueError(f"target must be torch.int64, class numbers; got {target.dtype}")
    named = {"hidden": hidden, "weight": weight} | {n: t for n, (t, _) in expected.items()}
    for name, tensor in named.items():
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}")
        if name == "target":
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
    reduction: str, memory: str | int,
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
    except TypeError:
        require_number("label_smoothing", label_smoothing)
        require_number("z_loss", z_loss)
        require_number("softcap", softcap)
        raise
    if not smooth:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}")
    if not squared:
        raise ValueError(f"z_loss must be finite and not negative, got {z_loss!r}")
    if not capped:
        raise ValueError(f"softcap must be None, or finite and above 0, got {softcap!r}")
