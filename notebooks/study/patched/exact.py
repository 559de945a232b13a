"""What is right: loss and gradients in float64, held against those of plain PyTorch."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fusedlib import reference
from fusedlib.bench import check
from fusedlib.bench.attempt import free_memory
from study import rivals
from study.cases import Case
from study.patched.arms import TASK
from study.patched.models import CONFIGS, Call, build, copy_of, tokens
from study.patched.trainer import LlamaTrainer
from study.rivals import rival

Arm = rivals.Rival[[nn.Module], Call]
EXACT = "exact-gradients"
LAYERS, CHECKED_TOKENS, CHECKED_CONTEXT = 2, 4096, 2048
CHUNK = 4096  # tokens whose logits exist at once, where a loss is computed for comparison


class ExactModel:
    """Loss and all gradients in float64; the measure is Hugging Face's error in the weights' dtype.

    Args:
        model: a plain one; its weights stay, its gradients go.
        ids: tokens and labels (batch, context), int64.
    """

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
        return check.errors(self._of(model, call, "graph" in one.traits), self.true)

    def errors(self, one: Arm, dtype: str) -> dict[str, Any]:
        """The largest error of an arm's gradients, as a figure.

        Raises:
            Wrong: the rule of `check` rejects one.
        """
        rival_errors = self.errors_of(one)
        gradients = [e.norm for name, e in rival_errors.items() if name != "loss"]
        figures = {"gradients_error": max(gradients, default=None)}
        return check.require(rival_errors, self.baseline, getattr(torch, dtype), figures=figures)

    def _of(self, model: nn.Module, call: Call, graph: bool = False) -> dict[str, Tensor]:
        if not graph:
            return self._results(model, call(self.ids, labels=self.ids).loss)
        program = LlamaTrainer(model, call, self.ids, graph=True)
        program.issue()
        return self._results(model, program.loss)

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


@torch.no_grad()
def plain_loss(model: Any, ids: Tensor) -> float:
    """The loss of the plain model, a sequence and a chunk of logits at a time, summed in fp32."""
    total = torch.zeros((), device=ids.device)
    cap = getattr(model.config, "final_logit_softcapping", None)
    for row in ids:
        hidden = model.model(row[None]).last_hidden_state[0, :-1]
        for states, wanted in zip(hidden.split(CHUNK), row[1:].split(CHUNK), strict=True):
            logits = model.lm_head(states).float()
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            total += cross_entropy(logits, wanted, reduction="sum")
    return total.item() / (ids.shape[0] * (ids.shape[1] - 1))


@rival(TASK, EXACT, requires=("transformers",),
       traits=frozenset({"on request"}))  # fmt: skip
def with_exact_gradients(model: nn.Module) -> Call:
    """Weights in their dtype, all else in float64, each gradient rounded once into its weight's."""

    def call(ids: Tensor, labels: Tensor) -> SimpleNamespace:
        weights = {name: weight.double() for name, weight in model.named_parameters()}
        return SimpleNamespace(loss=_exact_loss(model, ids, weights))

    return call
