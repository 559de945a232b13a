"""The arms: what each changes in a model, and what is then called with tokens and labels."""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

import fusedlib
from fusedlib.bench.arguments import require_known
from fusedlib.bench.attempt import Unavailable
from study import rivals
from study.cases import Case
from study.patched.models import CONFIGS, Call, build
from study.rivals import Task, rival

TASK = Task[[nn.Module], Call]("llama")
BASELINE = "huggingface"
OTHER_ATTENTION = "huggingface-eager"
"""The baseline again, its sums in another order."""
SWITCHES = ("rope", "swiglu", "rms_norm", "fused_linear_cross_entropy")
"""Liger's, by its own names."""
PARTS = ("mlp", "rms_norm", "rope", "attention", "loss")
"""Those of `fusedlib.apply_to`."""
WHOLE = frozenset({"whole"})
"""Trait of an arm that compiles the whole model."""


def require_possible(case: Case) -> None:
    """Raise `Unavailable` where device or package is missing, or an arm takes no such model."""
    arm = rivals.get(TASK, case["provider"])
    arm.check_available(case["device"], case["dtype"])
    if arm.name == "inductor-causal" and CONFIGS[case["model"]].get("family") == "Gemma2":
        raise Unavailable("scaled_dot_product_attention has no soft cap for this model's scores")


@rival(TASK, BASELINE, requires=("transformers",))
def plain(model: nn.Module) -> Call:
    """The model as transformers makes it, attention by scaled_dot_product_attention."""
    return model


def alone(case: Case) -> tuple[nn.Module, Call]:
    """A model with the case's arm in it, its weights those of the case's `seed`, else 0; and what
    is called.
    """
    model = build(case["model"], case["dtype"], case["device"], seed=case.get("seed", 0))
    return model, rivals.get(TASK, case["provider"]).build(model)


@rival(TASK, OTHER_ATTENTION, requires=("transformers",), traits=frozenset({"on request"}))
def plain_eager(model: nn.Module) -> Call:
    """The model as transformers makes it, attention by its "eager" implementation."""
    transformers_model: Any = model
    transformers_model.set_attn_implementation("eager")
    return model


@rival(TASK, "inductor", requires=("transformers",), traits=WHOLE)
def compiled(model: nn.Module) -> Call:
    """torch.compile of the whole model, its default mode, dynamic=False."""
    return torch.compile(model, dynamic=False)


def causal_attention() -> str:
    """Name of an attention, now known to transformers, that is causal by flag and gets no mask.

    A model that is compiled gets an explicit mask from transformers, where one that is not gets
    none (`masking_utils._ignore_causal_mask_sdpa`). For sequences without padding or cache.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    AttentionMaskInterface.register("causal", lambda *_, **__: None)
    return "causal"


@rival(TASK, "inductor-causal", requires=("transformers",), traits=WHOLE)
def compiled_causal(model: nn.Module) -> Call:
    """torch.compile of the whole model, dynamic=False, attention by the flag is_causal."""
    transformers_model: Any = model
    transformers_model.set_attn_implementation(causal_attention())
    return torch.compile(model, dynamic=False)


def with_liger(model: Any, switches: Iterable[str], **loss: Any) -> nn.Module:
    """Put Liger's operations into this one model; transformers' module stays as it was.

    Args:
        loss: further settings of Liger's fused loss.
    """
    wanted = set(switches)
    require_known("switch", sorted(wanted), SWITCHES)
    from liger_kernel import transformers as liger

    kind = model.config.model_type
    apply = getattr(liger, f"apply_liger_kernel_to_{kind}")
    source = sys.modules[type(model).__module__]
    before = dict(vars(source))
    # It takes a loaded model for all but RoPE, and patches the module for later ones besides.
    given = {name: name in wanted and name != "rope" for name in SWITCHES}
    if kind == "gemma2":
        given["geglu"] = given.pop("swiglu")
    apply(**given, model=model)
    vars(source).update(before)
    if "rope" in wanted:
        globals_of = {**before, "apply_rotary_pos_emb": liger.liger_rotary_pos_emb}
        for module in model.modules():
            own = type(module).forward
            if "apply_rotary_pos_emb" in own.__code__.co_names:
                turned = FunctionType(own.__code__, globals_of, own.__name__, own.__defaults__)
                module.forward = turned.__get__(module)
    if loss:
        model.forward = partial(model.forward, **loss)
    return model


def _liger_arm(name: str, switches: Sequence[str], **loss: Any) -> None:
    def arm(model: nn.Module) -> Call:
        return with_liger(model, switches, **loss)

    settings = ", ".join([*switches, *(f"{k}={v}" for k, v in loss.items())])
    arm.__doc__ = f"Liger's {settings}"
    rival(TASK, name, requires=("transformers",))(arm)


_liger_arm("liger", SWITCHES)
_liger_arm("liger-without-flce", SWITCHES[:3])
_liger_arm("liger-fp32", SWITCHES, accum_dtype=torch.float32)
for _name in SWITCHES:
    _short = _name.replace("fused_linear_cross_entropy", "FLCE")
    _liger_arm(f"liger-{_short.lower().replace('_', '-')}", (_name,))


def _fused_arm(name: str, parts: Sequence[str]) -> None:
    def arm(model: nn.Module) -> Call:
        fusedlib.apply_to(model, **{part: part in parts for part in PARTS})
        return model

    arm.__doc__ = f"fusedlib.apply_to: {', '.join(parts)}"
    rival(TASK, name, requires=("transformers",))(arm)


_fused_arm("fused", PARTS)
for _name in PARTS:
    _fused_arm(f"fused-{_name.replace('_', '-')}", (_name,))


@rival(TASK, "fused-inductor", requires=("transformers",), traits=WHOLE)
def fused_compiled(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, then torch.compile of the whole model."""
    fusedlib.apply_to(model)
    return torch.compile(model, dynamic=False)


@rival(TASK, "inductor-layers", requires=("transformers",), traits=frozenset({"on request"}))
def compiled_layers(model: nn.Module) -> Call:
    """torch.compile of each decoder layer, its default mode, dynamic=False."""
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        layer.compile(dynamic=False)
    return model


@rival(TASK, "fused-inductor-layers", requires=("transformers",), traits=frozenset({"on request"}))
def fused_compiled_layers(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, then torch.compile of each decoder layer."""
    fusedlib.apply_to(model)
    return compiled_layers(model)


@rival(TASK, "fused-graph", needs_cuda=True,
       requires=("transformers",), traits=frozenset({"graph"}))  # fmt: skip
def fused_captured(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, forward and backward captured in one CUDA graph."""
    fusedlib.apply_to(model)
    return model
