"""Study 04: what a SwiGLU MLP keeps for backward, what one step holds, and what deep stacks hold.

Three ways to measure that share nothing: saved-tensor hooks, every allocation as the profiler sees
it, and the peak that CUDA's allocator keeps itself. What is counted stands in `ledger`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from fusedlib import reference
from fusedlib.bench.arguments import require_least
from fusedlib.bench.attempt import forget_compiled, free_memory
from measure import mlp_ledger, pass_memory, study
from measure.pass_memory import CATEGORIES, Trace
from measure.racing import rivals
from measure.racing.cases import Case, grid
from measure.racing.memory import require_memory
from measure.racing.operation import Operation
from measure.racing.rivals import Rival, Workload, workload
from measure.racing.settings import MIB
from measure.study import Column, Experiment, Positive, Study
from study import mlp
from study.mlp import MODULE, TASK, SwiGLUProblem, draw, sizes

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
    name, deep = case["provider"], case["experiment"] == "stack"
    rival: Rival[..., Any] = rivals.get(MODULE, name) if deep else rivals.get(TASK, name)
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
    if deep:
        return figures | _stack(case)
    idle = _allocated(device)
    inputs = draw(problem, device)
    work = workload(rivals.get(TASK, name), inputs)
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
def _errors(rival: Rival[..., Any], problem: SwiGLUProblem, device: str) -> dict[str, Any]:
    """What the check in float64 says: only what is right, with every gradient, is measured.

    Raises:
        Wrong: it misses the reference.
    """
    inputs = draw(problem, device)
    setup = Operation(TASK, inputs, reference.swiglu_mlp)
    work = (
        mlp.one_layer(rival.name, problem, inputs) if rival.task == MODULE
        else workload(rival, inputs)
    )  # fmt: skip
    return setup.figures_of(rival, work)


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
    modules = mlp.stack(case["provider"], problem, int(case["layers"]), device)
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
    return figures | {"path": mlp.path(modules[0], x)}


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


# --- the study -----------------------------------------------------------------------------------


class Sizes(study.Sizes):
    """Shapes, rivals and depths of study 04."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    rivals: list[str] = ["light", "fused-input"]
    """who is measured at the shapes; light: all that need no compiler"""
    everywhere: list[str] = ["light", "fused-input"]
    """elsewhere"""
    shapes: list[str] = ["128·128·448"]
    """bf16 MLPs, tokens·hidden·intermediate"""
    tokens: list[int] = [8, 32, 512]
    """numbers of tokens at the first shape's widths"""
    sweep_tokens: Positive = 64
    """tokens of the published sweep"""
    sweep_widths: list[int] = [64, 128, 256]
    """widths of the published sweep, fp32"""
    grid_tokens: list[int] = [128]
    """tokens of the published grid"""
    grid_widths: list[int] = [128]
    """widths of the published grid, fp32"""
    layers: list[int] = [1, 4, 16]
    """depths of the stacks"""
    stack_fp32: str = "16·128·128"
    """a layer of the fp32 stack"""
    stack_bf16: str = "256·32·88"
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


# --- what its columns mean -----------------------------------------------------------------------

ITS_LAYER = "the published layer"
COLUMNS = {
    "experiment": Column(
        "experiment",
        names={"saved": "kept for backward", "step": "one step", "stack": "stack of layers"},
    ),
    "dtype": Column("dtype", names={"bfloat16": "bf16", "float32": "fp32"}),
    "shape": Column("tokens·hidden·intermediate"),
    "tokens": Column("tokens", ",d", log=True),
    "hidden_size": Column("hidden size", ",d", log=True),
    "density": Column("tokens / hidden size", log=True),
    "aspect": Column(
        "intermediate / hidden size", names={3.5: "intermediate size 3.5 times the hidden size"}
    ),
    "layers": Column("layers", ",d", log=True),
    "held": Column(
        "gradients", names={True: "gradients of an earlier pass held", False: "first pass"}
    ),
    "kept": Column("kept for backward"),
    "saved_mib": Column("kept, MiB", ",d"),
    "saved_f": Column("kept, in F", "2"),
    "peak_mib": Column("peak, MiB", ",d"),
    "peak_at": Column("moment of the peak"),
    "counted": Column("peak, by hand"),
    "counted_mib": Column("by hand, MiB", ",d"),
    "peak_f": Column("peak besides weights and inputs, in F", "3", log=True),
    "whole_mib": Column("peak with weights and inputs, MiB", "4"),
    "over_fused": Column("Liger's peak over a fused layer's", "3×"),
    "part": Column(
        "held at the peak",
        names={"saved": "kept for backward", "output": "y", "gradients": "gradients",
               "temporaries": "temporaries"},
    ),
    "part_mib": Column("peak besides weights and inputs, MiB", "3"),
    "beside_liger": Column("beside Liger"),
    "total_peak_mib": Column("peak with weights, MiB", "4", log=True),
    "layer_mib": Column("one more layer, MiB", ",d"),
    "in_weights": Column("peak of a layer / its weights", "3×"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    Of a layer: `shape`; `density`, its tokens over its hidden size, and `aspect`, its intermediate
    over its hidden size, with which all counts scale; `saved_f` and `peak_f`, what is saved and the
    peak in units of F.
    Of a step: `peak_at`, `counted` and `counted_mib`, the peak by the ledger of the path that ran;
    `whole_mib`, the peak with weights and inputs; `over_fused`, Liger's over fusedlib's in the same
    recording; `beside_liger`, how fusedlib's peak compares with Liger's, in words. Of a stack:
    `layer_mib`, the peak over that of the stack before it, a layer; `in_weights`, the peak a layer
    over the weights of one.
    """
    figures = ["operands_mib", "dy_mib", "peak_mib", "saved_mib", "total_peak_mib", "layers"]
    used = [*SHAPE, *figures, "held", "path", *(f"peak_{name}_mib" for name in CATEGORIES)]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    numbers = {name: pd.to_numeric(rows[name], errors="coerce") for name in (*SHAPE[:3], *figures)}
    tokens, hidden, inner = (numbers[name] for name in SHAPE[:3])
    nbytes = rows["dtype"].map({"bfloat16": 2, "float32": 4})
    depth, one_f = numbers["layers"], tokens * inner * nbytes / MIB
    widths = zip(tokens, hidden, inner, strict=True)
    rows = rows.assign(
        **numbers, shape=["·".join(f"{n:.0f}" for n in each) for each in widths],
        density=tokens / hidden, aspect=inner / hidden,
        saved_f=numbers["saved_mib"] / one_f, peak_f=numbers["peak_mib"] / one_f,
        whole_mib=numbers["operands_mib"] + numbers["dy_mib"] + numbers["peak_mib"],
        in_weights=numbers["total_peak_mib"] / (3 * hidden * inner * nbytes / MIB * depth),
    )  # fmt: skip
    steps, stacks = (rows[rows["experiment"] == name] for name in ("step", "stack"))
    peaks, wholes = (_by_rival(steps, value) for value in ("peak_mib", "whole_mib"))
    liger = steps["provider"] == "liger"
    return rows.assign(
        over_fused=(steps["whole_mib"] / wholes["fused"]).where(liger),
        beside_liger=_beside_liger(steps["tokens"], peaks["fused"] / peaks["liger"]),
        layer_mib=_one_more_layer(stacks), **_counted(steps),
    )  # fmt: skip


def _by_rival(steps: pd.DataFrame, value: str) -> pd.DataFrame:
    """Beside each row the figures of Liger and fusedlib for its problem and recording."""
    keys = ["machine", "recording", *SHAPE]
    rows = steps.astype({"machine": str})
    wide = rows.pivot_table(value, keys, "provider").reindex(columns=["liger", "fused"])
    return rows[keys].join(wide, on=keys)


def _beside_liger(tokens: pd.Series, ratio: pd.Series) -> pd.Series:
    """Such as "4,096 tokens: fusedlib 5 % above Liger", the title of a panel."""
    more = (100 * (ratio - 1)).round()
    words = more.dropna().map(lambda n: f"{abs(n):.0f} % {'above' if n > 0 else 'below'}")
    return tokens.loc[words.index].map("{:,.0f} tokens: fusedlib ".format) + words + " Liger"


def _counted(steps: pd.DataFrame) -> dict[str, pd.Series]:
    """Where the ledger of what ran has its peak, and how much that is, in words and in MiB."""
    found = {}
    for at, row in steps[steps["status"] == "ok"].iterrows():
        if book := mlp_ledger.of(row["provider"], row["path"], row["dtype"]):
            moment, held = book.peak(problem := SwiGLUProblem.of(row))
            size = mlp_ledger.total(held)
            found[at] = (moment, str(size), size.mib(problem))
    names = ("peak_at", "counted", "counted_mib")
    return {name: pd.Series({at: f[n] for at, f in found.items()}) for n, name in enumerate(names)}


def _one_more_layer(stacks: pd.DataFrame) -> pd.Series:
    """MiB of one more layer, measured between two depths."""
    ran = stacks[stacks["status"] == "ok"].sort_values("layers").astype({"machine": str})
    groups = ran.groupby(["machine", "recording", "provider", "held", *SHAPE])
    return groups["total_peak_mib"].diff() / groups["layers"].diff()


def by_part(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each step a row a part of its peak: `part` and `part_mib`."""
    names = {f"peak_{name}_mib": name for name in ("saved", "output", "gradients", "temporaries")}
    kept = [name for name in rows if name not in names]
    parts = rows.rename(columns=names).melt(
        kept, list(names.values()), var_name="part", value_name="part_mib"
    )  # fmt: skip
    parts.attrs = dict(rows.attrs)
    return parts


def from_tables(peaks: pd.DataFrame, ratios: pd.DataFrame) -> pd.DataFrame:
    """Rows of published peaks and ratios in the columns of the study's own rows.

    MB are powers of two there: their differences are whole numbers of tensors in MiB.
    """
    ratios = ratios[ratios["table"] == "benchmark_memory.py"].assign(implementation="liger")
    stack = peaks["num_layers"].notna()
    peaks = peaks.assign(
        experiment=stack.map({True: "stack", False: "step"}), layers=peaks["num_layers"],
        whole_mib=peaks["peak_mb"].mask(stack), total_peak_mib=peaks["peak_mb"].where(stack),
    )  # fmt: skip
    ratios = ratios.assign(experiment="step", over_fused=ratios["liger_over_fused"])
    both = pd.concat([peaks, ratios], ignore_index=True)
    return both.assign(
        provider=both["implementation"].replace({"fused": ITS_LAYER}), dtype="float32",
        tokens=both["batch_size"], hidden_size=both["d_model"], intermediate_size=both["d_model"],
        case=[f"published {n}" for n in range(len(both))],
    )  # fmt: skip


STUDY = Study(
    "04_memory", Sizes, [Experiment("memory", measure, _cases)], COLUMNS, described
)  # fmt: skip
