"""Ways to call `scaled_dot_product_attention` in a model: Q and K are rotated first, by
`fusedlib.rope`, and torch then takes the backend by itself. Heads whose width is no multiple of
eight stay as they are, or `rope` writes Q and K into wider ones, V is padded, and the output cut.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedlib import reference, rope
from fusedlib.bench.problem import Operands
from study import causal
from study.cases import grid
from study.causal import BOTH, FUSED, Exact, backend_of, exact
from study.models.transformer import ROPE_BASE, at_least_fp32, plain_attention
from study.rivals import Task, Workload, names, rival

TASK = Task[[Operands], Workload]("attention call")
STEP = 8  # of widths that attention's kernels take in 16 bits


def cases(shared: dict[str, Any], **axes: list[Any]) -> list[dict[str, Any]]:
    """A case a context, width, dtype, way to launch and way to call; one that pads only where
    there is something to pad.
    """
    listed = grid(shared | {"experiment": "call"}, **axes, direction=[BOTH], provider=names(TASK))
    return [c for c in listed if c["provider"] != "padded-heads" or c["head_dim"] % STEP]


def tables(heads: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (1, T, E) by which RoPE turns these heads (B, 1, T, E), in at least fp32."""
    length, width = heads.shape[-2:]
    turns = ROPE_BASE ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.outer(torch.arange(length, dtype=torch.float64), turns).repeat(1, 2)[None]
    wide = at_least_fp32(heads.dtype)
    return angles.cos().to(heads.device, wide), angles.sin().to(heads.device, wide)


def _called(operands: Operands, *, masked: bool = False, padded: bool = False) -> Workload:
    query, key, value = operands.leaves().values()
    length, true = query.shape[-2:]
    cos, sin = tables(query)
    wide = -(-true // STEP) * STEP if padded else true
    mask = None
    if masked:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()

    def forward() -> Tensor:
        q, k = rope(query, key, cos, sin, width=wide)
        v = F.pad(value, (0, wide - true)) if padded else value
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=true**-0.5)
        return y[..., :true] if padded else y

    return Workload(forward, operands.leaves(), figures={"backend": backend_of(forward())})


rival(TASK, "causal-flag", traits=frozenset({FUSED}))(_called)
rival(TASK, "mask-tensor")(partial(_called, masked=True))
rival(TASK, "padded-heads", traits=frozenset({FUSED}))(partial(_called, padded=True))


class Setup(causal.Setup):
    """As `causal.Setup`, of attention whose Q and K are rotated first."""

    task = TASK

    def truth(self) -> Exact:
        """Attention of what is rotated in float64; gradients of Q and K are rotated back."""
        leaves = {name: leaf.detach().double() for name, leaf in self.operands.leaves().items()}
        cos, sin = tables(leaves["query"])
        for name in ("query", "key"):
            leaves[name] = reference.rope(leaves[name], cos, sin)
        true = exact(Operands(leaves, self.operands.dy))
        for name in ("d_query", "d_key"):
            true.values[name] = reference.rope(true.values[name], cos, -sin)
        return true

    @staticmethod
    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Every step an operation of its own, in the operands' dtype."""
        cos, sin = tables(query)
        return plain_attention(
            reference.rope(query, cos, sin), reference.rope(key, cos, sin), value
        )
