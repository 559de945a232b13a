"""What fills memory in a training step, by the shape of a model: four parts by formula (`parts`),
and when which of them are there (`moments`).
"""

from typing import Any

from fusedlib.bench.arguments import require_known
from study.errors import SizesError

ATTENTION = ("fused", "plain")
LOSSES = ("whole", "chunked")
ADAMW = ("foreach", "fused")
PARTS = ("weights", "gradients", "optimizer", "activations")
MOMENTS = ("at the loss", "in the update")
# Bytes of a weight and its gradient; of AdamW's state; of one moment; of what products read.
WIDTHS = {
    "bf16": (2, 4, 2, 2), "bf16, fp32 master": (2, 12, 4, 2), "bf16 autocast": (4, 8, 4, 2),
    "fp32": (4, 8, 4, 4),
}  # fmt: skip


def parts(
    precision: str = "bf16", attention: str = "fused", *, hidden: int, layers: int, inner: int,
    heads: int, tokens: int, batch: int = 1, kv_heads: int = 0, head: int = 0,
    vocabulary: int = 10_000, tied: bool = False, loss: str = "whole",
) -> dict[str, float]:  # fmt: skip
    """GiB of weights, gradients, AdamW's state and kept activations, on an NVIDIA GPU.

    The model is that of `models.transformer`: a block has attention and a SwiGLU MLP, each behind
    an RMSNorm. D hidden, F inner, V vocabulary, L layers, H heads of E columns, K of them for keys
    and values; N = batch · tokens. Bytes a number: w of a weight, p of what products read and give;
    4 and 4 in "fp32", 2 and 2 in "bf16", its moments included, and in "bf16, fp32 master", 4 and 2
    under "bf16 autocast".

        weights       w (L (M + 2 D) + 2 V D + D),  M = 2 D H E + 2 D K E + 3 D F;  gradients alike,
                      the two moments twice as much; V D once where embeddings are `tied`. With
                      fp32 masters, AdamW's state is two moments and a copy of the weights in fp32
        kept a block  2 (8 N D + 4 N)        two norms: input and input / rms in fp32, and 1 / rms
                      (a + m) p N D          what the norms give; a = m = 1, for autocast casts it
                                             for each product anew: a = 3 (q, k, v), m = 2
                      p (2 N H E + 2 N K E)  q, k, v, and the heads' results side by side
                      4 N H + p N H E        fused attention: a number a row, and its output, which
                                             in fp32 is the one beside already
                      p N H T + T T          plain attention: all scores, autocast's fp32 ones too
                                             (p + 4), and the mask
                      4 p N F                gate, silu(gate), up and their product
        kept besides  8 N D + 4 N + p N D    the last norm
                      4 N V                  the loss: log-softmax of the logits, in fp32; where it
                                             is `chunked` the gradients of its input and weight,
                                             p N D + w V D, as fusedlib's and Liger's keep them
                      2 (L M + V D)          autocast's bf16 copies of the weights

    Kept activations and weights are those of every recorded `2.7b` within a thousandth. What comes
    and goes is none of the parts. All K and V heads are stored once: who repeats them for each
    query keeps H in place of K. `head` is E, by default D / H.

    Raises:
        ValueError: an unknown precision, attention or loss.
        SizesError: heads that do not divide.
    """
    require_known("precision", precision, WIDTHS)
    require_known("attention", attention, ATTENTION)
    require_known("loss", loss, LOSSES)
    weight, state, _, product = WIDTHS[precision]
    kv_heads = kv_heads or heads
    if heads % kv_heads or (not head and hidden % heads):
        raise SizesError(
            f"kv_heads must divide heads, and without a head's width heads must divide hidden: not "
            f"{kv_heads} of {heads} heads of {hidden} columns"
        )
    head = head or hidden // heads
    cast, n, width, kv_width = weight != product, batch * tokens, heads * head, kv_heads * head
    matrices = 2 * hidden * width + 2 * hidden * kv_width + 3 * hidden * inner
    embeddings = (1 if tied else 2) * vocabulary * hidden
    count = layers * (matrices + 2 * hidden) + embeddings + hidden
    norm = 8 * n * hidden + 4 * n
    block = 2 * norm + (5 if cast else 2) * product * n * hidden
    block += product * (2 * n * width + 2 * n * kv_width) + 4 * product * n * inner
    if attention == "plain":
        block += (product + 4 * cast) * n * heads * tokens + tokens**2
    else:
        block += 4 * n * heads + (product * n * width if product < 4 else 0)
    kept = layers * block + norm + product * n * hidden
    kept += product * (layers * matrices + vocabulary * hidden) if cast else 0
    whole, chunked = 4 * n * vocabulary, product * n * hidden + weight * vocabulary * hidden
    kept += whole if loss == "whole" else chunked
    sizes = (weight * count, weight * count, state * count, kept)
    return {name: size / 2**30 for name, size in zip(PARTS, sizes, strict=True)}


def moments(
    precision: str = "bf16", attention: str = "fused", *, adamw: str = "foreach", **shape: Any
) -> dict[str, dict[str, float]]:
    """GiB by part at the two moments of which one is a step's peak: `MOMENTS`.

    At the loss its backward pass has begun: everything that was kept is there, and two tensors as
    wide as the vocabulary ("logits", 8 N V), which a chunked loss has not. In the update all
    gradients are there, and with `foreach` a list of the square roots of all second moments
    ("temporaries"), with `fused` none. What a block's backward pass holds is not counted.

    Args:
        adamw: AdamW's form, "foreach" or "fused".
        shape: as of `parts`.
    """
    require_known("adamw", adamw, ADAMW)
    held = parts(precision, attention, **shape)
    wide = 8 * shape.get("batch", 1) * shape["tokens"] * shape.get("vocabulary", 10_000) / 2**30
    weight, _, moment, _ = WIDTHS[precision]
    stays = {name: held[name] for name in ("weights", "optimizer")}
    at_the_loss = stays | {"activations": held["activations"]}
    update = stays | {"gradients": held["gradients"]}
    if shape.get("loss", "whole") == "whole":
        at_the_loss["logits"] = wide
    if adamw == "foreach":
        update["temporaries"] = held["weights"] * moment / weight
    return dict(zip(MOMENTS, (at_the_loss, update), strict=True))
