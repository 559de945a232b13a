"""Softmax and matrix products of plain attention, counted, for a score of the T x T matrix each.

    products: q·k and p·v, a multiply and an add each over E: 4 E FLOPs
    softmax:  maximum, subtraction, exponential, sum, division: 5 FLOPs

Bytes are those that must be moved when each operation reads its inputs and writes its result once.
Per score the products write s and read p, and read or write q, k, v and the result, 4 E / T
elements. The softmax reads s and writes p. Under autocast s and p are bf16 and the softmax fp32,
so that it comes with a cast before and one behind.
"""

SOFTMAX_FLOPS = 5
# Bytes a score: moved by the softmax with its casts, and of one element of s, p, q, k and v.
_BYTES = {"fp32": (4 + 4, 4), "bf16": (2 + 2, 2), "bf16 autocast": ((2 + 4) + (4 + 4) + (4 + 2), 2)}


def flop_ratio(head_dim: int) -> float:
    """The softmax's FLOPs over those of both products, forward."""
    return SOFTMAX_FLOPS / (4 * head_dim)


def byte_ratio(precision: str, context_length: int, head_dim: int) -> float:
    """The softmax's bytes over those of both products, forward.

    Raises:
        ValueError: a precision that nobody has counted.
    """
    if precision not in _BYTES:
        raise ValueError(f"no bytes counted for {precision!r}; counted: {', '.join(_BYTES)}")
    softmax, element = _BYTES[precision]
    return softmax / (element * (2 + 4 * head_dim / context_length))
