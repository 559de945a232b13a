"""Hugging Face's Llamas and models of other families, and the arms that patch or compile them.

An *arm* is a rival of the task "llama": it takes a model, changes this one alone and gives what is
called with tokens and labels. No class is patched, so that arms share a process, and in races of
forward and backward one set of weights.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, nll_loss

import fusedlib
from fusedlib import reference
from fusedlib.bench import check, cuda_graphs
from fusedlib.bench.arguments import require_known
from fusedlib.bench.attempt import Unavailable, free_memory
from study import allocator, liger, rivals, trainers
from study.cases import Case
from study.models.transformer import sharing_copy
from study.rivals import Task, Workload, rival
from study.trainers import Sections

# --- models and their tokens ----------------------------------------------------------------------

Call = Callable[..., Any]
_LLAMA_32 = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
             "num_key_value_heads": 8}  # fmt: skip
_ROPE = {"rope_type": "default"}
_LLAMA_2 = {"num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
            "rope_parameters": _ROPE | {"rope_theta": 10000.0}}  # fmt: skip
_QWEN_3 = {"family": "Qwen3", "rms_norm_eps": 1e-6, "rope_parameters": _ROPE | {"rope_theta": 1e6}}
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
    "Qwen3-0.6B": _QWEN_3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936,
    },
    "Gemma-2-2B, 8 layers": {
        "family": "Gemma2", "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8,
        "vocab_size": 256000, "rms_norm_eps": 1e-6, "rope_parameters": _ROPE | {"rope_theta": 1e4},
    },
    "Phi-3-mini, 8 layers": {
        "family": "Phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 8,
        "vocab_size": 32064, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "rope_parameters": _ROPE | {"rope_theta": 1e4},
    },
    "Mistral-7B, 6 layers": {
        "family": "Mistral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 6,
        "vocab_size": 32768, "tie_word_embeddings": False, "sliding_window": None,
    },
    "two Qwen3 layers": _QWEN_3 | {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1024,
    },
}  # fmt: skip
"""Fields of a `family`'s configuration, Llama's by default, by the model's name, over those of
`build`.
"""


def build(
    config: str, dtype: torch.dtype | str, device: torch.device | str, seed: int = 0,
    layers: int | None = None,
) -> nn.Module:  # fmt: skip
    """A Hugging Face model for causal language modelling with random weights, in training mode;
    `layers` are instead of the configuration's.
    """
    require_known("model", config, CONFIGS)
    import transformers

    fields = CONFIGS[config] | ({"num_hidden_layers": layers} if layers else {})
    defaults: dict[str, Any] = {
        "tie_word_embeddings": True, "use_cache": False, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "pad_token_id": None,
        "rope_parameters": _ROPE | {"rope_theta": 500000.0},
    }  # fmt: skip
    fields = defaults | fields
    configuration = getattr(transformers, f"{fields.pop('family', 'Llama')}Config")(**fields)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    torch.manual_seed(seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(configuration, dtype=kind).train()


def copy_of(model: nn.Module, *, weights: bool = False) -> nn.Module:
    """A model of the same layers; its parameters are the given one's unless `weights` says copy."""
    return copy.deepcopy(model) if weights else sharing_copy(model)


def tokens(config: str, batch_size: int, context_length: int, device: Any, seed: int = 1) -> Tensor:
    """Random token ids (batch, context), the same ones for the same seed and device."""
    generator = torch.Generator(device).manual_seed(seed)
    size = batch_size, context_length
    return torch.randint(CONFIGS[config]["vocab_size"], size, generator=generator, device=device)


# --- one step of an arm ---------------------------------------------------------------------------


class LlamaTrainer(trainers.Trainer):
    """An arm's model with its tokens, which are labels too where none are given, as `trainers` runs
    it; where asked with torch's fused AdamW, with forward and backward as one CUDA `graph`, or
    inside `fusedlib.batch_invariant`. Whoever overwrites given labels changes those of a graph too.
    """

    def __init__(
        self, model: nn.Module, call: Call, ids: Tensor, *, optimizer: bool = False,
        graph: bool = False, invariant: bool = False, labels: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, ids.device)
        self.call, self.ids, self.labels = call, ids, labels
        self.around = fusedlib.batch_invariant if invariant else nullcontext
        if optimizer:
            self.optimizer = trainers.adamw(model.parameters(), "fused")
        self.captured: cuda_graphs.Captured | None = None
        if graph:
            work = Workload(self.forward, dict(model.named_parameters()))
            one = torch.ones((), device=ids.device, dtype=work.forward().dtype)
            self.captured = cuda_graphs.capture(work, one, "forward+backward")

    def forward(self) -> Tensor:
        """The model's own loss."""
        labels = self.ids if self.labels is None else self.labels
        loss: Tensor = self.call(self.ids, labels=labels).loss
        return loss

    def issue(self, section: trainers.Section | None = None) -> Sections:
        """One step, not waited for; where it is captured, forward and backward are one section."""
        if self.captured is None:
            with self.around():
                return super().issue(section)
        self.clear()
        sections = Sections(self.device)
        with sections.section("graph"):
            self.captured.replay()
        self.loss = self.captured.results["y"]
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.captured.results[f"d_{name}"]
        if self.optimizer is not None:
            with sections.section("optimizer"):
                self.update()
        return sections

    def activations(self) -> dict[str, float]:
        """MiB that forward and backward hold at their peak over weights and gradients, which are
        there before, as in accumulation; nothing is known elsewhere than on CUDA.

        A CUDA graph holds its memory all the time: what it took when it was captured.
        """
        if self.device.type != "cuda" or self.captured is not None:
            return {}
        held = allocator.peak(lambda: self.backward(self.forward()), self.device)
        return {"activations_mib": held or 0.0}


# --- who ------------------------------------------------------------------------------------------

TASK = Task[[nn.Module], Call]("llama")
BASELINE = "huggingface"
OTHER_ATTENTION = "huggingface-eager"
"""The baseline again, its sums in another order."""
BATCH_INVARIANT = "fused-invariant"
SWITCHES = ("rope", "swiglu", "rms_norm", "fused_linear_cross_entropy")
"""Liger's, by its own names."""
PARTS = ("mlp", "rms_norm", "rope", "attention", "loss")
"""Those of `fusedlib.apply_to`."""
WHOLE = frozenset({"whole"})
"""Trait of an arm that compiles the whole model."""
GRAPH, GRAPHS = "graph", "graphs"
"""Traits of an arm whose step is captured here in a CUDA graph, and where torch.compile does it."""
RECORDED = 2
"""Calls after which torch.compile has its CUDA graphs."""


def require_possible(case: Case) -> None:
    """Raise `Unavailable` where device or package is missing, or an arm takes no such model."""
    arm = rivals.get(TASK, case["provider"])
    arm.check_available(case["device"], case["dtype"])
    if "causal" in arm.name and CONFIGS[case["model"]].get("family") == "Gemma2":
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


def causal(model: Any) -> nn.Module:
    """The model with an attention that is causal by flag and gets no mask.

    A model that is compiled gets an explicit mask from transformers, where one that is not gets
    none (`masking_utils._ignore_causal_mask_sdpa`). For sequences without padding or cache.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    AttentionMaskInterface.register("causal", lambda *_, **__: None)
    model.set_attn_implementation("causal")
    return model


@rival(TASK, "inductor-causal", requires=("transformers",), traits=WHOLE)
def compiled_causal(model: nn.Module) -> Call:
    """torch.compile of the whole model, dynamic=False, attention by the flag is_causal."""
    return torch.compile(causal(model), dynamic=False)


@rival(TASK, "inductor-causal-loss", requires=("transformers",), traits=WHOLE)
def compiled_loss(model: nn.Module) -> Call:
    """The same, of a function that gives the loss alone: no logits are kept for who calls it."""
    plain = causal(model)

    @partial(torch.compile, dynamic=False)
    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        only: Tensor = plain(ids, labels=labels).loss
        return only

    return lambda ids, labels: SimpleNamespace(loss=loss(ids, labels))


@rival(
    TASK, "inductor-causal-searched", requires=("transformers",), needs_cuda=True,
    traits=WHOLE | {"searched", "on request"},
)  # fmt: skip
def compiled_searched(model: nn.Module) -> Call:
    """The same, mode="max-autotune-no-cudagraphs": it searches for the tiles of each product."""
    return torch.compile(causal(model), mode="max-autotune-no-cudagraphs", dynamic=False)


@rival(
    TASK, "inductor-causal-graphs", requires=("transformers",), needs_cuda=True,
    traits=WHOLE | {GRAPHS, "on request"},
)  # fmt: skip
def compiled_graphs(model: nn.Module) -> Call:
    """The same, mode="reduce-overhead": CUDA graphs of forward and of backward."""
    return torch.compile(causal(model), mode="reduce-overhead", dynamic=False)


_CAPTURED: dict[str, Any] = {"requires": ("transformers",), "needs_cuda": True}


def capturable(call: Call) -> Call:
    """A call whose first one runs as if it were captured, and is refused where the host waits for
    the card: a capture that fails there would leave torch's random generator unusable.
    """
    tried = False

    def called(*given: Any, **more: Any) -> Any:
        nonlocal tried
        if tried:
            return call(*given, **more)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with patch("torch.cuda.is_current_stream_capturing", lambda: True):
                result = call(*given, **more)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise Unavailable(
                f"its forward pass waits for the card, so no CUDA graph can hold it: {error}"
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
        tried = True
        return result

    return called


@rival(TASK, f"{BASELINE}-graph", traits=frozenset({GRAPH, "on request"}), **_CAPTURED)
def plain_captured(model: nn.Module) -> Call:
    """Attention by the flag is_causal, forward and backward captured in one CUDA graph."""
    return capturable(causal(model))


def with_liger(model: Any, switches: Iterable[str], **loss: Any) -> nn.Module:
    """Put Liger's operations into this one model, with further settings of its fused loss;
    transformers' module stays as it was.
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
        return liger.by(liger.TRITON, with_liger(model, switches, **loss))

    settings = ", ".join([*switches, *(f"{k}={v}" for k, v in loss.items())])
    arm.__doc__ = f"Liger's {settings}"
    rival(TASK, name, requires=("transformers",))(arm)


_liger_arm("liger", SWITCHES)
_liger_arm("liger-without-flce", SWITCHES[:3])
_liger_arm("liger-fp32", SWITCHES, accum_dtype=torch.float32)
_liger_arm("liger-chunks", SWITCHES, chunk_mem_const=8)  # as its own patch of GPT-OSS has it
_liger_arm("liger-chunks-32", SWITCHES, chunk_mem_const=32)  # two of a Llama-1B, as fusedlib's
for _name in SWITCHES:
    _short = _name.replace("fused_linear_cross_entropy", "FLCE")
    _liger_arm(f"liger-{_short.lower().replace('_', '-')}", (_name,))


def _liger_captured(name: str, switches: Sequence[str]) -> None:
    def arm(model: nn.Module) -> Call:
        return capturable(liger.by(liger.TRITON, with_liger(causal(model), switches)))

    arm.__doc__ = f"Liger's {', '.join(switches)}, captured as Hugging Face's"
    rival(TASK, name, traits=frozenset({GRAPH, "on request"}), **_CAPTURED)(arm)


_liger_captured("liger-graph", SWITCHES)
_liger_captured("liger-without-flce-graph", SWITCHES[:3])


_CUTE: dict[str, Any] = {"requires": ("transformers", "cutlass"), "capability": (9, 0)}


@rival(TASK, "liger-cute", **_CUTE)
def liger_cute(model: nn.Module) -> Call:
    """Liger's, LIGER_KERNEL_IMPL=cutedsl, but FLCE in Triton, for CuTe's raises on Hopper."""
    return liger.by(liger.CUTE, with_liger(model, SWITCHES))


@rival(TASK, "liger-cute-loss", **_CUTE)
def liger_cute_with_loss(model: nn.Module) -> Call:
    """The same, FLCE by liger_fused_linear_cross_entropy_sm90, put there by lines of our own."""
    return liger.by(liger.CUTE, with_liger(model, SWITCHES), loss=liger.hopper_loss)


@rival(TASK, "liger-inductor", requires=("transformers",), traits=WHOLE | {"on request"})
def liger_compiled(model: nn.Module) -> Call:
    """Liger's, all its switches, then torch.compile of the whole model, dynamic=False."""
    return liger.by(liger.TRITON, torch.compile(with_liger(model, SWITCHES), dynamic=False))


# Ends a process on an H200, a plain script of a user too: without a mask a kernel that Inductor
# (torch 2.11.0) writes for a model with Liger's patch makes an illegal memory access.
@rival(TASK, "liger-inductor-causal", requires=("transformers",), traits=WHOLE | {"on request"})
def liger_compiled_causal(model: nn.Module) -> Call:
    """The same, attention by the flag is_causal: no mask."""
    return liger_compiled(causal(model))


def _fused_arm(name: str, parts: Sequence[str], **options: Any) -> None:
    def arm(model: nn.Module) -> Call:
        fusedlib.apply_to(model, **{part: part in parts for part in PARTS})
        return model

    arm.__doc__ = f"fusedlib.apply_to: {', '.join(parts)}"
    rival(TASK, name, requires=("transformers",), **options)(arm)


_fused_arm("fused", PARTS)
_fused_arm("fused-again", PARTS)  # the same program in another place of its race
for _name in PARTS:
    _part = _name.replace("_", "-")
    _others = tuple(part for part in PARTS if part != _name)
    _fused_arm(f"fused-{_part}", (_name,))
    _fused_arm(f"fused-without-{_part}", _others, traits=frozenset({"on request"}))


@rival(TASK, BATCH_INVARIANT, requires=("transformers",), traits=frozenset({"on request"}))
def fused_invariant(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, each step inside of fusedlib.batch_invariant."""
    fusedlib.apply_to(model)
    return model


@rival(TASK, "fused-inductor", requires=("transformers",), traits=WHOLE)
def fused_compiled(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, then torch.compile of the whole model."""
    fusedlib.apply_to(model)
    return torch.compile(model, dynamic=False)


@rival(TASK, "fused-inductor-causal", requires=("transformers",), traits=WHOLE)
def fused_compiled_causal(model: nn.Module) -> Call:
    """The same, attention by the flag is_causal: no mask."""
    return fused_compiled(causal(model))


@rival(TASK, "inductor-layers", requires=("transformers",))
def compiled_layers(model: nn.Module) -> Call:
    """torch.compile of each decoder layer, its default mode, dynamic=False."""
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        layer.compile(dynamic=False)
    return model


@rival(TASK, "liger-inductor-layers", requires=("transformers",))
def liger_compiled_layers(model: nn.Module) -> Call:
    """Liger's loss, chunk_mem_const=32, then torch.compile of each decoder layer, which its RoPE
    would break into four graphs."""
    patched = with_liger(model, SWITCHES[3:], chunk_mem_const=32)
    return liger.by(liger.TRITON, compiled_layers(patched))


@rival(TASK, "fused-inductor-layers", requires=("transformers",))
def fused_compiled_layers(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, then torch.compile of each decoder layer."""
    fusedlib.apply_to(model)
    return compiled_layers(model)


@rival(TASK, "fused-graph", traits=frozenset({GRAPH}), **_CAPTURED)
def fused_captured(model: nn.Module) -> Call:
    """fusedlib.apply_to with all its parts, forward and backward captured in one CUDA graph."""
    fusedlib.apply_to(model)
    return model


# --- what is right --------------------------------------------------------------------------------

Arm = rivals.Rival[[nn.Module], Call]
EXACT = "exact-gradients"
LAYERS, CHECKED_TOKENS, CHECKED_CONTEXT = 2, 4096, 2048
CHUNK = 4096  # tokens whose logits exist at once, where a loss is computed for comparison


class ExactModel:
    """Loss and gradients in float64; the measure is Hugging Face's error in the weights' dtype."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.names = [name for name, _ in self.model.named_parameters()]
        exact = copy_of(self.model, weights=True).double()
        self.true = self._results(exact, _exact_loss(exact, self.ids))
        del exact
        self.baseline = check.errors(self._of(self.model, self.model), self.true)
        free_memory()

    @classmethod
    def of(cls, case: Case) -> "ExactModel":
        """Of a model of the case's widths with `LAYERS` layers, on `CHECKED_TOKENS` at most."""
        layers = min(LAYERS, CONFIGS[case["model"]]["num_hidden_layers"])
        context = min(int(case["context_length"]), CHECKED_CONTEXT)
        batch = min(int(case["batch_size"]), max(1, CHECKED_TOKENS // context))
        return cls(
            build(case["model"], case["dtype"], case["device"], layers=layers),
            tokens(case["model"], batch, context, case["device"]),
        )

    def errors_of(self, one: Arm) -> dict[str, check.Errors]:
        """Errors of an arm's loss and gradients, by name; of those alone that arrived."""
        model = copy_of(self.model, weights=True)
        call = one.build(model)
        return check.errors(self._of(model, call, one.traits), self.true)

    def path(self, one: Arm) -> str | None:
        """Whose kernels of Liger's an arm runs, as `liger.path` has it."""
        model = copy_of(self.model, weights=True)
        call = one.build(model)
        return liger.path(lambda: self._of(model, call))

    def errors(self, one: Arm, dtype: str) -> dict[str, Any]:
        """The largest error of an arm's gradients, as a figure."""
        rival_errors = self.errors_of(one)
        gradients = [e.norm for name, e in rival_errors.items() if name != "loss"]
        figures = {"gradients_error": max(gradients, default=None)}
        return check.require(rival_errors, self.baseline, getattr(torch, dtype), figures=figures)

    def _of(
        self, model: nn.Module, call: Call, traits: frozenset[str] = frozenset()
    ) -> dict[str, Tensor]:
        if GRAPH in traits:
            program = LlamaTrainer(model, call, self.ids, graph=True)
            program.issue()
            return self._results(model, program.loss)
        for _ in range(RECORDED * (GRAPHS in traits)):
            self._results(model, call(self.ids, labels=self.ids).loss)
        return self._results(model, call(self.ids, labels=self.ids).loss)

    def _results(self, model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
        if loss.requires_grad:
            model.zero_grad(set_to_none=True)
            loss.backward()
        arrived = {name: g.clone() for name, g in gradients(model, self.names).items()}
        model.zero_grad(set_to_none=True)
        return {"loss": loss.detach()} | arrived


def gradients(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Those that arrived, by the parameters' names in checkpoints, packed ones too."""
    arrived = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        gradient = getattr(model.get_submodule(path), leaf).grad
        if gradient is not None:
            arrived[name] = gradient.detach()
    return arrived


def _exact_loss(
    model: nn.Module, ids: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Of a model in float64, or with weights in float64 in the place of its own: transformers'
    RMSNorm alone would go down to fp32, and its loss.
    """
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(_exact_norm, norm)
    logits = functional_call(model, dict(weights or {}), (ids,)).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _exact_norm(norm: Any, x: Tensor) -> Tensor:
    if hasattr(norm, "variance_epsilon"):
        return reference.rms_norm(x, norm.weight, norm.variance_epsilon)
    return reference.rms_norm(x, 1 + norm.weight, norm.eps)  # Gemma's


class PlainLoss(NamedTuple):
    """Of the plain model: its loss; the tokens that it finds likeliest, as labels (batch, context)
    in the host's memory; and its loss with these.
    """

    loss: float
    likeliest: Tensor
    likeliest_loss: float


@torch.no_grad()
def plain_loss(model: Any, ids: Tensor) -> PlainLoss:
    """Of the plain model, a sequence and a chunk of logits at a time, summed in fp32."""
    total, least = torch.zeros(2, device=ids.device)
    likeliest = ids.to("cpu", copy=True)
    cap = getattr(model.config, "final_logit_softcapping", None)
    for row, labels in zip(ids, likeliest, strict=True):
        hidden = model.model(row[None]).last_hidden_state[0, :-1]
        chunks = hidden.split(CHUNK), row[1:].split(CHUNK), labels[1:].split(CHUNK)
        for states, wanted, best in zip(*chunks, strict=True):
            logits = model.lm_head(states).float()
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            logarithms = logits.log_softmax(-1)
            total += nll_loss(logarithms, wanted, reduction="sum")
            most = logarithms.max(-1)
            least -= most.values.sum()
            best.copy_(most.indices)
    count = ids.shape[0] * (ids.shape[1] - 1)
    return PlainLoss(total.item() / count, likeliest, least.item() / count)


@rival(TASK, EXACT, requires=("transformers",), traits=frozenset({"on request"}))
def with_exact_gradients(model: nn.Module) -> Call:
    """Weights in their dtype, all else in float64, each gradient rounded once into its weight's."""

    def call(ids: Tensor, labels: Tensor) -> SimpleNamespace:
        weights = {name: weight.double() for name, weight in model.named_parameters()}
        return SimpleNamespace(loss=_exact_loss(model, ids, weights))

    return call
