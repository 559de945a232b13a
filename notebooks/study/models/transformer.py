"""Decoder-only Transformer language model, the network that the study measures.

    x      = embedding[tokens]
    x      = x + attention(rms_norm(x));  x = x + swiglu(rms_norm(x))     (once a block)
    logits = rms_norm(x) @ W_out^T

    rms_norm(x)  = x / sqrt(mean(x²) + eps) · weight              (Zhang and Sennrich 2019)
    attention    = softmax(QK^T / sqrt(head_dim) + causal mask) V, Q and K rotated by RoPE
    RoPE         = pair i at position t turns by t · base^(-2i / head_dim)    (Su et al. 2021)
    swiglu(x)    = (silu(x W_gate^T) · (x W_up^T)) W_down^T       (Shazeer 2020)

No biases, no dropout, untied output layer. Shapes: B batch, T context, D d_model, F d_ff,
H heads, E = D / H head_dim, V vocabulary.

Precision: norms, rotations and the loss are computed in at least fp32 whatever the weights are;
everything else runs in the dtype of the weights, or as autocast decides. `factory` is device and
dtype, as torch's own layers take them.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedlib.bench.arguments import require_known

BATCH_SIZE = 4
ROPE_BASE = 10_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a model.

    `attention` is "sdpa" (`scaled_dot_product_attention`) or "plain" (softmax(QK^T)V with the
    T x T matrix in memory, which is what the published tables measured).
    """

    name: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000
    context_length: int = 256
    attention: Literal["sdpa", "plain"] = "sdpa"

    @property
    def head_dim(self) -> int:
        """Width E of one attention head."""
        return self.d_model // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Number of weights: 2VD + L(4D² + 3DF + 2D) + D, embedding and output layer included."""
        d = self.d_model
        block = 4 * d * d + 3 * d * self.d_ff + 2 * d
        return 2 * self.vocab_size * d + self.num_layers * block + d


# Ours, not published, are the three that a CPU trains in well under a second a step.
SIZES: dict[str, TransformerConfig] = {
    size.name: size
    for size in (
        TransformerConfig("nano", d_model=64, d_ff=256, num_layers=2, num_heads=4),
        TransformerConfig("micro", d_model=128, d_ff=512, num_layers=4, num_heads=4),
        TransformerConfig("mini", d_model=256, d_ff=1024, num_layers=4, num_heads=8),
        TransformerConfig("small", d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        TransformerConfig("medium", d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
        TransformerConfig("large", d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
        TransformerConfig("xl", d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
        TransformerConfig("2.7b", d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
    )
}


def config(name: str, **overrides: Any) -> TransformerConfig:
    """The configuration of size `name`, with fields replaced, as by `attention="plain"`."""
    require_known("model size", name, SIZES)
    require_known("attention", overrides.get("attention", "plain"), ("sdpa", "plain"))
    return replace(SIZES[name], **overrides)


def sharing_copy(model: nn.Module) -> nn.Module:
    """A model of the same layers whose parameters are the given one's."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms, rotations and losses: fp32, or fp64 for an fp64 model."""
    return torch.promote_types(dtype, torch.float32)


class Linear(nn.Linear):
    """A layer without bias whose outputs are O(1) for inputs that are: std = 1 / sqrt(inputs)."""

    def __init__(self, in_features: int, out_features: int, **factory: Any) -> None:
        super().__init__(in_features, out_features, bias=False, **factory)

    def reset_parameters(self) -> None:
        """Draw the weights from a normal distribution."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in at least fp32."""

    def __init__(self, d_model: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D) in the dtype of x."""
        wide = x.to(at_least_fp32(x.dtype))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + NORM_EPS)
        return (wide * scale * self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin (T, E/2) for RoPE, and the rotation itself.

    Feature i is paired with feature i + E/2. The tables are never narrower than fp32: in bf16
    neighbouring positions beyond 256 would share an angle.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context_length: int, **factory: Any) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.context_length = context_length
        self._build(torch.empty(0, **factory))

    def _build(self, like: Tensor) -> None:
        # Angles in fp64 on the CPU: t · base^(-2i/E) in fp32 is off by 1e-4 rad at t = 1000.
        pair = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
        position = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        angle = torch.outer(position, ROPE_BASE ** (-pair / self.head_dim))
        wide = at_least_fp32(like.dtype)
        self.register_buffer("cos", angle.cos().to(like.device, wide), persistent=False)
        self.register_buffer("sin", angle.sin().to(like.device, wide), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "RotaryEmbedding":
        # `.to(bfloat16)` would round the tables and `to_empty` would leave them unset.
        super()._apply(fn, recurse)
        self._build(self.cos)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x (..., T, E), rotated by its position 0 .. T-1, in the dtype of x."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax(QK^T / sqrt(E)) V with every step a kernel of its own.

    query, key, value (..., T, E) -> (..., T, E). The softmax is left to torch: it accumulates in
    fp32, returns fp32 under autocast, and rounds to the input's dtype otherwise.
    """
    length, head_dim = query.shape[-2:]
    scores = query @ key.transpose(-2, -1) * head_dim**-0.5  # (..., T, T)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(value.dtype) @ value


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which a token sees itself and what came before it."""

    def __init__(self, config: TransformerConfig, **factory: Any) -> None:
        super().__init__()
        width = config.d_model
        self.num_heads = config.num_heads
        self.attention = config.attention
        self.q_proj = Linear(width, width, **factory)
        self.k_proj = Linear(width, width, **factory)
        self.v_proj = Linear(width, width, **factory)
        self.o_proj = Linear(width, width, **factory)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, E)

    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        query = rope(self._heads(self.q_proj(x)))
        key = rope(self._heads(self.k_proj(x)))
        value = self._heads(self.v_proj(x))
        if self.attention == "sdpa":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = plain_attention(query, key, value)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """The MLP: (silu(x W_gate^T) · (x W_up^T)) W_down^T, weights named as in Hugging Face."""

    def __init__(self, d_model: int, d_ff: int, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, d_ff, **factory)
        self.up_proj = Linear(d_model, d_ff, **factory)
        self.down_proj = Linear(d_ff, d_model, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm layer: attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, **factory)
        self.attention = CausalSelfAttention(config, **factory)
        self.mlp_norm = RMSNorm(config.d_model, **factory)
        self.mlp = SwiGLU(config.d_model, config.d_ff, **factory)

    def forward(self, x: Tensor, rope: RotaryEmbedding) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The language model of `config`. The weights depend only on `torch.manual_seed` and device."""

    def __init__(self, config: TransformerConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, **factory)
        self.rope = RotaryEmbedding(config.head_dim, config.context_length, **factory)
        self.blocks = nn.ModuleList(Block(config, **factory) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, **factory)
        self.output = Linear(config.d_model, config.vocab_size, **factory)
        self._scale_residual_branches()

    @torch.no_grad()
    def _scale_residual_branches(self) -> None:
        # 2L branches add up in the residual stream: each scaled by 1/sqrt(2L), the sum stays O(1).
        scale = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (B, T) -> logits (B, T, V) of the token that follows each."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.output(self.norm(x))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, a scalar: logits (B, T, V), targets (B, T).

    Computed in at least fp32: a bf16 loss would carry fewer than three digits.
    """
    wide = logits.to(at_least_fp32(logits.dtype))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def flops(config: TransformerConfig, batch_size: int, context_length: int) -> int:
    """FLOPs of forward and backward: matrix products alone, a multiply and an add each counted.

    Of B sequences of T tokens the forward's are, backward's twice as many,

        2 · BT · (L (4D² + 3DF) + DV)    attention's four products with weights, the MLP's, the head
        2 · L · 2BT²D                    QKᵀ and softmax · V, the mask not taken off

    What is recomputed is no work of the model: flash and its kin compute QKᵀ a second time.
    """
    tokens, width, layers = batch_size * context_length, config.d_model, config.num_layers
    block = 4 * width * width + 3 * width * config.d_ff
    weights = 2 * tokens * (layers * block + width * config.vocab_size)
    attention = 2 * layers * 2 * tokens * context_length * width
    return 3 * (weights + attention)
