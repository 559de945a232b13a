"""One parameter behind several `torch.nn.Linear`s, and the classes of modules changed one by one.

`pack` lays the weights of some linear children of a module one above the other in one parameter of
that module, `w_qkv` for instance, so that their products are one. The children stay where they were
as `PackedLinear`, and checkpoints keep their names: `q_proj.weight` is a block of rows of `w_qkv`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Where torch.func.functional_call puts other tensors in a parameter's place, and back.
SWAPS = "torch.nn.utils._named_member_accessor"
Kinds = tuple[type[nn.Linear], ...]


class Fused(nn.Module):
    """Put before a module's own class by `fuse`: what it overrides is fused, all else stays.

    `super().forward` is what the module computed before. Its class keeps its name, which wrapping
    policies and others look for; `print` shows it with "Fused" before.
    """

    _fused: type[Fused]
    _base: type[nn.Module]
    # What its own projections are computed by; `apply_to(linear=True)` puts `fusedlib.linear` here.
    _linear: Callable[..., Tensor] = staticmethod(linear)

    def _get_name(self) -> str:
        return f"Fused{self._base.__name__}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copied and pickled by its two classes: their union can be imported from nowhere.

        As any module without what compiles it, which would compute with the original's weights.
        """
        return _blank, (self._fused, self._base), self.__getstate__()


def fuse(module: nn.Module, fused: type[Fused]) -> None:
    """Give this one module the class's methods; a second time changes nothing."""
    if not isinstance(module, fused):
        module.__class__ = _union(fused, type(module))  # type: ignore[arg-type]


def loosen(module: nn.Module) -> None:
    """Give a module that was fused its own class back."""
    module.__class__ = base_of(module)
    module.__dict__.pop("_parts", None)
    module.__dict__.pop("_linear", None)


def base_of(module: nn.Module) -> type[nn.Module]:
    """A module's own class, behind what fused it."""
    base: type[nn.Module] = getattr(type(module), "_base", type(module))
    return base


@cache
def _union(fused: type[Fused], base: type[nn.Module]) -> type[Fused]:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (fused, base), names | {"_fused": fused, "_base": base})


def _blank(fused: type[Fused], base: type[nn.Module]) -> nn.Module:
    union = _union(fused, base)  # type: ignore[arg-type]
    return union.__new__(union)


class Hookable(nn.Module):
    """Notes that it was hooked: whoever calls it another way, or not at all, then calls it as ever.

    Hooks of torch and DeepSpeed do not count: they bring weights, and change no values.
    """

    _noted = False


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(nn.Module, name)

    @wraps(plain)
    def register(self: Hookable, hook: Any, *args: Any, **settings: Any) -> Any:
        library = str(getattr(hook, "__module__", None)).partition(".")[0]
        self.__dict__["_noted"] = self._noted or library not in ("torch", "deepspeed")
        return plain(self, hook, *args, **settings)

    return register


for _name in (
    "register_forward_hook", "register_forward_pre_hook", "register_backward_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook",
):  # fmt: skip
    setattr(Hookable, _name, _noting(_name))


def hooked(module: Any) -> bool:
    """Whether a call of the module runs hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip


class Packed(Fused):
    """A module whose linear children are packed: its `state_dict` has their names alone."""

    _packs: tuple[str, ...] = ()  # names of packed parameters
    _children: tuple[str, ...] = ()  # that were packed
    _loaded: Set[str] = frozenset()  # packed parameters that the last state dict had as such

    def is_packed(self) -> bool:
        """Whether all children are still ours alone; one that others wrap or hook is called."""
        for name in self._children:
            child: Any = self._modules[name]
            if type(child) is not PackedLinear or (child._noted and hooked(child)):
                return False
        return bool(self._children)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._packs:
            del destination[prefix + name]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
        strict: bool, missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """The children load their rows. Packed names are taken too: DeepSpeed's consolidated state
        and `torch.distributed.checkpoint` speak those of `named_parameters`.
        """
        missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        self.__dict__["_loaded"] = {n for n in self._packs if prefix + n in state_dict}
        missing_keys.extend(k for k in missing if k.removeprefix(prefix) not in self._packs)


class PackedLinear(Hookable, nn.Linear):
    """A `torch.nn.Linear` whose weight, and bias, are rows of parameters of the module above it.

    Both read and written as ever: `.weight`, `.weight.grad`, `.weight.data = …`,
    `.weight = nn.Parameter(…)`, the last two in place: what was read before is overwritten.
    They cannot be frozen one without the other, nor swapped by `torch.func.functional_call`.
    """

    _owner: tuple[Packed]  # in a tuple, for it is no child
    _held: dict[str, str]  # weight -> w_qkv, bias -> bias_qkv
    _rows: slice

    def _whole(self, name: str) -> Tensor:
        whole: Tensor = getattr(self._owner[0], self._held[name])
        return whole

    def _part(self, name: str) -> Tensor | None:
        return self._whole(name)[self._rows] if name in self._held else None

    def _parameter(self, name: str) -> Tensor | None:
        if name not in self._held:
            return None
        whole = self._whole(name)
        with torch.enable_grad():
            part = whole[self._rows]
        if type(whole) is not nn.Parameter:  # FSDP's shards: a copy, to be read only
            return part
        rows = part.as_subclass(Rows)
        rows._whole, rows._place, rows._name = whole, self._rows, self._held[name]
        return rows

    @property
    def weight(self) -> Tensor | None:  # type: ignore[override]
        """The rows of the packed weight."""
        return self._parameter("weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The rows of the packed bias, or None."""
        return self._parameter("bias")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("weight", "bias"):
            return super().__setattr__(name, value)
        held = self._part(name)
        if held is None and value is None:  # as PEFT sets where it takes an adapter off
            return
        if held is None or not isinstance(value, Tensor) or value.shape != held.shape:
            raise ValueError(f"{name} is {_kind(held)} here, got {_kind(value)}")
        if sys._getframe(1).f_globals.get("__name__") == SWAPS:
            raise ValueError(
                f"functional_call cannot swap {name}, rows of {self._held[name]}, which it would "
                f"overwrite: give it {self._held[name]}, by the names of named_parameters()"
            )
        self._fill(name, value)

    def extra_repr(self) -> str:
        """The sizes and whose rows the weight is, for print."""
        return f"{super().extra_repr()}, rows of {self._held['weight']}"

    def requires_grad_(self, requires_grad: bool = True) -> PackedLinear:
        """Refuse what would freeze its neighbours, or nothing."""
        for name in self._held:
            part = self._parameter(name)
            assert part is not None
            part.requires_grad = requires_grad
        return self

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b with its own rows alone."""
        weight = self._part("weight")
        assert weight is not None
        return self._owner[0]._linear(input, weight, self._part("bias"))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name in self._held:
            part = self._parameter(name) if keep_vars else own_storage(self._part(name))  # type: ignore[arg-type]
            destination[prefix + name] = part
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
        strict: bool, missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        own = {prefix + name: name for name in self._held}
        for key, name in own.items():
            given, held = state_dict.get(key), self._part(name)
            assert held is not None
            if given is None:
                loaded = self._held[name] in self._owner[0]._loaded
                missing_keys.extend([key] if strict and not loaded else [])
            elif given.shape != held.shape:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {given.shape} from "
                    f"checkpoint, the shape in current model is {held.shape}."
                )
            else:
                if local_metadata.get("assign_to_params_buffers", False):
                    self._match(name, given)
                self._fill(name, given)
        others = {k: v for k, v in state_dict.items() if k not in own}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @torch.no_grad()
    def _fill(self, name: str, given: Tensor) -> None:
        """Write the rows; where FSDP has sharded the whole, each process writes its share."""
        whole: Any = self._whole(name)
        if not hasattr(whole, "full_tensor"):
            whole[self._rows].copy_(given)
            return
        full = whole.full_tensor()
        full[self._rows] = given.full_tensor() if hasattr(given, "full_tensor") else given
        replicated = type(whole).from_local(full, whole.device_mesh)
        whole.copy_(replicated.redistribute(placements=whole.placements))

    def _match(self, name: str, given: Tensor) -> None:
        """Lay the packed parameter anew where and in the dtype that `load_state_dict(assign=True)`
        asks for; the rows of the others are loaded after these.
        """
        whole = self._whole(name)
        if (whole.device, whole.dtype) == (given.device, given.dtype):
            return
        kind: Any = {"device": given.device, "dtype": given.dtype}
        anew = torch.empty_like(whole, **kind) if whole.is_meta else whole.detach().to(**kind)
        setattr(self._owner[0], self._held[name], nn.Parameter(anew, whole.requires_grad))


class Rows(Tensor):
    """Rows of a packed parameter that answer as a parameter: `.grad` and `.data` are theirs."""

    _whole: nn.Parameter
    _place: slice
    _name: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """The rows themselves, without gradients."""
        return self._whole.data[self._place]

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"these are rows of {self._name}: {_kind(self)} cannot become {_kind(value)}"
            )
        self._whole.data[self._place].copy_(value)

    @property
    def grad(self) -> Tensor | None:
        """The rows of the packed gradient; None sets them to zero."""
        return None if self._whole.grad is None else self._whole.grad[self._place]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._whole.grad is None:
            if value is None:
                return
            self._whole.grad = torch.zeros_like(self._whole)
        if value is not None and value.shape != self.shape:
            raise ValueError(f"the gradient of {_kind(self)} cannot be {_kind(value)}")
        rows = self._whole.grad[self._place]
        rows.zero_() if value is None else rows.copy_(value)

    @property
    def requires_grad(self) -> bool:
        """That of the whole packed parameter."""
        return self._whole.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Rows:
        """Refuse what would freeze or thaw the neighbours too."""
        if requires_grad != self._whole.requires_grad:
            verb = "trained" if requires_grad else "frozen"
            raise ValueError(
                f"rows of {self._name} cannot be {verb} alone: set requires_grad of {self._name}, "
                "or of the weights before apply_to, which then leaves them apart"
            )
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Rows of {self._name}: {self.detach()!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


def own_storage(part: Tensor) -> Tensor:
    """The same memory without gradients, in a storage that ends where the part ends.

    accelerate and safetensors drop or refuse tensors that share a storage. Subclasses, as FSDP's
    shards, and tensors of other devices than CPU and CUDA are only detached.
    """
    part = part.detach()
    plain = type(part) is Tensor and part.device.type in ("cpu", "cuda")
    return torch.from_dlpack(part) if plain else part


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def pack(module: Packed, suffix: str, children: tuple[str, ...]) -> None:
    """Lay the children's weights, and biases, in `w_<suffix>` and `bias_<suffix>` of the module.

    Their gradients come along. The children are plain linear layers, alike in what `packable` asks.
    """
    linears = [module.get_submodule(child) for child in children]
    held: dict[str, str] = {}
    for kind in ("weight", "bias"):
        parts = [getattr(child, kind) for child in linears]
        if parts[0] is None:
            continue
        held[kind] = name = {"weight": f"w_{suffix}", "bias": f"bias_{suffix}"}[kind]
        whole = nn.Parameter(torch.cat([p.detach() for p in parts]), parts[0].requires_grad)
        if any(p.grad is not None for p in parts):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
            whole.grad = torch.cat(grads)
        for child in linears:
            del child._parameters[kind]
        module.register_parameter(name, whole)
        module._packs += (name,)
    module._children += children
    start = 0
    for child in linears:
        loosen(child)
        rows = slice(start, start + child.out_features)  # type: ignore[operator]
        start = int(rows.stop)
        child.__class__ = PackedLinear
        child.__dict__.update(_owner=(module,), _held=held, _rows=rows)


def changeable(module: nn.Module, name: str, kinds: Kinds) -> str | None:
    """Why a child is more than a linear layer of one of these kinds; None where it is that."""
    child = getattr(module, name, None)
    if child is None or base_of(child) not in kinds:
        kind = type(child)
        return f"{name} is a {kind.__module__}.{kind.__qualname__}, not a torch.nn.Linear"
    if "forward" in vars(child):
        return f"{name} has a forward of its own"
    if hooked(child):
        return f"{name} has hooks, which the fused product would not call"
    if type(child.weight) is not nn.Parameter:
        return f"the weight of {name} is a {type(child.weight).__qualname__}"
    return None


def packable(module: nn.Module, children: tuple[str, ...], kinds: Kinds) -> str | None:
    """Why the children cannot be packed; None where they can.

    Raises:
        ValueError: weights of several devices or dtypes.
    """
    for name in children:
        if why := changeable(module, name, kinds):
            return why
        for kind, p in getattr(module, name)._parameters.items():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                return f"the {kind} of {name} has hooks, which a packed one would not call"
    linears = {child: getattr(module, child) for child in children}
    first, *others = children
    for name in others:
        one, other = linears[first], linears[name]
        if (one.bias is None) != (other.bias is None):
            return f"{first} and {name} do not both have a bias"
        pairs = zip(one._parameters.values(), other._parameters.values(), strict=True)
        for a, b in pairs:
            if a is None or b is None:
                continue
            if (a.device, a.dtype) != (b.device, b.dtype):
                raise ValueError(
                    f"{first} is {a.dtype} on {a.device}, {name} is {b.dtype} on {b.device}: "
                    "weights that become one must have one dtype and device"
                )
            if a.requires_grad != b.requires_grad:
                frozen, trained = (name, first) if a.requires_grad else (first, name)
                return f"{frozen} is frozen and {trained} is trained"
    return None
