"""What a SwiGLU MLP keeps for backward, what one step holds, and what deep stacks hold.

Three ways to measure that share nothing: saved-tensor hooks, every allocation as the profiler sees
it, and the peak that CUDA's allocator keeps itself. What is counted stands in `study.ledger`.
"""

from functools import cache, partial
from itertools import product
from typing import Any

import pandas as pd
import torch

from fusedlib import reference
from fusedlib.bench.attempt import forget_compiled, free_memory
from study import ledger, mlp, rivals
from study.allocator import kept, mib_of, passed
from study.cases import Case, Row, device_of, grid
from study.fits import require_memory
from study.mlp import MODULE, TASK, SwiGLUProblem, draw
from study.operation import Operation
from study.race import each
from study.rivals import Rival, workload
from study.run import sized
from study.settings import MIB

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, cpu, or auto for the best there is
    "rivals": ["light", "fused-input"],  # who is measured at the shapes; light: without compiler
    "everywhere": ["light", "fused-input"],  # elsewhere
    "shapes": ["128·128·448"],  # bf16 MLPs, tokens·hidden·intermediate
    "tokens": [8, 32, 512],  # numbers of tokens at the first shape's widths
    "sweep_tokens": 64,  # of the published sweep
    "sweep_widths": [64, 128, 256],  # hidden = intermediate of the published sweep, fp32
    "grid_tokens": [128],  # of the published grid
    "grid_widths": [128],
    "layers": [1, 4, 16],  # depths of the stacks
    "stack_fp32": "16·128·128",  # a layer of the fp32 stack
    "stack_bf16": "256·32·88",
}
FULL: dict[str, Any] = QUICK | {
    "rivals": ["light", "inductor", "quack", "fused-input"],
    "shapes": ["8192·4096·14336", "4096·4096·11008", "16384·2048·8192", "4096·8192·28672"],
    "tokens": [256, 1024, 4096, 16384, 65536],
    "sweep_widths": [512, 1024, 2048, 4096, 8192, 16384, 32768],
    "grid_tokens": [64, 256, 1024], "grid_widths": [2048, 4096],
    "layers": [4, 8, 16, 32, 64, 128, 256],
    "stack_fp32": "256·2048·2048", "stack_bf16": "16384·2048·5632",
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
# The check in float64 takes many times a step's memory: at most so many tokens, and so wide.
MOST_TOKENS, WIDEST = 8192, 16_384
SHAPE = ["tokens", "hidden_size", "intermediate_size", "dtype"]


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What autograd keeps ("saved") and what a step holds ("step") of an MLP, and "stack"s of them:
    without gradients from an earlier pass, and with them held.
    """
    s = sized(PROFILES, profile, sizes)
    device = {"device": device_of(s.device)}
    squares = [(s.sweep_tokens, width) for width in s.sweep_widths]
    squares += product(s.grid_tokens, s.grid_widths)
    first = mlp.sizes(s.shapes[0])[1:] if s.shapes else (1, 1)
    listed = [(mlp.sizes(shape), "bfloat16", s.rivals) for shape in s.shapes]
    listed += [((n, *first), "bfloat16", s.everywhere) for n in s.tokens if s.shapes]
    listed += [((n, width, width), "float32", s.everywhere) for n, width in squares]
    found = []
    for shape, dtype, names in listed:
        chosen = rivals.chosen(TASK, names)
        alone = [n for n in chosen if "bound" not in rivals.get(TASK, n).traits]
        fields = device | dict(zip(SHAPE, (*shape, dtype), strict=True))
        found += grid(fields, experiment=("saved", "step"), provider=alone)
    for shape, dtype in ((s.stack_fp32, "float32"), (s.stack_bf16, "bfloat16")):
        fields = {"experiment": "stack", **device}
        fields |= dict(zip(SHAPE, (*mlp.sizes(shape), dtype), strict=True))
        modules = rivals.chosen(MODULE, s.everywhere)
        found += grid(fields, layers=s.layers, held=(False, True), provider=modules)
    return found


def measure(race: list[Case]) -> list[Row]:
    """A row a case, in MiB. What is wrong, cannot run here, or is counted far above the memory
    there is has no figures.
    """
    return each(race, figures)


def figures(case: Case) -> dict[str, Any]:
    """The figures of a case, whose rival is right at this shape or a smaller one."""
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
    found = rival.facts() | _errors(rival, checked, device)
    if deep:
        return found | _stack(case)
    inputs = draw(problem, device)
    work = workload(rivals.get(TASK, name), inputs)
    found["path"] = work.path
    if case["experiment"] == "saved":
        saved = kept(work.forward, work.leaves.values())
        return found | {"saved_mib": sum(one.nbytes for one in saved) / MIB}
    found |= {"operands_mib": mib_of(work.leaves.values()), "dy_mib": mib_of([inputs.dy])}
    work.forward().backward(inputs.dy)  # libraries, kernels and workspaces are there from now on
    work.reset()
    return found | passed(work.forward, inputs.dy).figures()


def counted_mib(case: Case) -> float:
    """What a case needs at least by the ledger, weights, x and dy included, in MiB; weights and
    inputs alone for a rival that nobody has counted.
    """
    problem, deep = SwiGLUProblem.of(case), case["experiment"] == "stack"
    book = ledger.of(case["provider"], dtype=problem.dtype)
    layers, held = (int(case["layers"]), bool(case["held"])) if deep else (1, False)
    need = ledger.D * 2 + ledger.W * (3 * layers * (2 if held else 1))
    if book:
        one = ledger.total(book.peak(problem)[1])
        need += (book.at(problem).kept() + ledger.D) * layers if deep else one
    return need.mib(problem)


@cache
def _errors(rival: Rival[..., Any], problem: SwiGLUProblem, device: str) -> dict[str, Any]:
    """What the check in float64 says: only what is right, with every gradient, is measured."""
    inputs = draw(problem, device)
    work = (
        mlp.one_layer(rival.name, problem, inputs) if rival.task == MODULE
        else workload(rival, inputs)
    )  # fmt: skip
    return Operation(TASK, inputs, reference.swiglu_mlp).figures_of(rival, work)


def _stack(case: Case) -> dict[str, Any]:
    problem, device, held = SwiGLUProblem.of(case), case["device"], bool(case["held"])
    modules = mlp.stack(case["provider"], problem, int(case["layers"]), device)
    x = torch.randn(problem.tokens, problem.hidden_size, device=device).to(problem.torch_dtype)
    x, dy = x.requires_grad_(), torch.ones_like(x)
    modules[0](x).backward(dy)  # libraries, kernels and workspaces are there from now on
    if held:
        modules(x).backward(dy)
    else:
        modules.zero_grad(set_to_none=True)
    x.grad = None
    found = passed(partial(modules, x), dy).figures()
    weights, ends = mib_of(modules.parameters()), 2 * mib_of([dy])
    found["total_peak_mib"] = (2 if held else 1) * weights + ends + found["peak_mib"]
    return found | {"path": mlp.path(modules[0], x)}


# --- rows ----------------------------------------------------------------------------------------

NUMBERS = [*SHAPE[:3], "operands_mib", "dy_mib", "peak_mib", "saved_mib", "total_peak_mib",
           "layers"]  # fmt: skip


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with `saved_f`, what is saved in units of F, a step's peak by the ledger of what ran,
    with weights and inputs (`whole_mib`) and beside Liger's in words; and of a stack `layer_mib`,
    MiB of one more layer, and `in_weights`, the peak a layer over the weights of one.
    """
    used = [*SHAPE, *NUMBERS, "held", "path", "set", "experiment", *_PARTS]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    numbers = {name: pd.to_numeric(rows[name], errors="coerce") for name in NUMBERS}
    tokens, hidden, inner = (numbers[name] for name in SHAPE[:3])
    nbytes = rows["dtype"].map({"bfloat16": 2, "float32": 4}).astype(float)
    one_f = tokens * inner * nbytes / MIB
    widths = zip(tokens, hidden, inner, strict=True)
    rows = rows.assign(
        **numbers, shape=["·".join(f"{n:.0f}" for n in shape) for shape in widths],
        saved_f=numbers["saved_mib"] / one_f,
        whole_mib=numbers["operands_mib"] + numbers["dy_mib"] + numbers["peak_mib"],
        in_weights=numbers["total_peak_mib"] * MIB / (3 * hidden * inner * nbytes)
        / numbers["layers"],
    )  # fmt: skip
    steps, stacks = (rows[rows["experiment"] == name] for name in ("step", "stack"))
    fused, liger = (_beside(steps, name) for name in ("fused", "liger"))
    return rows.assign(
        beside_liger=_in_words(steps["tokens"], fused / liger),
        layer_mib=_one_more_layer(stacks),
        **_counted(steps),
    )  # fmt: skip


_PARTS = {f"peak_{name}_mib": name for name in ("saved", "output", "gradients", "temporaries")}


def _beside(steps: pd.DataFrame, provider: str) -> pd.Series:
    """Beside each step the peak of this provider for its problem, in the same set."""
    keys = ["machine", "set", *SHAPE]
    theirs = steps[(steps["provider"] == provider) & steps["peak_mib"].notna()]
    return steps[keys].join(theirs.groupby(keys)["peak_mib"].last(), on=keys)["peak_mib"]


def _in_words(tokens: pd.Series, ratio: pd.Series) -> pd.Series:
    """Such as "4,096 tokens: fusedlib 5 % above Liger", the title of a panel."""
    more = (100 * (ratio - 1)).round()
    words = more.dropna().map(lambda n: f"{abs(n):.0f} % {'above' if n > 0 else 'below'}")
    return tokens.loc[words.index].map("{:,.0f} tokens: fusedlib ".format) + words + " Liger"


def _counted(steps: pd.DataFrame) -> dict[str, pd.Series]:
    """Where the ledger of what ran has its peak, and how much that is, in words and in MiB."""
    found = {}
    for at, row in steps[steps["status"] == "ok"].iterrows():
        if book := ledger.of(row["provider"], row["path"], row["dtype"]):
            moment, held = book.peak(problem := SwiGLUProblem.of(row))
            size = ledger.total(held)
            found[at] = (moment, str(size), size.mib(problem))
    names = ("peak_at", "counted", "counted_mib")
    return {name: pd.Series({at: f[n] for at, f in found.items()}) for n, name in enumerate(names)}


def _one_more_layer(stacks: pd.DataFrame) -> pd.Series:
    """MiB of one more layer, measured between two depths."""
    keys = ["machine", "set", "provider", "held", *SHAPE]
    ran = stacks[stacks["status"] == "ok"].sort_values("layers")
    peaks = ran.groupby([*keys, "layers"])["total_peak_mib"].last().reset_index()
    change = peaks.groupby(keys)[["total_peak_mib", "layers"]].diff()
    peaks["layer_mib"] = change["total_peak_mib"] / change["layers"]
    return ran[[*keys, "layers"]].join(peaks.set_index([*keys, "layers"])["layer_mib"],
                                       on=[*keys, "layers"])["layer_mib"]  # fmt: skip


def from_tables(published: pd.DataFrame) -> pd.DataFrame:
    """Published peaks, as `press.show.published` has them, in the columns of the rows.

    MB are powers of two there: their differences are whole numbers of tensors in MiB.
    """
    peaks = published[published["file"] == "swiglu_memory"]
    stack = peaks["num_layers"].notna()
    return peaks.assign(
        experiment=stack.map({True: "stack", False: "step"}), layers=peaks["num_layers"],
        whole_mib=peaks["peak_mb"].mask(stack), total_peak_mib=peaks["peak_mb"].where(stack),
        machine="published", set="published", status="ok", dtype="float32",
        provider=peaks["implementation"].replace({"fused": "the published layer"}),
        tokens=peaks["batch_size"], hidden_size=peaks["d_model"],
        intermediate_size=peaks["d_model"], race=[f"published {n}" for n in range(len(peaks))],
    )  # fmt: skip
