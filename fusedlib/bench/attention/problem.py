"""One causal attention, and the FLOPs and traffic that it implies, counted.

    out = softmax(Q Kᵀ / √E + causal mask) V        Q, K, V, out (B, 1, T, E), B sequences, one head

A product of the T × T matrix with a T × E one takes 2 T² E FLOPs a sequence. The forward pass has
two of them (Q Kᵀ and P V), the backward pass four (dV, dP, dQ and dK). What keeps no T × T matrix
computes the scores once more in the backward pass, which makes five, two and a half times the
forward pass, and leaves out what lies above the diagonal, about half of each (Dao 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedlib.bench.problems import DTYPES

DIRECTIONS = ("forward", "backward")
HEADS = 1
_PRODUCTS = {"forward": 2, "backward": 4}
# Reads and writes of a B × T × T tensor, operation by operation, in plain attention:
# forward   Q Kᵀ 1, scaling 2, masking 2, softmax 2, P V 1
# backward  dP 1, dV 1, softmax 3, masking 2, scaling 2, dQ 1, dK 1
SQUARE_PASSES = {"forward": 8, "backward": 11}
# Of the T × T mask: made of ones (1), its lower part zeroed (2), read; read again going backward.
_MASK_PASSES = {"forward": 4, "backward": 1}
# Of a B × T × E tensor: Q, K, V, out; then dout twice, V, Q, K, dQ, dK, dV.
_PLAIN_LINEAR = {"forward": 4, "backward": 8}
# The same for one that reads each operand once: Q, K, V, out, dout, dQ, dK, dV going backward.
_FUSED_LINEAR = {"forward": 4, "backward": 8}
LOGSUMEXP_BYTES = 4


@dataclass(frozen=True)
class AttentionProblem:
    """A shape and a dtype.

    Args:
        context_length: T, tokens a sequence.
        head_dim: E, width of the one head.
        batch_size: B, sequences.
        dtype: of all tensors: float32, bfloat16 or float16.

    Raises:
        ValueError: a size that is no whole number from 1, or an unknown dtype.
    """

    context_length: int
    head_dim: int
    batch_size: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("context_length", "head_dim", "batch_size"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {size!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    @property
    def square(self) -> int:
        """Elements of a B × T × T tensor."""
        return self.batch_size * self.context_length**2

    @property
    def linear(self) -> int:
        """Elements of a B × T × E tensor."""
        return self.batch_size * self.context_length * self.head_dim

    @property
    def rows(self) -> int:
        """Rows of all T × T matrices: B × T, elements of a logsumexp."""
        return self.batch_size * self.context_length

    def flops(self, direction: str, *, fused: bool) -> int:
        """FLOPs of "forward" or "backward", of the products alone.

        `fused`: the part on and below the diagonal, the scores once more in the backward pass.
        """
        products = _PRODUCTS[direction]
        if not fused:
            return products * 2 * self.square * self.head_dim
        products += direction == "backward"
        pairs = self.batch_size * self.context_length * (self.context_length + 1) // 2
        return products * 2 * pairs * self.head_dim

    def traffic(self, direction: str, *, fused: bool) -> int:
        """Bytes that the operations of "forward" or "backward" read and write at least.

        Plain: every operand and every result of each operation once. `fused`: those of the whole,
        and the logsumexp.
        """
        if fused:
            linear = _FUSED_LINEAR[direction] * self.linear * self.itemsize
            return linear + self.rows * LOGSUMEXP_BYTES
        whole = SQUARE_PASSES[direction] * self.square + _PLAIN_LINEAR[direction] * self.linear
        return whole * self.itemsize + _MASK_PASSES[direction] * self.context_length**2


@dataclass(frozen=True)
class Operands:
    """Q, K, V as leaves that want gradients, and dout; each (B, 1, T, E)."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor

    def leaves(self) -> dict[str, Tensor]:
        """The operands by name."""
        return {"query": self.query, "key": self.key, "value": self.value}

    def sequences(self, start: int, stop: int) -> "Operands":
        """Some sequences of the batch, with leaves of their own."""
        parts = (t.detach()[start:stop].clone() for t in self.leaves().values())
        query, key, value = (part.requires_grad_() for part in parts)
        return Operands(query, key, value, self.dout[start:stop])


def draw(problem: AttentionProblem, device: torch.device | str, seed: int = 0) -> Operands:
    """Normal operands, the same ones for the same seed and device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (problem.batch_size, HEADS, problem.context_length, problem.head_dim)

    def normal() -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(problem.torch_dtype)

    query, key, value = (normal().requires_grad_() for _ in range(3))
    return Operands(query, key, value, normal())
