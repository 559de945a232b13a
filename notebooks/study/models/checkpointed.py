"""Activation checkpointing of the Transformer: blocks that keep their input only, and run again.

A checkpointed segment keeps its input, C bytes, and runs again when its backward begins; then it
holds all it would have kept, A a block (Chen et al. 2016). With L blocks in segments of k the
blocks hold at the most

    (L / k) C + k A,    least at k = sqrt(L C / A): sqrt(L) only where a block keeps just its input.

Nested, each block of a segment that runs again is checkpointed in turn:

    (L / k) C + k C + A,    least at k = sqrt(L), for a third pass through most blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from study.models import activations
from study.models.transformer import BATCH_SIZE, Transformer, TransformerConfig


@dataclass(frozen=True)
class CheckpointPlan:
    """Which blocks are checkpointed.

    "none"; "first": each of the first `size` blocks by itself; "segments": all, in segments of
    `size` blocks; "nested": segments whose blocks are checkpointed again.
    """

    kind: Literal["none", "first", "segments", "nested"]
    size: int = 0

    def segments(self, layers: int) -> list[range]:
        """The segments of blocks 0 .. layers - 1 that are checkpointed, in order."""
        if self.size > layers:
            raise ValueError(f"{self.kind} of {self.size} blocks, but the model has {layers}")
        if self.kind == "none":
            return []
        if self.kind == "first":
            return [range(at, at + 1) for at in range(self.size)]
        return [range(at, min(at + self.size, layers)) for at in range(0, layers, self.size)]


def forward(model: Transformer, tokens: Tensor, plan: CheckpointPlan) -> Tensor:
    """`model(tokens)` with checkpoints: tokens (B, T) -> logits (B, T, V), gradients the same."""
    blocks: list[Callable[[Tensor], Tensor]] = [partial(b, rope=model.rope) for b in model.blocks]
    segments = plan.segments(len(blocks))
    x, done = model.embedding(tokens), 0
    for segment in segments:
        chain = partial(_chain, blocks[segment.start : segment.stop], plan.kind == "nested")
        x, done = _again(chain, x), segment.stop
    for block in blocks[done:]:
        x = block(x)
    logits: Tensor = model.output(model.norm(x))
    return logits


def _chain(blocks: list[Callable[[Tensor], Tensor]], nested: bool, x: Tensor) -> Tensor:
    for block in blocks:
        x = _again(block, x) if nested else block(x)
    return x


def _again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # Nothing in the model draws random numbers, so none of their state is kept.
    y: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return y


def held_bytes(
    shape: TransformerConfig, precision: str, device: str, plan: CheckpointPlan,
    batch_size: int = BATCH_SIZE,
) -> dict[str, int]:  # fmt: skip
    """Bytes over weights and gradients that a pass holds at three moments, by formula.

    `forward`: its end, where autocast still has every weight it has cast; `loss`: the beginning of
    the backward; `again`: a segment has run again, and the inputs of those before it are there. The
    peak is the largest of them, but for what comes and goes inside a block.
    """
    layers, segments = shape.num_layers, plan.segments(shape.num_layers)
    block = activations.block_bytes(shape, precision, device, batch_size)
    cast = activations.block_cast_bytes(shape, precision)
    entry = activations.tensor_bytes(shape, precision, batch_size)
    inputs, plain = len(segments) * entry, layers - sum(map(len, segments))
    head = activations.head_bytes(shape, precision, batch_size)
    casts = activations.cast_weights(shape, precision)
    passing = activations.loss_temporaries(shape, precision, batch_size)
    held = inputs + plain * block + head
    moments = {
        "forward": held + casts + passing["forward"],
        "loss": held + casts - (layers - plain) * cast + passing["backward"],
    }
    if segments:
        # In at least fp32 the first block of a segment keeps the segment's input itself.
        shared = 0 if precision == "bf16" else entry
        moments["again"] = max(
            number * entry
            - shared
            + (len(s) * entry + block + cast if plan.kind == "nested" else len(s) * (block + cast))
            for number, s in enumerate(segments, 1)
        )
    return moments
