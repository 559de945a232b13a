"""One Transformer, one set of weights, and steps of it in turns.

"mlp", and under load "sustained": each block's MLP by another provider. "model": the model, as it
is or compiled. Each is checked in a model of the case's widths and tokens with `LAYERS` blocks,
after its compilation was timed: logits and the gradient of every parameter against float64, by the
rule of `fusedlib.bench.check`.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.bench import check
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.turns import Checked
from fusedlib.ops import fused_class
from fusedlib.patch import apply
from study import rivals, step_clock
from study.cases import Case
from study.compiling import call_until_compiled, empty_compile_cache
from study.mlp import MODULE
from study.models import flops
from study.models.transformer import SwiGLU, Transformer, loss, sharing_copy
from study.rivals import Task, rival
from study.settings import matmul_settings
from study.trainer import WEIGHTS, Trainer, autocast_bf16, require_possible, shape_of

Call = Callable[..., Any]
COMPILE = Task[[Transformer], Call]("compile")
RACES: dict[str, Task[..., Any]] = {"mlp": MODULE, "sustained": MODULE, "model": COMPILE}
"""Who competes, by experiment: in the MLP's place, or in how the model runs."""
LAYERS = 2
# Of a turn, after a step that gives the host the head start which it has in a loop.
STEPS = 1


rival(COMPILE, "eager", settings="Plain PyTorch")(lambda model: model)


@rival(COMPILE, "inductor")
def compiled(model: Transformer) -> Call:
    """torch.compile, dynamic=False, from an empty cache on disk."""
    return torch.compile(model, dynamic=False)


@rival(COMPILE, "linear", traits=frozenset({"on request"}))
def by_linear(model: Transformer) -> Call:
    """Every projection, the head's too, by fusedlib.linear; all else plain PyTorch."""
    same = sharing_copy(model)
    for module in list(same.modules()):
        if isinstance(module, nn.Linear):
            fused_class.fuse(module, apply.FusedLinear)
    return same


def require_available(case: Case) -> None:
    """Raise `Refused` for a provider that cannot run here, or a case far above the memory."""
    require_possible(case)
    one = rivals.get(RACES[case["experiment"]], case["provider"])
    one.check_available(case["device"], WEIGHTS[case["precision"]])
    if case["experiment"] == "sustained" and not case["device"].startswith("cuda"):
        raise Unavailable("sustained runs need a CUDA GPU")


def work(case: Case) -> dict[str, Any]:
    """FLOPs of forward and backward by formula, and tokens of a step."""
    batch, context = case["batch_size"], case["context_length"]
    return {"flops": flops.count(shape_of(case), batch, context), "tokens": batch * context}


class Setup:
    """A trainer whose model the providers take turns in; each parameter has its moments."""

    def __init__(self, case: Case) -> None:
        self.trainer = Trainer.of(case)
        self.own = mlps(self.trainer.model)

    def check(self, case: Case) -> Checked:
        """Put one into the model, step until nothing compiles any more, weigh and check it."""
        trainer, one = self.trainer, rivals.get(RACES[case["experiment"]], case["provider"])
        place = placer(case, trainer.model, self.own)

        def put_in() -> None:
            trainer.call = place()

        put_in()
        assert trainer.optimizer is not None
        stepped = trainer.optimizer.param_groups[0]["params"]
        held = set(map(id, stepped))
        stepped.extend(p for p in trainer.model.parameters() if id(p) not in held)
        try:
            figures = {**one.facts(), **call_until_compiled(trainer.step, case["device"], 1)}
            figures |= step_clock.peaks(trainer)
        finally:
            trainer.clear()
        figures |= checked(case)
        return Checked(figures, lambda timed: step_clock.turn(trainer, put_in, STEPS))


def mlps(model: Transformer) -> list[SwiGLU]:
    """A model's own MLPs, block by block."""
    return [part for part in model.modules() if isinstance(part, SwiGLU)]


def placer(case: Case, model: Transformer, own: Sequence[SwiGLU]) -> Callable[[], Call]:
    """What puts a case's provider into a model of these own MLPs, and gives the model as it is
    called then.
    """
    task = RACES[case["experiment"]]
    if task == COMPILE:
        call = rivals.get(COMPILE, case["provider"]).build(model)
        return lambda: call
    parts = [rivals.get(MODULE, case["provider"]).build(one) for one in own]

    def place() -> Call:
        for block, part in zip(model.blocks, parts, strict=True):
            block.mlp = part
        return model

    return place


def checked(case: Case) -> dict[str, Any]:
    """The largest error of the gradients, after logits and gradients were right.

    Raises:
        Wrong: the rule of `check` rejects one.
    """
    torch.manual_seed(0)
    dtype, device = getattr(torch, WEIGHTS[case["precision"]]), case["device"]
    small = replace(shape_of(case), num_layers=LAYERS)
    model = Transformer(small, device=device, dtype=dtype)
    size = 2, case["batch_size"], case["context_length"]
    batch = torch.randint(small.vocab_size, size, device=device)
    exact = copy.deepcopy(model).double()
    true = _results(exact, exact, batch)
    cast = case["precision"] == "bf16 autocast"
    baseline = check.errors(_results(model, model, batch, cast), true)
    place = placer(case, model, mlps(model))
    errors = check.errors(_results(model, place(), batch, cast), true)
    gradients = [error.norm for name, error in errors.items() if name != "logits"]
    rounded = torch.float32 if case["precision"] == "fp32" else torch.bfloat16
    figures = {"gradients_error": max(gradients, default=None)}
    return check.require(errors, baseline, rounded, true, figures)


def _results(
    model: Transformer, call: Call, batch: Tensor, cast: bool = False
) -> dict[str, Tensor]:
    """Logits, under autocast or not, and the gradients that arrived by the state dict's names."""
    model.zero_grad(set_to_none=True)
    with autocast_bf16(batch.device) if cast else nullcontext():
        logits = call(batch[0])
    loss(logits, batch[1]).backward()
    arrived = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **arrived}


@contextmanager
def cold_compiler(case: Case) -> Iterator[None]:
    """fp32 products in fp32; where compilation is timed, an empty cache on disk and warm imports.

    What is compiled in this process the race forgets before each setup.
    """
    is_timed = case["experiment"] == "model"
    with matmul_settings("highest", True), warnings.catch_warnings():
        # This study wants its fp32 products in fp32, which Inductor takes for an oversight.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        with empty_compile_cache(case["device"]) if is_timed else nullcontext():
            yield
