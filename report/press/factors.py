"""What the five reports conclude, as factors, beside the same factors of ours.

A factor came out if the gain on the H200 is half to twice as many per cent as the published one,
or if neither is a gain or a loss of more than `NONE`. The rule was chosen after the rows were
known.
"""

from collections.abc import Mapping

import pandas as pd

from press.origin import stated
from press.published import load as published
from study.rows import load, ratio
from study.warmup import after_warmup

CARDS = ("H200", "H100")
NONE = 0.05
GROUPS = {
    "fused": ("000", "a fused MLP is faster than Liger's"),
    "fused memory": ("000", "and smaller"),
    "mnist": ("000", "an epoch of MNIST with it is shorter"),
    "autocast": ("001", "autocast to bf16 changes the time of five models"),
    "compile": ("001", "torch.compile speeds them up in fp32"),
    "warmup": ("001, 004", "without warm-up the mean step of small is longer"),
    "liger": ("002", "a Llama with Liger's kernels is no faster, weights on the host"),
    "liger memory": ("002", "and smaller"),
    "compilers": ("003", "torch.compile and Thunder speed up Llamas"),
}
"""Each group's reports, and what they conclude."""
PYTHON = (
    "launch == 'python' and precision == 'highest' and dtype == 'float32' "
    "and direction == 'forward+backward' and shape == '1024·4096'"
)
MODELS = ("small", "medium", "large", "xl", "2.7b")


def came_out(theirs: float, ours: float) -> bool:
    """Whether a factor of ours is in keeping with a published one."""
    theirs, ours = theirs - 1, ours - 1
    none = abs(theirs) < NONE and abs(ours) < NONE
    return none or min(theirs / 2, 2 * theirs) <= ours <= max(theirs / 2, 2 * theirs)


def factors() -> pd.DataFrame:
    """A row a published factor: `group`, `report` (its GPU), `what`, `published`, a column a card,
    `came_out`, and `why` where something explains the difference or the likeness."""
    anatomy, models, llama = load("anatomy"), load("end_to_end"), load("llama")
    compilers, training = load("compilers"), load("mnist").drop(columns="status")
    fresh = load("warmup").query("experiment == 'steps' and isolation == 'fresh'")
    fresh = fresh.query("direction != 'step'")
    lines = [
        *_fused(anatomy, training), *_course(models), *_liger(llama), *_compilers(compilers),
        *_warmup(fresh),
    ]  # fmt: skip
    table = pd.DataFrame(lines)
    table["came_out"] = [
        came_out(theirs, ours) for theirs, ours in table[["published", CARDS[0]]].to_numpy()
    ]
    used = pd.concat([anatomy, models, llama, compilers, training, fresh])
    table.attrs = {"of": stated(used[["machine", "began", "commit"]])}
    return table


def line(group: str, report: str, what: str, factor: float, ours: pd.Series, why: str = "") -> dict:
    """One factor as published, and ours by machine."""
    return {"group": group, "report": report, "what": what, "published": factor,
            **{card: ours.get(card) for card in CARDS}, "why": why}  # fmt: skip


def of(frame: pd.DataFrame, where: str, by: str, base: object, other: object, value: str) -> float:
    """A published factor: the figure of one over that of the other."""
    each = frame.query(where).groupby(by, dropna=False)[value].mean()
    return float(each[base] / each[other])


def ours(
    rows: pd.DataFrame, over: str, provider: str, where: str, value: str = "median_ms"
) -> pd.Series:
    """How many times as fast or small a provider is, by machine, of the newest session."""
    some = ratio(rows.query(where), over=over, value=value).query("provider == @provider")
    return some.groupby("machine", observed=True)["ratio"].median()


def _fused(anatomy: pd.DataFrame, training: pd.DataFrame) -> list[dict]:
    grid = published("swiglu_times").query(
        "table == 'mlp_backward_compare.py' and batch_size == 1024 and d_model == 4096"
    )
    peaks = anatomy.query("experiment == 'peak' and hidden_size == 16384")
    peaks = peaks[peaks["provider"] == "published-kernel"].set_index("machine")["peak_ratio"]
    of_memory = published("swiglu_ratios").query("quantity == 'peak memory'")["liger_over_fused"]
    epochs = training.query("experiment == 'epoch' and data_source == 'loader'")
    epochs = epochs.pivot_table("train_s", "machine", "provider", observed=True)
    log = published("mnist").groupby("table")["train_ms"].median()
    return [
        line("fused", "L4", "fused MLP, 1,024·4,096, both passes",
             of(grid, "table.notna()", "implementation", "liger", "fused", "time_ms"),
             ours(anatomy, "liger", "published-kernel", PYTHON), "its kernel leaves out work"),
        line("fused memory", "L4", "its memory, 64·16,384", of_memory.iloc[-1], peaks,
             "two gradients are missing"),
        line("mnist", "L4", "an epoch of MNIST with it", log["Liger"] / log["Fused no weight-grad"],
             epochs["liger"] / epochs["published-kernel"],
             "its width is guessed"),
    ]  # fmt: skip


def _course(models: pd.DataFrame) -> list[dict]:
    report = published("end_to_end")
    cuda = "backend == 'cuda' and direction == 'forward+backward' and warmup_steps.isna()"
    steps = models.query("experiment == 'step' and device == 'cuda' and attention == 'plain' and "
                         "context_length == 256")  # fmt: skip
    steps = steps.pivot_table("both_median_ms", ["model", "machine"], "precision", observed=True)
    cast = steps["fp32"] / steps["bf16 autocast"]
    waits, card = "another host", "RTX PRO 6000"
    lines = []
    for name in MODELS:
        where = f"{cuda} and model == '{name}'"
        factor = of(report, f"{where} and not compile", "precision", "float32",
                    "bfloat16 autocast", "mean_ms")  # fmt: skip
        lines.append(line("autocast", card, f"autocast, {name}", factor, cast[name],
                          waits if name in MODELS[:2] else "another card"))  # fmt: skip
    for name in MODELS:
        where = f"{cuda} and model == '{name}' and precision == 'float32'"
        measured = f"experiment == 'model' and precision == 'fp32' and model == '{name}'"
        lines.append(line("compile", card, f"torch.compile in fp32, {name}",
                          of(report, where, "compile", False, True, "mean_ms"),
                          ours(models, "eager", "inductor", measured, "both_median_ms"),
                          waits if name in MODELS[:2] else "another card"))  # fmt: skip
    return lines


def _liger(llama: pd.DataFrame) -> list[dict]:
    study = published("llama")
    typed = "table == 'drawing.py (typed)' and batch_size == 8 and context_length == 1024"
    offload = llama.query("strategy == 'offload-throttled' and batch_size == 8")
    of_both = offload.pivot_table(
        ["tokens_per_s", "peak_mib"], "machine", "provider", observed=True
    )
    rate, peak = of_both["tokens_per_s"], of_both["peak_mib"]
    return [
        line("liger", "RTX 4090", "Liger's tokens a second over Hugging Face's",
             of(study, typed, "provider", "liger", "huggingface", "tokens_per_s"),
             rate["liger"] / rate["huggingface"], "no gain there, none here"),
        line("liger memory", "RTX 4090", "Hugging Face's peak over Liger's",
             of(study, typed, "provider", "huggingface", "liger", "peak_bytes"),
             peak["huggingface"] / peak["liger"], "bf16 here, fp16 there"),
    ]  # fmt: skip


def _compilers(compilers: pd.DataFrame) -> list[dict]:
    litgpt = published("litgpt")
    static = "script == 'train.py' and shapes == 'static'"
    forward, token = "table == '1 forward'", "table == 'Compiled model inference'"
    mask = "ours has a mask, theirs none"
    eager, inductor = ("eager", "inductor"), ("inductor", "eager")
    return [
        line("compilers", "A100", what,
             of(litgpt, where, "method", *sides, "tokens_per_s" if where == token else "time_s"),
             ours(compilers.query("processes != 1"), "huggingface", provider, f"work == '{work}'"),
             why)
        for what, where, sides, work, provider, why in (
            ("torch.compile, a forward pass, no mask", forward, eager, "forward",
             "inductor-causal", ""),
            ("Thunder, a forward pass", forward, ("eager", "thunder"), "forward", "thunder", mask),
            ("torch.compile in CUDA graphs, a token", token, inductor, "inference",
             "inductor-graphs", "another card and host"),
            ("torch.compile, training, no mask", static, eager, "training sgd", "inductor-causal",
             ""),
            ("torch.compile, training", static, eager, "training sgd", "inductor", mask),
            ("Thunder, training", static, ("eager", "thunder"), "training sgd", "thunder", mask),
            ("torch.compile by layer, two GPUs", "sharding_stage == 2", eager,
             "distributed fsdp2-2", "inductor-layers",
             "ours hours apart, of two commits"),
        )
    ]  # fmt: skip


def _warmup(fresh: pd.DataFrame) -> list[dict]:
    small = after_warmup(
        fresh.query("model == 'small' and direction == 'forward+backward'"), 0, 1, 5
    )
    small = small.pivot_table("mean_ms", "machine", "warmup_steps", "median", observed=True)
    notes = published("warmup").query("direction == 'forward+backward' and model == 'small'")
    return [
        line("warmup", card, f"mean of small without warm-up, over that with {later}",
             of(notes, f"source == '{source}'", "warmup_steps", 0, later, "mean_ms"),
             small[0] / small[later], "the first steps wait for the host")
        for source, card, later in (("001", "RTX PRO 6000", 1), ("004", "not stated", 5))
    ]  # fmt: skip


def by_report(table: pd.DataFrame) -> Mapping[str, pd.DataFrame]:
    """The factors of each conclusion, in the order of `GROUPS`."""
    return {name: table[table["group"] == name] for name in GROUPS}
