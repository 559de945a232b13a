"""`apply_to`: the library's operations in a whole model, put into each module of it by itself.

No class is patched: a module that is replaced stays the object that it was, with the parameters,
hooks, children and attributes that it had, and gets a class of its own whose `forward` is fused
(`fusedlib.ops.fused_class.Fused`). Where a call asks for what is not fused, its old `forward` runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fusedlib.launch import INTERPRETED, MIN_CAPABILITY, has_kernels
from fusedlib.ops.fused_class import (
    LINEAR_FORWARDS,
    Fused,
    add_switches,
    full_name,
    fuse,
    has_hooks,
    is_plain_tensor,
    original_class,
    package_of,
    stored_weight,
)
from fusedlib.ops.matmul.module import Linear
from fusedlib.patch.families import (
    FAMILIES,
    LITGPT,
    PARAMETRIZED,
    Family,
    Part,
    changed,
    is_fused,
)
from fusedlib.patch.modules import FusedAttention, FusedHead, FusedLinear, FusedMLP, FusedRMSNorm

SWITCHES = ("mlp", "rms_norm", "rope", "attention", "loss", "linear")
OFF = "switched off"
BY_TENSORS = "tensor parallelism"
LOADED_WHOLE = ": load it without tp_plan and split it later, by torch's parallelize_module say"


def _by_switch() -> dict[str, list[Any]]:
    return {switch: [] for switch in SWITCHES}


@dataclass
class Report:
    """What `apply_to` did to a model; `print` shows it as a table.

    Attributes:
        model: name of the model's class.
        replaced: paths of modules by switch.
        already: those that an earlier call had replaced, and every `fusedlib.Linear`.
        left: by switch, pairs of a path and the reason why it is as it was.
        plain: why what was replaced runs plain PyTorch where the model lies now; None where it runs
            kernels.
    """

    model: str
    replaced: dict[str, list[str]] = field(default_factory=_by_switch)
    already: dict[str, list[str]] = field(default_factory=_by_switch)
    left: dict[str, list[tuple[str, str]]] = field(default_factory=_by_switch)
    plain: str | None = None

    def __str__(self) -> str:
        lines = [f"fusedlib in {self.model}"]
        for switch in SWITCHES:
            said = [
                f"{len(done[switch])} {word}"
                for word, done in (("replaced", self.replaced), ("replaced before", self.already))
                if done[switch]
            ]
            reasons: dict[str, list[str]] = {}
            for path, why in self.left[switch]:
                reasons.setdefault(why, []).append(path or "the model")
            for why, paths in reasons.items():
                more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
                said.append(f"not {paths[0]}{more}: {why}" if why != OFF else why)
            first, *others = said or ["nothing found"]
            lines += [f"  {switch:<10}{first}", *(f"  {'':<10}{line}" for line in others)]
        if self.replaced["loss"]:
            lines.append("  In training with labels it gives no logits unless skip_logits=False.")
        if self.plain and any(self.replaced.values()):
            lines.append(f"  All that was replaced runs plain PyTorch: {self.plain}.")
        return "\n".join(lines)


def apply_to(
    model: nn.Module, *, mlp: bool = True, rms_norm: bool = True, rope: bool = True,
    attention: bool = True, loss: bool = True, linear: bool = True,
) -> Report:  # fmt: skip
    """Put the library's operations into a model, in place; a second call finds nothing to do.

    Takes models of transformers, with or without a head, and litgpt's GPT of the Llama kind. In
    transformers it knows modules by their code. Llama, Mistral, Qwen2 (2.5 too), Qwen3, SmolLM3,
    OLMo 2 and 3, Phi-3 (Phi-4 too) and Gemma 1 to 3 become fused as a whole, and so does in any
    other model what computes as a module of theirs, its MLP with SiLU or GELU. What computes
    otherwise is left and reported, as experts, other rotations and own subclasses.

    What the model computes stays, and so do its modules, parameters, `state_dict` and attributes:
    no parameter is made, moved or renamed. Optimizers, hooks, adapters, freezing, DDP, FSDP,
    pruning and checkpoints work as on the unpatched model; FSDP and DeepSpeed come afterwards.

    One thing changes: a `...ForCausalLM` whose loss is fused, in training mode with labels, gives
    `logits=None`, as Liger's models do. Call it with `skip_logits=False` for the plain loss and its
    logits, or patch with `loss=False` for a library that reads them.

    A module is fused where its children are what they were. Where an adapter, a hook, a shard or a
    quantized weight has taken the place of a projection, its MLP or its attention's q, k and v run
    unfused for as long. After `resize_token_embeddings` call `apply_to` again, for the new head.

    `fusedlib/patch/PATCHING.md` has the rest: masks under torch.compile, a step as one CUDA graph,
    the Trainer's evaluation, libraries that read logits or go by a module's exact type.

    Args:
        model: changed in place.
        mlp: the MLP as one operation.
        rms_norm: every RMSNorm, and in layers as Llama's the residual stream added inside the one
            behind attention.
        rope: q and k turned in one launch.
        attention: q, k and v with one gradient of what they are computed from.
        loss: the cross entropy computed from hidden states, its logits never stored as a whole.
        linear: every other projection of fp32 weights by `fusedlib.linear`: on tensor cores where
            torch's matmul precision is "highest", and as ever at others. Weights of other dtypes
            are left alone.

    Returns:
        What was replaced, and what was not and why.

    Raises:
        TypeError: what is given is no `torch.nn.Module`; a switch that is no bool.
        ValueError: a model of another kind, or one that is wrapped already. Nothing is changed
            then.
    """
    family, known = _recognize(model)
    wanted = dict(zip(SWITCHES, (mlp, rms_norm, rope, attention, loss, linear), strict=True))
    report = Report(type(model).__name__, plain=why_plain(model.parameters()))
    for switch, value in wanted.items():
        if not isinstance(value, bool):
            raise TypeError(f"{switch} must be True or False, got {value!r}")
    todo: list[tuple[str, nn.Module, Part]] = []
    for path, module in model.named_modules():
        parts = {part.switch: part for part in family.parts.get(known.get(module, ""), ())}
        for switch in parts or family.switches_by_child.get(path.rpartition(".")[2], ()):
            part = parts.get(switch)
            if not wanted[switch]:
                report.left[switch].append((path, OFF))
            elif part is None:
                report.left[switch].append((path, _why_not_recognized(module, switch, family)))
            elif why := changed(module, part.fused) or part.refuse(module):
                report.left[switch].append((path, why))
            elif is_fused(module, switch):
                report.already[switch].append(path)
            else:
                todo.append((path, module, part))
    for path, module, part in todo:
        fuse(module, part.fused)
        part.prepare(module)
        add_switches(module, {part.switch})
        report.replaced[part.switch].append(path)
    _fuse_projections(model, wanted["linear"], report)
    for layer, name in known.items():
        fused, norm = family.layers.get(name, (Fused, ""))
        after = getattr(layer, norm, None)
        adds = isinstance(after, FusedRMSNorm) and not has_hooks(after)
        if adds and not changed(layer, fused):
            fuse(layer, fused)
    return report


def why_plain(parameters: Iterable[Tensor]) -> str | None:
    """Why no kernel runs for a model with such parameters as they lie now."""
    weights = [p for p in parameters if p.is_floating_point() and not p.is_meta]
    if not weights:
        return None
    if all(p.dtype == torch.float64 for p in weights):
        return "it is in float64"
    devices = {p.device for p in weights}
    if any(map(has_kernels, devices)):
        return None
    if find_spec("triton") is None:
        return "triton is not installed"
    if INTERPRETED:
        return "Triton's interpreter is switched on, TRITON_INTERPRET, and runs them on a CPU alone"
    kinds = ", ".join(sorted({d.type for d in devices}))
    if kinds != "cuda":
        return f"it lies on {kinds}, the kernels are for NVIDIA GPUs"
    if torch.version.cuda is None:
        return "the kernels are for NVIDIA GPUs"
    least = ".".join(map(str, MIN_CAPABILITY))
    return f"the kernels are for GPUs of compute capability {least} and higher"


def _fuse_projections(model: nn.Module, wanted: bool, report: Report) -> None:
    """Have `fusedlib.linear` compute the linear layers, and q, k and v of an attention.

    Each `fusedlib.Linear` goes on by it, whatever is wanted.
    """
    owners = {child: owner for owner in model.modules() for child in _computed_by(owner)}
    todo: list[nn.Module] = []
    for path, module in model.named_modules():
        owner = owners.get(module, module)
        if not isinstance(module, nn.Linear) or isinstance(owner, FusedMLP):
            continue  # an MLP is one operation
        ours = _is_ours(module)
        why = None if ours else _why_not_split(module) if wanted else OFF
        if why is not None:
            report.left["linear"].append((path, why))
            continue
        already = ours or is_fused(owner, "linear")
        (report.already if already else report.replaced)["linear"].append(path)
        todo.append(owner)
    for owner in todo:
        if not isinstance(owner, Fused | Linear):
            fuse(owner, FusedLinear)
        if isinstance(owner, Fused):
            add_switches(owner, {"linear"})


def _computed_by(owner: nn.Module) -> list[nn.Module]:
    """Linear layers that a fused module computes itself."""
    if isinstance(owner, FusedMLP):
        return list(owner.children())
    if isinstance(owner, FusedAttention) and "attention" in owner._fusion.switches:
        return [child for child in owner.projected() if type(child) is nn.Linear]
    return []


def _is_ours(module: nn.Module) -> bool:
    """Whether it is a `fusedlib.Linear`."""
    forward = getattr(original_class(module), "forward", None)
    return forward is Linear.forward and "forward" not in vars(module)


def _why_not_split(module: nn.Linear) -> str | None:
    """Why a linear layer stays as it is."""
    cls = type(module)
    if cls.forward not in {*LINEAR_FORWARDS, FusedHead.forward} or "forward" in vars(module):
        return f"a {full_name(cls)} with a forward of its own"
    if is_parametrized(module) and not isinstance(module, Fused):
        return PARAMETRIZED
    weight = stored_weight(module)
    if not is_plain_tensor(weight):
        return f"its weight is a {type(weight).__qualname__}"
    dtype = weight.dtype
    return None if dtype == torch.float32 else f"{dtype}; only fp32 is split"


def _recognize(model: nn.Module) -> tuple[Family, dict[nn.Module, str]]:
    """The family of a model, and of its modules what each is known as."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply_to changes a torch.nn.Module, got {type(model).__name__}")
    name = full_name(type(model))
    family, known = _known_modules(model)
    if family is LITGPT:
        config: Any = model.config
        classes = config.norm_class_name, config.mlp_class_name
        if classes != ("RMSNorm", "LLaMAMLP") or config.parallel_residual:
            raise ValueError(
                f"{name} named {config.name!r} is not of the Llama kind: looked for are RMSNorm, "
                f"LLaMAMLP and no parallel_residual, found {' and '.join(classes)}, "
                f"parallel_residual={config.parallel_residual}"
            )
    if family is not None and known:
        for weight, parameter in model.named_parameters():
            if splitter := _who_split(model, parameter):
                raise ValueError(
                    f"{weight} is split by {splitter} already: call apply_to on the whole model, "
                    f"before {splitter}{LOADED_WHOLE if splitter == BY_TENSORS else ''}"
                )
        return family, known
    message = (
        f"{name} is no model that apply_to knows; looked for are litgpt's GPT and models of "
        "transformers with modules that compute as those of Llama, Mistral, Qwen2, Qwen3, SmolLM3, "
        "OLMo, Phi-3 or Gemma"
    )
    for path, module in model.named_modules():
        if _known_modules(module)[1]:
            held = type(module).__qualname__
            message += f". It holds a {held} as .{path}: give that one, before others wrap it"
            break
    else:
        message += (
            ". In a module of your own put fusedlib.SwiGLUMLP, fusedlib.RMSNorm and the like in "
            "the place of what they compute"
        )
    raise ValueError(message)


def _known_modules(model: nn.Module) -> tuple[Family | None, dict[nn.Module, str]]:
    family = next((f for f in FAMILIES if f.includes(type(model))), None)
    return family, family.recognize(model) if family else {}


def _who_split(model: nn.Module, parameter: nn.Parameter) -> str | None:
    """Who keeps a parameter in parts; None for a whole one."""
    if hasattr(parameter, "ds_id"):
        return "DeepSpeed"
    if not hasattr(parameter, "device_mesh"):  # of a DTensor
        return None
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return "FSDP" if "FSDPModule" in bases else BY_TENSORS


def _why_not_recognized(module: nn.Module, switch: str, family: Family) -> str:
    cls = original_class(module)
    if package_of(cls) != family.package:
        return f"a {full_name(cls)}, no class of {family.package}"
    names = [name for name, parts in family.parts.items() if switch in {p.switch for p in parts}]
    return f"a {full_name(cls)}, which does not compute as {' or '.join(names)}"
