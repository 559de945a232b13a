"""What the five reports conclude, as factors, with the same factors of ours and a verdict."""

from collections.abc import Iterator

import pandas as pd

from press.columns import ordered_values
from press.origin import stated
from press.published import load as published
from study.patched import CONFIGS
from study.rows import load, ratio

EQUAL = 0.05
"""A factor within this of 1 is no gain and no loss."""
VERDICTS = ("reproduced", "larger here", "smaller here", "varies", "not comparable", "wrong result")
RULE = (
    "*Reproduced*: in every session of ours, on each GPU that ran it, the gain (the factor less 1) "
    "is half to twice theirs, or both factors lie within 5 % of 1. *Varies*: sessions or "
    "GPUs differ in the verdict. A slow-down that is less of one here is *larger*. *Not "
    "comparable*: ours computes something else, did not finish or was not run. We chose the rule "
    "after we had seen the numbers. No verdict have other "
    "sizes of the log and of the Liger study, Lit-GPT's memory, autocast with torch.compile, "
    "laptops, and what warm-up changes."
)
GROUPS = {
    "fused": ("kernel log, L4", "a fused MLP is faster than Liger's: 1,024 tokens, width 4,096"),
    "fused memory": ("kernel log, L4", "and holds less memory"),
    "mnist": ("kernel log, L4", "and shortens an epoch of MNIST"),
    "autocast": ("course report, RTX PRO 6000", "autocast to bf16, five models in fp32"),
    "compile": ("course report, RTX PRO 6000", "torch.compile speeds them up"),
    "liger": (
        "Liger study, RTX 4090",
        "Liger's kernels, weights on the host, 8 × 1,024: no faster",
    ),
    "liger memory": ("Liger study, RTX 4090", "and less memory"),
    "inductor": ("Lit-GPT, A100", "torch.compile speeds up Llamas"),
    "thunder": ("Lit-GPT, A100", "and Thunder speeds up some"),
}
"""Each group's report, and what it concludes."""
PYTHON = (
    "launch == 'python' and precision == 'highest' and dtype == 'float32' "
    "and direction == 'forward+backward' and shape == '1024·4096'"
)
MODELS = ("small", "medium", "large", "xl", "2.7b")
HOST, CARD = "small models wait for the host", "another card"
WRONG = "its result is wrong"
PACES = {
    "inductor": "faster memory; over the eager one's sessions",
    "thunder": "another host; over the eager one's sessions",
}
"""What a token waits for, compiled in a CUDA graph and not."""


def reproduced(theirs: float, ours: float) -> bool:
    """Whether a factor of ours is in keeping with a published one."""
    theirs, ours = theirs - 1, ours - 1
    equal = abs(theirs) < EQUAL and abs(ours) < EQUAL
    return equal or min(theirs / 2, 2 * theirs) <= ours <= max(theirs / 2, 2 * theirs)


def verdict(theirs: float, every: pd.Series, differs: str) -> str:
    """One of `VERDICTS` over the factors of all sessions of ours."""
    if differs or every.empty:
        return "wrong result" if differs == WRONG else "not comparable"
    each = {
        "reproduced" if reproduced(theirs, one)
        else "larger here" if one > theirs else "smaller here" for one in every
    }  # fmt: skip
    return each.pop() if len(each) == 1 else "varies"


def factors() -> pd.DataFrame:
    """A row a published factor: `group`, `report` (its GPU), `what`, `published`, a column a card
    with the least and the greatest of ours over sessions, `verdict`, and `why`. Every card has a
    column whose sessions a verdict is over; `cards` lists them."""
    known = {
        topic: load(topic, sessions=True)
        for topic in ("anatomy", "mnist", "end_to_end", "llama", "compilers")
    }
    lines = [*_fused(known["anatomy"], known["mnist"]), *_course(known["end_to_end"]),
             *_liger(known["llama"]), *_compilers(known["compilers"])]  # fmt: skip
    ends = pd.DataFrame([one.pop("ours") for one in lines])
    of = stated(pd.concat([one.pop("rows") for one in lines]))
    table, last = pd.DataFrame(lines), ["verdict", "why"]
    ends = ends[ordered_values("machine", ends)]
    table = pd.concat([table.drop(columns=last), ends, table[last]], axis=1)
    table.attrs = {"of": of}
    return table


def cards(table: pd.DataFrame) -> list[str]:
    """The columns of `factors` that are cards."""
    named = [*table]
    return named[named.index("published") + 1 : named.index("verdict")]


def counted(table: pd.DataFrame) -> str:
    """How many of the factors have which verdict, in a sentence or two."""
    n = table["verdict"].value_counts().reindex(VERDICTS, fill_value=0)
    which = table.loc[table["verdict"] == "reproduced", cards(table)].notna().sum()
    words = {0: "none", n["reproduced"]: "all"}
    ran = ", ".join(f"{words.get(count, count)} on the {card}" for card, count in which.items())
    ran = ran.replace(" on", " ran on", 1)
    compared = n[["reproduced", "larger here", "smaller here", "varies"]].sum()
    slower = ((table["verdict"] == "larger here") & (table["published"] < 1)).sum()
    return (
        f"Of {len(table)} factors of four of the reports {compared} compare with ours. "
        f"{n['reproduced']} were reproduced; of these {ran}. "
        f"{n['larger here']} are larger here, {slower} of them published as slow-downs. "
        f"{n['smaller here']} are smaller, and {n['varies']} vary by session or GPU. "
        f"{n['not comparable']} do not compare, and {n['wrong result']} are of a kernel whose "
        "result is wrong."
    )


def line(
    group: str, what: str, theirs: float, ours: pd.Series, rows: pd.DataFrame, why: str = "",
    differs: str = "",
) -> dict:  # fmt: skip
    """One factor as published, and ours.

    Args:
        ours: a factor a session, `machine` in the index.
        rows: of which it is.
        why: what may explain the difference, or the likeness.
        differs: what ours computes that theirs does not; `WRONG` where their result is wrong.
    """
    ours = ours.dropna()
    ends = {
        card: (own.min(), own.max())
        for card, own in ours.groupby(level="machine", observed=True) if len(own)
    }  # fmt: skip
    return {"group": group, "report": GROUPS[group][0], "what": what, "published": theirs,
            "ours": ends, "verdict": verdict(theirs, ours, differs),
            "why": "" if differs == WRONG else differs or why,
            "rows": rows[["machine", "began", "commit"]]}  # fmt: skip


def quotient(
    frame: pd.DataFrame, where: str, by: str, base: object, other: object, value: str
) -> float:
    """A published factor: the figure of one over that of the other."""
    each = frame.query(where).groupby(by, dropna=False)[value].mean()
    return float(each[base] / each[other])


def by_baseline(
    rows: pd.DataFrame, over: str, provider: str, value: str = "median_ms"
) -> tuple[pd.Series, pd.DataFrame]:
    """The same where the baseline drifts from session to session: over each of its sessions."""
    base, own = rows[rows["provider"] == over], rows[rows["provider"] == provider]
    each = base.set_index(["machine", "session"])[value]
    return each / own.groupby("machine", observed=True)[value].median(), pd.concat([base, own])


def by_session(
    rows: pd.DataFrame, over: str, provider: str, value: str = "median_ms"
) -> tuple[pd.Series, pd.DataFrame]:
    """How many times as fast or small a provider is, by machine and session, and of which rows."""
    rows = rows.query("provider in [@over, @provider]")
    some = ratio(rows, over=over, value=value)
    session = some["session"].fillna(some["set"])
    paired = rows[rows["session"].fillna(rows["set"]).isin(session)]
    return some.groupby(["machine", session], observed=True)["ratio"].median(), paired


def divided(
    rows: pd.DataFrame, columns: str, base: object, other: object, value: str
) -> tuple[pd.Series, pd.DataFrame]:
    """The figure of one over that of the other, by machine and recording, and of which rows."""
    rows = rows[rows[columns].isin([base, other])]
    wide = rows.pivot_table(value, ["machine", "recording"], columns, "median", observed=True)
    found = (wide[base] / wide[other]).dropna()
    return found, rows[rows["recording"].isin(found.index.get_level_values("recording"))]


def _fused(anatomy: pd.DataFrame, training: pd.DataFrame) -> Iterator[dict]:
    grid = published("swiglu_times").query(
        "table == 'mlp_backward_compare.py' and batch_size == 1024 and d_model == 4096"
    )
    peaks = anatomy.query("experiment == 'peak' and hidden_size == 16384")
    peaks = peaks[peaks["provider"] == "published-kernel"].set_index(["machine", "set"])
    of_memory = published("swiglu_ratios").query("quantity == 'peak memory'")["liger_over_fused"]
    epochs = training.query("experiment == 'epoch' and data_source == 'loader'")
    log = published("mnist").groupby("table")["train_ms"].median()
    yield line(
        "fused", "fused MLP, 1,024·4,096, both passes",
        quotient(grid, "table.notna()", "implementation", "liger", "fused", "time_ms"),
        *by_session(anatomy.query(PYTHON), "liger", "published-kernel"), differs=WRONG,
    )  # fmt: skip
    second = published("swiglu_times").query(
        "table == 'mlp_backward_compare_WF.py' and batch_size == 1024 and d_model == 4096"
    )
    yield line(
        "fused", "its second version, both passes",
        quotient(second, "table.notna()", "implementation", "liger", "fused", "time_ms"),
        peaks["peak_ratio"][:0], anatomy[:0], differs=WRONG,
    )  # fmt: skip
    yield line("fused memory", "its memory, 64·16,384", of_memory.iloc[-1], peaks["peak_ratio"],
               peaks.reset_index(), differs=WRONG)  # fmt: skip
    yield line(
        "mnist", "an epoch of MNIST with it", log["Liger"] / log["Fused no weight-grad"],
        *divided(epochs, "provider", "liger", "published-kernel", "train_s"),
        differs="its width is guessed",
    )  # fmt: skip


def _course(models: pd.DataFrame) -> Iterator[dict]:
    report = published("end_to_end")
    cuda = "backend == 'cuda' and direction == 'forward+backward' and warmup_steps.isna()"
    steps = models.query(
        "experiment in ['step', 'model', 'profile'] and device == 'cuda' and attention == 'plain' "
        "and context_length == 256 and provider == 'eager'"
    )
    steps = steps.assign(recording=steps["recording"] + " " + steps["experiment"].astype(str))
    for name in MODELS:
        where = f"{cuda} and model == '{name}' and not compile"
        theirs = quotient(report, where, "precision", "float32", "bfloat16 autocast", "mean_ms")
        ours = divided(steps[steps["model"] == name], "precision", "fp32", "bf16 autocast",
                       "both_median_ms")  # fmt: skip
        yield line("autocast", f"autocast, {name}", theirs, *ours,
                   HOST if name in MODELS[:2] else CARD)  # fmt: skip
    for name in MODELS:
        where = f"{cuda} and model == '{name}' and precision == 'float32'"
        measured = f"experiment == 'model' and precision == 'fp32' and model == '{name}'"
        yield line("compile", f"torch.compile in fp32, {name}",
                   quotient(report, where, "compile", False, True, "mean_ms"),
                   *by_session(models.query(measured), "eager", "inductor", "both_median_ms"),
                   HOST if name in MODELS[:2] else CARD)  # fmt: skip


def _liger(llama: pd.DataFrame) -> Iterator[dict]:
    study = published("llama")
    typed = "table == 'drawing.py (typed)' and batch_size == 8 and context_length == 1024"
    offload = llama.query("strategy == 'offload-throttled' and batch_size == 8")
    plain = "provider == 'huggingface'"
    more = study.query(f"{typed} and {plain}")["peak_bytes"].item()
    more -= offload.query(plain)["peak_mib"].median() * 2**20
    logits = 8 * 1024 * CONFIGS["Llama-3.2-1B"]["vocab_size"]
    yield line("liger", "Liger's tokens a second over Hugging Face's, 8 × 1,024",
               quotient(study, typed, "provider", "liger", "huggingface", "tokens_per_s"),
               *divided(offload, "provider", "liger", "huggingface", "tokens_per_s"),
               "with weights on the GPU Liger is faster at this size")  # fmt: skip
    yield line("liger memory", "Hugging Face's peak over Liger's, 8 × 1,024",
               quotient(study, typed, "provider", "huggingface", "liger", "peak_bytes"),
               *divided(offload, "provider", "huggingface", "liger", "peak_mib"),
               f"their peak has {more / logits:.0f} more bytes a logit")  # fmt: skip


def _compilers(compilers: pd.DataFrame) -> Iterator[dict]:
    litgpt = published("litgpt")
    mask, layers = "ours has a mask, theirs none", "ours compiles layer by layer"
    cut, absent = "ours was cut off after 200 s", "Thunder was not run on two GPUs"
    token, race = "table == 'Compiled model inference'", "table == 'Compiled generation inference'"
    static = "script == 'train.py' and shapes == 'static'"
    other = "script == 'train.py' and shapes == 'dynamic'"
    for what, where, work, inductor, theirs, thunder in (
        ("a forward pass", "table == '1 forward'", "forward", "inductor-causal", "", mask),
        ("a token", token, "inference", "inductor-graphs", "", ""),
        ("a generated token", race, "generation race", "inductor-graphs", "", ""),
        ("training", static, "training sgd", "inductor-causal", "", mask),
        ("training, other lengths", other, "dynamic", "inductor-layers", layers, cut),
        ("two GPUs, weights kept", "sharding_stage == 2", "distributed fsdp2-2",
         "inductor-layers", layers, absent),
        ("two GPUs, gathered anew", "sharding_stage == 3", "distributed fsdp2-3",
         "inductor-layers", layers, absent),
    ):  # fmt: skip
        rates = what.endswith("token")
        for method, provider, differs in (
            ("inductor", inductor, theirs), ("thunder", "thunder", thunder)
        ):  # fmt: skip
            sides = (method, "eager") if rates else ("eager", method)
            ours = compilers[(compilers["work"] == work) & (compilers["processes"] != 1)]
            ours = ours[:0] if differs == cut else ours
            value = "published_as" if work == "dynamic" else "median_ms"  # with all compilation
            name = {"inductor": "torch.compile", "thunder": "Thunder"}[method]
            yield line(
                method, f"{name}, {what}",
                quotient(litgpt, where, "method", *sides, "tokens_per_s" if rates else "time_s"),
                *(by_baseline if rates else by_session)(ours, "huggingface", provider, value),
                PACES[method] if rates else CARD, differs,
            )  # fmt: skip
