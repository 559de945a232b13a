"""One causal attention, and its FLOPs, traffic and memory by count.

    out = softmax(Q Kᵀ / √E + causal mask) V        Q, K, V, out (B, 1, T, E), B sequences, one head

**FLOPs.** A product of the T × T matrix with a T × E one takes 2 T² E FLOPs a sequence. The forward
pass has two of them (Q Kᵀ and P V), the backward pass four (dV, dP, dQ and dK). What keeps no T × T
matrix computes the scores once more in the backward pass, which makes five, two and a half times
the forward pass, and leaves out what lies above the diagonal, about half of each (Dao 2023).

**Memory.** Plain attention keeps P = softmax(…), B T² elements, for the backward pass, and the
mask, T² bytes. Three B × T × T tensors are alive at the end of its forward pass: scaled scores,
masked scores and P. In the backward pass these are P, dP and dS, and on CUDA P ∘ dP, which torch's
softmax backward writes before it sums its rows. What is fused keeps out and a logsumexp a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.problem import Operands
from measure.racing.cases import Case
from measure.racing.settings import DTYPES

HEADS = 1


@dataclass(frozen=True)
class AttentionProblem:
    """A shape and a dtype.

    Args:
        context_length: T, tokens a sequence.
        head_dim: E, width of the one head.
        batch_size: B, sequences.
        dtype: of all tensors: float32, bfloat16 or float16.
    """

    context_length: int
    head_dim: int
    batch_size: int
    dtype: str

    def __post_init__(self) -> None:
        sizes = ("context_length", "head_dim", "batch_size")
        require_least(1, **{name: getattr(self, name) for name in sizes})
        require_known("dtype", self.dtype, DTYPES)

    @classmethod
    def of(cls, case: Case) -> "AttentionProblem":
        """The problem that a case or a row speaks of."""
        return cls(
            int(case["context_length"]), int(case["head_dim"]), int(case["batch_size"]),
            str(case["dtype"]),
        )  # fmt: skip

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def square(self) -> int:
        """Bytes of a B × T × T tensor."""
        return self.batch_size * self.context_length**2 * DTYPES[self.dtype]

    @property
    def linear(self) -> int:
        """Bytes of a B × T × E tensor."""
        return self.batch_size * self.context_length * self.head_dim * DTYPES[self.dtype]

    @property
    def rows(self) -> int:
        """Rows of all T × T matrices: B × T, elements of a logsumexp."""
        return self.batch_size * self.context_length


def draw(problem: AttentionProblem, device: torch.device | str, seed: int = 0) -> Operands:
    """Normal query, key and value, which want gradients, and dO; each (B, 1, T, E), the same ones
    for the same seed and device.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (problem.batch_size, HEADS, problem.context_length, problem.head_dim)

    def normal() -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(problem.torch_dtype)

    leaves = {name: normal().requires_grad_() for name in ("query", "key", "value")}
    return Operands(leaves, normal())


# --- counts --------------------------------------------------------------------------------------

BOTH = "forward+backward"
_PRODUCTS = {"forward": 2, "backward": 4}
# Reads and writes of a B × T × T tensor, operation by operation, in plain attention:
# forward   Q Kᵀ 1, scaling 2, masking 2, softmax 2, P V 1
# backward  dP 1, dV 1, softmax 3, masking 2, scaling 2, dQ 1, dK 1
SQUARE_PASSES = {"forward": 8, "backward": 11}
# Of the T × T mask: made of ones (1), its lower part zeroed (2), read; read again going backward.
_MASK_PASSES = {"forward": 4, "backward": 1}
# Of a B × T × E tensor: Q, K, V, out; going backward Q, K, V, dout, dQ, dK, dV, and in plain
# attention dout once more, in a fused kernel out.
_LINEAR_PASSES = {"forward": 4, "backward": 8}
_LOGSUMEXP_BYTES = 4
_MATH_BYTES = 4  # torch's MATH backend computes halves in fp32
PEAK_SQUARES = {"cuda": 4, "cpu": 3, "mps": 3}


def flops(problem: AttentionProblem, direction: str, *, fused: bool) -> int:
    """FLOPs of the products. `fused`: on and below the diagonal, the scores computed twice."""
    if direction == BOTH:
        return sum(flops(problem, each, fused=fused) for each in _PRODUCTS)
    products, width = _PRODUCTS[direction], problem.head_dim
    if not fused:
        return products * 2 * problem.rows * problem.context_length * width
    pairs = problem.rows * (problem.context_length + 1) // 2
    return (products + (direction == "backward")) * 2 * pairs * width


def traffic(problem: AttentionProblem, direction: str, *, fused: bool) -> int:
    """Bytes that a direction's operations read and write at least.

    Plain: every operand and every result of each operation once. `fused`: those of the whole, and
    the logsumexp.
    """
    if direction == BOTH:
        return sum(traffic(problem, each, fused=fused) for each in _PRODUCTS)
    linear = _LINEAR_PASSES[direction] * problem.linear
    if fused:
        return linear + problem.rows * _LOGSUMEXP_BYTES
    mask = _MASK_PASSES[direction] * problem.context_length**2
    return linear + SQUARE_PASSES[direction] * problem.square + mask


def kept(form: str, problem: AttentionProblem) -> dict[str, int]:
    """Bytes by tensor kept for the backward pass beside Q, K and V.

    Args:
        form: "plain", "math" (torch's backend of that name) or "fused".
    """
    halves = DTYPES[problem.dtype] < _MATH_BYTES
    wide = problem.rows * problem.head_dim * _MATH_BYTES
    square = problem.rows * problem.context_length * _MATH_BYTES
    forms = {
        "plain": {"P": problem.square, "mask": problem.context_length**2},
        "math": {"P": square, "scaled Q": wide, "scaled K": wide, "V in fp32": halves * wide},
        "fused": {"out": problem.linear, "logsumexp": problem.rows * _LOGSUMEXP_BYTES},
    }
    return {name: nbytes for name, nbytes in forms[form].items() if nbytes}


def plain_peak(problem: AttentionProblem, device: str) -> int:
    """Most bytes that plain attention holds over Q, K, V and dout, forward and backward.

    The largest of three moments of the backward pass, out and dV being there in each: the squares
    and the mask in the softmax; one square, dQ and dK in the product's; dQ, dKᵀ and its copy in
    K's layout at the end. The last two are the larger ones only where T is far below E.
    """
    square, linear = problem.square, problem.linear
    softmax = PEAK_SQUARES[device] * square + problem.context_length**2 + 2 * linear
    return max(softmax, square + 4 * linear, 5 * linear)


def operands_bytes(problem: AttentionProblem) -> int:
    """Bytes of Q, K, V and dout."""
    return 4 * problem.linear
