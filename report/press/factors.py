"""Page one: for every published source its factors, and what they are when measured again.

A factor is how many times as fast, or as small, one implementation is as another. Taken are the
comparisons from which each report concludes, at every size of its tables for an NVIDIA GPU that was
measured again. The published factor is taken from its table; the measured ones, one a GPU, are of
the published settings: medians over recordings of ratios within a session, or of medians where the
two were not raced against each other.
"""

import statistics
from collections.abc import Iterator

import pandas as pd

from press.analysis import ratios
from press.published import MACHINE, load
from press.rows import Rows, study

MENDED = "all work done"
MODELS = ("small", "medium", "large", "xl", "2.7b")
SHOWN = ("ok", "wrong")  # the published kernel and its repairs are wrong, and are the subject
NEAR = 1.15
SOURCES = {
    "000": "L4", "001": "RTX PRO 6000", "004": "a notebook", "002": "RTX 4090", "003": "A100",
}  # fmt: skip


def factors() -> pd.DataFrame:
    """A row a published factor and a row a GPU that measured it: `source`, `comparison`, `by`
    ("published" or "measured"), `machine`, `value`, and whether it is `mended`: the published
    kernel's factors stand a second time beside those of the kernel that does all the work."""
    rows = []
    for source, comparison, published, measured in _pairs():
        first = {"source": SOURCES[source], "comparison": f"{comparison} ({SOURCES[source]})",
                 "mended": comparison.endswith(MENDED)}  # fmt: skip
        rows.append({**first, "by": "published", "machine": MACHINE, "value": published})
        rows += [
            {**first, "by": "measured", "machine": machine, "value": value}
            for machine, value in measured.items()
        ]
    return pd.DataFrame(rows)


def survival(table: pd.DataFrame, machine: str) -> dict[str, int]:
    """How many of the factors that a machine measured are `near` the published ones, and of the
    others how many `turned`: published as faster or smaller and measured as slower or larger, or
    the other way round. A factor within one per cent of 1 is neither. Mended ones do not count."""
    table = table[~table["mended"]]
    ours = table[table["machine"] == machine].set_index("comparison")["value"]
    theirs = table[table["by"] == "published"].set_index("comparison")["value"].reindex(ours.index)
    near = (ours / theirs).between(1 / NEAR, NEAR)
    sides = [(v > 1.01).astype(int) - (v < 0.99).astype(int) for v in (ours, theirs)]
    turned = (sides[0] * sides[1] < 0) & ~near
    return {"all": len(ours), "near": int(near.sum()), "turned": int(turned.sum())}


def _pairs() -> Iterator[tuple[str, str, float, pd.Series]]:
    """Source, comparison, the published factor, and the measured ones by machine."""
    wide = study("anatomy").of(
        tokens=1024, hidden_size=4096, direction="forward+backward", dtype="float32",
        launch="python",
    )  # fmt: skip
    time = _stated("swiglu_times", "table == 'mlp_backward_compare.py' and batch_size == 1024 and "
                   "d_model == 4096", "implementation", "liger", "fused", "time_ms")  # fmt: skip
    deep = study("anatomy").of(experiment="peak", tokens=64, hidden_size=16384)
    ratio = load("swiglu_ratios").query("quantity == 'peak memory' and d_model == 16384")
    peak = float(ratio["liger_over_fused"].iloc[0])
    fp32, tf32 = wide.of(precision="highest"), wide.of(precision="high")
    for comparison, published, measured in (
        ("fused over Liger", time, _raced(fp32, "liger", "published-kernel")),
        (f"both in fp32, {MENDED}", time, _raced(fp32, "liger", "ieee-products")),
        (f"both in TF32, {MENDED}", time, _raced(tf32, "liger", "all-gradients")),
        ("fused over Liger, memory", peak,
         _median(deep.of(provider="published-kernel"), "peak_ratio")),
        (f"memory, {MENDED}", peak, _median(deep.of(provider="all-gradients"), "peak_ratio")),
    ):  # fmt: skip
        yield "000", comparison, published, measured

    steps = study("end_to_end").of(experiment="step", context_length=256, device="cuda")
    compiled = study("end_to_end").of(experiment="model", precision="fp32")
    selected = "backend == 'cuda' and direction == 'forward+backward' and warmup_steps.isna()"
    for model in MODELS:
        yield (
            "001", f"autocast over fp32, {model}",
            _stated("end_to_end", f"{selected} and model == '{model}' and not compile", "precision",
                    "float32", "bfloat16 autocast", "mean_ms"),
            _apart(steps.of(model=model), "precision", "fp32", "bf16 autocast", "both_median_ms"),
        )  # fmt: skip
    for model in MODELS:
        yield (
            "001", f"torch.compile, {model}",
            _stated("end_to_end", f"{selected} and model == '{model}' and precision == 'float32'",
                    "compile", False, True, "mean_ms"),
            _raced(compiled.of(model=model), "eager", "inductor", "both_median_ms"),
        )  # fmt: skip
    fresh = study("warmup").of(
        experiment="steps", isolation="fresh", model="small", direction="forward+backward"
    )  # fmt: skip
    for source, later in (("001", 1), ("004", 5)):
        series = f"model == 'small' and direction == 'forward+backward' and source == '{source}'"
        cold, warm = (_median(_mean_of_ten(fresh, after), "mean_ms") for after in (0, later))
        yield (
            source, "mean without warm-up, small",
            _stated("warmup", series, "warmup_steps", 0, later, "mean_ms"), cold / warm,
        )  # fmt: skip

    offload = study("llama").of(
        experiment="distributed", strategy="offload-throttled", batch_size=8
    )
    typed = "table == 'drawing.py (typed)' and batch_size == 8 and context_length == 1024"
    yield (
        "002", "Liger over Hugging Face, time",
        _stated("llama", typed, "provider", "liger", "huggingface", "tokens_per_s"),
        _apart(offload, "provider", "huggingface", "liger", "median_ms"),
    )  # fmt: skip
    yield (
        "002", "Liger over Hugging Face, memory",
        _stated("llama", typed, "provider", "huggingface", "liger", "peak_bytes"),
        _apart(offload, "provider", "huggingface", "liger", "peak_mib"),
    )  # fmt: skip

    for comparison, where, method, experiment, provider in (
        ("torch.compile, a forward pass", "table == '1 forward'", "inductor",
         {"experiment": "forward"}, "inductor-causal"),
        ("Thunder, a forward pass, with a mask", "table == '1 forward'", "thunder",
         {"experiment": "forward"}, "thunder"),
        ("torch.compile with CUDA graphs, a token", "table == 'Compiled model inference'",
         "inductor", {"experiment": "inference"}, "inductor-graphs"),
        ("torch.compile, training", "script == 'train.py' and shapes == 'static'", "inductor",
         {"experiment": "training", "optimizer": "sgd"}, "inductor-causal"),
        ("Thunder, training, with a mask", "script == 'train.py' and shapes == 'static'", "thunder",
         {"experiment": "training", "optimizer": "sgd"}, "thunder"),
        ("torch.compile, two GPUs", "sharding_stage == 2", "inductor",
         {"experiment": "distributed", "strategy": "fsdp2-2"}, "inductor-layers"),
    ):  # fmt: skip
        tokens = experiment["experiment"] == "inference"  # its table has rates, the others times
        sides = (method, "eager") if tokens else ("eager", method)
        yield (
            "003", comparison,
            _stated("litgpt", where, "method", *sides, "tokens_per_s" if tokens else "time_s"),
            _raced(study("compilers").of(**experiment), "huggingface", provider),
        )  # fmt: skip


def _stated(table: str, where: str, by: str, base: object, other: object, value: str) -> float:
    """A published factor: the figure of one over that of the other."""
    frame = load(table).query(where)
    each = frame.groupby(by, dropna=False)[value].mean()
    return float(each[base] / each[other])


def _raced(rows: Rows, base: str, other: str, value: str = "median_ms") -> pd.Series:
    """How many times as fast or as small an implementation is as the base, in their sessions."""
    compared = ratios(rows[rows["status"].isin(SHOWN)], base, value=value)
    return _median(compared[compared["provider"] == other], "ratio")


def _apart(rows: Rows, by: str, base: object, other: object, value: str) -> pd.Series:
    """The median figure of one over that of the other, which were not raced."""
    ran = rows[rows["status"] == "ok"]
    return (_median(ran[ran[by] == base], value) / _median(ran[ran[by] == other], value)).dropna()


def _mean_of_ten(rows: Rows, after: int) -> pd.DataFrame:
    """Each series with the mean of ten steps after so many."""
    ran = rows[rows["status"] == "ok"]
    return ran.assign(mean_ms=[statistics.mean(s[after : after + 10]) for s in ran["samples_ms"]])


def _median(rows: pd.DataFrame, value: str) -> pd.Series:
    return rows.groupby("machine", observed=True)[value].median().dropna().astype(float)
