"""Fused Triton kernels for Transformer training: exact, and timed honestly.

    fusedlib.apply_to(model)                              all of it in a whole Llama
    fusedlib.swiglu_mlp(x, w_gate_up, w_down)             the whole MLP
    fusedlib.swiglu(x, w_gate_up)                         without the down projection
    fusedlib.SwiGLUMLP(hidden_size, intermediate_size)    the module
    fusedlib.geglu_mlp(x, w_gate_up, w_down)              the MLP with gelu, Gemma's
    fusedlib.GeGLUMLP(hidden_size, intermediate_size)     the module
    fusedlib.linear(x, weight, bias)                      fp32 products on tensor cores
    fusedlib.Linear(in_features, out_features)            the module
    fusedlib.fixed_weights()                              split fp32 weights once for many batches
    fusedlib.batch_invariant()                            a token's bits whatever is beside it
    fusedlib.rms_norm(x, weight, residual=stream)         RMSNorm, the residual added in one pass
    fusedlib.RMSNorm(hidden_size)                         the module
    fusedlib.rope(q, k, cos, sin)                         rotary embedding of q and k
    fusedlib.linear_cross_entropy(hidden, weight, target) a model's loss without its logits
    fusedlib.linear_cross_entropy_and_accuracy(…)         the same, and the tokens' accuracy
    fusedlib.LinearCrossEntropyLoss()                     the module
    fusedlib.linear_log_probs(hidden, weight, tokens)     tokens' log-probabilities, and entropies
    fusedlib.LinearLogProbs()                             the module
    fusedlib.warm_up(model)                               all kernels compiled before the first step

Importing this package imports neither torch nor anything else. `fusedlib.bench` times anybody's
kernels; the study that measures these lies in a checkout, in `notebooks` and `report`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, editors and the API reference
    from fusedlib.fixed import fixed_weights
    from fusedlib.invariant import batch_invariant
    from fusedlib.ops.loss.function import (
        linear_cross_entropy,
        linear_cross_entropy_and_accuracy,
        linear_log_probs,
    )
    from fusedlib.ops.loss.module import LinearCrossEntropyLoss, LinearLogProbs
    from fusedlib.ops.matmul.function import linear
    from fusedlib.ops.matmul.module import Linear
    from fusedlib.ops.mlp.function import geglu_mlp, swiglu, swiglu_mlp
    from fusedlib.ops.mlp.module import GeGLUMLP, SwiGLUMLP
    from fusedlib.ops.norm.function import rms_norm
    from fusedlib.ops.norm.module import RMSNorm
    from fusedlib.ops.rope.function import rope
    from fusedlib.patch.apply import apply_to
    from fusedlib.patch.warm_up import warm_up

__version__ = "0.2.0"

_PUBLIC = {
    "apply_to": "fusedlib.patch.apply",
    "batch_invariant": "fusedlib.invariant",
    "fixed_weights": "fusedlib.fixed",
    "linear": "fusedlib.ops.matmul.function",
    "Linear": "fusedlib.ops.matmul.module",
    "rms_norm": "fusedlib.ops.norm.function",
    "rope": "fusedlib.ops.rope.function",
    "RMSNorm": "fusedlib.ops.norm.module",
    "linear_cross_entropy": "fusedlib.ops.loss.function",
    "linear_cross_entropy_and_accuracy": "fusedlib.ops.loss.function",
    "LinearCrossEntropyLoss": "fusedlib.ops.loss.module",
    "linear_log_probs": "fusedlib.ops.loss.function",
    "LinearLogProbs": "fusedlib.ops.loss.module",
    "swiglu": "fusedlib.ops.mlp.function",
    "swiglu_mlp": "fusedlib.ops.mlp.function",
    "geglu_mlp": "fusedlib.ops.mlp.function",
    "warm_up": "fusedlib.patch.warm_up",
    "SwiGLUMLP": "fusedlib.ops.mlp.module",
    "GeGLUMLP": "fusedlib.ops.mlp.module",
}
__all__ = [
    "GeGLUMLP",
    "Linear",
    "LinearCrossEntropyLoss",
    "LinearLogProbs",
    "RMSNorm",
    "SwiGLUMLP",
    "apply_to",
    "batch_invariant",
    "fixed_weights",
    "geglu_mlp",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_and_accuracy",
    "linear_log_probs",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_mlp",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)  # found once
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
