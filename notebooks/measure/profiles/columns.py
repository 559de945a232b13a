"""What the columns of study 08's rows mean, and those that follow from others."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from measure.profiles import classes
from measure.profiles.measure import ALL_SECTIONS, REST, SECTIONS
from measure.study import Column
from models import transformer
from study.step_clock import pace_setter

CASE = ["model", "precision", "context_length", "attention", "provider"]
IDLE, OTHERS = "GPU idle", "others"
DRAWN = ("GEMM", "element-wise", "optimizer", "softmax", "copy and cast")
"""Classes that have a colour; all other kernels are `OTHERS`."""
PRODUCTS = ["block/attention/scores", "block/attention/values"]
SOFTMAX = ["block/attention/softmax"]
BYTES = {"fp32": (4 + 4, 4), "bf16 autocast": ((2 + 4) + (4 + 4) + (4 + 2), 2)}
"""Bytes that the softmax moves a score, with its casts, and of an element of q, k, v, scores."""
LISTS = ["classes", "kernels", "parts"]
FIGURES = [
    "kernels_ms", "profiled_kernels", "profiled_ms", "ranged_ms", "idle_ms", "late_ms", "gaps",
    "step_median_ms", "issue_ms",
]  # fmt: skip
SETTERS = {"card": "GPU", "host": "CPU"}
"""Who sets the pace of a step, by `study.step_clock.pace_setter`'s words."""
HOW = ("measured", "counted bytes", "counted FLOPs")

COLUMNS = {
    "experiment": Column(
        "experiment", names={"step": "steps by the clock", "profile": "steps under the profiler"}
    ),
    "model": Column("size", names={name: name for name in transformer.SIZES}),
    "precision": Column("precision", names={name: name for name in ("fp32", "bf16 autocast")}),
    "context_length": Column("context", "1 tokens", log=True),
    "attention": Column(
        "attention", names={"plain": "plain attention", "sdpa": "fused attention"}
    ),
    "kind": Column(
        "step", names={"eager plain": "PyTorch", "eager sdpa": "PyTorch, fused attention",
                       "inductor plain": "torch.compile"},
    ),
    "sized": Column("size and context"),
    "section": Column("pass", names={name: name for name in ALL_SECTIONS}),
    "class": Column("kernels", names={classes.GEMM: "matrix products"} | {
        name: name for name in (*DRAWN[1:], OTHERS, IDLE)
    }),
    "kernel": Column("kernel"),
    "calls": Column("calls", ",d"),
    "class_ms": Column("time of kernels", "3 ms"),
    "kernel_ms": Column("time of all its calls", "3 ms"),
    "step_share": Column("share of a step", "2%"),
    "how": Column("softmax / products", names={name: name for name in HOW}),
    "softmax_ratio": Column("time of the softmax / products", "2×", log=True),
    "kernels_ms": Column("kernel time", "3 ms"),
    "profiled_kernels": Column("kernels", ",d"),
    "step_ms": Column("step", "3 ms"),
    "issue_ms": Column("launched in", "3 ms"),
    "busy": Column("GPU busy", "2%"),
    "pace": Column("pace set by"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them: `kind` of a step, its provider and attention; `sized`, size
    and context; and the columns of `_of_clock`, `_of_kernels` and `_of_attention`.
    """
    used = [*CASE, "experiment", "on_device", *FIGURES, *LISTS]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    rows[FIGURES] = rows[FIGURES].apply(pd.to_numeric, errors="coerce")
    rows = rows.assign(
        kind=rows["provider"] + " " + rows["attention"],
        sized=rows["model"] + rows["context_length"].map(", {:.0f} tokens".format),
    )
    more = [part(rows) for part in (_of_clock, _of_kernels, _of_attention)]
    return pd.concat([rows.drop(columns=["issue_ms"]), *more], axis=1)


def _of_clock(rows: pd.DataFrame) -> pd.DataFrame:
    """Beside each profile the same recording's step without a profiler.

    `step_ms`, and `issue_ms`, which the CPU takes to launch its kernels; `busy`, the time of
    kernels over the step, and `pace`, who sets it, both of a GPU alone.
    """
    keys = ["machine", "recording", *CASE]
    steps = rows[(rows["experiment"] == "step") & (rows["status"] == "ok")].drop_duplicates(keys)
    beside = rows[keys].merge(steps[[*keys, "step_median_ms", "issue_ms"]], "left", on=keys)
    beside = beside.set_axis(rows.index)
    step = beside["step_median_ms"]
    kernels = rows["kernels_ms"].where(rows["on_device"].eq(True))
    return pd.DataFrame({
        "step_ms": step, "issue_ms": beside["issue_ms"], "busy": kernels / step,
        "pace": [SETTERS[pace_setter(k, s)] if k > 0 and s > 0 else None
                 for k, s in zip(kernels, step, strict=True)],
    })  # fmt: skip


def _of_kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """Of a profiled step `products_ms`, `optimizer_ms` and `others_ms`, all but products."""
    gemm, adam = (
        rows["classes"].map(lambda c, n=n: _ms(c, SECTIONS, [n])).astype(float)
        for n in (classes.GEMM, classes.OPTIMIZER)
    )
    others = rows["kernels_ms"] - gemm
    return pd.DataFrame({"products_ms": gemm, "optimizer_ms": adam, "others_ms": others})


def _of_attention(rows: pd.DataFrame) -> pd.DataFrame:
    """`softmax_ratio`, the softmax's forward time over that of both products in plain attention,
    and what counting predicts of it, `flops_ratio` and `bytes_ratio`.
    """
    ratio = rows["parts"].map(lambda p: _over(p, "forward")).astype(float)
    plain = rows[rows["attention"].eq("plain") & rows["precision"].isin(BYTES)]
    counts = [_counted(row) for row in plain.to_dict("records")]
    counted = pd.DataFrame(counts, plain.index, ["flops_ratio", "bytes_ratio"])
    return counted.reindex(rows.index).assign(softmax_ratio=ratio)


def by_class(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each profile a row a class of kernels, and one for the time when the GPU is idle.

    `class_ms` is the time in a step, `step_share` its share of the unprofiled step. On a CPU, where
    operators stand in for kernels, it is a share of their time, and nothing is idle.
    """
    profiles = _profiles(rows)
    parts = []
    for name in (*DRAWN, OTHERS, IDLE):
        if name == IDLE:
            ms = profiles["step_ms"] - profiles["kernels_ms"]
        else:
            ms = profiles["classes"].map(lambda c, n=name: _ms(c, SECTIONS, _members(n)))
        parts.append(profiles.assign(**{"class": name, "class_ms": ms.astype(float)}))
    found = pd.concat(parts)
    on_cpu = ~found["on_device"].eq(True)
    span = found["step_ms"].mask(on_cpu, found["kernels_ms"])
    idle_cpu = on_cpu & found["class"].eq(IDLE)
    return found.assign(step_share=found["class_ms"].clip(lower=0) / span)[~idle_cpu]


def by_section(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each profile a row a pass and class of kernels, with `class_ms`."""
    profiles = _profiles(rows)
    parts = [
        profiles.assign(
            section=section, **{"class": name},
            class_ms=profiles["classes"].map(
                lambda c, s=section, n=name: _ms(c, [s], _members(n))
            ).astype(float),
        )
        for section in ALL_SECTIONS for name in (*DRAWN, OTHERS)
    ]  # fmt: skip
    return pd.concat(parts).query("class_ms > 0")


def by_kernel(rows: pd.DataFrame, most: int = 8) -> pd.DataFrame:
    """Of each profile a row for each of the kernels that take most of a step."""
    profiles, found = _profiles(rows), []
    for at, kernels in enumerate(profiles["kernels"]):
        lines = [line for line in kernels if line[0] in SECTIONS and line[2] != REST]
        frame = pd.DataFrame(lines, columns=["section", "class", "kernel", "calls", "kernel_ms"])
        sums = frame.groupby(["kernel", "class"], sort=False)[["calls", "kernel_ms"]].sum()
        dear = sums.nlargest(most, "kernel_ms").reset_index()
        own = profiles.iloc[[at] * len(dear)].reset_index(drop=True)
        found.append(own.assign(**dear))
    return pd.concat(found) if found else profiles


def by_count(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each profile of plain attention a row measured and two counted: `how`, `softmax_ratio`."""
    ratios = {"measured": "softmax_ratio", "counted bytes": "bytes_ratio",
              "counted FLOPs": "flops_ratio"}  # fmt: skip
    profiles = rows[rows["softmax_ratio"].notna()]
    return pd.concat(
        [profiles.assign(how=how, softmax_ratio=profiles[of]) for how, of in ratios.items()]
    )


def _profiles(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["classes"].map(lambda c: isinstance(c, list))]


def _members(name: str) -> list[str]:
    """The classes of kernels that are drawn under a name."""
    return [c for c in classes.CLASSES if c not in DRAWN] if name == OTHERS else [name]


def _ms(lines: Any, sections: Iterable[str], names: Sequence[str]) -> float | None:
    """Time of the entries of a row's list with these sections and second columns."""
    if not isinstance(lines, list):
        return None
    return sum(line[-1] for line in lines if line[0] in sections and line[1] in names)


def _over(parts: Any, section: str) -> float | None:
    """The softmax's time over that of both products in a pass."""
    products = _ms(parts, [section], PRODUCTS)
    return (_ms(parts, [section], SOFTMAX) or 0.0) / products if products else None


def _counted(row: dict[str, Any]) -> tuple[float, float]:
    """The softmax's FLOPs and bytes over those of both products.

    A score takes 4 · width FLOPs in the products and five in the softmax. The products write it
    and read its probability, and read or write 4 · width / context elements of q, k, v and the
    output.
    """
    width = transformer.config(row["model"]).head_dim
    softmax, element = BYTES[row["precision"]]
    return 5 / (4 * width), softmax / (element * (2 + 4 * width / row["context_length"]))
