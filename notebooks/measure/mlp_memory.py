"""Study 04: what a SwiGLU MLP keeps for backward, what one step holds, and what deep stacks hold.

Three ways to measure that share nothing: saved-tensor hooks, every allocation as the profiler sees
it, and the peak that CUDA's allocator keeps itself. What is counted stands in `ledger`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from fusedlib import reference
from fusedlib.bench import check, rivals
from fusedlib.bench.attempt import forget_compiled, free_memory, require_memory
from fusedlib.bench.cases import Case, grid, require_least
from fusedlib.bench.operation import Operation, required_results
from fusedlib.bench.rivals import Rival, Workload
from fusedlib.bench.settings import MIB
from measure import mlp_ledger, mlp_rivals, pass_memory, study
from measure.mlp_problem import SwiGLUProblem, draw
from measure.mlp_rivals import MODULE, TASK
from measure.pass_memory import CATEGORIES, Trace
from measure.study import Experiment, Positive, Study
from measure.swiglu import sizes

# The check in float64 takes many times a step's memory: at most so many tokens, and so wide.
MOST_TOKENS, WIDEST = 8192, 16_384
# Share of the peak that the events may be off before they are not taken for its parts.
COMPLETE = 0.005
SHAPE = ("tokens", "hidden_size", "intermediate_size", "dtype")


def cases(
    shapes: Iterable[str | tuple[int, int, int]], rival_names: Sequence[str], *, dtype: str,
    device: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """For each shape and rival what autograd keeps ("saved") and what one step holds ("step")."""
    names = [
        n for n in rivals.chosen(TASK, rival_names) if "bound" not in rivals.get(TASK, n).traits
    ]
    return grid(
        {"device": device}, shape=[_fields(shape, dtype) for shape in shapes], provider=names,
        experiment=("saved", "step"),
    )  # fmt: skip


def stack_cases(
    shape: str, layers: Sequence[int], rival_names: Sequence[str], *, dtype: str, device: str
) -> list[dict[str, Any]]:
    """Stacks of that many layers, without gradients from an earlier pass and with them held."""
    require_least(1, layers=layers)
    shared = {"experiment": "stack", "device": device, **_fields(shape, dtype)}
    names = rivals.chosen(MODULE, rival_names)
    return grid(shared, layers=layers, provider=names, held=(False, True))


def _fields(shape: str | tuple[int, int, int], dtype: str) -> dict[str, Any]:
    problem = SwiGLUProblem(*sizes(shape), dtype)
    return {name: getattr(problem, name) for name in SHAPE}


def measure(case: Case) -> dict[str, Any]:
    """The row's figures, in MiB.

    Raises:
        Refused: the rival is wrong, cannot run here, or is counted far above the memory there is.
    """
    rival = rivals.get(MODULE if case["experiment"] == "stack" else TASK, case["provider"])
    problem, device = SwiGLUProblem.of(case), case["device"]
    rival.check_available(device, problem.dtype)
    require_memory(counted_mib(case) / 1024, device)
    forget_compiled()
    free_memory()  # also when the case before ended in an exception
    checked = SwiGLUProblem(
        min(problem.tokens, MOST_TOKENS), min(problem.hidden_size, WIDEST),
        min(problem.intermediate_size, WIDEST), problem.dtype,
    )  # fmt: skip
    figures = rival.facts() | {"checked_at": checked.shape} | _errors(rival, checked, device)
    if rival.task == MODULE:
        return figures | _stack(case)
    idle = _allocated(device)
    inputs = draw(problem, device)
    work = rival.build(inputs)
    figures["path"] = work.path
    if case["experiment"] == "saved":
        kept = pass_memory.kept_for_backward(work)
        return figures | {"saved_mib": kept["mib"], "kept": kept["tensors"]}
    return figures | {"idle_mib": idle / MIB} | _step(work, inputs.dy, device)


def counted_mib(case: Case) -> float:
    """All that a case needs at its peak by the ledger, weights, x and dy included, in MiB.

    Weights and inputs alone for a rival that nobody has counted.
    """
    problem = SwiGLUProblem.of(case)
    book = mlp_ledger.of(case["provider"], case.get("path"), problem.dtype)
    deep = case["experiment"] == "stack"
    layers, held = (int(case["layers"]), bool(case["held"])) if deep else (1, False)
    weights, ends = (mlp_ledger.W * 3 * layers).mib(problem), (mlp_ledger.D * 2).mib(problem)
    over = mlp_ledger.stack_peak_mib(book, layers, problem, held=held) if book else {}
    return ends + (2 if held else 1) * weights + sum(over.values())


@cache
def _errors(rival: Rival, problem: SwiGLUProblem, device: str) -> dict[str, Any]:
    """What the check in float64 says: only what is right, with every gradient, is measured.

    Raises:
        Wrong: it misses the reference.
    """
    inputs = draw(problem, device)
    setup = Operation(TASK, inputs, reference.swiglu_mlp)
    module = rival.task == MODULE
    work = mlp_rivals.one_layer(rival.name, problem, inputs) if module else rival.build(inputs)
    return setup.error_figures(rival, check.results_of(work, inputs.dy), required_results(inputs))


def _step(work: Workload, dy: Tensor, device: str) -> dict[str, Any]:
    """Forward and backward once, every allocation seen, after a pass that is not measured."""
    operands = sum(leaf.untyped_storage().nbytes() for leaf in work.leaves.values())
    work.forward().backward(dy)
    work.reset()
    base = _allocated(device)
    trace = _traced(work.forward, dy, device)
    figures = _moments(trace, device, base)
    work.reset()
    if figures["complete"]:
        figures |= {f"live_{name}_mib": live for name, live in trace.live_mib().items()}
    return figures | {
        "operands_mib": operands / MIB,
        "dy_mib": dy.untyped_storage().nbytes() / MIB,
        "forward_events": trace.forward_events,
    }


def _traced(forward: Callable[[], Tensor], dy: Tensor, device: str) -> Trace:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return pass_memory.trace(forward, dy)


def _moments(trace: Trace, device: str, base: int) -> dict[str, Any]:
    """MiB over base after the forward, at the peak with its parts, and in gradients at the end.

    On CUDA the allocator's own counts are the figures, and the events give the parts. Where their
    peak is not the allocator's (`complete` False: the profiler does not see what torch's checkpoint
    releases), there are no parts.
    """
    live = trace.live_mib()
    held = [sum(parts) for parts in zip(*(live[name] for name in CATEGORIES), strict=True)]
    forward = trace.forward_events - 1
    at = max(range(len(held)), key=lambda event: held[event])
    peak, after = held[at], held[forward]
    if device == "cuda" and trace.forward_bytes is not None:
        peak = (torch.cuda.max_memory_allocated() - base) / MIB
        after = (trace.forward_bytes - base) / MIB
    output = sum(b.nbytes for b in trace.blocks if b.category == "output") / MIB
    complete = abs(held[at] - peak) <= COMPLETE * peak
    figures = {
        "after_forward_mib": after, "output_mib": output, "saved_mib": after - output,
        "peak_mib": peak, "events_peak_mib": held[at], "complete": complete,
    }  # fmt: skip
    if complete:
        figures["gradients_mib"] = live["gradients"][-1]
        figures |= {f"peak_{name}_mib": live[name][at] for name in CATEGORIES}
    return figures


def _stack(case: Case) -> dict[str, Any]:
    problem, device = SwiGLUProblem.of(case), case["device"]
    held = bool(case["held"])
    modules = mlp_rivals.stack(case["provider"], problem, int(case["layers"]), device)
    x = torch.randn(problem.tokens, problem.hidden_size, device=device).to(problem.torch_dtype)
    x, dy = x.requires_grad_(), torch.ones_like(x)
    modules[0](x).backward(dy)  # libraries, kernels and workspaces are there from now on
    if held:
        modules(x).backward(dy)
    else:
        modules.zero_grad(set_to_none=True)
    x.grad = None
    base = _allocated(device)
    figures = _moments(_traced(partial(modules, x), dy, device), device, base)
    weights = sum(w.untyped_storage().nbytes() for w in modules.parameters()) / MIB
    ends = 2 * dy.untyped_storage().nbytes() / MIB
    figures["total_peak_mib"] = (2 if held else 1) * weights + ends + figures["peak_mib"]
    return figures | {"path": mlp_rivals.path(modules[0], x)}


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


# --- the study -----------------------------------------------------------------------------------


class Sizes(study.Sizes):
    """Shapes, rivals and depths of study 04."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    rivals: list[str] = ["all", "fused-input"]
    """who is measured at the shapes"""
    everywhere: list[str] = ["light", "fused-input"]
    """elsewhere; light: all that need no compiler"""
    shapes: list[str] = ["128·128·384"]
    """bf16 MLPs, tokens·hidden·intermediate"""
    tokens: list[int] = [64, 512]
    """numbers of tokens at the first shape's widths"""
    sweep_tokens: Positive = 64
    """tokens of the published sweep"""
    sweep_widths: list[int] = [64, 128, 256]
    """widths of the published sweep, fp32"""
    grid_tokens: list[int] = [128]
    """tokens of the published grid"""
    grid_widths: list[int] = [128]
    """widths of the published grid, fp32"""
    layers: list[int] = [1, 4]
    """depths of the stacks"""
    stack_fp32: str = "64·128·128"
    """a layer of the fp32 stack"""
    stack_bf16: str = "256·128·352"
    """a layer of the bf16 stack"""


def _cases(chosen: Sizes) -> list[dict[str, Any]]:
    half = {"dtype": "bfloat16", "device": chosen.where}
    single = half | {"dtype": "float32"}
    of_first = [(n, *sizes(shape)[1:]) for shape in chosen.shapes[:1] for n in chosen.tokens]
    squares = [(chosen.sweep_tokens, width, width) for width in chosen.sweep_widths]
    squares += [(n, width, width) for n in chosen.grid_tokens for width in chosen.grid_widths]
    return [
        *cases(chosen.shapes, chosen.rivals, **half),
        *cases(of_first, chosen.everywhere, **half),
        *cases(squares, chosen.everywhere, **single),
        *stack_cases(chosen.stack_fp32, chosen.layers, chosen.everywhere, **single),
        *stack_cases(chosen.stack_bf16, chosen.layers, chosen.everywhere, **half),
    ]


STUDY = Study("04_memory", Sizes, [Experiment("memory", measure, _cases)])
