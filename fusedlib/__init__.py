"""Triton kernels around the SwiGLU MLP, and the study that measures them.

    fusedlib.swiglu_mlp(x, w_gate_up, w_down)             the whole MLP
    fusedlib.swiglu(x, w_gate_up)                         without the down projection
    fusedlib.SwiGLUMLP(hidden_size, intermediate_size)    the module

Importing this package imports neither torch nor a notebook tool nor a plotting library; the study
lives in `fusedlib.study`, the measuring side in `fusedlib.bench`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "swiglu": "fusedlib.functional",
    "swiglu_mlp": "fusedlib.functional",
    "SwiGLUMLP": "fusedlib.modules",
}
__all__ = ["SwiGLUMLP", "swiglu", "swiglu_mlp"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
