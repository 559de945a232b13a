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

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from fusedlib.bench.arguments import require_known
from study.models.transformer import BATCH_SIZE, TransformerConfig

Precision = Literal["fp32", "bf16 autocast", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class Widths(NamedTuple):
    """Bytes an element of weights, of the residual stream, and of what products read and give."""

    weight: int
    stream: int
    product: int


_WIDTHS: dict[str, Widths] = {
    "fp32": Widths(4, 4, 4),
    "bf16 autocast": Widths(4, 4, 2),
    "bf16": Widths(2, 2, 2),
}
_WIDE = 4  # norms and the loss are computed in fp32


@dataclass(frozen=True)
class Kept:
    """Tensors of one kind that a part keeps: how many, and the bytes of each."""

    part: str
    what: str
    count: int
    each: int

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.each


def widths(precision: str) -> Widths:
    """Bytes an element. Raises ValueError for an unknown precision, listing the known ones."""
    require_known("precision", precision, _WIDTHS)
    return _WIDTHS[precision]


def tensor_bytes(shape: TransformerConfig, precision: str, batch_size: int = BATCH_SIZE) -> int:
    """Bytes of one activation (B, T, D) of the residual stream: batch · context · d_model · width.

    T is the shape's `context_length`.
    """
    return batch_size * shape.context_length * shape.d_model * widths(precision).stream


def of_block(
    shape: TransformerConfig, precision: str, device: str, batch_size: int = BATCH_SIZE
) -> list[Kept]:
    """What one block keeps, at the shape's context length and attention."""
    tokens, product = batch_size * shape.context_length, widths(precision).product
    inner = tokens * shape.d_ff * product
    return [
        *_norm("attention norm", tokens, shape.d_model),
        _norm_output("attention", tokens, shape.d_model, precision, readers=3),
        Kept("attention", "q, k, v, mixed heads", 4, tokens * shape.d_model * product),
        *_scores(shape, precision, device, batch_size),
        *_norm("mlp norm", tokens, shape.d_model),
        _norm_output("mlp", tokens, shape.d_model, precision, readers=2),
        Kept("mlp", "gate, silu(gate), up, h", 4, inner),
    ]


def of_head(shape: TransformerConfig, precision: str, batch_size: int = BATCH_SIZE) -> list[Kept]:
    """What comes after the blocks: the last norm, the output layer and the loss."""
    tokens = batch_size * shape.context_length
    return [
        *_norm("last norm", tokens, shape.d_model),
        _norm_output("output", tokens, shape.d_model, precision, readers=1),
        Kept("loss", "log-softmax", 1, tokens * shape.vocab_size * _WIDE),
        Kept("loss", "sum of the targets' weights", 1, _WIDE),
    ]


def total(kept: list[Kept]) -> int:
    """Bytes of all of them."""
    return sum(item.nbytes for item in kept)


def saved_bytes(
    shape: TransformerConfig, precision: str, device: str, batch_size: int = BATCH_SIZE
) -> int:
    """All that a forward pass keeps besides weights and their casts: L blocks and the head."""
    block = total(of_block(shape, precision, device, batch_size))
    return shape.num_layers * block + total(of_head(shape, precision, batch_size))


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


def _norm(part: str, tokens: int, d_model: int) -> list[Kept]:
    return [
        Kept(part, "input, input / rms", 2, tokens * d_model * _WIDE),
        Kept(part, "1 / rms", 1, tokens * _WIDE),
    ]


def _norm_output(part: str, tokens: int, d_model: int, precision: str, readers: int) -> Kept:
    """The product that reads it keeps it; under autocast each has a copy of its own."""
    weight, _, product = widths(precision)
    copies = 1 if weight == product else readers
    return Kept(part, "the norm's output", copies, tokens * d_model * product)


def _scores(shape: TransformerConfig, precision: str, device: str, batch_size: int) -> list[Kept]:
    rows = batch_size * shape.num_heads * shape.context_length
    weight, _, product = widths(precision)
    if shape.attention == "sdpa":
        ready = device == "cuda" and precision == "fp32"
        apart = 0 if ready else rows * shape.head_dim * product
        return [
            Kept("attention", "log of the softmax's sums", 1, rows * _WIDE),
            Kept("attention", "its output, heads apart", 1, apart),
        ]
    softmax_in_fp32 = weight != product and device == "cuda"
    each = rows * shape.context_length * (_WIDE + product if softmax_in_fp32 else product)
    return [
        Kept("attention", "attention weights", 1, each),
        Kept("attention", "causal mask", 1, shape.context_length**2),
    ]
