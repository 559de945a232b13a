"""fp32 products on tensor cores, from two fp16 parts a factor.

For C = A B of A (m, k) and B (k, n), with the sums over k of row i and column j,

    |error| ≤ (18 + k/4096) 2⁻²² Σ|a||b| + 2⁻³⁹ (max|a| Σ|b| + max|b| Σ|a|)

and inf and nan are where IEEE arithmetic has them, unless a term or partial sum overflows that the
true sum does not: derived in `parts` and `product`. IEEE fp32's own bound is 2⁻²² k/4 Σ|a||b|. Sums
that fp32 holds come out exact if the factors fit in fp16.
"""

from fusedlib.ops.linear.split.mm import multiply, split_mm

__all__ = ["multiply", "split_mm"]
