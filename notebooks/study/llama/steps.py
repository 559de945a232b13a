"""Steps of arms: in turns on one model; alone, what fills their memory and how far they reach."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.bench import check
from fusedlib.bench.attempt import Unavailable, Wrong, free_memory, is_out_of_memory
from fusedlib.bench.turns import Checked, Turn
from study import liger, rivals, trainers
from study.allocator import CATEGORIES, Watch, at_peak, live
from study.cases import Case, Row
from study.compiling import graphs_compiled, graphs_refused, never_eager
from study.patched import (
    BATCH_INVARIANT,
    CONFIGS,
    GRAPH,
    GRAPHS,
    RECORDED,
    TASK,
    WHOLE,
    Call,
    ExactModel,
    LlamaTrainer,
    PlainLoss,
    alone,
    build,
    copy_of,
    plain_loss,
    require_possible,
    tokens,
)
from study.race import timed
from study.settings import matmul_settings
from study.trainers import watched_steps


class Setup:
    """One model; each arm is checked once and timed at each batch and context.

    Without an optimizer all arms share one set of weights.
    """

    def __init__(self, case: Case) -> None:
        self.exact = ExactModel.of(case)
        self.base = build(case["model"], case["dtype"], case["device"])
        self.losses: dict[tuple[int, int], PlainLoss] = {}

    def check(self, case: Case) -> Checked:
        """Hold an arm against the truth and set it up on the whole model."""
        one = rivals.get(TASK, case["provider"])
        before = graphs_compiled()
        figures = {**one.facts(), **self.exact.errors(one, case["dtype"])}
        if one.traits >= WHOLE and graphs_compiled() == before:
            raise Unavailable("torch.compile made no graph of it: it would run eagerly")
        if liger.is_liger(one.name):
            figures["path"] = self.exact.path(one) or liger.TRITON
        free_memory()
        model = copy_of(self.base, weights=case["optimizer"])
        call = one.build(model)
        return Checked(figures, lambda timed: self.turn(timed, model, call))

    def turn(self, case: Case, model: nn.Module, call: Call) -> Turn:
        """An arm's turns on one batch, whose loss at full size is compared and whose peaks are
        taken first.
        """
        traits = rivals.get(TASK, case["provider"]).traits
        graph = GRAPH in traits
        ids = tokens(case["model"], case["batch_size"], case["context_length"], case["device"])
        size = case["batch_size"], case["context_length"]
        if size not in self.losses:
            self.losses[size] = plain_loss(self.base, ids)
        program = LlamaTrainer(
            model, call, ids, optimizer=case["optimizer"], graph=graph,
            invariant=case["provider"] == BATCH_INVARIANT, labels=ids.clone(),
        )  # fmt: skip
        begin, refused = time.perf_counter(), graphs_refused()
        for _ in range(RECORDED * (GRAPHS in traits)):
            program.issue()
        figures: dict[str, float] = {}
        figures["loss"] = _checked_loss(program, self.losses[size], case["dtype"])
        if "searched" in traits:
            figures["search_s"] = time.perf_counter() - begin
        if GRAPHS in traits:
            figures["graphs_refused"] = graphs_refused() - refused
        if not traits & {GRAPH, GRAPHS}:  # their memory is held all the time
            figures |= program.activations() | trainers.peaks(program)
        turn = trainers.turn(program, steps=1)
        turn.figures |= figures
        return turn


LIKELIEST_ROUNDOFFS = 1.0
"""Of the products behind a loss, by which it may be off with the likeliest tokens as labels. To
round every hidden state once more moves it by a third of that at most, at 96 tokens; a part of one
layer that gives zeros by more, but for the last attention of sixteen layers."""


def _checked_loss(program: LlamaTrainer, plain: PlainLoss, dtype: str) -> float:
    """The loss of a step, held against the plain model's; so is that with the likeliest tokens as
    labels: random tokens cost about as much whatever the layers do, and those do not.
    """
    optimizer, program.optimizer = program.optimizer, None
    likeliest_loss, loss = (_loss(program, labels) for labels in (plain.likeliest, program.ids))
    program.optimizer = optimizer
    count = program.ids.numel()
    if not abs(loss / plain.loss - 1) <= _most_off(dtype, count, check.FLOOR_ROUNDOFFS):
        raise Wrong(f"loss {loss:.6g}, Hugging Face's is {plain.loss:.6g}", {"loss": loss})
    most = plain.loss * _most_off(dtype, count, LIKELIEST_ROUNDOFFS)  # it is of the logits' size
    if not abs(likeliest_loss - plain.likeliest_loss) <= most:
        raise Wrong(
            f"loss {likeliest_loss:.6g} where Hugging Face's likeliest tokens are the labels, its "
            f"own is {plain.likeliest_loss:.6g}: they may differ by {most:.2g}", {"loss": loss},
        )  # fmt: skip
    return loss


def _loss(program: LlamaTrainer, labels: Tensor) -> float:
    """Of a step with these labels, which stay."""
    assert program.labels is not None
    program.labels.copy_(labels)
    program.issue()
    return program.loss.item()


def _most_off(dtype: str, count: int, roundoffs: float) -> float:
    """How far a loss may be off, relatively: so many roundoffs of the products behind it, TF32's
    where torch takes it for fp32; but at least `check.FLOOR_ROUNDOFFS` of a sum of `count` tokens
    in fp32, whose errors walk at random.
    """
    tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    products = "float16" if tf32 else dtype  # both have eleven bits
    summed = check.FLOOR_ROUNDOFFS * count**0.5 * 2.0**-24
    return max(roundoffs * torch.finfo(getattr(torch, products)).eps / 2, summed)


def precision_of(case: Case) -> AbstractContextManager[None]:
    """torch's fp32 products as the case has them: "highest" is IEEE's, "high" TF32."""
    return matmul_settings(case.get("precision", "highest"), True)


class InFp32(Setup):
    """The same arms in fp32; where torch takes TF32, the floor of an error is TF32's roundoff."""

    def check(self, case: Case) -> Checked:
        """As in other dtypes."""
        rounded = "float32" if case["precision"] == "highest" else "float16"  # eleven bits, as TF32
        return super().check({**case, "dtype": rounded})


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


def race(cases: Sequence[Case]) -> list[Row]:
    """Arms in turns, in half precision or in fp32."""
    with never_eager():
        return timed(
            cases, InFp32 if cases[0]["experiment"] == "fp32" else Setup,
            # By repetitions, so that graphs of few tokens give their memory back before many.
            same=("model", "dtype", "device", "optimizer", "group", "precision", "repetitions"),
            available=require_possible, settings=precision_of,
            work=lambda case: {"tokens": case["batch_size"] * case["context_length"]},
            rounds=int(cases[0]["repetitions"]), warmup=1, bursts=False,
        )  # fmt: skip


# --- one arm alone --------------------------------------------------------------------------------

GROWING = {"batch": 1, "context": 256}
"""What a limit looks for, and the unit that it is told in."""


def memory(case: Case) -> dict[str, Any]:
    """What fills memory in the second of two whole steps, by the allocator's history.

    `logits` are blocks as wide as the vocabulary that are no weight, gradient or moment.
    """

    def make() -> LlamaTrainer:
        model, call = alone(case)
        size = case["batch_size"], case["context_length"]
        ids = tokens(case["model"], *size, case["device"])
        return LlamaTrainer(model, call, ids, optimizer=True)

    _, watch = watched_steps(make, torch.device(case["device"]), 2)
    figures = _split(watch, CONFIGS[case["model"]]["vocab_size"])
    return figures | {"tokens": case["batch_size"] * case["context_length"]}


def _split(watch: Watch, vocabulary: int) -> dict[str, float]:
    """The peak of the second step, and its parts by category."""
    odd = vocabulary // (vocabulary & -vocabulary)
    every, moments = watch.blocks(), watch.history.moments
    for block in every:
        passes = block.category in ("activations", "temporaries", "other")
        if passes and not block.nbytes % odd:
            block.category = "logits"
    held = live(every, len(watch.history.changes), (*CATEGORIES, "logits"))
    begin, end = moments["begin 2"], moments["step 2"]
    return at_peak({name: series[begin:end] for name, series in held.items()})


def limit(case: Case) -> dict[str, Any]:
    """The largest batch, or the longest context, whose whole step fits, on a CUDA card."""
    model, call = alone(case)
    program = LlamaTrainer(model, call, tokens(case["model"], 1, 2, "cuda"), optimizer=True)
    grows, unit = case["grows"], GROWING[case["grows"]]
    at = ("batch", "context").index(grows)

    def fits(count: int) -> bool:
        size = [case["batch_size"], case["context_length"]]
        size[at] = count * unit
        free_memory()
        try:
            program.ids = tokens(case["model"], size[0], size[1], "cuda")
            program.issue()
            torch.cuda.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            model.zero_grad(set_to_none=True)
            return False
        return True

    first = max(1, (case["batch_size"], case["context_length"])[at] // unit)
    with never_eager():
        return {"largest": furthest(fits, first) * unit}


def furthest(fits: Callable[[int], bool], first: int) -> int:
    """The largest count that fits: doubled until one does not, then the gap is halved."""
    if not fits(first):
        raise MemoryError(f"out of memory at {first} already")
    low, high = first, 2 * first
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
