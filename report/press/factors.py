"""Page one: for every published source its factors, and what they are when measured again.

A factor is how many times as fast, or as small, one implementation is as another. Taken are the
comparisons from which each report concludes, at every size of its tables for an NVIDIA GPU that was
measured again. The published factor is taken from its table. The measured ones, one a GPU, are of
the published settings: medians over sessions of ratios within a session, with their range.
"""

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd

from press import style
from press.published import MACHINE, load
from press.say import key_of
from study import rows as recorded
from study.rows import ratio

MENDED, MASKED = "all work done", "with a mask"
"""What is measured beside a published factor and is not the same: it is drawn and not counted."""
MODELS = ("small", "medium", "large", "xl", "2.7b")
KEPT = 2.0
"""A factor carries over if its gain, as a percentage, is the published one or at most so many times
as large or as small."""
OUTCOMES = ("kept", "not kept", "kept in some sessions", "not counted")
SOURCES = {
    "000": "L4", "001": "RTX PRO 6000", "004": "a notebook", "002": "RTX 4090", "003": "A100",
}  # fmt: skip

style.register(*OUTCOMES[:2])
style.register(OUTCOMES[2], first=4)
style.register(OUTCOMES[3], first=6)


class Pair(NamedTuple):
    """A published factor, and what it is when measured again.

    Attributes:
        measured: a factor a session, indexed by machine.
        other: what it would be with the baseline's time of other sessions, indexed by machine.
        drawn: whether page one's picture has it; it has one size of a sweep.
    """

    source: str
    comparison: str
    published: float
    measured: pd.Series
    other: pd.Series = pd.Series(dtype=float)
    drawn: bool = True


def factors() -> pd.DataFrame:
    """A row a published factor and a row a GPU that measured it.

    Columns: `source`, `comparison`, `by` ("published" or "measured"), `machine`, `value`, its range
    over sessions `low` and `high`, how many `sessions` measured it, `drawn`, and `apart`: whether
    what was measured is not what was published, but the kernel that does all the work, or a model
    with a mask.
    """
    rows = []
    for pair in _pairs():
        first = {"source": SOURCES[pair.source], "drawn": pair.drawn,
                 "comparison": f"{pair.comparison} ({SOURCES[pair.source]})",
                 "apart": pair.comparison.endswith((MENDED, MASKED))}  # fmt: skip
        stated = dict.fromkeys(("value", "low", "high"), pair.published)
        rows.append({**first, "by": "published", "machine": MACHINE, **stated, "sessions": 1})
        for machine, sessions in pair.measured.groupby(level=0, observed=True):
            other = pair.other[pair.other.index == machine]
            every = [*sessions, *other]
            rows.append({**first, "by": "measured", "machine": machine, "value": sessions.median(),
                         "low": min(every), "high": max(every),
                         "sessions": len(sessions)})  # fmt: skip
    return pd.DataFrame(rows)


def _of_topic(name: str) -> pd.DataFrame:
    """Every row of a topic, its machine by its folder's name."""
    rows = recorded.load(name, sessions=True).rename(columns={"old_run": "run"})
    return rows.assign(machine=rows["machine"].map(key_of), recording=rows["set"], study=name)


def eager_steps() -> pd.DataFrame:
    """Every eager training step that a session of two topics clocked on a GPU, and `of` which."""
    each = {"end_to_end": _of_topic("end_to_end"), "profile": _of_topic("profile")}
    steps = pd.concat([rows.assign(of=name) for name, rows in each.items()])
    return steps.query(
        "provider == 'eager' and attention == 'plain' and device == 'cuda' and "
        "experiment != 'mlp' and status == 'ok' and step_median_ms.notna()"
    )


def standing(table: pd.DataFrame, machine: str) -> pd.DataFrame:
    """What became of each factor that a machine measured, by comparison.

    Columns: `sessions`, `value` and `stated`, and whether the gain is `kept` by the median session,
    by all (`sure`) and by some (`possible`). A published gain of 20 % is kept by one of 10 to 40 %.
    """
    ours = table[table["machine"] == machine].set_index("comparison")
    stated = table[table["by"] == "published"].set_index("comparison")["value"].reindex(ours.index)
    share = (ours[["value", "low", "high"]] - 1).div(stated - 1, axis=0)
    near = share.apply(lambda column: column.between(1 / KEPT, KEPT))
    ends = share[["low", "high"]].agg(["min", "max"], axis=1)
    across = (ends["min"] <= KEPT) & (ends["max"] >= 1 / KEPT)
    return ours[["sessions", "value"]].assign(
        stated=stated, kept=near["value"], sure=near.all(axis=1), possible=across
    )


def by_gain(table: pd.DataFrame, machine: str) -> pd.DataFrame:
    """The same rows; those measured have an outcome in `by`, and a machine's kept ones are first.

    Each machine's outcome is by its own sessions.
    """
    kept, lost, some, uncounted = OUTCOMES
    table = table.copy()
    for one in table.loc[table["by"] == "measured", "machine"].unique():
        own = table["machine"] == one
        each = standing(table, one)
        outcome = pd.Series(lost, each.index).mask(each["possible"], some).mask(each["sure"], kept)
        table.loc[own, "by"] = table.loc[own, "comparison"].map(outcome)
    table.loc[table["apart"] & (table["machine"] != MACHINE), "by"] = uncounted
    order = {kept: 0, some: 1, lost: 2, uncounted: 3}
    at = table[table["machine"] == machine].set_index("comparison")["by"].map(order)
    return table.iloc[table["comparison"].map(at).argsort(kind="stable")]


def survival(table: pd.DataFrame, machine: str) -> dict[str, Any]:
    """How many of the factors that a machine measured carry over; those `apart` left out.

    Returns:
        `all`; `near`, whose gain is kept by the median; `sure` and `possible`, those that keep it
        in each session and in some; `once`, those of `sure` that ran in one session only; `depend`,
        the names of those in some alone; `turned`, published as faster or smaller and measured as
        slower or larger, or the other way round. A factor within one per cent of 1 is neither.
    """
    each = standing(table[~table["apart"]], machine)
    sides = [(each[n] > 1.01).astype(int) - (each[n] < 0.99).astype(int)
             for n in ("value", "stated")]  # fmt: skip
    sure = each["sure"]
    counts = {"near": each["kept"], "sure": sure, "once": sure & (each["sessions"] == 1),
              "possible": each["possible"], "turned": sides[0] * sides[1] < 0}  # fmt: skip
    depend = [*each.index[each["possible"] & ~sure]]
    return {"all": len(each), **{n: int(which.sum()) for n, which in counts.items()},
            "depend": depend}  # fmt: skip


def _pairs() -> Iterator[Pair]:
    yield from _of_the_layer()
    yield from _of_steps()
    yield from _of_warm_up()
    yield from _of_llama()
    yield from _of_compilers()


def _of_the_layer() -> Iterator[Pair]:
    """The fused layer's, at the sizes of its grid and its sweeps."""
    rows = recorded.load("anatomy", sessions=True)
    rows = rows.assign(machine=rows["machine"].map(key_of))
    launched = rows.query("experiment == 'time' and launch == 'python' and dtype == 'float32'")
    over = ratio(launched, over="liger").set_index(
        ["machine", "tokens", "hidden_size", "direction", "provider", "precision"]
    )["ratio"]  # fmt: skip
    kernel = over.xs(("published-kernel", "highest"), level=("provider", "precision"))
    peak = rows.query("experiment == 'peak' and tokens == 64")
    kept = peak.set_index(["provider", "hidden_size", "machine"])["peak_ratio"].sort_index()
    swept = load("swiglu_ratios").set_index(["quantity", "batch_size", "d_model"])
    swept = swept["liger_over_fused"]
    cells = load("swiglu_times").query("table != 'mlp_backward_compare_WF.py'").replace(
        {"direction": {"backward": "forward+backward"}}  # what it calls backward has both
    )  # fmt: skip
    cells = cells.pivot(index=["batch_size", "d_model", "direction"], columns="implementation",
                        values="time_ms").eval("liger / fused")  # fmt: skip
    sweep = {(*size, "forward"): value for size, value in swept["forward time"].items()}
    largest = (1024, 4096, "forward+backward")
    for size, published in {**cells, **sweep}.items():
        again = kernel.index.droplevel("machine") == size
        if any(again):
            name = "kernel that skips work, time" + f", {size}" * (size != largest)
            measured = kernel[again].droplevel([1, 2, 3])
            yield Pair("000", name, published, measured, drawn=size == largest)
    for (_, width), published in swept["peak memory"].items():
        name = "kernel that skips work, memory" + f", {width}" * (width != 16384)
        measured = kept["published-kernel", width]
        yield Pair("000", name, published, measured, drawn=width == 16384)

    time, memory = cells[largest], swept["peak memory", 64, 16384]
    wide = over.xs(largest, level=("tokens", "hidden_size", "direction"))
    for comparison, published, provider, precision in (
        ("both in fp32, from Python", time, "ieee-products", "highest"),
        ("both in TF32, from Python", time, "all-gradients", "high"),
    ):
        measured = wide.xs((provider, precision), level=("provider", "precision"))
        yield Pair("000", f"{comparison}, {MENDED}", published, measured)
    yield Pair("000", f"memory, {MENDED}", memory, kept["all-gradients", 16384])


def _of_steps() -> Iterator[Pair]:
    """Autocast's and torch.compile's. Each experiment of a recording clocked eager steps anew."""
    by = ["machine", "study", "recording", "experiment"]
    compiled = _of_topic("end_to_end").query("experiment == 'model' and precision == 'fp32'")
    gain = ratio(compiled, over="eager", value="both_median_ms").query("provider == 'inductor'")
    selected = "backend == 'cuda' and direction == 'forward+backward' and warmup_steps.isna()"
    clocks = {
        name: own.pivot_table("both_median_ms", by, "precision", observed=True)
        for name, own in eager_steps().query("context_length == 256").groupby("model")
    }
    for name in MODELS:
        ms = clocks[name]
        cast = (ms["fp32"] / ms["bf16 autocast"]).dropna().droplevel(by[1:])
        alone = f"{selected} and model == '{name}' and not compile"
        yield Pair("001", f"autocast over fp32, {name}",
                   _stated("end_to_end", alone, "precision", "float32", "bfloat16 autocast",
                           "mean_ms"), cast)  # fmt: skip
    for name in MODELS:
        own = gain[gain["model"] == name].set_index("machine")
        after = own.groupby("machine")["both_median_ms"].median()
        fp32 = clocks[name]["fp32"].dropna().droplevel(by[1:])
        yield Pair("001", f"torch.compile, {name}",
                   _stated("end_to_end", f"{selected} and model == '{name}' and precision == "
                           "'float32'", "compile", False, True, "mean_ms"),
                   own["ratio"],
                   (fp32 / after.reindex(fp32.index)).dropna())  # fmt: skip


def _of_warm_up() -> Iterator[Pair]:
    """Means of ten steps without warm-up over those with it, a session a process."""
    fresh = _of_topic("warmup").query(
        "experiment == 'steps' and isolation == 'fresh' and direction == 'forward+backward' and "
        "status == 'ok'"
    )
    for source, later in (("001", 1), ("004", 5)):
        for model in MODELS:
            own = fresh[fresh["model"] == model].set_index("machine")["samples_ms"]
            series = f"direction == 'forward+backward' and source == '{source}'"
            yield Pair(source, f"mean without warm-up, {model}",
                       _stated("warmup", f"{series} and model == '{model}'", "warmup_steps", 0,
                               later, "mean_ms"),
                       own.map(lambda s, n=later: statistics.mean(s[:10])
                               / statistics.mean(s[n : n + 10])),
                       drawn=model == "small")  # fmt: skip


def _of_llama() -> Iterator[Pair]:
    """Liger's over Hugging Face's under DeepSpeed, which were not raced."""
    offload = recorded.load("llama", sessions=True).query(
        "experiment == 'distributed' and strategy == 'offload-throttled' and batch_size == 8 "
        "and status == 'ok'"
    )
    offload = offload.assign(machine=offload["machine"].map(key_of))
    typed = "table == 'drawing.py (typed)' and batch_size == 8 and context_length == 1024"
    sides = ["huggingface", "liger"]
    for what, ours, theirs in (("time", "median_ms", "tokens_per_s"),
                               ("memory", "peak_mib", "peak_bytes")):  # fmt: skip
        by = offload.pivot_table(ours, ["machine", "set"], "provider", observed=True)
        base, other = sides[::-1] if what == "time" else sides  # rates, and bytes
        yield Pair("002", f"Liger over Hugging Face, {what}",
                   _stated("llama", typed, "provider", base, other, theirs),
                   (by[sides[0]] / by[sides[1]]).droplevel("set"))  # fmt: skip


def _of_compilers() -> Iterator[Pair]:
    """Compilers' over eager PyTorch."""
    rows = recorded.load("compilers", sessions=True)
    over = ratio(rows.assign(machine=rows["machine"].map(key_of)), over="huggingface")
    train, static = "work == 'training sgd'", "script == 'train.py' and shapes == 'static'"
    for comparison, where, method, work, provider in (
        ("torch.compile without mask, forward", "table == '1 forward'", "inductor",
         "work == 'forward'", "inductor-causal"),
        ("torch.compile with CUDA graphs, a token", "table == 'Compiled model inference'",
         "inductor", "work == 'inference'", "inductor-graphs"),
        ("torch.compile without mask, training", static, "inductor", train, "inductor-causal"),
        ("torch.compile by layer, two GPUs", "sharding_stage == 2", "inductor",
         "work == 'distributed fsdp2-2' and processes == 2", "inductor-layers"),
        (f"torch.compile, training, {MASKED}", static, "inductor", train, "inductor"),
        (f"Thunder, a forward pass, {MASKED}", "table == '1 forward'", "thunder",
         "work == 'forward'", "thunder"),
        (f"Thunder, training, {MASKED}", static, "thunder", train, "thunder"),
    ):  # fmt: skip
        rates = work == "work == 'inference'"  # the other tables have times
        sides = (method, "eager") if rates else ("eager", method)
        value = "tokens_per_s" if rates else "time_s"
        published = _stated("litgpt", where, "method", *sides, value)
        measured = over.query(f"{work} and provider == '{provider}'").set_index("machine")
        yield Pair("003", comparison, published, measured["ratio"])


def _stated(table: str, where: str, by: str, base: object, other: object, value: str) -> float:
    """A published factor: the figure of one over that of the other."""
    frame = load(table).query(where)
    each = frame.groupby(by, dropna=False)[value].mean()
    return float(each[base] / each[other])
