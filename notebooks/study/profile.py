"""Where the time of a training step goes: a step by the clock, and the same under the profiler.

The two are rows of their own, `experiment` "step" and "profile", all steps before all profiles:
once the profiler has run in a process, nobody knows whether the host keeps its pace. A step has one
time, the clock's. The profile gives which kernels run and how long each, of the second of two steps
back to back, when the host is as far ahead as it ever gets; and, from one more forward pass, how
long each step of plain attention takes.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from fusedlib.bench.arguments import require_known
from fusedlib.bench.attempt import Unavailable, free_memory
from study import trace, trainers
from study.cases import Case, Row, device_of, grid
from study.compiling import graphs_compiled
from study.models import transformer
from study.race import each
from study.run import sized
from study.trace import Piece, Trace
from study.trainers import WEIGHTS, TransformerTrainer, require_possible

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, mps, cpu, or auto for the best there is
    "models": ["nano", "micro"],  # sizes of the Transformer, in fp32 and in bf16 autocast
    "contexts": [16],  # tokens a sequence, for all sizes
    "spanning": ["nano"],  # sizes at more contexts than those
    "more_contexts": [8],  # tokens a sequence, for these
    "compiled": [],  # sizes compiled by Inductor too, under autocast
    "seconds": 0.02,  # a step without the profiler is clocked for so long at least
}
FULL: dict[str, Any] = QUICK | {
    "models": ["small", "large", "2.7b"], "contexts": [256], "spanning": ["small"],
    "more_contexts": [128, 512, 1024], "compiled": ["small"], "seconds": 0.3,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}

SECTIONS = ("forward", "backward", "optimizer")
STEP = "step"
WARMUP = 2
Figures = dict[str, Any]


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """Every case by the clock, then every one under the profiler."""
    s = sized(PROFILES, profile, sizes)
    listed, both, half = [], [*WEIGHTS][:2], ["bf16 autocast"]
    for experiment, clock in ((STEP, {"seconds": s.seconds}), ("profile", {})):
        shared = {"experiment": experiment, "batch_size": transformer.BATCH_SIZE, **clock}
        of = partial(settings, shared, s.device)
        listed += [
            *of(s.models, s.contexts, both), *of(s.spanning, s.more_contexts, both),
            *of(s.compiled, s.contexts[:1], half, provider="inductor"),
        ]  # fmt: skip
    return listed


def settings(
    shared: Case, device: str, models: Sequence[str], contexts: Sequence[int],
    precisions: Sequence[str], provider: str = "eager",
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a context, precision and size of the Transformer."""
    for context, model in product(contexts, models):
        transformer.config(model, context_length=context)
    require_known("precision", precisions, WEIGHTS)
    fields = {**shared, "attention": "plain", "provider": provider, "device": device_of(device)}
    return grid(fields, context_length=contexts, precision=precisions, model=models)


def measure(race: list[Case]) -> list[Row]:
    """A row a case: the clock's times, or lists of kernels."""
    return each(race, figures)


def available(case: Case) -> None:
    """Raise `Refused` for what cannot run here, or is far above the memory there is."""
    require_possible(case)
    if case["experiment"] == "profile" and not case["device"].startswith("cuda"):
        raise Unavailable("kernels run on a CUDA GPU")


def figures(case: Case) -> Figures:
    """The row's figures: the clock's, or those of `profiled`."""
    available(case)
    free_memory()  # also when the case before ended in an exception
    trainer = TransformerTrainer.of(case, provider=case["provider"])
    try:
        if case["experiment"] == "profile":
            return profiled(trainer, has_parts=case["provider"] == "eager")
        return trainers.measure(trainer, seconds=case["seconds"], steps=2)
    finally:
        if case["provider"] != "eager":
            torch.compiler.reset()
        del trainer
        free_memory()


# --- under the profiler --------------------------------------------------------------------------


def profiled(trainer: TransformerTrainer, *, has_parts: bool) -> Figures:
    """What a step consists of: how many kernels, their time, and two lists with the columns

    - `classes`: section, class, calls, ms
    - `parts`: section, part of the model, calls, ms; the steps of plain attention in eager models
    """
    for _ in range(WARMUP):
        trainer.issue()
    before = graphs_compiled()

    def twice() -> None:
        for _ in range(2):
            with record_function(STEP):
                trainer.issue(record_function)

    found = taken_apart(trace.record(trainer.device, twice))
    if graphs_compiled() != before:
        raise RuntimeError("a profiled step compiled the model once more")
    if has_parts:
        with AttentionSteps():
            found["parts"] = parts(trace.record(trainer.device, trainer.forward))
    return found


def taken_apart(profile: Trace) -> Figures:
    """The kernels of a trace's last step, and their classes by section."""
    classes: dict[tuple[str, str], list[Piece]] = {}
    for section in SECTIONS:
        for piece in profile.during(section):
            kind = OPTIMIZER if section == "optimizer" else class_of(piece.name)
            classes.setdefault((section, kind), []).append(piece)
    whole = profile.during(STEP)
    return {
        "classes": [[*key, len(pieces), _ms_of(pieces)] for key, pieces in classes.items()],
        "profiled_kernels": len(whole), "kernels_ms": _ms_of(whole),
    }  # fmt: skip


class AttentionSteps(TorchFunctionMode):
    """Ranges "scores", "softmax" and "values" around these steps of plain attention; the softmax
    has the cast of its result."""

    def __init__(self) -> None:
        super().__init__()
        self._softmax_seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, in the range of its step if it is one."""
        name, step = func.__name__.strip("_"), ""
        if name == "softmax" or (name == "to" and self._softmax_seen):
            step, self._softmax_seen = "softmax", True
        elif name == "matmul":
            step = "values" if self._softmax_seen else "scores"
            self._softmax_seen = False
        if not step:
            return func(*args, **(kwargs or {}))
        with record_function(step):
            return func(*args, **(kwargs or {}))


def parts(profile: Trace) -> list[list[Any]]:
    """The steps of attention in a forward pass, of all blocks together."""
    named = {name: profile.during(name, every=True) for name in ("scores", "softmax", "values")}
    return [
        ["forward", f"block/attention/{name}", len(own), _ms_of(own)] for name, own in named.items()
    ]


def _ms_of(pieces: Iterable[Piece]) -> float:
    return round(sum(piece.us for piece in pieces) / 1e3, 6)


# --- classes of kernels ---------------------------------------------------------------------------

GEMM, SOFTMAX, ELEMENTWISE, OPTIMIZER = "GEMM", "softmax", "element-wise", "optimizer"
REDUCTION, COPY, INDEXING, OTHER = "reduction", "copy and cast", "indexing", "other"

_MOVES = (
    "_to_copy|_unsafe_view|as_strided|cat|clone|constant_pad_nd|copy|expand|full|permute|select|"
    "slice|split|squeeze|stack|t|transpose|unsqueeze|view|zeros"
)
# The first rule that is found in the name decides: an element-wise kernel's template says whether
# all it does is copy.
_RULES = [(kind, re.compile(rule, re.IGNORECASE)) for kind, rule in (
    (OPTIMIZER, r"multi_tensor_apply|fused_?adam|adamw"),
    (GEMM, r"gemm|nvjet|cutlass|split_?k|gemv|cublas|triton_(mm|bmm|tem)|xmma"),
    (SOFTMAX, r"softmax"),
    (COPY, rf"^triton_(poi|red|per)_fused(_({_MOVES}))+_\d+$"),
    (REDUCTION, r"^triton_(red|per)_"),
    (ELEMENTWISE, r"^triton_(?!poi_fused_(embedding|index|nll_loss)\w*_\d+$)"),
    (INDEXING, r"embedding|index|gather|scatter|radixsort|\bcub::|nll_loss|krn_partial|segments|"
               r"grad_weight"),
    (COPY, r"memcpy|memset|copy|fillfunctor|transpose"),
    (REDUCTION, r"reduce|norm"),
    (ELEMENTWISE, r"elementwise|triu_tril|arange|pointwise"),
)]  # fmt: skip


@cache
def class_of(name: str) -> str:
    """The class of a kernel, copy or fill, by its name.

    Kernels of cuBLAS, CUTLASS, cuDNN, PyTorch and Inductor name their work. Inductor names a kernel
    after all operations that it fused: one that only moves or casts is a copy, one with a softmax
    among them a softmax, and any other goes by its kind of loop.
    """
    return next((kind for kind, rule in _RULES if rule.search(name)), OTHER)


# --- what follows from rows ----------------------------------------------------------------------

CASE = ["model", "precision", "context_length", "attention", "provider"]
IDLE, OTHERS = "GPU idle", "others"
DRAWN = (GEMM, ELEMENTWISE, OPTIMIZER, SOFTMAX, COPY)
"""Classes that have a colour; all other kernels are `OTHERS`."""
BYTES = {"fp32": (4 + 4, 4), "bf16 autocast": ((2 + 4) + (4 + 4) + (4 + 2), 2)}
"""Bytes that the softmax moves a score, with its casts, and of an element of q, k, v, scores."""
SETTERS = {"card": "GPU", "host": "CPU"}


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    Beside each profile stands its set's step without a profiler: `step_ms`, and `issue_ms`, in
    which the CPU launches it; of a GPU `busy`, the time of kernels over the step, and `pace`, who
    sets it. Of a profile `products_ms`, `optimizer_ms` and `others_ms`, all but products; of plain
    attention `softmax_ratio`, the softmax's forward time over that of both products, and what
    counting predicts of it, `flops_ratio` and `bytes_ratio`.
    """
    used = ["experiment", "set", *CASE, "classes", "parts", "kernels_ms", "step_median_ms",
            "issue_ms"]  # fmt: skip
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    keys = ["machine", "set", *CASE]
    steps = rows[(rows["experiment"] == STEP) & (rows["status"] == "ok")].drop_duplicates(keys)
    beside = rows[keys].merge(steps[[*keys, "step_median_ms", "issue_ms"]], "left", on=keys)
    step_ms, issue_ms = (
        pd.Series(beside[name].to_numpy(dtype=float), rows.index)
        for name in ("step_median_ms", "issue_ms")
    )
    kernels = rows["kernels_ms"].astype(float)
    lists = rows["classes"].where(rows["classes"].notna(), None)
    gemm, adam = (
        lists.map(lambda of, name=name: _ms(of, SECTIONS, [name]), "ignore").astype(float)
        for name in (GEMM, OPTIMIZER)
    )
    parts = rows["parts"].where(rows["parts"].notna(), None)
    counts = [_counted(row) for row in rows[CASE].to_dict("records")]
    counted = pd.DataFrame(counts, rows.index, ["flops_ratio", "bytes_ratio"], dtype=float)
    return rows.assign(
        sized=rows["model"] + rows["context_length"].map(", {:.0f} tokens".format),
        step_ms=step_ms, issue_ms=issue_ms, busy=kernels / step_ms,
        pace=[SETTERS[trainers.pace_setter(k, s)] if k > 0 and s > 0 else None
              for k, s in zip(kernels, step_ms, strict=True)],
        products_ms=gemm, optimizer_ms=adam, others_ms=kernels - gemm,
        softmax_ratio=parts.map(_softmax_over_products, "ignore").astype(float), **counted,
    )  # fmt: skip


def by_class(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each profile a row a class of kernels, and one for the time when the GPU is idle.

    `class_ms` is the time in a step, `step_share` its share of the unprofiled step.
    """
    profiles, found = rows[rows["classes"].notna()], []
    for name in (*DRAWN, OTHERS):
        ms = [float(_ms(lines, SECTIONS, _members(name, lines))) for lines in profiles["classes"]]
        found.append(profiles.assign(**{"class": name, "class_ms": ms}))
    idle = profiles["step_ms"] - profiles["kernels_ms"]
    every = pd.concat([*found, profiles.assign(**{"class": IDLE, "class_ms": idle})])
    return every.assign(step_share=every["class_ms"].clip(lower=0) / every["step_ms"])


def _members(name: str, lines: list[list[Any]]) -> set[str]:
    """The classes of a list's lines that are drawn under a name."""
    return {kind for _, kind, *_ in lines} - {*DRAWN} if name == OTHERS else {name}


def _ms(lines: list[list[Any]], sections: Iterable[str], names: Iterable[str]) -> float:
    """Time of a list's lines of these sections and second columns."""
    return sum(line[-1] for line in lines if line[0] in sections and line[1] in names)


def _softmax_over_products(lines: list[list[Any]]) -> float | None:
    part = "block/attention/{}".format
    products = _ms(lines, ["forward"], [part("scores"), part("values")])
    return _ms(lines, ["forward"], [part("softmax")]) / products if products else None


def _counted(case: Case) -> tuple[float | None, float | None]:
    """The softmax's FLOPs and bytes over those of both products, of plain attention.

    A score takes 4 · width FLOPs in the products and five in the softmax. The products write it
    and read its probability, and read or write 4 · width / context elements of q, k, v and the
    output.
    """
    if case["attention"] != "plain" or case["precision"] not in BYTES:
        return None, None
    width = transformer.config(case["model"]).head_dim
    softmax, element = BYTES[case["precision"]]
    return 5 / (4 * width), softmax / (element * (2 + 4 * width / case["context_length"]))
