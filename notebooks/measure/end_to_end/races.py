"""Study 06's races: one model, one set of weights, and the rivals' steps in turns.

"mlp": each block's MLP by another rival. "model": the model, as it is or compiled. Each rival is
checked in a model of the case's widths and tokens with `LAYERS` blocks, after its compilation was
timed: logits and the gradient of every parameter against float64, by the rule of
`fusedlib.bench.check`. `LOADED` runs them under load.
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
from fusedlib.bench.turns import Checked
from fusedlib.ops import fused_class
from fusedlib.patch import apply
from measure.end_to_end import measure
from measure.end_to_end.cases import COMPILE, RACES, Call, require_possible, shape
from measure.racing import rivals, step_clock, sustained
from measure.racing.cases import Case
from measure.racing.race import Race
from measure.racing.rivals import rival
from measure.racing.settings import matmul_settings
from models.transformer import SwiGLU, Transformer, loss, sharing_copy
from study import mlp
from study.compiling import call_until_compiled, counting_graphs, warm_compiler
from study.mlp import MODULE
from study.trainer import WEIGHTS, Trainer, autocast_bf16

LAYERS = 2
# Of a turn, after a step that gives the host the head start which it has in a loop.
STEPS = 1


# --- whether it is compiled ------------------------------------------------------


rival(COMPILE, "eager", settings="Plain PyTorch")(lambda model: model)


@rival(COMPILE, "inductor")
def compiled(model: Transformer) -> Call:
    """torch.compile, dynamic=False, from an empty cache on disk."""
    return torch.compile(model, dynamic=False)


@rival(COMPILE, "linear", label="fusedlib.linear", slot=27, traits=frozenset({"on request"}))
def by_linear(model: Transformer) -> Call:
    """Every projection, the head's too, by fusedlib.linear; all else plain PyTorch."""
    same = sharing_copy(model)
    for module in list(same.modules()):
        if isinstance(module, nn.Linear):
            fused_class.fuse(module, apply.FusedLinear)
    return same


# --- the setup ------------------------------------------------------------------------------------


class Setup:
    """A trainer whose model the rivals take turns in; each parameter has its moments."""

    def __init__(self, case: Case) -> None:
        self.trainer = Trainer.of(case)
        self.own = mlps(self.trainer.model)

    def check(self, case: Case) -> Checked:
        """Put a rival into the model, step until nothing compiles any more, weigh and check it."""
        trainer, one = self.trainer, rivals.get(RACES[case["experiment"]], case["provider"])
        rival_in = rival_placer(case, trainer.model, self.own)

        def put_rival_in() -> None:
            trainer.call = rival_in()

        put_rival_in()
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
        return Checked(
            figures,
            lambda timed: counting_graphs(step_clock.turn(trainer, put_rival_in, STEPS)),
        )


def mlps(model: Transformer) -> list[SwiGLU]:
    """A model's own MLPs, block by block."""
    return [part for part in model.modules() if isinstance(part, SwiGLU)]


def rival_placer(case: Case, model: Transformer, own: Sequence[SwiGLU]) -> Callable[[], Call]:
    """What puts a rival into a model of these own MLPs and gives the model as it is called then."""
    if case["experiment"] == "model":
        call = rivals.get(COMPILE, case["provider"]).build(model)
        return lambda: call
    parts = [rivals.get(MODULE, case["provider"]).build(mlp) for mlp in own]

    def rival_in() -> Call:
        for block, part in zip(model.blocks, parts, strict=True):
            block.mlp = part
        return model

    return rival_in


def checked(case: Case) -> dict[str, Any]:
    """Errors of the logits and, the largest, of the gradients; and which code ran, where it varies.

    Raises:
        Wrong: the rule of `check` rejects one.
    """
    torch.manual_seed(0)
    dtype, device = getattr(torch, WEIGHTS[case["precision"]]), case["device"]
    small = replace(shape(case), num_layers=LAYERS)
    model = Transformer(small, device=device, dtype=dtype)
    size = 2, case["batch_size"], case["context_length"]
    batch = torch.randint(small.vocab_size, size, device=device)
    exact = copy.deepcopy(model).double()
    true = _results(exact, exact, batch)
    cast = case["precision"] == "bf16 autocast"
    baseline = check.errors(_results(model, model, batch, cast), true)
    rival_in = rival_placer(case, model, mlps(model))
    errors = check.errors(_results(model, rival_in(), batch, cast), true)
    gradients = [error.norm for name, error in errors.items() if name != "logits"]
    figures = {
        "logits_error": errors["logits"].norm, "gradients_error": max(gradients, default=None),
        "path": _path(model, case),
    }  # fmt: skip
    rounded = torch.float32 if case["precision"] == "fp32" else torch.bfloat16
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


def _path(model: Transformer, case: Case) -> str | None:
    """Which code the model's MLPs run at the case's tokens, where they are ours."""
    tokens, width = case["batch_size"] * case["context_length"], model.embedding.embedding_dim
    dtype = torch.float32 if case["precision"] == "fp32" else torch.bfloat16
    x = torch.empty(tokens, width, device=case["device"], dtype=dtype)
    return mlp.path(model.blocks[0].get_submodule("mlp"), x)


# --- compilation ----------------------------------------------------------------------------------


@contextmanager
def cold_compiler(case: Case) -> Iterator[None]:
    """fp32 products in fp32; where compilation is timed, an empty cache on disk and warm imports.

    What is compiled in this process the race forgets before each setup.
    """
    with matmul_settings("highest", True), warnings.catch_warnings():
        # This study wants its fp32 products in fp32, which Inductor takes for an oversight.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        if RACES[case["experiment"]] != "compile":
            yield
            return
        from torch._inductor.utils import fresh_cache

        warm_compiler(case["device"])
        with fresh_cache():
            yield


def _require_available(case: Case) -> None:
    require_possible(case)
    one = rivals.get(RACES[case["experiment"]], case["provider"])
    one.check_available(case["device"], WEIGHTS[case["precision"]])


RACE = Race(
    setup=Setup, available=_require_available, settings=cold_compiler, work=measure.work, warmup=1,
    fields=("experiment", "model", "context_length", "precision", "attention", "device",
            "batch_size"),
    seconds=2.0, most=15, bursts=False,
)  # fmt: skip
LOADED = sustained.loaded_race(RACE)
