"""The activations of a gated MLP: names, plain PyTorch, and the modules that compute them.

Their formulas for kernels are in `fusedlib.ops.mlp.kernels`. This imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import gelu, silu


class Activation(NamedTuple):
    """An activation that the kernels have.

    Attributes:
        compute: act(gate) in plain PyTorch.
        modules: that compute it, by package and class: `apply_to` fuses an MLP with one of them.
    """

    compute: Callable[[Tensor], Tensor]
    modules: tuple[tuple[str, str], ...] = ()


ACTIVATIONS = {
    "silu": Activation(silu, (("torch", "SiLU"), ("transformers", "SiLUActivation"))),
    "gelu": Activation(gelu, (("transformers", "GELUActivation"),)),
    "gelu_tanh": Activation(
        partial(gelu, approximate="tanh"),
        (("transformers", "GELUTanh"), ("transformers", "NewGELUActivation")),
    ),
}
_OF_MODULES = {module: name for name, act in ACTIVATIONS.items() for module in act.modules}


def gelu_name(approximate: str) -> str:
    """The name in ACTIVATIONS of torch's gelu with that `approximate`.

    Raises:
        ValueError: neither "tanh" nor "none".
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate must be one of tanh, none, got {approximate!r}")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def activation_of(module: object) -> str | None:
    """The name in ACTIVATIONS of what a module computes, or None."""
    if type(module) is nn.GELU:
        return gelu_name(module.approximate)
    cls = type(module)
    return _OF_MODULES.get((cls.__module__.partition(".")[0], cls.__name__))
