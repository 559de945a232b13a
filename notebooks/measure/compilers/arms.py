"""The arms: whose operations run, and what compiles them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedlib.bench.attempt import Unavailable
from measure import llama
from measure.racing.rivals import Task, rival

BASELINE = llama.BASELINE
Call = Callable[..., Any]


@dataclass(frozen=True)
class Arm:
    """Whose operations run, and what makes a compiled callable of a module or function."""

    fused: bool
    compile: Callable[[Call], Call]


TASK = Task[[], Arm]("compiler")


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


def _by_layer(model: Any) -> Call:
    # One graph serves all.
    same: Any = llama.copy_of(model)
    for layer in same.model.layers:
        layer.compile()
    return same


def _whole(mode: str) -> Callable[[Call], Call]:
    return lambda call: torch.compile(call, mode=mode)


def _causal(model: Any) -> Call:
    same: Any = llama.copy_of(model)
    same.set_attn_implementation(llama.causal_attention())
    return torch.compile(same)


def _inductor(
    name: str, settings: str, call: Callable[[Call], Call], *traits: str, **look: Any
) -> None:
    """Register an arm of torch.compile, on fusedlib's operations where its name begins so."""
    fused = name.startswith("fused")
    settings = "fusedlib.apply_to, then " * fused + "torch.compile of " + settings
    rival(
        TASK, name, settings=settings, requires=("transformers",),
        traits=frozenset({"compiles", *traits}), **look,
    )(lambda: Arm(fused, call))  # fmt: skip


_default = "the whole, mode default", _whole("default")
_graphs = "the whole, mode reduce-overhead", _whole("reduce-overhead")
_layers = "each decoder layer, mode default", _by_layer
_inductor("inductor", *_default)
_inductor("inductor-graphs", *_graphs, "graphs", label="torch.compile, CUDA graphs", slot=3)
_inductor(
    "inductor-graphs-searched", "the whole, mode max-autotune",
    _whole("max-autotune"), "graphs", "on request",
    label="torch.compile, searched, CUDA graphs", slot=10,
)  # fmt: skip
_inductor(
    "inductor-dynamic", "the whole, mode default, dynamic=True",
    lambda call: torch.compile(call, dynamic=True), "on request",
    label="torch.compile, any length", slot=16,
)  # fmt: skip
_inductor("fused-inductor", *_default)
_inductor(
    "fused-inductor-graphs", *_graphs, "graphs",
    label="fusedlib, torch.compile, CUDA graphs", slot=6,
)  # fmt: skip
_inductor(
    "inductor-causal", "the whole, mode default, attention by the flag is_causal", _causal,
    "on request",
)  # fmt: skip
_inductor("inductor-layers", *_layers, "on request")
_inductor("fused-inductor-layers", *_layers, "on request")
