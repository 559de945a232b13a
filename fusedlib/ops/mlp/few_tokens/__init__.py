"""The plain products at few tokens: y by one launch, all three gradients by another."""

from fusedlib.ops.mlp.few_tokens.products import Products

__all__ = ["Products"]
