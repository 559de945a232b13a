"""The arms: whose operations run, and what compiles them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.rivals import rival
from measure import llama

TASK, BASELINE = "compiler", llama.BASELINE
Call = Callable[..., Any]


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


def _inductor_arm(name: str, mode: str, *traits: str, **look: Any) -> None:
    fused = name.startswith("fused")

    def arm() -> Arm:
        return Arm(fused, partial(torch.compile, mode=mode))

    whose = "fusedlib.apply_to, then " if fused else ""
    arm.__doc__ = f"{whose}torch.compile of the whole, mode {mode}"
    marks = frozenset({"compiles", *traits})
    rival(TASK, name, requires=("transformers",), traits=marks, **look)(arm)


_inductor_arm("inductor", "default")
_inductor_arm("inductor-graphs", "reduce-overhead", "graphs",
              label="torch.compile, CUDA graphs", slot=3)  # fmt: skip
_inductor_arm("inductor-graphs-searched", "max-autotune", "graphs", "asked for",
              label="torch.compile, searched, CUDA graphs", slot=10)  # fmt: skip
_inductor_arm("fused-inductor", "default")
_inductor_arm("fused-inductor-graphs", "reduce-overhead", "graphs",
              label="fusedlib, torch.compile, CUDA graphs", slot=6)  # fmt: skip


@rival(TASK, "inductor-causal", requires=("transformers",),
       traits=frozenset({"compiles", "asked for"}))  # fmt: skip
def causal() -> Arm:
    """torch.compile of the whole, mode default, attention by the flag is_causal."""
    attention = llama.causal_attention()

    def compiled(model: Any) -> Call:
        inner = torch.compile(model)

        def call(*given: Any, **named: Any) -> Any:
            model.set_attn_implementation(attention)
            try:
                return inner(*given, **named)
            finally:
                model.set_attn_implementation("sdpa")

        return call

    return Arm(False, compiled)


def _by_layer(name: str) -> None:
    fused = name.startswith("fused")

    def arm() -> Arm:
        def compiled(model: Any) -> Call:
            compile_one: Any = torch.compile
            layers = model.model.layers
            each = nn.ModuleList(compile_one(layer) for layer in layers)

            def call(*given: Any, **named: Any) -> Any:
                model.model.layers = each
                try:
                    return model(*given, **named)
                finally:
                    model.model.layers = layers

            return call

        return Arm(fused, compiled)

    whose = "fusedlib.apply_to, then " if fused else ""
    arm.__doc__ = f"{whose}torch.compile of each decoder layer, mode default: one graph serves all"
    marks = frozenset({"compiles", "asked for"})
    rival(TASK, name, requires=("transformers",), traits=marks)(arm)


_by_layer("inductor-layers")
_by_layer("fused-inductor-layers")
