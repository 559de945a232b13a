"""Study 11: whole Llama training steps; who computes them, what they hold, how far they reach.

An *arm* is a rival of the task "llama": it takes a Hugging Face model, changes this one model and
gives what is called with tokens and labels. No class is patched, so that arms share a process, and
in races of forward and backward one set of weights.

experiment  what is measured
step        forward and backward, or a whole step with AdamW, all arms in turns
fp32        the same in fp32, at a setting of torch's fp32 products
sustained   forward and backward under load, with energy
memory      two steps watched by the allocator's history: what fills the peak
limit       the largest batch or the longest context whose step fits
train       losses of a short training
fp32-train  the same at a setting of torch's fp32 products, and in float64
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fusedlib
from fusedlib import paths, reference
from fusedlib.bench import (
    allocator_history,
    check,
    code,
    fresh,
    graphs,
    machine,
    race,
    rivals,
    sources,
    step_clock,
    steps,
    sustained,
    timing,
)  # fmt: skip
from fusedlib.bench.allocations import quiet
from fusedlib.bench.allocator_history import Known, watching
from fusedlib.bench.attempt import Attempt, Unavailable, Wrong, free_memory, is_out_of_memory
from fusedlib.bench.model_memory import addresses_of
from fusedlib.bench.race import Entry, Event, Lap
from fusedlib.bench.rivals import Workload, rival
from fusedlib.bench.step_clock import MIB
from fusedlib.bench.swiglu import PLAIN_PATH
from fusedlib.bench.timing import Sections
from fusedlib.bench.torch_precision import matmul_settings
from fusedlib.kernels import route

STUDY, TASK, BASELINE = "11_llama", "llama", "huggingface"
_LLAMA_32 = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
             "num_key_value_heads": 8}  # fmt: skip
_LLAMA_2 = {"num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _LLAMA_32 | {"num_hidden_layers": 16, "vocab_size": 128256},
    "four layers": _LLAMA_32 | {"num_hidden_layers": 4, "vocab_size": 32000},
    # 4096 + 16: an odd factor tells what is as wide as the vocabulary by its size alone.
    "two layers": {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 4112,
    },
    "Llama-2-7B": _LLAMA_2 | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "max_position_embeddings": 4096,
    },
    "open_llama_3b": _LLAMA_2 | {
        "hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
    "two small layers": _LLAMA_2 | {
        "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4,
        "num_hidden_layers": 2, "vocab_size": 1024,
    },
}  # fmt: skip
"""Fields of `LlamaConfig` by the model's name, over those of `build`."""
LAYERS, CHECKED_TOKENS, CHECKED_CONTEXT = 2, 4096, 2048
DTYPES = ("bfloat16", "float16", "float32")
GROWING = {"batch": 1, "context": 256}
"""What a limit looks for, and the unit that it is told in."""
TRIES = 6
POINTS = 300
CHUNK = 4096  # tokens whose logits exist at once, where a loss is computed for comparison
Case = Mapping[str, Any]
Call = Callable[..., Any]


# --- models --------------------------------------------------------------------------------------


def build(
    config: str, dtype: torch.dtype | str, device: torch.device | str, seed: int = 0,
    layers: int | None = None,
) -> nn.Module:  # fmt: skip
    """A Hugging Face Llama with random weights, in training mode.

    Args:
        config: of `CONFIGS`.
        dtype: of the weights.
        device: where it is made.
        seed: the same weights for the same one.
        layers: instead of the configuration's.

    Raises:
        ValueError: an unknown name.
        ModuleNotFoundError: transformers is not installed.
    """
    if config not in CONFIGS:
        raise ValueError(f"unknown model {config!r}; known: {', '.join(CONFIGS)}")
    from transformers import AutoModelForCausalLM, LlamaConfig

    fields = CONFIGS[config] | ({"num_hidden_layers": layers} if layers else {})
    usual: dict[str, Any] = {
        "tie_word_embeddings": True, "use_cache": False, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }  # fmt: skip
    llama = LlamaConfig(**usual | fields)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(llama, dtype=kind).train()


def copy_of(model: nn.Module, *, weights: bool = False) -> nn.Module:
    """A model of the same layers; its parameters are the given one's unless `weights` says copy."""
    return copy.deepcopy(model, {} if weights else {id(p): p for p in model.parameters()})


def tokens(config: str, batch_size: int, context_length: int, device: Any, seed: int = 1) -> Tensor:
    """Random token ids (batch, context), the same ones for the same seed and device."""
    generator = torch.Generator(device).manual_seed(seed)
    size = batch_size, context_length
    return torch.randint(CONFIGS[config]["vocab_size"], size, generator=generator, device=device)


# --- the arms ------------------------------------------------------------------------------------

SWITCHES = ("rope", "swiglu", "rms_norm", "fused_linear_cross_entropy")
"""Liger's, by its own names."""
PARTS = ("mlp", "rms_norm", "rope", "attention", "loss")
"""Those of `fusedlib.apply_to`."""
_NEEDS_LIGER = {"requires": ("transformers", "liger_kernel"), "needs_cuda": True}


@rival(TASK, BASELINE, label="Hugging Face", place=1, requires=("transformers",))
def plain(model: nn.Module) -> Call:
    """The model as transformers makes it, attention by scaled_dot_product_attention."""
    return model


@rival(TASK, "inductor", requires=("transformers",))
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


@rival(TASK, "inductor causal", label="torch.compile, no mask", place=8,
       requires=("transformers",))  # fmt: skip
def compiled_causal(model: nn.Module) -> Call:
    """torch.compile of the whole model, dynamic=False, attention by the flag is_causal."""
    transformers_model: Any = model
    transformers_model.set_attn_implementation(causal_attention())
    return torch.compile(model, dynamic=False)


def with_liger(model: nn.Module, switches: Iterable[str], **loss: Any) -> nn.Module:
    """Put Liger's operations into this one model; transformers' module stays as it was.

    Args:
        model: changed in place.
        switches: of `SWITCHES`.
        loss: further settings of Liger's fused loss.

    Raises:
        ValueError: an unknown switch.
    """
    wanted = set(switches)
    if unknown := sorted(wanted - set(SWITCHES)):
        raise ValueError(f"unknown switch {unknown[0]!r}; Liger has {', '.join(SWITCHES)}")
    from liger_kernel.transformers import apply_liger_kernel_to_llama, liger_rotary_pos_emb
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    # It takes a loaded model for all but RoPE, and patches the module for later ones besides.
    apply_liger_kernel_to_llama(
        **{name: name in wanted and name != "rope" for name in SWITCHES}, model=model
    )
    for name in ("LlamaRMSNorm", "LlamaMLP"):
        setattr(modeling_llama, name, before[name])
    if "rope" in wanted:
        own = modeling_llama.LlamaAttention.forward
        theirs = {**before, "apply_rotary_pos_emb": liger_rotary_pos_emb}
        turned = FunctionType(own.__code__, theirs, own.__name__, own.__defaults__)
        for module in model.modules():
            if isinstance(module, modeling_llama.LlamaAttention):
                module.forward = turned.__get__(module)
    if loss:
        model.forward = partial(model.forward, **loss)
    return model


def _liger_arm(
    name: str, label: str, switches: Sequence[str], place: int | None, **loss: Any
) -> None:
    def arm(model: nn.Module) -> Call:
        return with_liger(model, switches, **loss)

    settings = ", ".join([*switches, *(f"{k}={v}" for k, v in loss.items())])
    arm.__doc__ = f"Liger's {settings}"
    rival(TASK, name, label=label, place=place, **_NEEDS_LIGER)(arm)


_liger_arm("liger", "Liger", SWITCHES, 3)
_liger_arm("liger without flce", "Liger without FLCE", SWITCHES[:3], 10)
_liger_arm("liger fp32", "Liger, fp32 sums", SWITCHES, 17, accum_dtype=torch.float32)
for _name in SWITCHES:
    _short = _name.replace("fused_linear_cross_entropy", "FLCE")
    _liger_arm(f"liger {_short.lower()}", f"Liger, {_short} alone", (_name,), None)


def _ours() -> Iterable[Any]:
    return sources.behind("fusedlib.apply")


def _fused_arm(name: str, label: str | None, parts: Sequence[str], place: int | None) -> None:
    def arm(model: nn.Module) -> Call:
        fusedlib.apply_to(model, **{part: part in parts for part in PARTS})
        return model

    arm.__doc__ = f"fusedlib.apply_to: {', '.join(parts)}"
    options: dict[str, Any] = {"requires": ("transformers",), "behind": _ours}
    rival(TASK, name, label=label, place=place, **options)(arm)


_fused_arm("fused", "fusedlib", PARTS, 0)
for _name in PARTS:
    _fused_arm(f"fused {_name}", f"fusedlib, {_name} alone", (_name,), None)


@rival(TASK, "fused inductor", label="fusedlib, torch.compile", place=7,
       requires=("transformers",), behind=_ours)  # fmt: skip
def fused_compiled(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, then torch.compile of the whole model."""
    fusedlib.apply_to(model)
    return torch.compile(model, dynamic=False)


@rival(TASK, "fused graph", label="fusedlib, CUDA graph", place=14, needs_cuda=True,
       requires=("transformers",), behind=_ours, traits=frozenset({"graph"}))  # fmt: skip
def fused_captured(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, forward and backward captured in one CUDA graph."""
    fusedlib.apply_to(model)
    return model


@rival(TASK, "liger graph", label="Liger, CUDA graph", place=24, traits=frozenset({"graph"}),
       **_NEEDS_LIGER)  # fmt: skip
def liger_captured(model: nn.Module) -> Call:
    """Liger with all its switches, forward and backward captured in one CUDA graph."""
    try:  # a capture that fails can leave the allocator of its process useless
        fresh.run("fusedlib.bench.llama:try_capture", {"provider": "liger"}, timeout_s=120)
    except fresh.FreshProcessError as error:
        raise Unavailable(f"its step cannot be captured: {str(error).splitlines()[0]}") from None
    return with_liger(model, SWITCHES)


@rival(TASK, "float64", place=25, requires=("transformers",), traits=frozenset({"asked for"}))
def in_float64(model: nn.Module) -> Call:
    """The model's fp32 weights and all it computes, norms and loss too, in float64."""
    model.double()
    return lambda ids, labels: SimpleNamespace(loss=_exact_loss(model, ids))


def try_capture(provider: str, start: Mapping[str, float]) -> None:
    """Entry of a fresh process: capture the step of a small model of this arm."""
    model = build("two layers", torch.bfloat16, "cuda")
    call = rivals.get(TASK, provider).build(model)
    _capture(model, call, tokens("two layers", 2, 128, "cuda"))


# --- cases ---------------------------------------------------------------------------------------


def cases(
    experiment: str, arms: Iterable[str], *, model: str, dtype: str = "bfloat16",
    batch_size: int = 4, context_length: int = 2048, device: str = "auto", **more: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case an arm.

    Args:
        experiment: see the top of this file.
        arms: names of rivals, or "all".
        model: of `CONFIGS`.
        dtype: of weights, gradients and moments.
        batch_size: sequences a step.
        context_length: tokens a sequence.
        device: "auto" takes the best there is.
        more: what else makes the case: `optimizer` and `repetitions` of a step, `grows` of a
            limit, `steps` and `learning_rate` of a training, `precision` of fp32 products.

    Raises:
        ValueError: an unknown experiment, model, dtype or arm, or a size below 1.
    """
    for name, given, known in (
        ("experiment", experiment, ("step", "fp32", *MEASURES)), ("model", model, CONFIGS),
        ("dtype", dtype, DTYPES), ("grows", more.get("grows", "batch"), GROWING),
    ):  # fmt: skip
        if given not in known:
            raise ValueError(f"unknown {name} {given!r}; known: {', '.join(known)}")
    if batch_size < 1 or context_length < 2:
        raise ValueError(
            f"batch_size={batch_size}, context_length={context_length}: need at least 1 and 2"
        )
    where = machine.device_type() if device == "auto" else device
    shared = {"model": model, "dtype": dtype, "batch_size": batch_size,
              "context_length": context_length, "device": where, **more}  # fmt: skip
    return [
        {"experiment": experiment, "provider": name, **shared}
        for name in rivals.chosen(TASK, arms)
    ]  # fmt: skip


def label(case: Case) -> str:
    """A case in a few words."""
    size = f"{case['batch_size']}×{case['context_length']}"
    return f"{case['experiment']} {case['model']} {size} {case['dtype']} {case['provider']}"


def require_possible(case: Case) -> None:
    """Raise `Unavailable` where the device or a package is missing."""
    rivals.get(TASK, case["provider"]).check_available(case["device"], case["dtype"])


# --- one step ------------------------------------------------------------------------------------


class Program:
    """An arm's model with its tokens, as `step_clock` runs it; with AdamW where asked.

    Args:
        model: whose parameters get gradients.
        call: what is called with tokens and labels.
        ids: tokens and labels (batch, context).
        optimizer: whether AdamW, torch's fused one, ends a step.
        graph: whether forward and backward are one CUDA graph.
    """

    def __init__(
        self, model: nn.Module, call: Call, ids: Tensor, *, optimizer: bool = False,
        graph: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.call, self.ids, self.device = model, call, ids, ids.device
        self.optimizer = steps.adamw(model.parameters(), "fused") if optimizer else None
        self.loss: Tensor | None = None
        self.captured = _capture(model, call, ids) if graph else None

    def issue(self) -> Sections:
        """One step, not waited for, with marks at the borders of its sections."""
        self.model.zero_grad(set_to_none=True)
        sections = Sections(self.device)
        if self.captured is not None:
            with sections.section("graph"):
                self.captured.replay()
            self.loss = self.captured.results["y"]
            adopt(self.model, self.captured.results)
        else:
            with sections.section("forward"):
                loss = self.call(self.ids, labels=self.ids).loss
            with sections.section("backward"):
                loss.backward()
            self.loss = loss.detach()
        if self.optimizer is not None:
            with sections.section("optimizer"):
                self.optimizer.step()
        return sections

    def activations(self) -> dict[str, float]:
        """MiB that forward and backward hold at their peak over weights and gradients, which are
        there before, as in accumulation; nothing is known elsewhere than on CUDA.

        A CUDA graph holds its memory all the time: what it took when it was captured.
        """
        if self.device.type != "cuda" or self.captured is not None:
            return {}
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.call(self.ids, labels=self.ids).loss.backward()
        return {"activations_mib": (torch.cuda.max_memory_allocated() - held) / MIB}


def _capture(model: nn.Module, call: Call, ids: Tensor) -> graphs.Captured:
    work = Workload(lambda: call(ids, labels=ids).loss, dict(model.named_parameters()))
    one = torch.ones((), device=ids.device, dtype=work.forward().dtype)
    return graphs.capture(work, one, "forward+backward")


def adopt(model: nn.Module, results: Mapping[str, Tensor]) -> None:
    """Give parameters the gradients that a graph writes."""
    for name, parameter in model.named_parameters():
        parameter.grad = results[f"d_{name}"]


# --- what is right -------------------------------------------------------------------------------


class Judge:
    """Loss and all gradients in float64, of a model of the case's widths with `LAYERS` layers, on
    `CHECKED_TOKENS` of its tokens at most; the measure is Hugging Face's error in the same dtype.
    """

    def __init__(self, case: Case) -> None:
        layers = min(LAYERS, CONFIGS[case["model"]]["num_hidden_layers"])
        self.model = build(case["model"], case["dtype"], case["device"], layers=layers)
        context = min(int(case["context_length"]), CHECKED_CONTEXT)
        batch = min(int(case["batch_size"]), max(1, CHECKED_TOKENS // context))
        self.ids = tokens(case["model"], batch, context, case["device"])
        self.names = [name for name, _ in self.model.named_parameters()]
        exact = copy_of(self.model, weights=True).double()
        self.true = self._results(exact, _exact_loss(exact, self.ids))
        del exact
        self.usual = check.errors(self._of(self.model, self.model), self.true)
        free_memory()

    def errors(self, one: rivals.Rival, dtype: str) -> dict[str, Any]:
        """The arm's errors as figures: of the loss, the head's gradient, and the largest one.

        Raises:
            Wrong: the rule of `check` rejects one.
        """
        model = copy_of(self.model, weights=True)
        call = one.build(model)
        found = check.errors(self._of(model, call, "graph" in one.traits), self.true)
        gradients = {name: e.norm for name, e in found.items() if name != "loss"}
        figures = {
            "loss_error": found["loss"].norm, "checked_tokens": self.ids.numel(),
            "head_gradient_error": gradients.get(self.names[0]),
            "gradients_error": max(gradients.values(), default=None),
        }  # fmt: skip
        rounded = getattr(torch, dtype)
        if wrong := check.misses(found, self.usual, rounded):
            raise Wrong("; ".join(wrong[:5]), figures)
        return figures

    def _of(self, model: nn.Module, call: Call, graph: bool = False) -> dict[str, Tensor]:
        if not graph:
            return self._results(model, call(self.ids, labels=self.ids).loss)
        program = Program(model, call, self.ids, graph=True)
        program.issue()
        assert program.loss is not None
        return self._results(model, program.loss)

    def _results(self, model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
        if loss.requires_grad:
            model.zero_grad(set_to_none=True)
            loss.backward()
        found = {name: g.clone() for name, g in gradients(model, self.names).items()}
        model.zero_grad(set_to_none=True)
        return {"loss": loss.detach()} | found


def gradients(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Those that arrived, by the parameters' names in checkpoints, packed ones too."""
    found = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        gradient = getattr(model.get_submodule(path), leaf).grad
        if gradient is not None:
            found[name] = gradient.detach()
    return found


def _exact_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Of a model in float64: transformers' RMSNorm alone would go down to fp32, and its loss."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(_exact_norm, norm)
    logits = model(ids).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _exact_norm(norm: Any, x: Tensor) -> Tensor:
    return reference.rms_norm(x, norm.weight, norm.variance_epsilon)


@torch.no_grad()
def plain_loss(model: Any, ids: Tensor) -> float:
    """The loss of the plain model, a sequence and a chunk of logits at a time, summed in fp32."""
    total = torch.zeros((), device=ids.device)
    for row in ids:
        hidden = model.model(row[None]).last_hidden_state[0, :-1]
        for states, wanted in zip(hidden.split(CHUNK), row[1:].split(CHUNK), strict=True):
            total += cross_entropy(model.lm_head(states).float(), wanted, reduction="sum")
    return total.item() / (ids.shape[0] * (ids.shape[1] - 1))


# --- the race ------------------------------------------------------------------------------------


class Course:
    """One model; each arm is checked once and has its heats, one a batch and context.

    Without an optimizer all arms share one set of weights, but those that packing lays out anew.
    """

    def __init__(self, case: Case) -> None:
        self.judge = Judge(case)
        self.base = build(case["model"], case["dtype"], case["device"])
        self.losses: dict[tuple[int, int], float] = {}

    def enter(self, case: Case) -> Entry:
        """Hold an arm against the truth and set it up on the whole model."""
        one = rivals.get(TASK, case["provider"])
        figures = {**one.facts(), **self.judge.errors(one, case["dtype"]), "path": path_of(case)}
        free_memory()
        model = copy_of(self.base, weights=case["optimizer"])
        call = one.build(model)
        return Entry(figures, lambda heat: self.lap(heat, model, call, "graph" in one.traits))

    def lap(self, case: Case, model: nn.Module, call: Call, graph: bool) -> Lap:
        """An arm's turns on one batch, whose loss at full size is compared and whose peaks are
        taken first.
        """
        ids = tokens(case["model"], case["batch_size"], case["context_length"], case["device"])
        size = case["batch_size"], case["context_length"]
        if size not in self.losses:
            self.losses[size] = plain_loss(self.base, ids)
        program: Any = Program(model, call, ids, optimizer=case["optimizer"], graph=graph)
        figures = {"loss": _checked_loss(program, self.losses[size], case["dtype"])}
        figures |= program.activations() | ({} if graph else step_clock.peaks(program, steps=1))
        lap = step_clock.lap(program, steps=1)
        lap.figures |= figures
        return lap


def _checked_loss(program: Program, usual: float, dtype: str) -> float:
    """The loss of a step.

    Raises:
        Wrong: it is further from plain PyTorch's than a few roundoffs.
    """
    optimizer, program.optimizer = program.optimizer, None
    program.issue()
    program.optimizer = optimizer
    assert program.loss is not None
    loss = program.loss.item()
    allowed = check.FLOOR_ROUNDOFFS * _loss_roundoff(dtype, program.ids.numel())
    if not abs(loss / usual - 1) <= allowed:
        raise Wrong(f"loss {loss:.6g}, Hugging Face's is {usual:.6g}", {"loss": loss})
    return loss


def _loss_roundoff(dtype: str, count: int) -> float:
    """Of the products behind a loss, TF32's where torch takes it for fp32; but at least that of a
    sum of so many tokens in fp32, whose errors walk at random.
    """
    tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    products = "float16" if tf32 else dtype  # both have eleven bits
    return max(torch.finfo(getattr(torch, products)).eps / 2, count**0.5 * 2.0**-24)


def path_of(case: Case) -> str | None:
    """Which code our arms run on these tokens; of others nothing."""
    if not case["provider"].startswith("fused"):
        return None
    return "kernels" if route.has_kernels(torch.device(case["device"])) else PLAIN_PATH


def work(case: Case) -> dict[str, Any]:
    """Tokens of a step."""
    return {"tokens": case["batch_size"] * case["context_length"]}


@contextmanager
def few_threads(case: Case) -> Iterator[None]:
    """One thread on a CPU: small models wait longer for a second one than it helps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if case["device"] == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


EVENT = Event(
    course=Course, settings=few_threads, fields=("model", "dtype", "device", "optimizer", "group"),
    available=require_possible, work=work, warmup=1, bursts=False, label=label,
)  # fmt: skip


# --- the race in fp32, and under load ------------------------------------------------------------


@contextmanager
def at_precision(case: Case) -> Iterator[None]:
    """torch's fp32 products as the case has them: "highest" is IEEE's, "high" TF32."""
    with matmul_settings(case["precision"], True), few_threads(case):
        yield


class InFp32(Course):
    """The same arms in fp32; where torch takes TF32, the floor of an error is TF32's roundoff."""

    def enter(self, case: Case) -> Entry:
        """As in other dtypes."""
        rounded = "float32" if case["precision"] == "highest" else "float16"  # eleven bits, as TF32
        entry = super().enter({**case, "dtype": rounded})
        return Entry(entry.figures | {"path": path_of(case)}, entry.lap)


class Loaded(Course):
    """The same arms; a lap is one step of forward and backward, issued and not waited for."""

    def lap(self, case: Case, model: nn.Module, call: Call, graph: bool) -> Lap:
        """An arm's steps on the case's batch, whose loss at full size is compared first."""
        ids = tokens(case["model"], case["batch_size"], case["context_length"], case["device"])
        program = Program(model, call, ids, graph=graph)
        loss = _checked_loss(program, plain_loss(self.base, ids), case["dtype"])
        return Lap(program.issue, reset=model.zero_grad, figures={"loss": loss})


def flops(case: Case) -> int:
    """Of the products of forward and backward: 2 a weight and token, attention's unmasked half as
    many again, and twice all that backward.
    """
    c = CONFIGS[case["model"]]
    width, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    shared = c.get("num_key_value_heads", heads) / heads
    layer = (2 + 2 * shared) * width**2 + 3 * width * c["intermediate_size"]
    weights = 2 * (layers * layer + c["vocab_size"] * width)
    attention = 2 * layers * case["context_length"] * width
    return 3 * int(case["batch_size"] * case["context_length"] * (weights + attention))


FP32 = replace(
    EVENT, course=InFp32, fields=(*EVENT.fields, "precision"), settings=at_precision
)  # fmt: skip
LOADED = sustained.event(
    replace(EVENT, course=Loaded, work=lambda case: work(case) | {"flops": flops(case)})
)


# --- one arm alone -------------------------------------------------------------------------------


def alone(case: Case) -> tuple[nn.Module, Call]:
    """A model of an arm and what is called."""
    model = build(case["model"], case["dtype"], case["device"])
    return model, rivals.get(TASK, case["provider"]).build(model)


def memory(case: Case) -> dict[str, Any]:
    """What fills memory in the second of two whole steps, by the allocator's history.

    `logits` are blocks as wide as the vocabulary that are no weight, gradient or moment.
    """
    known, device = Known(), torch.device(case["device"])
    size = case["batch_size"], case["context_length"]
    with watching(device) as watch:
        model, call = alone(case)
        ids = tokens(case["model"], *size, device)
        program = Program(model, call, ids, optimizer=True)
        watch.mark("built")
        known.named.append(("built", "weights", addresses_of(model.parameters())))
        for number in (1, 2):
            begin, forward, backward, update = (
                f"{name} {number}" for name in ("begin", "forward", "backward", "update")
            )
            watch.mark(begin)
            loss = call(ids, labels=ids).loss
            watch.mark(forward)
            known.forwards.append((begin, forward, set()))
            loss.backward()
            watch.mark(backward)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            known.named.append((backward, "gradients", addresses_of(gradients)))
            assert program.optimizer is not None
            program.optimizer.step()
            watch.mark(update)
            moments = [t for s in program.optimizer.state.values() for t in s.values() if t.dim()]
            known.named.append((update, "optimizer", addresses_of(moments)))
            del loss, gradients
            model.zero_grad(set_to_none=True)
    figures = _split(watch, known, CONFIGS[case["model"]]["vocab_size"])
    if device.type == "cuda":
        file = snapshot_path(case)
        figures |= {"snapshot": file.name, "snapshot_mib": watch.save(file) / MIB}
    return figures | work(case) | {"path": path_of(case)}


def snapshot_path(case: Case) -> Path:
    """Where an arm's snapshot lies, to be opened on https://pytorch.org/memory_viz."""
    name = f"llama-{case['provider']}-{case['batch_size']}x{case['context_length']}.pickle"
    return paths.build_dir() / "snapshots" / name.replace(" ", "-")


def _split(watch: Any, known: Known, vocabulary: int) -> dict[str, Any]:
    """The timeline of the second step by category, and the same at its peak."""
    odd = vocabulary // (vocabulary & -vocabulary)
    every = allocator_history.classify(watch.history, known)
    passing = ("activations", "temporaries", "other")
    wide = {id(b) for b in every if b.category in passing and not b.nbytes % odd}
    changes = len(watch.history.changes)
    held, logits = (
        allocator_history.live([b for b in every if (id(b) in wide) == chosen], changes)
        for chosen in (False, True)
    )
    held |= {"logits": np.sum(list(logits.values()), axis=0)}
    del held["casts"]
    start, stop = watch.history.moments["begin 2"], watch.history.moments["update 2"]
    total = np.sum(list(held.values()), axis=0)[start:stop]
    at = start + int(np.argmax(total))
    points = start + allocator_history.thinned(total, [], POINTS)
    moments = watch.history.moments
    names = ("forward 2", "backward 2", "update 2")
    figures: dict[str, Any] = {
        "peak_mib": int(total.max()) / MIB, "live_at": (points - start).tolist(),
        "moment_at": [moments[name] - start for name in names],
        "peak_in": next(name.split()[0] for name in names if at < moments[name]),
    }  # fmt: skip
    for name, series in held.items():
        figures[f"live_{name}_mib"] = [round(float(v), 3) for v in series[points] / MIB]
        figures[f"peak_{name}_mib"] = int(series[at]) / MIB
    return figures


def limit(case: Case) -> dict[str, Any]:
    """The largest batch, or the longest context, whose whole step fits.

    Raises:
        Unavailable: away from CUDA, where memory has no such end.
    """
    if case["device"] != "cuda":
        raise Unavailable("only a CUDA card's memory has an end that a step meets")
    model, call = alone(case)
    program = Program(model, call, tokens(case["model"], 1, 2, "cuda"), optimizer=True)
    grows, unit = case["grows"], GROWING[case["grows"]]
    at = ("batch", "context").index(grows)

    def peak_mib(count: int) -> float | None:
        size = [case["batch_size"], case["context_length"]]
        size[at] = count * unit
        free_memory()
        try:
            program.ids = tokens(case["model"], size[0], size[1], "cuda")
            torch.cuda.reset_peak_memory_stats()
            program.issue()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / MIB
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        model.zero_grad(set_to_none=True)
        return None

    first = max(1, (case["batch_size"], case["context_length"])[at] // unit)
    peak_mib(first)  # makes the moments
    capacity = torch.cuda.get_device_properties(0).total_memory / MIB
    low, high, tried, slope = furthest(peak_mib, first, capacity)
    return {
        "largest": low * unit, "fails_at": high and high * unit, "tried": [n * unit for n in tried],
        "mib_each": slope / unit, "capacity_mib": capacity,
    }  # fmt: skip


def furthest(
    peak: Callable[[int], float | None], first: int, capacity: float
) -> tuple[int, int | None, list[int], float]:
    """The largest count that fits, the smallest tried that does not, those tried, and the slope.

    The first guess continues the line through `first` and twice as many. From there steps double
    until one count fits and one does not, then the gap is halved, for `TRIES` tries in all.

    Args:
        peak: memory of a count, None where it does not fit.
        first: a small count.
        capacity: all the memory there is.

    Raises:
        MemoryError: twice the small count does not fit.
    """
    low, high = 2 * first, None
    tried: list[int] = []
    small, large = peak(first), peak(low)
    if small is None or large is None:
        raise MemoryError(f"out of memory at {first} or {low} already")
    slope = (large - small) / first
    guess = max(low + 1, int(low + (capacity - large) / slope)) if slope > 0 else 2 * low
    step = max(1, guess // 50)
    while len(tried) < TRIES and (high is None or high - low > 1):
        tried.append(guess)
        low, high = (low, guess) if peak(guess) is None else (guess, high)
        if high is None:
            guess += step
        else:
            middle = (low + high) // 2
            guess = middle if low in tried else max(middle, guess - step)
        step *= 2
    return low, high, tried, slope


def train(case: Case) -> dict[str, Any]:
    """Losses of a training from one seed on one order of data, every arm's the same.

    A token is followed by its successor four times of five, else by any of the first 1024.
    """
    model, call = alone(case)
    optimizer = steps.adamw(model.parameters(), "fused")
    optimizer.param_groups[0]["lr"] = case["learning_rate"]
    alphabet = min(1024, CONFIGS[case["model"]]["vocab_size"])
    generator = torch.Generator().manual_seed(case["seed"])
    successor = torch.randperm(alphabet, generator=generator)
    losses = []
    for _ in range(case["steps"]):
        size = case["batch_size"], case["context_length"]
        ids = torch.randint(alphabet, size, generator=generator)
        follows = torch.rand(size, generator=generator) < 0.8
        for at in range(1, size[1]):
            ids[:, at] = torch.where(follows[:, at], successor[ids[:, at - 1]], ids[:, at])
        ids = ids.to(case["device"])
        optimizer.zero_grad(set_to_none=True)
        loss = call(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": [round(loss.item(), 5) for loss in losses], "path": path_of(case)}


def train_at_precision(case: Case) -> dict[str, Any]:
    """Losses of the same training at a setting of fp32 products."""
    with at_precision(case):
        return train(case)


def _code(*own: Any) -> code.Code:
    common = (build, tokens, with_liger, Program)
    return code.Code((timing, step_clock), (*common, *own), rivals.fingerprints(TASK))


_RACED = race, check, graphs, Judge, Course
CODES = {
    "step": _code(*_RACED),
    "fp32": _code(*_RACED, InFp32, at_precision, matmul_settings),
    sustained.EXPERIMENT: sustained.study_code(_code(*_RACED, Loaded, flops)),
    sustained.PRODUCT: sustained.PRODUCT_CODE,
    "memory": _code(allocator_history, memory),
    "limit": _code(limit),
    "train": _code(train),
    "fp32-train": _code(train_at_precision, matmul_settings),
}


def study_code(**others: code.Code) -> code.Code:
    """Fingerprints of study 11's rows; further experiments bring theirs by name."""
    return code.ByExperiment((), (), codes=CODES | others)


MEASURES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "memory": memory, "limit": limit, "train": train, "fp32-train": train_at_precision,
}  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """The figures of a case of `MEASURES`.

    Raises:
        Refused: it cannot run here.
    """
    require_possible(case)
    free_memory()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    try:
        with few_threads(case):
            return MEASURES[case["experiment"]](case)
    finally:
        free_memory()


# --- profiles for TensorBoard --------------------------------------------------------------------

SHOWN = (BASELINE, "liger", "inductor", "fused")


def profile(case: Case, folder: Path) -> None:
    """Write a trace of an arm's settled step of forward, backward and AdamW into a folder."""
    require_possible(case)
    model, call = alone(case)
    ids = tokens(case["model"], case["batch_size"], case["context_length"], case["device"])
    program = Program(model, call, ids, optimizer=True)
    for _ in range(3):
        program.issue()
    timing.synchronize(program.device)
    written = torch.profiler.tensorboard_trace_handler(str(folder))
    options = {"profile_memory": True, "with_stack": True, "on_trace_ready": written}
    with quiet(), torch.profiler.profile(**options):
        program.issue()
        timing.synchronize(program.device)


def main() -> None:
    """One trace an arm under `report/build/tensorboard`, and how to open them."""
    large = torch.cuda.is_available()
    model, batch, context = ("Llama-3.2-1B", 4, 2048) if large else ("two layers", 2, 128)
    folder = paths.build_dir() / "tensorboard"
    for case in cases("step", SHOWN, model=model, batch_size=batch, context_length=context):
        with few_threads(case):
            tried = Attempt.at(profile, case, folder / case["provider"])
        print(f"{label(case)}: {tried.status} {tried.reason or ''}", flush=True)
        free_memory()
    print(
        f"tensorboard --logdir {folder}\n"
        "(pip install tensorboard torch-tb-profiler; the .json files also open in ui.perfetto.dev)"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m fusedlib.bench.llama", description=main.__doc__
    ).parse_args()
    main()
