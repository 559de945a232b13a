"""FLOPs of a Transformer by formula: matrix products alone, a multiply and an add each counted.

For B sequences of T tokens, D d_model, F d_ff, L layers, V vocabulary:

    weights    W  = 2 · BT · (L (4D² + 3DF) + DV)     attention's four, the MLP's three, the head
    attention  A  = 2 · L · 2BT²D                     QKᵀ and softmax · V, the mask not taken off
    forward       = W + A
    backward      = 2 (W + A)                         a product's gradients are two such products

The causal half of QKᵀ is counted as if it were needed, since plain attention computes it.
Element-wise work, softmax, norms, the embedding (a look-up) and the optimizer are not counted: they
are traffic. What is recomputed is no work of the model, and a utilisation leaves it out (Chowdhery
et al. 2022, appendix B): flash and its kin compute QKᵀ a second time, which
`torch.utils.flop_counter` counts.
"""

from study.models.transformer import TransformerConfig


def count(config: TransformerConfig, batch_size: int, context_length: int) -> int:
    """FLOPs of forward and backward of `batch_size` sequences of `context_length` tokens."""
    tokens, width, layers = batch_size * context_length, config.d_model, config.num_layers
    block = 4 * width * width + 3 * width * config.d_ff
    weights = 2 * tokens * (layers * block + width * config.vocab_size)
    attention = 2 * layers * 2 * tokens * context_length * width
    return 3 * (weights + attention)
