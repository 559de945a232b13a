"""Arms in turns on one model: in half precision, in fp32, and under load."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fusedlib.bench import check
from fusedlib.bench.attempt import Unavailable, Wrong, free_memory
from fusedlib.bench.turns import Checked, Turn
from study import rivals, step_clock
from study.cases import Case, Row
from study.patched import (
    CONFIGS,
    TASK,
    Call,
    ExactModel,
    LlamaTrainer,
    build,
    copy_of,
    few_threads,
    path_of,
    plain_loss,
    require_possible,
    tokens,
)
from study.race import loaded, timed
from study.settings import matmul_settings


class Setup:
    """One model; each arm is checked once and timed at each batch and context.

    Without an optimizer all arms share one set of weights.
    """

    def __init__(self, case: Case) -> None:
        self.exact = ExactModel.of(case)
        self.base = build(case["model"], case["dtype"], case["device"])
        self.losses: dict[tuple[int, int], float] = {}

    def check(self, case: Case) -> Checked:
        """Hold an arm against the truth and set it up on the whole model."""
        one = rivals.get(TASK, case["provider"])
        figures = {**one.facts(), **self.exact.errors(one, case["dtype"]), "path": path_of(case)}
        free_memory()
        model = copy_of(self.base, weights=case["optimizer"])
        call = one.build(model)
        return Checked(figures, lambda timed: self.turn(timed, model, call, "graph" in one.traits))

    def turn(self, case: Case, model: nn.Module, call: Call, graph: bool) -> Turn:
        """An arm's turns on one batch, whose loss at full size is compared and whose peaks are
        taken first.
        """
        ids = tokens(case["model"], case["batch_size"], case["context_length"], case["device"])
        size = case["batch_size"], case["context_length"]
        if size not in self.losses:
            self.losses[size] = plain_loss(self.base, ids)
        program = LlamaTrainer(model, call, ids, optimizer=case["optimizer"], graph=graph)
        figures = {"loss": _checked_loss(program, self.losses[size], case["dtype"])}
        figures |= program.activations() | ({} if graph else step_clock.peaks(program, steps=1))
        turn = step_clock.turn(program, steps=1)
        turn.figures |= figures
        return turn


def _checked_loss(program: LlamaTrainer, baseline: float, dtype: str) -> float:
    """The loss of a step.

    Raises:
        Wrong: it is further from plain PyTorch's than a few roundoffs.
    """
    optimizer, program.optimizer = program.optimizer, None
    program.issue()
    program.optimizer = optimizer
    loss = program.loss.item()
    most = check.FLOOR_ROUNDOFFS * _loss_roundoff(dtype, program.ids.numel())
    if not abs(loss / baseline - 1) <= most:
        raise Wrong(f"loss {loss:.6g}, Hugging Face's is {baseline:.6g}", {"loss": loss})
    return loss


def _loss_roundoff(dtype: str, count: int) -> float:
    """Of the products behind a loss, TF32's where torch takes it for fp32; but at least that of a
    sum of so many tokens in fp32, whose errors walk at random.
    """
    tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    products = "float16" if tf32 else dtype  # both have eleven bits
    return max(torch.finfo(getattr(torch, products)).eps / 2, count**0.5 * 2.0**-24)


@contextmanager
def at_precision(case: Case) -> Iterator[None]:
    """torch's fp32 products as the case has them: "highest" is IEEE's, "high" TF32."""
    with matmul_settings(case["precision"], True), few_threads(case):
        yield


class InFp32(Setup):
    """The same arms in fp32; where torch takes TF32, the floor of an error is TF32's roundoff."""

    def check(self, case: Case) -> Checked:
        """As in other dtypes."""
        rounded = "float32" if case["precision"] == "highest" else "float16"  # eleven bits, as TF32
        checked = super().check({**case, "dtype": rounded})
        return Checked(checked.figures | {"path": path_of(case)}, checked.turn)


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


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is made."""
    require_possible(case)
    if case["experiment"] == "sustained":
        require_cuda(case, "sustained runs need a CUDA GPU")


def require_cuda(case: Case, why: str) -> None:
    """Raise `Unavailable` away from CUDA."""
    if torch.device(case["device"]).type != "cuda":
        raise Unavailable(why)


def _work(case: Case) -> dict[str, Any]:
    """Tokens of a step; under load also its FLOPs."""
    found = {"tokens": case["batch_size"] * case["context_length"]}
    return found | ({"flops": flops(case)} if case["experiment"] == "sustained" else {})


def race(cases: Sequence[Case]) -> list[Row]:
    """Arms in turns, in half precision or in fp32, or each alone under load."""
    experiment = cases[0]["experiment"]
    how: dict[str, Any] = {
        "same": ("model", "dtype", "device", "optimizer", "group", "precision"),
        "available": available, "settings": few_threads, "work": _work,
    }  # fmt: skip
    if experiment == "sustained":
        return loaded(cases, Setup, **how)
    if experiment == "fp32":
        how["settings"] = at_precision
    rounds = int(cases[0]["repetitions"])
    setup = InFp32 if experiment == "fp32" else Setup
    return timed(cases, setup, rounds=rounds, warmup=1, bursts=False, **how)
