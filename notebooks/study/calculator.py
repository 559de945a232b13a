"""What fills memory in a training step, by the shape of a model: the four parts by formula.

parts("bf16", hidden=4096, layers=32, inner=14336, heads=32, kv_heads=8, vocabulary=128_256,
      tokens=8192)    # {"weights": …, "gradients": …, "optimizer": …, "activations": …}, GiB
"""

from fusedlib.bench.arguments import require_known
from models.activations import widths

ATTENTION = ("fused", "plain")
PARTS = ("weights", "gradients", "optimizer", "activations")


def parts(
    precision: str = "bf16", attention: str = "fused", *, hidden: int, layers: int, inner: int,
    heads: int, tokens: int, batch: int = 1, kv_heads: int = 0, vocabulary: int = 10_000,
) -> dict[str, float]:  # fmt: skip
    """GiB of weights, gradients, AdamW's moments and kept activations, on an NVIDIA GPU.

    The model is that of `models.transformer`: a block has attention and a SwiGLU MLP, each behind
    an RMSNorm, and the output layer has weights of its own. D hidden, F inner, V vocabulary,
    L layers, H heads of E = D / H columns, K of them for keys and values; N = batch · tokens.
    Bytes a number: w of a weight, p of what products read and give; 4 and 4 in "fp32", 2 and 2 in
    "bf16", its moments included, 4 and 2 under "bf16 autocast".

        weights       w (L (M + 2 D) + 2 V D + D),  M = 2 D D + 2 D K E + 3 D F;  gradients alike,
                      the two moments twice as much
        kept a block  2 (8 N D + 4 N)        two norms: input and input / rms in fp32, and 1 / rms
                      (a + m) p N D          what the norms give; a = m = 1, for autocast casts it
                                             for each product anew: a = 3 (q, k, v), m = 2
                      p (2 N D + 2 N K E)    q, k, v, and the heads' results side by side
                      4 N H + p N D          fused attention: a number a row, and its output, which
                                             in fp32 is the one beside already
                      p N H T + T T          plain attention: all scores, autocast's fp32 ones too
                                             (p + 4), and the mask
                      4 p N F                gate, silu(gate), up and their product
        kept besides  8 N D + 4 N + p N D    the last norm
                      4 N V                  the loss: log-softmax of the logits, in fp32
                      2 (L M + V D)          autocast's bf16 copies of the weights

    Kept activations and weights are those of every recorded `2.7b` within a thousandth. What comes
    and goes is none of the parts: the logits and their gradients, 8 N V around the loss, and what a
    layer's backward pass holds. All K and V heads are stored once: who repeats them for each query
    keeps H in place of K.

    Raises:
        ValueError: an unknown precision or attention, or heads that do not divide.
    """
    require_known("attention", attention, ATTENTION)
    weight, _, product = widths(precision)
    kv_heads = kv_heads or heads
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"{kv_heads} must divide {heads} heads, and these {hidden} columns")
    cast, n = weight != product, batch * tokens
    kv_width = hidden // heads * kv_heads
    matrices = 2 * hidden**2 + 2 * hidden * kv_width + 3 * hidden * inner
    weights = weight * (layers * (matrices + 2 * hidden) + 2 * vocabulary * hidden + hidden)
    norm = 8 * n * hidden + 4 * n
    block = 2 * norm + (5 if cast else 2) * product * n * hidden
    block += product * (2 * n * hidden + 2 * n * kv_width) + 4 * product * n * inner
    if attention == "plain":
        block += (product + 4 * cast) * n * heads * tokens + tokens**2
    else:
        block += 4 * n * heads + (product * n * hidden if product < 4 else 0)
    kept = layers * block + norm + product * n * hidden + 4 * n * vocabulary
    kept += product * (layers * matrices + vocabulary * hidden) if cast else 0
    sizes = (weights, weights, 2 * weights, kept)
    return {name: size / 2**30 for name, size in zip(PARTS, sizes, strict=True)}
