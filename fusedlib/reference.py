"""The truth: the library's operations in a few lines of plain PyTorch, in the dtype of the inputs.

Called with float64 tensors this is what everything is compared with.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


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


def linear_log_probs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *,
    bias: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """log p of the tokens and −Σ p log p, p = softmax(softcap(hidden Wᵀ + b) / temperature); 0 of
    tokens that are ignored. Shapes and dtypes as of `linear_cross_entropy`.
    """
    logits = hidden @ weight.mT if bias is None else hidden @ weight.mT + bias
    logits = logits if logits.dtype.itemsize > 4 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    valid = tokens != ignore_index
    chosen = log_p.gather(-1, tokens.where(valid, 0)[:, None])[:, 0]
    return chosen.where(valid, 0), -(log_p.exp() * log_p).sum(-1).where(valid, 0)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *,
    bias: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    token_weights: Tensor | None = None, class_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """w ((1 − ε) ω_y (lse − logits_y) + ε mean_c ω_c (lse − logits_c) + ζ ω_y lse²), w a token's
    and ω a class's weight, summed over the tokens that are not ignored, or divided by their
    Σ w ω_y: hidden (tokens, hidden), weight (vocabulary, hidden).

    The logits have the inputs' dtype, the rest is fp32 at least.
    """
    logits = hidden @ weight.mT if bias is None else hidden @ weight.mT + bias
    logits = logits if logits.dtype.itemsize > 4 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid = target != ignore_index
    y = target.where(valid, 0)[:, None]
    lse = logits.logsumexp(-1)
    log_p = logits - lse[:, None]
    by_class = logits.new_ones(weight.shape[0]) if class_weights is None else class_weights
    at_y = by_class[y[:, 0]]
    losses = at_y * ((label_smoothing - 1) * log_p.gather(-1, y)[:, 0] + z_loss * lse.square())
    losses = losses - label_smoothing * (by_class * log_p).mean(-1)
    weights = valid.to(logits.dtype) if token_weights is None else token_weights.where(valid, 0)
    losses = losses.where(valid, 0) * weights
    if reduction == "none":
        return losses
    return losses.sum() / ((weights * at_y).sum() if reduction == "mean" else 1)
