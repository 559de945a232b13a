"""The arms: whose operations run, and what compiles them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.rivals import rival
from measure import llama

TASK, BASELINE = "compiler", llama.BASELINE
Call = Callable[..., Any]
COMPILED: dict[str, Any] = {"requires": ("transformers",), "traits": frozenset({"compiles"})}
GRAPHS = COMPILED | {"traits": frozenset({"compiles", "graphs"})}
ASKED = COMPILED | {"traits": frozenset({"compiles", "asked for"})}


@dataclass(frozen=True)
class Arm:
    """Whose operations run, and what makes a compiled callable of a module or function."""

    fused: bool
    compile: Callable[[Call], Call]


def _as_it_is(call: Call) -> Call:
    return call


@rival(TASK, BASELINE, requires=("transformers",))
def plain() -> Arm:
    """transformers' Llama, an operation at a time, attention by scaled_dot_product_attention."""
    return Arm(False, _as_it_is)


@rival(TASK, "fused", requires=("transformers",))
def ours() -> Arm:
    """fusedlib.apply_to with all its parts, the rest an operation at a time."""
    return Arm(True, _as_it_is)


@rival(TASK, "thunder", label="Thunder", slot=5, requires=("transformers", "thunder"),
       traits=frozenset({"compiles"}))  # fmt: skip
def thunder() -> Arm:
    """thunder.dynamo.thunderfx with the executors that it finds."""
    try:
        from thunder.dynamo import thunderfx  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:  # of another torch it fails in many ways
        raise Unavailable(f"Thunder cannot be imported: {type(error).__name__}: {error}") from None
    return Arm(False, thunderfx)


def _inductor(fused: bool, mode: str) -> Arm:
    return Arm(fused, partial(torch.compile, mode=mode))


@rival(TASK, "inductor", **COMPILED)
def inductor() -> Arm:
    """torch.compile of the whole, mode default."""
    return _inductor(False, "default")


@rival(TASK, "inductor-graphs", label="torch.compile, CUDA graphs", slot=3, **GRAPHS)
def graphs() -> Arm:
    """torch.compile of the whole, mode reduce-overhead."""
    return _inductor(False, "reduce-overhead")


@rival(TASK, "inductor-graphs-searched", label="torch.compile, searched, CUDA graphs", slot=10,
       **GRAPHS | {"traits": GRAPHS["traits"] | {"asked for"}})  # fmt: skip
def graphs_searched() -> Arm:
    """torch.compile of the whole, mode max-autotune."""
    return _inductor(False, "max-autotune")


@rival(TASK, "fused-inductor", **COMPILED)
def fused_inductor() -> Arm:
    """fusedlib.apply_to, then torch.compile of the whole, mode default."""
    return _inductor(True, "default")


@rival(
    TASK, "fused-inductor-graphs", label="fusedlib, torch.compile, CUDA graphs", slot=6, **GRAPHS
)
def fused_graphs() -> Arm:
    """fusedlib.apply_to, then torch.compile of the whole, mode reduce-overhead."""
    return _inductor(True, "reduce-overhead")


@rival(TASK, "inductor-causal", **ASKED)
def causal() -> Arm:
    """torch.compile of the whole, mode default, attention by the flag is_causal."""
    attention = llama.causal_attention()

    def compiled(model: Any) -> Call:
        same: Any = llama.copy_of(model)
        same.set_attn_implementation(attention)
        return torch.compile(same)

    return Arm(False, compiled)


def _by_layer(model: Any) -> Call:
    # One graph serves all.
    same: Any = llama.copy_of(model)
    for layer in same.model.layers:
        layer.compile()
    return same


@rival(TASK, "inductor-layers", **ASKED)
def layers() -> Arm:
    """torch.compile of each decoder layer, mode default."""
    return Arm(False, _by_layer)


@rival(TASK, "fused-inductor-layers", **ASKED)
def fused_layers() -> Arm:
    """fusedlib.apply_to, then torch.compile of each decoder layer, mode default."""
    return Arm(True, _by_layer)
