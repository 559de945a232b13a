"""Study 10: the operations of a Llama alone, each beside its rivals and what bounds it.

task   operands -> outputs                                      bounded by
loss   hidden (tokens, hidden), weight (vocabulary, hidden),    its three products
       target (tokens,) -> mean cross entropy
norm   x, residual (tokens, hidden), weight (hidden,)           a copy of as many bytes
       -> y, s = x + residual
rope   q, k (batch, heads, context, head), cos, sin             a copy of as many bytes
       (1, context, head) -> q, k turned, in memory (batch, context, heads, head) as projections are

A task is an experiment of the study; its rivals are functions of the operands, named as above, to
the outputs in that order. What bounds a task is made for its operands and does as much and no more.

On CUDA a norm or rope is timed as a CUDA graph of `SETS` calls in a row, each on operands of its
own, all results kept: no host's time, and an L2 that holds little of what comes next. In a loss
some rivals wait for the host, so all are launched from Python.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

import fusedlib
from fusedlib import reference
from fusedlib.bench import check, cuda_graphs, rivals, timing
from fusedlib.bench.attempt import Unavailable, Wrong
from fusedlib.bench.cases import Case, device_of, grid, require_known, require_least
from fusedlib.bench.race import Checked, Figures, Race, Turn
from fusedlib.bench.rivals import Task, rival
from fusedlib.bench.settings import DTYPES
from measure import llama
from measure.pass_memory import mib_of, peak_over_mib

HEADS, KEY_HEADS = 32, 8
SETS = 8
BOTH = "forward+backward"
EPS, THETA, SCALE = 1e-5, 500_000.0, 0.02  # of Llama-3.2-1B
DIRECTIONS = {"loss": (BOTH,), "norm": ("forward", BOTH), "rope": ("forward", BOTH)}
COMPILER: dict[str, Any] = {"fullgraph": True, "dynamic": False, "mode": "default"}
BOUND, COMPILED = frozenset({"bound"}), frozenset({"on request", "compiled"})
Outputs = tuple[Tensor, ...]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Operands:
    """One set: what wants gradients, what does not, and the gradients of the outputs by name."""

    leaves: dict[str, Tensor]
    fixed: dict[str, Tensor]
    upstream: dict[str, Tensor]

    def each(self) -> dict[str, Tensor]:
        """All of them; an output's gradient goes by `upstream` and its name."""
        upstream = {f"upstream {name}": tensor for name, tensor in self.upstream.items()}
        return self.leaves | self.fixed | upstream

    def to(self, dtype: torch.dtype) -> "Operands":
        """The same values in another dtype; numbers of classes and scalars stay."""
        leaves, fixed, upstream = (
            {n: t.detach().to(dtype) if t.is_floating_point() and t.dim() else t for n, t in part}
            for part in (self.leaves.items(), self.fixed.items(), self.upstream.items())
        )
        return Operands({n: t.requires_grad_() for n, t in leaves.items()}, fixed, upstream)


def draw(case: Case, seed: int) -> Operands:
    """Random operands of a case, the same ones for the same seed and device."""
    on = {"device": case["device"]}
    generator = torch.Generator(**on).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, **on)

    batch, length, width = case["batch_size"], case["context_length"], case["hidden_size"]
    tokens, fixed = batch * length, {}
    if case["experiment"] == "loss":
        classes = case["vocabulary"]
        leaves = {"hidden": normal(tokens, width), "weight": SCALE * normal(classes, width)}
        fixed = {"target": torch.randint(classes, (tokens,), generator=generator, **on)}
        upstream = {"loss": torch.ones((), **on)}
    elif case["experiment"] == "norm":
        leaves = {"x": normal(tokens, width), "residual": normal(tokens, width),
                  "weight": 1 + 0.1 * normal(width)}  # fmt: skip
        upstream = {"y": normal(tokens, width), "s": normal(tokens, width)}
    else:
        head = width // case["heads"]
        q, k, dq, dk = (
            normal(batch, length, heads, head).transpose(1, 2)
            for heads in 2 * (case["heads"], case["key_heads"])
        )
        steps = THETA ** -(torch.arange(0, head, 2, **on) / head)
        angles = torch.outer(torch.arange(length, **on), steps).repeat(1, 2)[None]
        leaves, upstream = {"q": q, "k": k}, {"q_out": dq, "k_out": dk}
        fixed = {"cos": angles.cos(), "sin": angles.sin()}
    return Operands(leaves, fixed, upstream).to(getattr(torch, case["dtype"]))


def results(forward: Callable[..., Outputs], operands: Operands, direction: str) -> Results:
    """The outputs by name and, going backward, the gradients that arrive."""
    outputs = forward(**operands.leaves, **operands.fixed)
    named = list(zip(operands.upstream, outputs, strict=True))
    named_results = {name: output.detach() for name, output in named}
    reached = [(o, operands.upstream[name]) for name, o in named if o.requires_grad]
    if direction == "forward" or not reached:
        return named_results
    gradients = torch.autograd.grad(
        [o for o, _ in reached], list(operands.leaves.values()), [d for _, d in reached],
        allow_unused=True,
    )  # fmt: skip
    return named_results | {
        f"d_{name}": gradient
        for name, gradient in zip(operands.leaves, gradients, strict=True)
        if gradient is not None
    }


# --- rivals --------------------------------------------------------------------------------------


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """linear, float() and cross_entropy, as transformers' models have them."""
    logits = linear(hidden, weight)
    return (cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target),)


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """The residual stream first, then its norm."""
    s = x + residual
    return reference.rms_norm(s, weight, EPS), s


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """q and k one after the other."""
    return reference.rope(q, cos, sin), reference.rope(k, cos, sin)


PLAIN: dict[str, Callable[..., Outputs]] = {
    "loss": plain_loss, "norm": plain_norm, "rope": plain_rope
}  # fmt: skip
TASKS: dict[str, Task[..., Any]] = {name: Task(name) for name in PLAIN}


class _Norm(NamedTuple):
    """What LlamaRMSNorm's forward reads of its module."""

    weight: Tensor
    variance_epsilon: float = EPS


def llama_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """transformers' LlamaRMSNorm after an addition."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    s = x + residual
    return LlamaRMSNorm.forward(_Norm(weight), s), s


def llama_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """transformers' apply_rotary_pos_emb."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    turned: Outputs = apply_rotary_pos_emb(q, k, cos, sin)
    return turned


_HUGGING_FACE: tuple[Callable[..., Outputs], ...] = (plain_loss, llama_norm, llama_rope)
for _task, _build in zip(TASKS, _HUGGING_FACE, strict=True):
    _packages: tuple[str, ...] = () if _task == "loss" else ("transformers",)
    rival(TASKS[_task], llama.BASELINE, requires=_packages)(_build)
    # Not of "all": a compilation takes longer than everything else in `quick`.
    rival(TASKS[_task], "inductor", requires=_packages, traits=COMPILED)(_build)


def _loss(name: str, build: Callable[..., Outputs], settings: str, **look: Any) -> None:
    rival(TASKS["loss"], name, settings=settings, **look)(build)


def liger_loss(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Outputs:
    """Liger's fused linear cross entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return (liger_fused_linear_cross_entropy(hidden, weight, target, **settings),)


_liger = "Liger's fused linear cross entropy"
_loss("liger", liger_loss, f"{_liger} as it comes: d_weight summed in the weight's dtype")
_loss("liger-fp32", partial(liger_loss, accum_dtype=torch.float32),
      f"{_liger}, accum_dtype=torch.float32")  # fmt: skip


@rival(TASKS["norm"], "liger")
def liger_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """Liger's fused add RMSNorm, in_place=False: its default writes over the incoming gradient."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    outputs: Outputs = liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False)
    return outputs


@rival(TASKS["rope"], "liger", traits=frozenset({"in place"}))
def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """Liger's RoPE, in place on operands and incoming gradients that nobody else reads."""
    from liger_kernel.transformers import liger_rotary_pos_emb

    turned: Outputs = liger_rotary_pos_emb(q, k, cos, sin)
    return turned


@rival(TASKS["loss"], "torch-chunked", label="PyTorch, chunked", slot=10)
def torch_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """torch.nn.functional.linear_cross_entropy, options=LinearCrossEntropyOptions()."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy in chunks")
    options = torch.nn.LinearCrossEntropyOptions()
    return (torch.nn.functional.linear_cross_entropy(hidden, weight, target, options=options),)


def quack_loss(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Outputs:
    """QuACK's linear cross entropy, tiles as they come."""
    from quack.linear_cross_entropy import (  # type: ignore[import-not-found]
        chunked_linear_cross_entropy,
    )

    return (chunked_linear_cross_entropy(hidden, weight, target, tuned=False, **settings),)


def cut_loss(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Outputs:
    """Cut cross entropy."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    if lacking := set(settings) - set(signature(linear_cross_entropy).parameters):
        raise Unavailable(f"this cut_cross_entropy takes no {', '.join(lacking)}")
    return (linear_cross_entropy(hidden, weight, target, **settings),)


_quack, _cut = "QuACK's chunked_linear_cross_entropy", "cut cross entropy"
_loss("quack", quack_loss, f"{_quack}, its own choice of a way, tiles as they come",
      label="QuACK", slot=4)  # fmt: skip
_loss("quack-unfused", partial(quack_loss, use_scaled_exp=False),
      f"{_quack}, use_scaled_exp=False, tiles as they come",
      label="QuACK, backward not fused", slot=13)  # fmt: skip
_loss("cut", cut_loss, "Cut cross entropy as it comes: skips blocks of gradients below a 32nd of "
      "the dtype's eps", label=_cut, slot=5)  # fmt: skip
_loss("cut-whole", partial(cut_loss, filter_eps=None),
      "Cut cross entropy, filter_eps=None: no block is skipped",
      label=f"{_cut}, nothing skipped", slot=12)  # fmt: skip
_loss("cut-kahan", partial(cut_loss, filter_eps=None, use_kahan=True),
      "Cut cross entropy, filter_eps=None, use_kahan=True: gradients by compensated sums",
      label=f"{_cut}, compensated sums", slot=14)  # fmt: skip


@rival(TASKS["loss"], "fused")
def fused_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """fusedlib.linear_cross_entropy, d_weight summed in fp32."""
    return (fusedlib.linear_cross_entropy(hidden, weight, target),)


@rival(TASKS["norm"], "fused")
def fused_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """fusedlib.rms_norm with its residual."""
    return tuple(fusedlib.rms_norm(x, weight, EPS, residual=residual))


@rival(TASKS["rope"], "fused")
def fused_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """fusedlib.rope of q and k."""
    return fusedlib.rope(q, k, cos, sin)


@rival(TASKS["loss"], "products", traits=BOUND)
def products(operands: Operands, case: Case) -> Callable[[], None]:
    """The problem's logits, d_hidden and d_weight by torch.mm, each into a tensor that exists."""
    hidden, weight = (t.detach() for t in operands.leaves.values())
    target = operands.fixed["target"]
    logits = hidden @ weight.mT
    d_logits = torch.softmax(logits, -1, dtype=torch.float32).to(logits.dtype)
    d_logits[torch.arange(len(target), device=target.device), target] -= 1
    d_logits /= len(target)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.mT, out=logits)
        torch.mm(d_logits, weight, out=d_hidden)
        torch.mm(d_logits.mT, hidden, out=d_weight)

    return run


def copy(operands: Operands, case: Case) -> Callable[[], None]:
    """A copy of as many bytes as the operation must move, one a pass, by a kernel: x · 1 in fp32.

    `copy_` is the driver's, which took 1.5 times as long for 64 MiB.
    """
    passes = case["direction"].count("+") + 1
    size = work(case)["compulsory_bytes"] // passes // 2 // 4
    source = torch.rand(size, device=case["device"])
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(passes):
            torch.mul(source, 1.0, out=target)

    return run


for _task in ("norm", "rope"):
    rival(TASKS[_task], "copy", traits=BOUND)(copy)


# --- cases ---------------------------------------------------------------------------------------


def cases(
    experiment: str, rival_names: Iterable[str], *, widths: Sequence[int], vocabulary: int,
    batch_size: int, context_length: int, dtype: str, device: str, repetitions: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a width, direction and rival.

    Args:
        rival_names: "all" for every one that does not compile for long.
        widths: hidden sizes; of `rope`, heads together.
        vocabulary: rows of the loss's weight.

    Raises:
        ValueError: an unknown name, a size below 1, or a width that heads of an even size do not
            share.
    """
    require_known("experiment", experiment, TASKS)
    require_known("dtype", dtype, DTYPES)
    require_least(
        1, vocabulary=vocabulary, batch_size=batch_size, context_length=context_length,
        repetitions=repetitions, widths=widths,
    )  # fmt: skip
    heads = {"heads": HEADS, "key_heads": KEY_HEADS} if experiment == "rope" else {}
    if odd := [width for width in widths if heads and width % (2 * HEADS)]:
        raise ValueError(f"width {odd[0]} is no multiple of {2 * HEADS}: {HEADS} heads turn pairs")
    where = device_of(device)
    graph = experiment != "loss" and torch.device(where).type == "cuda"
    shared = {
        "experiment": experiment, "batch_size": batch_size, "context_length": context_length,
        **heads, "vocabulary": vocabulary if experiment == "loss" else None, "dtype": dtype,
        "launch": "graph" if graph else "python", "device": where, "repetitions": repetitions,
    }  # fmt: skip
    names = rivals.chosen(TASKS[experiment], rival_names)
    return grid(shared, hidden_size=widths, direction=DIRECTIONS[experiment], provider=names)


def work(case: Case) -> Figures:
    """FLOPs of a loss's products; the fewest bytes of a norm or a rope, each pass for itself.

    In a step both passes lie apart: what backward needs it reads again. Forward of a norm x,
    residual, weight, y, s; backward dy, ds, s, weight, d_weight and one gradient, which is that of
    x and of residual. Of a rope q, k, both results, cos and sin, or the gradients instead.
    """
    length, width = case["context_length"], case["hidden_size"]
    tokens = case["batch_size"] * length
    if case["experiment"] == "loss":
        return {"tokens": tokens, "flops": 3 * 2 * tokens * width * case["vocabulary"]}
    if case["experiment"] == "norm":
        passes = [4 * tokens * width + width, 4 * tokens * width + 2 * width]
    else:
        head = width // case["heads"]
        passes = 2 * [2 * tokens * (case["heads"] + case["key_heads"]) * head + 2 * length * head]
    numbers = sum(passes[: len(case["direction"].split("+"))])
    return {"tokens": tokens, "compulsory_bytes": numbers * DTYPES[case["dtype"]]}


# --- the race ------------------------------------------------------------------------------------


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is drawn."""
    rivals.get(TASKS[case["experiment"]], case["provider"]).check_available(
        case["device"], case["dtype"]
    )


class Setup:
    """Sets of operands, and of the first one the truth in float64 and plain PyTorch's errors."""

    def __init__(self, case: Case) -> None:
        self.case, plain = case, PLAIN[case["experiment"]]
        self.first, self.sets = draw(case, 0), self._draw()
        self.true = results(plain, self.first.to(torch.float64), BOTH)
        self.baseline = check.errors(results(plain, self.first, BOTH), self.true)

    def _draw(self) -> list[Operands]:
        sets = SETS if self.case["launch"] == "graph" else 1
        return [draw(self.case, seed) for seed in range(sets)]

    def check(self, case: Case) -> Checked:
        """Set a rival up and hold all outputs and gradients against the truth.

        Raises:
            Wrong: one misses, or it wrote over what it was given without saying so.
        """
        one = rivals.get(TASKS[case["experiment"]], case["provider"])
        if "bound" in one.traits:
            return Checked(
                one.facts(),
                lambda timed: self._turn(timed, [one.build(each, timed) for each in self.sets]),
            )
        in_place, compiled = "in place" in one.traits, "compiled" in one.traits
        sets = self._draw() if in_place else self.sets
        forward = torch.compile(one.build, **COMPILER) if compiled else one.build
        first_results = results(forward, sets[0], BOTH)
        figures = {**one.facts(), "path": llama.path_of(case)}
        figures["compiler"] = str(COMPILER) if compiled else None
        try:
            figures |= self._error_figures(first_results, BOTH)
        finally:
            written = self._restore(sets[0])
        if written and not in_place:
            raise Wrong(f"wrote over {', '.join(written)}", figures)

        def turn(timed: Case) -> Turn:
            calls = [partial(results, forward, each, timed["direction"]) for each in sets]
            return self._turn(timed, calls, sets[0])

        return Checked(figures, turn)

    def _error_figures(self, results_of_call: Results, direction: str) -> Figures:
        required = list(self.true if direction == BOTH else self.first.upstream)
        dtype = getattr(torch, self.case["dtype"])
        return check.require(
            check.errors(results_of_call, self.true), self.baseline, dtype, required
        )

    @torch.no_grad()
    def _restore(self, operands: Operands) -> list[str]:
        """Put the first set's values back; the names of those that had others."""
        drawn, now = self.first.each(), operands.each()
        written = [name for name in drawn if not torch.equal(now[name], drawn[name])]
        for name in written:
            now[name].copy_(drawn[name])
        return written

    def _turn(
        self, timed: Case, calls: Sequence[Callable[[], Any]], given: Operands | None = None
    ) -> Turn:  # fmt: skip
        """The turns of one call, or of a graph of all; what is checked is what the first one gives
        on `given`, where there is something to check.
        """
        if timed["launch"] != "graph":

            def once() -> None:
                calls[0]()

            return Turn(
                once, figures=_peaks(calls[0]) if given and timed["device"] == "cuda" else {}
            )
        kept: list[Any] = []

        def every() -> None:
            kept.clear()
            kept.extend(call() for call in calls)

        replay, clock = cuda_graphs.capture_call(every).replay, timing.clock_for(timed["device"])
        figures: Figures = {}
        if given:
            self._restore(given)
            replay()
            figures = self._error_figures(kept[0], timed["direction"])

        def run() -> Mapping[str, float]:
            replay()  # the device is busy while the host issues what is timed
            start = clock.mark()
            replay()
            return {"total": clock.elapsed_ms(start, clock.mark()) / len(calls)}

        return Turn(run, figures=figures)


def _peaks(call: Callable[[], Results]) -> Figures:
    """MiB at the peak over what lay there, and how much of it is gradients."""
    given: Results = {}
    peak = peak_over_mib(lambda: given.update(call()))
    gradients = mib_of(tensor for name, tensor in given.items() if name.startswith("d_"))
    return {"peak_mib": peak, "gradients_mib": gradients}


RACE = Race(
    setup=Setup, settings=llama.few_threads, available=available, work=work, bursts=False,
    fields=("experiment", "batch_size", "context_length", "hidden_size", "vocabulary", "dtype",
            "launch", "device"),
    seconds=0.5, most=30,
)  # fmt: skip
