"""What a forward pass of the Transformer keeps for backward, in bytes by formula.

N = B·T tokens, D d_model, F d_ff, H heads, V vocabulary. Autograd keeps for each operation what its
derivative reads; one storage counts once, parameters, RoPE's tables and the tokens not at all.
Bytes an element, by precision:

    part       what is kept                 elements      fp32   bf16 autocast    bf16
    norm       its input, at least fp32     N·D           4      4                4 (a copy)
               1 / rms                      N             4      4                4
               input / rms                  N·D           4      4                4
    attention  the norm's output            N·D           4      2 each for q,k,v  2
               q, k (rotated), v            N·D each      4      2                2
               mixed heads                  N·D           4      2                2
      sdpa     log of the softmax's sums    B·H·T         4      4                4
               its output, heads apart      N·D           4      2                2
      plain    attention weights            B·H·T²        4      4 + 2            2
               causal mask                  T²            1      1                1
    mlp        the norm's output            N·D           4      2 for gate, up   2
               gate, silu(gate), up, h      N·F each      4      2                2
    output     the last norm's output       N·D           4      2                2
    loss       log-softmax                  N·V           4      4                4
               sum of the targets' weights  1             4      4                4

Why: `x·s` keeps x and s where both want a gradient; RoPE's tables want none, so it keeps only them.
Residual sums and casts keep nothing. Autocast casts an activation anew for each product that reads
it, and a weight once a forward pass (`cast_weights`); its softmax returns fp32, which is then cast
for the product with v.

What depends on the device (a type such as "cuda"): on a CPU autocast leaves the softmax in bf16,
so its weights take 2 bytes. `scaled_dot_product_attention` gives its output in the layout of the
query, which merging the heads copies, so both are kept; CUDA's memory-efficient backend, which
serves fp32 there, gives it ready to be merged. On CUDA it also keeps a few numbers of the random
generator's state, and its fp32 backend pads T to a multiple of 32: neither is counted.
"""

from typing import NamedTuple

from fusedlib.bench.arguments import require_known
from study.models.transformer import BATCH_SIZE, TransformerConfig


class Widths(NamedTuple):
    """Bytes an element of weights, of the residual stream, and of what products read and give."""

    weight: int
    stream: int
    product: int


_WIDTHS = {
    "fp32": Widths(4, 4, 4), "bf16 autocast": Widths(4, 4, 2), "bf16": Widths(2, 2, 2)
}  # fmt: skip
PRECISIONS = tuple(_WIDTHS)
_WIDE = 4  # norms and the loss are computed in fp32


def widths(precision: str) -> Widths:
    """Bytes an element. Raises ValueError for an unknown precision, listing the known ones."""
    require_known("precision", precision, _WIDTHS)
    return _WIDTHS[precision]


def tensor_bytes(shape: TransformerConfig, precision: str, batch_size: int = BATCH_SIZE) -> int:
    """Bytes of one activation of the residual stream: batch · context · d_model · width."""
    return batch_size * shape.context_length * shape.d_model * widths(precision).stream


def block_bytes(
    shape: TransformerConfig, precision: str, device: str, batch_size: int = BATCH_SIZE
) -> int:
    """What one block keeps, at the shape's context length and attention."""
    tokens, product = batch_size * shape.context_length, widths(precision).product
    heads = 4 * tokens * shape.d_model * product  # q, k, v, mixed
    inner = 4 * tokens * shape.d_ff * product  # gate, silu(gate), up, h
    norms = _norm_bytes(shape, precision, batch_size, 3) + _norm_bytes(
        shape, precision, batch_size, 2
    )
    return norms + heads + inner + _scores_bytes(shape, precision, device, batch_size)


def head_bytes(shape: TransformerConfig, precision: str, batch_size: int = BATCH_SIZE) -> int:
    """What comes after the blocks keeps: the last norm, the output layer and the loss."""
    log_softmax = batch_size * shape.context_length * shape.vocab_size * _WIDE
    return _norm_bytes(shape, precision, batch_size, 1) + log_softmax + _WIDE


def saved_bytes(
    shape: TransformerConfig, precision: str, device: str, batch_size: int = BATCH_SIZE
) -> int:
    """All that a forward pass keeps besides weights and their casts: L blocks and the head."""
    block = block_bytes(shape, precision, device, batch_size)
    return shape.num_layers * block + head_bytes(shape, precision, batch_size)


def block_cast_bytes(shape: TransformerConfig, precision: str) -> int:
    """bf16 copies of one block's matrices that autocast keeps: 2 (4 D² + 3 D F), else nothing."""
    weight, _, product = widths(precision)
    if weight == product:
        return 0
    return product * (4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff)


def cast_weights(shape: TransformerConfig, precision: str) -> int:
    """bf16 copies of all weights of linear layers, V·D of the output layer included."""
    weight, _, product = widths(precision)
    head = 0 if weight == product else product * shape.vocab_size * shape.d_model
    return shape.num_layers * block_cast_bytes(shape, precision) + head


def loss_temporaries(
    shape: TransformerConfig, precision: str, batch_size: int = BATCH_SIZE
) -> dict[str, int]:
    """Bytes of the order N·V that come and go around the loss, besides the log-softmax it keeps.

    `forward`: the logits, and unless they are fp32 themselves their fp32 copy; `backward`: the
    gradients of the log-softmax and of its input.
    """
    logits = batch_size * shape.context_length * shape.vocab_size
    product = widths(precision).product
    copy = 0 if product == _WIDE else _WIDE
    return {"forward": logits * (product + copy), "backward": logits * 2 * _WIDE}


def _norm_bytes(shape: TransformerConfig, precision: str, batch_size: int, readers: int) -> int:
    """A norm's input, input / rms and 1 / rms; and its output, which the products that read it
    keep: under autocast each has a copy of its own.
    """
    tokens, (weight, _, product) = batch_size * shape.context_length, widths(precision)
    outputs = 1 if weight == product else readers
    return tokens * ((2 * shape.d_model + 1) * _WIDE + outputs * shape.d_model * product)


def _scores_bytes(shape: TransformerConfig, precision: str, device: str, batch_size: int) -> int:
    """What attention keeps between q, k, v and the mixed heads."""
    rows = batch_size * shape.num_heads * shape.context_length
    weight, _, product = widths(precision)
    if shape.attention == "sdpa":
        is_ready = device == "cuda" and precision == "fp32"
        apart = 0 if is_ready else rows * shape.head_dim * product
        return rows * _WIDE + apart
    softmax_in_fp32 = weight != product and device == "cuda"
    each = _WIDE + product if softmax_in_fp32 else product
    return rows * shape.context_length * each + shape.context_length**2
