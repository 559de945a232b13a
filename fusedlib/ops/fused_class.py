"""Modules whose class is changed one by one: parameters, hooks, attributes and children stay.

A fused module computes with its children's weights instead of calling the children. It does so only
where a call of them would be the plain product and nothing else: `plain_weights`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fusedlib.compat import has_global_hooks as has_global_hooks
from fusedlib.compat import has_own_hooks, hooks_of, is_fake

# The forwards of linear layers that give x Wᵀ + b; ours are added where they are defined.
LINEAR_FORWARDS: set[Any] = {nn.Linear.forward}
# Hooks of these bring a module's weights where it is called, or where they are read; DeepSpeed's do
# both. They change no values. Tensor parallelism's move the first argument, and drop the others.
BRING_TO_CALLS, BRING_TO_READERS = ("torch", "deepspeed"), ("deepspeed",)
TENSOR_PARALLEL = "torch.distributed.tensor"


@dataclass(frozen=True)
class Fusion:
    """The state that `apply_to` keeps on a module, as its `_fusion`.

    Attributes:
        switches: those of `apply_to` that changed this module.
        causal: for a model with a head: its attention is causal and no more where nobody gives a
            mask, so that none need be made.
    """

    switches: frozenset[str] = frozenset()
    causal: bool = False


class FusedClass(type):
    """The class of the classes that `fuse` makes, of which there is one for two bases.

    They carry another's name, so pickle takes them by their bases; dill and cloudpickle, which
    make a class that its name does not lead to anew, get the one that there is.
    """

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any
    ) -> Any:  # fmt: skip
        """The class of these bases: the one that there is, or a new one."""
        union = _FUSED_CLASSES.get(bases)
        if union is None:
            union = super().__new__(cls, name, bases, namespace, **keywords)
            if len(bases) == 2 and issubclass(bases[0], Fused) and type(bases[0]) is type:
                _FUSED_CLASSES[bases] = union
        return union


_FUSED_CLASSES: dict[tuple[type, ...], Any] = {}


def _reduce_class(cls: FusedClass) -> Any:
    """What pickle makes a fused class of: its bases; of a class derived from one, its name."""
    fused = _FUSED_CLASSES.get(cls.__bases__) is cls
    return (_fused_class, cls.__bases__) if fused else cls.__qualname__


copyreg.pickle(FusedClass, _reduce_class)


class Fused(nn.Module):
    """Put before a module's own class by `fuse`: what it overrides is fused, all else stays.

    `super().forward` is what the module computed before. Its class keeps its name, which wrapping
    policies, transformers and others look for; `print` adds the word "fused".
    """

    _fused: type[Fused]
    _base: type[nn.Module]
    _fusion = Fusion()

    if TYPE_CHECKING:  # of the module's own class

        def __getattr__(self, name: str) -> Any: ...

    def extra_repr(self) -> str:
        """What the module's own class says, and that it is fused."""
        return ", ".join(filter(None, (super().extra_repr(), "fused")))


def fuse(module: nn.Module, fused: type[Fused]) -> None:
    """Give this one module the class's methods; a second time changes nothing."""
    if not isinstance(module, fused):
        module.__class__ = _fused_class(fused, type(module))


def unfuse(module: nn.Module) -> None:
    """Give a module that was fused its own class back."""
    module.__class__ = original_class(module)
    module.__dict__.pop("_fusion", None)


def original_class(module: nn.Module) -> type[nn.Module]:
    """A module's own class, behind what fused it."""
    return getattr(type(module), "_base", type(module))


def full_name(cls: type) -> str:
    """Module and name of a class, for messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


def package_of(cls: type) -> str:
    """Name of the package that a class comes from."""
    return cls.__module__.partition(".")[0]


def fusion_state(module: nn.Module) -> Fusion:
    """The state that `apply_to` keeps on a module; an empty one for all others."""
    return vars(module).get("_fusion", Fused._fusion)


def add_switches(module: Any, switches: Set[str]) -> None:
    """Note on a fused module which switches of `apply_to` changed it."""
    module._fusion = replace(module._fusion, switches=module._fusion.switches | switches)


def _fused_class(fused: type[Fused], base: type[nn.Module]) -> type[Fused]:
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    names |= {"_fused": fused, "_base": base}
    return FusedClass(base.__name__, (fused, base), names)


# --- whether children are plain ------------------------------------------------------------------


def plain_weights(*children: Any, biased: bool = True) -> list[Tensor] | None:
    """The weights of linear layers, each read once; None where a call of one is more than x Wᵀ + b.

    An adapter, a hook, a shard or a quantized weight in a child's place makes it more, and so does
    a bias where there shall be none. A weight that others compute when it is read, by a
    parametrization, does not.
    """
    if has_global_hooks():
        return None
    for child in children:
        cls = type(child)  # a function's and a scripted module's have no forward
        if cls is not nn.Linear and getattr(cls, "forward", None) not in LINEAR_FORWARDS:
            return None
        if "forward" in child.__dict__ or has_hooks(child, BRING_TO_READERS):
            return None
        if not biased and getattr(child, "bias", None) is not None:
            return None
    weights = [child.weight for child in children]
    return weights if all(map(is_plain_tensor, weights)) else None


def has_hooks(module: Any, besides: tuple[str, ...] = ()) -> bool:
    """True if a call of the module runs hooks of its own, except those of these libraries."""
    if not has_own_hooks(module):
        return False
    origins = [str(getattr(hook, "__module__", None)) for hook in hooks_of(module)]
    return any(
        name.partition(".")[0] not in besides or name.startswith(TENSOR_PARALLEL)
        for name in origins
    )


def has_value_hooks(module: Any) -> bool:
    """True if a call of the module runs hooks that may read values or change them."""
    return has_global_hooks() or has_hooks(module, BRING_TO_CALLS)


def is_plain_tensor(weight: Any) -> bool:
    """True if a weight is a tensor of torch's own, or one that stands for it while it traces.

    Subclasses, DTensor say, may have rules for torch's operators and none for ours.
    """
    cls = type(weight)
    if cls is nn.Parameter or cls is Tensor:
        return True
    return is_fake(cls)


def stored_weight(layer: nn.Module) -> Any:
    """A layer's weight; of a parametrized one what it is computed from, for computing it has
    effects: spectral norm goes on with its iteration, noise draws numbers.
    """
    if is_parametrized(layer, "weight"):
        stored: Any = layer.parametrizations
        return getattr(stored["weight"], "original" if stored["weight"].is_tensor else "original0")
    return layer.weight


def why_not_linear(module: nn.Module, name: str) -> str | None:
    """Why a child is more than a linear layer; None where it is that."""
    child = getattr(module, name, None)
    cls = type(child)
    kind: Any = original_class(child) if isinstance(child, nn.Module) else None
    if getattr(kind, "forward", None) not in LINEAR_FORWARDS:
        return f"{name} is a {full_name(cls)}, not a torch.nn.Linear"
    assert child is not None
    if "forward" in vars(child):
        return f"{name} has a forward of its own"
    if has_hooks(child):
        return f"{name} has hooks, which the fused product would not call"
    weight = stored_weight(child)
    if not is_plain_tensor(weight):
        return f"the weight of {name} is a {type(weight).__qualname__}"
    return None
