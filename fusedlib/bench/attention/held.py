"""What attention holds, counted: bytes of every tensor by a formula in B, T and E.

Plain attention keeps P = softmax(…), B T² elements, for the backward pass, and the mask, T²
bytes; Q, K and V are there anyway. Three B × T × T tensors are alive at the end of the forward
pass: scaled scores, masked scores and P. Going backward these are P, dP and dS, and on CUDA P ∘ dP,
which torch's softmax backward writes before it sums its rows.

What is fused keeps out (T E elements a sequence) and a logsumexp a row, nothing of T².
"""

from bisect import bisect_right
from math import isqrt

from fusedlib.bench.attention.problem import LOGSUMEXP_BYTES, AttentionProblem

PEAK_SQUARES = {"cuda": 4}
PEAK_SQUARES_ELSEWHERE = 3
MATH_BYTES = 4  # torch's MATH backend computes halves in fp32
_FUSED = ("flash", "efficient", "cudnn", "flex")


def kept(way: str, problem: AttentionProblem) -> dict[str, int] | None:
    """Bytes by tensor kept for the backward pass beside Q, K and V; None where nobody counted.

    What Inductor keeps is its own choice.
    """
    if way == "plain":
        return {"P": problem.square * problem.itemsize, "mask": problem.context_length**2}
    if way == "math":
        found = {
            "P": problem.square * MATH_BYTES,
            "scaled Q": problem.linear * MATH_BYTES,
            "scaled K": problem.linear * MATH_BYTES,
        }
        wide = {"V in fp32": problem.linear * MATH_BYTES}
        return found | (wide if problem.itemsize < MATH_BYTES else {})
    if way in _FUSED:
        return {
            "out": problem.linear * problem.itemsize,
            "logsumexp": problem.rows * LOGSUMEXP_BYTES,
        }
    return None


def plain_peak(problem: AttentionProblem, device: str) -> int:
    """Most bytes that plain attention holds over Q, K, V and dout, forward and backward.

    The largest of three moments of the backward pass, out and dV being there in each: the squares
    and the mask in the softmax; one square, dQ and dK in the product's; dQ, dKᵀ and its copy in
    K's layout at the end. The last two are the larger ones only where T is far below E.
    """
    square, linear = problem.square * problem.itemsize, problem.linear * problem.itemsize
    squares = PEAK_SQUARES.get(device, PEAK_SQUARES_ELSEWHERE) * square
    softmax = squares + problem.context_length**2 + 2 * linear
    return max(softmax, square + 4 * linear, 5 * linear)


def operands(problem: AttentionProblem) -> int:
    """Bytes of Q, K, V and dout."""
    return 4 * problem.linear * problem.itemsize


def longest(
    capacity_bytes: float, head_dim: int, batch_size: int, dtype: str, device: str
) -> int:  # fmt: skip
    """The longest context at which plain attention and its operands fit `capacity_bytes`."""

    def needed(context: int) -> int:
        problem = AttentionProblem(context, head_dim, batch_size, dtype)
        return plain_peak(problem, device) + operands(problem)

    upper = isqrt(int(capacity_bytes)) + 2  # the mask alone is more than that
    return bisect_right(range(1, upper), capacity_bytes, key=needed)


def crossing(head_dim: int, batch_size: int, dtype: str) -> float:
    """The context at which plain attention keeps as many bytes as flash attention, about E."""
    one = AttentionProblem(1, head_dim, batch_size, dtype)
    plain, fused = (kept(name, one) or {} for name in ("plain", "flash"))
    return sum(fused.values()) / sum(plain.values())
