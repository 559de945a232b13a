"""The plain products at few tokens: y by one launch, all three gradients by another."""

from fusedlib.kernels.few_tokens.products import Products

__all__ = ["Products"]
