"""The truth: the library's operations in a few lines of plain PyTorch, in the dtype of the inputs.

Called with float64 tensors this is what everything is compared with.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, linear, silu


def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """silu(x Wgᵀ) ⊙ (x Wuᵀ), Shazeer 2020: x (..., hidden), weights (intermediate, hidden)."""
    return silu(x @ w_gate.mT) * (x @ w_up.mT)


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """swiglu(x) Wdᵀ: w_down (hidden, intermediate), result (..., hidden)."""
    return swiglu(x, w_gate, w_up) @ w_down.mT


def geglu_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *, approximate: str = "tanh"
) -> Tensor:
    """(gelu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ, of operands as of `swiglu_mlp`."""
    return (gelu(x @ w_gate.mT, approximate=approximate) * (x @ w_up.mT)) @ w_down.mT


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, cast: str = "hf") -> Tensor:
    """weight ⊙ x / √(mean(x²) + eps), x (..., width): fp32 inside unless x is float64.

    "hf" as transformers' `LlamaRMSNorm`, "litgpt" as litgpt's `RMSNorm` place their casts.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if cast == "hf":
        return weight * normed.to(x.dtype)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, heads, tokens, head_dim) turned by cos and sin (1 or batch, tokens, rotary_dim)."""
    cos, sin, width = cos[:, None], sin[:, None], cos.shape[-1]
    left, right = x[..., : width // 2], x[..., width // 2 : width]
    turned = x[..., :width] * cos + torch.cat([-right, left], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


def token_losses(
    hidden: Tensor, weight: Tensor, target: Tensor, *,
    bias: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, temperature: float = 1.0,
    class_weights: Tensor | None = None, hits: bool = False, entropy: bool = False,
    sums: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(1 − ε) ω_y (lse − logits_y) + ε mean_c ω_c (lse − logits_c) + ζ ω_y lse² of each token, and
    if wanted its hit (y is the first of the largest logits), its entropy −Σ p log p and lse; 0 of
    those that are ignored. logits = softcap(hidden Wᵀ + b) / temperature, p = softmax(logits), ω
    are class_weights: hidden (tokens, hidden), weight (vocabulary, hidden).

    Logits are rounded to the inputs' dtype, the rest is fp32 at least.
    """
    logits = linear(hidden, weight, bias)
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1:
        logits = logits / temperature
    by_class = None if class_weights is None else class_weights.to(logits.dtype)
    losses = cross_entropy(
        logits, target, by_class, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    valid = target != ignore_index
    if z_loss:
        squares = torch.logsumexp(logits, dim=-1).square()
        if by_class is not None:
            squares = squares * by_class[target.where(valid, 0)]
        losses = losses + z_loss * squares.masked_fill(~valid, 0)
    first_largest = ((logits.argmax(-1) == target) & valid).float() if hits else None
    entropies = None
    if entropy:
        log_p = torch.log_softmax(logits, -1)
        entropies = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1)
        entropies = entropies.masked_fill(~valid, 0)
    lse = torch.logsumexp(logits, -1).masked_fill(~valid, 0) if sums else None
    return losses, first_largest, entropies, lse


def linear_log_probs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """log p of the tokens, their entropies, logsumexps and hits, of the logits
    softcap(logit_scale · (hidden Wᵀ + b)) / temperature; operands and further settings as of
    `token_losses`.
    """
    losses, hits, entropies, sums = token_losses(
        hidden, weight, tokens, temperature=temperature / logit_scale,
        softcap=0.0 if softcap is None else softcap / logit_scale, entropy=True, sums=True,
        hits=True, **settings,
    )  # fmt: skip
    return -losses, entropies, sums, None if hits is None else hits.bool()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *,
    ignore_index: int = -100, reduction: str = "mean", token_weights: Tensor | None = None,
    class_weights: Tensor | None = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """w times a token's loss, summed over those that are not ignored; a mean is over Σ w ω_y.

    Operands and further settings as of `token_losses`; token_weights (tokens,) are w.
    """
    settings |= {"ignore_index": ignore_index, "class_weights": class_weights}
    losses, *_ = token_losses(hidden, weight, target, **settings)
    valid = target != ignore_index
    weights = valid if token_weights is None else token_weights.where(valid, 0)
    weights = weights.to(losses.dtype)
    losses = losses * weights
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    if class_weights is not None:
        weights = weights * class_weights[target.where(valid, 0)]
    return losses.sum() / weights.sum()
