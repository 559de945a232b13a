"""What in a model `apply_to` can fuse, and how it is known.

A module of transformers is known by its code. Most models there are written from the same parts: a
class whose `forward` reads as that of `LlamaMLP` computes what that one computes, whatever its name
is. It is read in the files of the installed package, where nobody has put anything else in its
place. litgpt has one class for all models, known by its name.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fusedlib.ops.fused_class import (
    Fused,
    Fusion,
    add_switches,
    full_name,
    fuse,
    fusion_state,
    has_hooks,
    original_class,
    package_of,
    unfuse,
    why_not_linear,
)
from fusedlib.ops.mlp.activation import ACTIVATIONS, activation_of
from fusedlib.patch import layers, modules

# Their forward does not call the old one, and relies on what that one takes.
REWRITTEN = (
    modules.FusedAttention,
    modules.FusedLitGPTAttention,
    layers.FusedLayer,
    layers.FusedLitGPTLayer,
    modules.FusedCausalLM,
)
# Of these, Phi-3's leaves what lies in a head behind the cosines, as `fusedlib.rope` does.
ROTATION, ROTATIONS = ("apply_rotary_pos_emb", "rotate_half"), ("Llama", "Olmo2", "Phi3")
# Its class is one of torch's own, which is to be the first base again when the weight is stored.
PARAMETRIZED = "a parametrization computes its weight"
LOSSES, LOSS = "transformers.loss.loss_utils", ("ForCausalLMLoss", "fixed_cross_entropy")
DECORATORS = "torch", "kernels"  # packages that may stand around a function of transformers
# Models with a class that `TRANSFORMERS` names.
MODELS = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Olmo2", "Olmo3", "Phi3", "Gemma2", "Gemma3",
    "Gemma", "Mixtral", "NanoChat", "DeepseekV3",
)  # fmt: skip
MASKS = "create_causal_mask", "create_sliding_window_causal_mask"
FOLDERS = {"DeepseekV3": "deepseek_v3"}  # whose names are not the model's in small letters
# Decoders that ask transformers for a causal mask and no other, with or without a window.
DECODERS = (
    "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SmolLM3Model", "Phi3Model",
    "Gemma2Model",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What a switch replaces.

    Attributes:
        switch: the argument of `apply_to`.
        fused: what the module becomes.
        refuse: why this one cannot become that; None where it can.
        prepare: what is done besides.
    """

    switch: str
    fused: type[Fused]
    refuse: Callable[[Any], str | None] = lambda module: None
    prepare: Callable[[Any], None] = lambda module: None


@dataclass(frozen=True)
class Family:
    """The models of one library.

    Attributes:
        package: where its classes come from.
        model: name of a class that all of them descend from.
        parts: by the name of the class whose code is known.
        layers: likewise, what a layer becomes, and the name of its norm that follows attention.
        switches_by_child: what stands at a name, the last of a path; "" is the model itself.
    """

    package: str
    model: str
    parts: dict[str, tuple[Part, ...]]
    layers: dict[str, tuple[type[Fused], str]]
    switches_by_child: dict[str, tuple[str, ...]]

    def includes(self, cls: type) -> bool:
        """Whether a class is one of the family's models."""
        names = {(package_of(c), c.__name__) for c in cls.__mro__}
        return (self.package, self.model) in names

    def recognize(self, model: nn.Module) -> dict[nn.Module, str]:
        """The modules that are known, each with the class of `parts` or `layers` it reads as."""
        known, names = {}, (*self.parts, *self.layers)
        for module in model.modules():
            cls = original_class(module)
            name = _class_with_same_code(cls, names) if package_of(cls) == self.package else None
            if name is not None:
                known[module] = name
        return known


# --- reading code --------------------------------------------------------------------------------


def _class_with_same_code(cls: type, names: tuple[str, ...]) -> str | None:
    """The first of its library's classes of these names that a class reads as."""
    if cls.__name__ in names or package_of(cls) != "transformers":
        return cls.__name__ if cls.__name__ in names else None
    return _find_same_code(cls.__module__, cls.__name__, names)


@cache
def _find_same_code(module: str, cls: str, names: tuple[str, ...]) -> str | None:
    code = _definitions(module).get(cls)
    same = (name for name in names if code == _definitions(_defining_module(name)).get(name))
    return None if code is None else next(same, None)


def _defining_module(name: str) -> str:
    """The module of transformers where the class of this name stands."""
    model = next((m for m in MODELS if name.startswith(m)), None)
    if model is None:
        raise ValueError(f"{name} begins with no name of MODELS: add its model there")
    folder = FOLDERS.get(model, model.lower())
    return f"transformers.models.{folder}.modeling_{folder}"


@cache
def _definitions(module: str) -> dict[str, dict[str, str]]:
    """What a file defines, by name: a function, or a class's `forward` and whom it leads to."""
    try:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (ImportError, OSError, AssertionError, ValueError):
        return {}
    code_by_name = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            code_by_name[node.name] = {node.name: _code_alone(node)}
        elif isinstance(node, ast.ClassDef):
            methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            if "forward" in methods:
                code_by_name[node.name] = {
                    name: _code_alone(methods[name]) for name in _methods_used(methods)
                }
    return code_by_name


def _methods_used(methods: dict[str, ast.FunctionDef]) -> list[str]:
    """`forward` and the methods of its class that it uses, at whatever depth."""
    names = ["forward"]
    for name in names:
        used = {n.attr for n in ast.walk(methods[name]) if isinstance(n, ast.Attribute)}
        names += sorted(used & methods.keys() - {*names})
    return names


def _code_alone(function: ast.FunctionDef) -> str:
    """A function's code without docstring, annotations and decorators."""
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:]
    function.decorator_list, function.returns = [], None
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(function)


# --- what stands in the way ----------------------------------------------------------------------


def _first(reasons: Iterable[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def is_fused(module: Any, switch: str) -> bool:
    """Whether an earlier call fused it by this switch, and it still is."""
    if switch == "loss" and not isinstance(module.lm_head, modules.FusedHead):
        return False  # resize_token_embeddings made another head
    return switch in fusion_state(module).switches


def changed(module: nn.Module, fused: type[Fused]) -> str | None:
    """Why its forward is another than the one that our class takes the place of."""
    base = original_class(module)
    methods = [*_definitions(base.__module__).get(base.__name__, ["forward"])]
    for name in methods:
        if name in vars(module):
            return f"its {name} was replaced by someone else's"
    if issubclass(fused, REWRITTEN):
        theirs, ours = ([*signature(c.forward).parameters] for c in (base, fused))
        if theirs != ours:
            return f"its forward takes {theirs}; expected is one with {ours}"
    return _first(_why_patched(getattr(base, name), base.__module__) for name in methods)


def _why_patched(function: Any, module: str) -> str | None:
    """Whether someone put a function of theirs in the place of this module's, or around it.

    `functools.wraps` gives a wrapper the name and module of what it wraps, but not its file.
    """
    home = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", repr(function))
    if home != module:
        return f"{home}.{name} stands in the place of {module}'s own"
    roots = _roots(module.partition(".")[0])
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(roots):
            return f"a function of {code.co_filename} stands around {module}'s {name}"
        function = getattr(function, "__wrapped__", None)
    return None


def _roots(package: str) -> tuple[str, ...]:
    """Folders of those who may decorate a package's functions."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in (package, *DECORATORS))
    return tuple(str(Path(file).parent) for file in files if file)


def _why_functions_patched(module: nn.Module, *names: str) -> str | None:
    """Whether a function is not the one that stands in the file of the module's class."""
    source = original_class(module).__module__
    return _first(_why_patched(getattr(sys.modules[source], name), source) for name in names)


def _why_another_rotation(attention: nn.Module) -> str | None:
    source = original_class(attention).__module__
    if _rotation_code(source) not in [
        _rotation_code(_defining_module(model)) for model in ROTATIONS
    ]:
        return f"{source.rpartition('.')[2]} turns q and k in a way of its own"
    return _why_functions_patched(attention, *ROTATION)


def _rotation_code(module: str) -> list[dict[str, str] | None]:
    return [_definitions(module).get(name) for name in ROTATION]


def _refused(why: str) -> Callable[[Any], str]:
    return lambda module: why


# --- transformers --------------------------------------------------------------------------------


def _mlp(fused: type[modules.FusedMLP]) -> tuple[Part, ...]:
    def refuse(mlp: Any) -> str | None:
        if name := fused._activation:
            act: Any = getattr(mlp, name, None)
            if activation_of(act) is None:
                names = ", ".join(ACTIVATIONS)
                return f"its activation is {full_name(type(act))}, not one of {names}"
            kind = type(act)
            if why := _why_patched(kind.forward, kind.__module__):
                return why
            if "forward" in vars(act):
                return f"the forward of {name} was replaced by someone else's"
            if has_hooks(act):
                return f"{name} has hooks, which the fused MLP would not call"
        projections = *fused._gate_up, fused._down
        why = _first(why_not_linear(mlp, projection) for projection in projections)
        biased = not why and any(getattr(mlp, p).bias is not None for p in projections)
        return "its projections have biases" if biased else why

    def prepare(mlp: Any) -> None:
        _unfuse_linears(mlp, *fused._gate_up, fused._down)

    return (Part("mlp", fused, refuse, prepare),)


def _attention(fused: type[modules.FusedAttention]) -> tuple[Part, ...]:
    names = "q_proj", "k_proj", "v_proj"

    def refuse(module: Any) -> str | None:
        return _first(why_not_linear(module, name) for name in names)

    def prepare(module: Any) -> None:
        add_switches(module, _unfuse_linears(module, *names))

    return Part("attention", fused, refuse, prepare), Part("rope", fused, _why_another_rotation)


def _one_product(fused: type[Fused], refuse: Callable[[Any], str | None]) -> tuple[Part, ...]:
    refused = _refused("q, k and v are one product already")
    return Part("attention", fused, refused), Part("rope", fused, refuse)


def _unfuse_linears(module: nn.Module, *names: str) -> frozenset[str]:
    """Give children that an earlier call fused alone their class back.

    Returns:
        The switches that had changed them.
    """
    switches: frozenset[str] = frozenset()
    for name in names:
        child: Any = getattr(module, name)
        switches |= fusion_state(child).switches
        if isinstance(child, modules.FusedLinear) and not is_parametrized(child):
            unfuse(child)
    return switches


def _loss(fused: type[modules.FusedCausalLM]) -> tuple[Part, ...]:
    def refuse(model: Any) -> str | None:
        if why := why_not_linear(model, "lm_head"):
            return why
        head, losses = model.lm_head, sys.modules[LOSSES]
        if is_parametrized(head) and not isinstance(head, modules.FusedHead):
            return f"lm_head: {PARAMETRIZED}"
        return _first(_why_patched(getattr(losses, name), LOSSES) for name in LOSS)

    return (Part("loss", fused, refuse, _prepare_head),)


def _prepare_head(model: Any) -> None:
    switches = _unfuse_linears(model, "lm_head")
    fuse(model.lm_head, modules.FusedHead)
    model.lm_head._fusion = Fusion(switches)
    cls = original_class(model.model)
    source = sys.modules[cls.__module__]
    masks = [getattr(source, name) for name in MASKS if hasattr(source, name)]
    causal = (
        getattr(model.config, "is_causal", True)
        and package_of(cls) == "transformers"
        and _class_with_same_code(cls, DECODERS) is not None
        and not _why_patched(cls.forward, cls.__module__)
        and not any(_why_patched(mask, "transformers.masking_utils") for mask in masks)
    )
    model._fusion = Fusion(fusion_state(model).switches, causal)


TRANSFORMERS = Family(
    "transformers",
    "PreTrainedModel",
    {
        "LlamaRMSNorm": (Part("rms_norm", modules.FusedRMSNorm),),
        "Olmo2RMSNorm": (Part("rms_norm", modules.FusedWideNorm),),
        "NanoChatRMSNorm": (Part("rms_norm", modules.FusedBareNorm),),
        "GemmaRMSNorm": (Part("rms_norm", modules.FusedCenteredNorm),),
        "LlamaMLP": _mlp(modules.FusedMLP),
        "Phi3MLP": _mlp(modules.FusedPhi3MLP),
        "LlamaAttention": _attention(modules.FusedAttention),
        "MistralAttention": _attention(modules.FusedMistralAttention),
        "Qwen2Attention": _attention(modules.FusedQwen2Attention),
        "Qwen3Attention": _attention(modules.FusedQwen3Attention),
        "Gemma2Attention": _attention(modules.FusedGemma2Attention),
        "Gemma3Attention": _attention(modules.FusedQwen3Attention),
        "SmolLM3Attention": _attention(modules.FusedSmolLM3Attention),
        "Olmo2Attention": _attention(modules.FusedOlmo2Attention),
        "Olmo3Attention": _attention(modules.FusedOlmo3Attention),
        "Phi3Attention": _one_product(modules.FusedPhi3Attention, _why_another_rotation),
        "LlamaForCausalLM": _loss(modules.FusedCausalLM),
        "Gemma2ForCausalLM": _loss(modules.FusedSoftcappedCausalLM),
        "MixtralForCausalLM": _loss(modules.FusedMoeCausalLM),
        # By its name and by its code, which is Llama's until transformers 5.17.
        "DeepseekV3ForCausalLM": _loss(modules.FusedRoutedCausalLM),
    },
    {
        "LlamaDecoderLayer": (layers.FusedLayer, "post_attention_layernorm"),
        "Phi3DecoderLayer": (layers.FusedPhi3Layer, "post_attention_layernorm"),
    },
    dict.fromkeys(
        (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm", "norm", "q_norm", "k_norm",
        ),
        ("rms_norm",),
    )
    | dict.fromkeys(("mlp", "feed_forward"), ("mlp",))
    | {"self_attn": ("attention", "rope"), "": ("loss",)},
)  # fmt: skip

# --- litgpt --------------------------------------------------------------------------------------


def _why_not_llama(attention: Any) -> str | None:
    config = attention.config
    odd = {
        "rope_interleave": config.rope_interleave,
        "norm_qk_type": config.norm_qk and config.norm_qk_type != "default",
        "sliding_window_size": attention.apply_sliding_window_attention,
    }
    names = [name for name, value in odd.items() if value]
    why = f"its {names[0]} is not Llama's" if names else None
    return why or _why_functions_patched(attention, "apply_rope")


LITGPT = Family(
    "litgpt",
    "GPT",
    {
        "RMSNorm": (
            Part(
                "rms_norm",
                modules.FusedLitGPTNorm,
                lambda norm: "it adds 1 to its weight" if norm.add_unit_offset else None,
            ),
        ),
        "LLaMAMLP": _mlp(modules.FusedLitGPTMLP),
        "CausalSelfAttention": _one_product(modules.FusedLitGPTAttention, _why_not_llama),
        "GPT": (
            Part(
                "loss",
                Fused,
                _refused("litgpt computes it outside: use fusedlib.linear_cross_entropy there"),
            ),
        ),
    },
    {"Block": (layers.FusedLitGPTLayer, "norm_2")},
    dict.fromkeys(("norm_1", "norm_2", "ln_f", "norm_q", "norm_k"), ("rms_norm",))
    | {"attn": ("attention", "rope"), "mlp": ("mlp",)},
)

FAMILIES = TRANSFORMERS, LITGPT
