"""What the study claims of whole models that one line patches."""

from collections.abc import Callable, Sequence

import pandas as pd

from press.columns import read
from press.say import claim
from press.show import published
from study.llama import from_tables
from study.rows import ratio

CUT = "experiment == 'families' and model == 'Gemma-2-2B, 8 layers'"
WHOLE = "experiment == 'step' and group == 'whole'"
FEW = (
    "experiment == 'step' and model == 'Llama-3.2-1B' and group == 'sizes' "
    "and tokens in [1024, 2048]"
)
OF_1B = "experiment == 'step' and model == 'Llama-3.2-1B'"
LIMIT = "experiment == 'limit' and model == 'Llama-3.2-1B'"


LOSS = (
    "experiment == 'loss' and vocabulary == 128256 and ignored_share == 0 and "
    "distribution != 'zipf' and direction == 'forward+backward'"
)
RIVAL_LOSSES = ["liger-chunks", "liger-chunks-32", "liger-cute", "quack-base", "inductor"]
"""Those that are fast, where our check lets them pass."""
BOTH_SESSIONS = (
    "model == 'Llama-3.2-1B' and dtype == 'bfloat16' and "
    "((experiment == 'step' and group == 'arms') or experiment == 'families')"
)
"""Two sessions of a recording: among all rivals of the model, and among families."""
LIGERS = [
    "liger", "liger-chunks", "liger-chunks-32", "liger-without-flce", "liger-cute",
    "liger-cute-loss", "liger-inductor-layers",
]  # fmt: skip
"""Liger's patch in its settings, in Triton and in CuTe, and its loss beside compiled layers."""
UNMASKED = [
    "inductor-causal", "inductor-causal-loss", "inductor-causal-searched", "inductor-layers",
]  # fmt: skip
"""torch.compile without a mask: by itself, of the loss alone, with a search, and by layer."""
GRAPHS = ["fused-graph", "huggingface-graph", "liger-without-flce-graph", "liger-graph",
          "inductor-causal-graphs"]  # fmt: skip
PARTS = ["fused-mlp", "fused-rms-norm", "fused-rope", "fused-attention", "fused-loss"]


def faster(rows: pd.DataFrame, by: str = "provider") -> pd.Series:
    """How many times as fast fusedlib is: the median of each other implementation."""
    return ratio(rows, of="fused").groupby(by)["ratio"].median()


def of_arms(query: str, arms: Sequence[str]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """What selects these arms, and fusedlib beside them, where a query holds."""
    return lambda rows: rows.query(f"({query}) and provider in {['fused', *arms]}")


def beside_fastest(rows: pd.DataFrame, arms: Sequence[str]) -> tuple[tuple[float, float], str]:
    """How many times as fast fusedlib is as the fastest of these arms in each race, the least and
    the most; and the names of those arms."""
    over = ratio(rows[rows["provider"].isin(["fused", *arms])], of="fused")
    least = over.loc[over.groupby("race")["ratio"].idxmin()]
    names = [read("provider", name) for name in sorted({*least["provider"]})]
    return (least["ratio"].min(), least["ratio"].max()), " or ".join(names)


def extent(rows: pd.DataFrame, by: str = "provider") -> dict[str, tuple[float, float]]:
    """The least and the largest ratio of each group."""
    ends = rows.groupby(by)["ratio"].agg(["min", "max"])
    return {str(name): (low, high) for name, low, high in ends.itertuples()}


def medians(rows: pd.DataFrame, value: str) -> pd.Series:
    """The median of each implementation."""
    return rows.groupby("provider")[value].median()


@claim(
    "llama/whole-step",
    "A patched Llama is as fast as the plain one under torch.compile, in less memory",
    of=of_arms(BOTH_SESSIONS, ["inductor", "inductor-causal"]),
    optional=of_arms(f"{BOTH_SESSIONS} or ({OF_1B} and group == 'searched')", UNMASKED),
)
def whole_step(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Over the fastest timed without a mask ({arm}) fusedlib is {compiled:3×} as fast, and over
    torch.compile with its mask {masked:3×}. Its peak memory is {whole:2%} of the plain
    model's least under torch.compile."""
    gib = medians(rows[rows["group"] != "searched"], "whole_gib")
    least = gib.reindex(["inductor", *UNMASKED]).min()
    compiled, arm = beside_fastest(rows, UNMASKED)
    masked, _ = beside_fastest(rows, ["inductor"])
    say: dict = {"compiled": compiled, "arm": arm, "masked": masked}
    say["whole"] = gib["fused"] / least
    ahead = compiled[0] > 1 and compiled[1] < min(1.05, masked[0])
    return say, ahead and say["whole"] < 0.9


@claim("llama/published", of=lambda rows: from_tables(published("llama")))
def of_tables(rows: pd.DataFrame) -> tuple[dict, bool]:
    """By its own data the published study shows no faster kernel: at equal size Liger's throughput
    is {slow:2%} to {fast:2%} off Hugging Face's. One case was run {runs:,d} times, and the plot has
    the largest figure. Liger's step takes {one:3 s} at batch 1 and {eight:3 s} at batch 8. At batch
    1 Liger saves {bytes:,d} bytes, exactly one fp16 copy of the head's weight."""
    by = rows.set_index(["experiment", "sequences", "provider"]).sort_index()
    drawn, runs = by.loc["step"], by.loc["run"]
    speed = drawn["tokens_per_s"].unstack().dropna()
    off = speed.div(speed["huggingface"], axis=0).drop(columns="huggingface") - 1
    again, s = (runs.xs("liger", level="provider")[n] for n in ("tokens_per_s", "latency_s"))
    saved = drawn["peak_bytes"].loc["1 × 1,024"]
    say = {"slow": off.min().min(), "fast": off.max().max(), "runs": len(again["4 × 1,024"])}
    say |= {"one": s["1 × 1,024"].item(), "eight": s["8 × 1,024"].item()}
    say |= {"bytes": saved["huggingface"] - saved["liger"]}
    largest = speed.loc["4 × 1,024", "liger"] == again["4 × 1,024"].max()
    alike = say["fast"] < 0.02 and say["eight"] < 1.05 * say["one"]
    return say, largest and alike and say["bytes"] == 128256 * 2048 * 2


@claim(
    "llama/checkpoints",
    of=lambda rows: rows.query("experiment == 'distributed' and strategy == 'offload-throttled'"),
)
def checkpoints(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With activation checkpoints and the published settings a step of Llama-3.2-1B holds
    {fused:3 GiB} with fusedlib, {liger:3 GiB} with Liger and {huggingface:3 GiB} with Hugging
    Face."""
    gib = medians(rows[rows["batch_size"] == 8], "peak_gib")
    say = {name: gib[name] for name in ("fused", "liger", "huggingface")}
    return say, say["liger"] < say["fused"] < 0.5 * say["huggingface"]


@claim(
    "llama/limits",
    of=of_arms(LIMIT, ["liger", "huggingface"]),
    optional=of_arms(LIMIT, [*LIGERS, *UNMASKED]),
)
def limits(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Such a step fits at least {fused:,d} sequences of 1,024 tokens with fusedlib, {liger:,d} with
    Liger and {huggingface:,d} with Hugging Face."""
    most = rows.pivot(index="provider", columns="grows", values="largest")
    others = most.drop("fused").max()
    ordered = all(n["liger"] > n["huggingface"] for _, n in most.items())
    say = most["batch"].to_dict() | {"liger": most["batch"].reindex(LIGERS).max()}
    return say, ordered and bool((most.loc["fused"] > others).all())


@claim(
    "llama/few-tokens",
    of=of_arms(FEW, ["huggingface", "liger"]),
    optional=of_arms(FEW, LIGERS),
    first="With 2,048 tokens or fewer the CPU decides, and fusedlib is no faster",
)
def few_tokens(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With 1,024 or 2,048 tokens the CPU sets the pace, which differs from host to host. There
    fusedlib is {few:2×} as fast as Hugging Face and {liger:2×} as fast as {arm}, all uncompiled,
    over {rounds:,d} rounds."""
    few, _ = beside_fastest(rows, ["huggingface"])
    liger, arm = beside_fastest(rows, LIGERS)
    say = {"few": few, "liger": liger, "arm": arm, "rounds": rows["repetitions"].min()}
    return say, few[0] > 1.1 and liger[0] > 1.02


@claim(
    "llama/few-compiled",
    of=of_arms(f"{FEW} and tokens == 1024", ["inductor-causal"]),
    first="It is faster with 4,096 tokens too",
    unchanged=True,  # in the recordings that have both
)
def few_compiled(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With 1,024 tokens torch.compile without a mask, whose step the CPU holds up less, is
    {compiled:2×} as fast as fusedlib."""
    over = ratio(rows, of="inductor-causal").set_index("provider")["ratio"]
    return {"compiled": over["fused"]}, over["fused"] > 1


@claim(
    "llama/graphs",
    of=lambda rows: rows.query(f"{OF_1B} and group == 'sizes' and provider in {GRAPHS}"),
)
def graphs(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In one CUDA graph, with {tokens} tokens, fusedlib is {plain:2×} as fast as Hugging Face, and
    {liger:2×} as Liger without its fused Triton loss, which no graph can hold. Over torch.compile
    without a mask, in its own graphs (`reduce-overhead`), it is {compiled:3×} as fast."""
    ends = extent(ratio(rows, of="fused-graph"))
    say: dict = {"plain": ends["huggingface-graph"], "liger": ends["liger-without-flce-graph"]}
    say["compiled"] = ends["inductor-causal-graphs"]
    sizes = rows["tokens"].dropna()
    say["tokens"] = f"{sizes.min():,.0f} to {sizes.max():,.0f}"
    refused = rows.loc[rows["provider"] == "liger-graph", "status"].eq("unavailable").all()
    ahead = say["plain"][0] > 1.15 and say["liger"][0] > 1.02 and say["compiled"][0] > 0.95
    return say, refused and ahead


@claim(
    "llama/beside",
    of=of_arms(BOTH_SESSIONS, ["huggingface", "liger"]),
    optional=of_arms(BOTH_SESSIONS, LIGERS),
    first="It is at least 5 % faster than Liger; beside larger chunks or CuTe's loss it is not",
)
def beside(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of Llama-3.2-1B (bf16, 4 × 2,048 tokens) are {plain:3×} as fast with
    fusedlib as with Hugging Face, and {time:3×} as fast as with {arm}. Their peak memory is
    {share:2%} of Hugging Face's and {beside:2%} of Liger's least, weights and gradients counted."""
    (time, arm), (plain, _) = (beside_fastest(rows, arms) for arms in (LIGERS, ["huggingface"]))
    gib = medians(rows, "whole_gib")
    liger = gib.reindex(LIGERS).min()
    say: dict = {"time": time, "arm": arm, "plain": plain, "beside": gib["fused"] / liger}
    say["share"] = gib["fused"] / gib["huggingface"]
    ahead = time[0] > 1.02 and plain[0] >= 1.05
    return say, ahead and say["share"] < 0.5 and say["beside"] < 0.95


@claim(
    "llama/adamw",
    of=of_arms(WHOLE, ["huggingface", "liger"]),
    optional=of_arms(WHOLE, [*LIGERS, *UNMASKED]),
)
def adamw(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A whole training step with AdamW (Llama-3.2-1B, bf16, 4 × 2,048 tokens) is {plain:3×} as fast
    with fusedlib as with Hugging Face. It is {liger:3×} as fast as with {arm}, and {fastest:3×} as
    with the fastest other in that race, {who}."""
    (liger, _), arm = beside_fastest(rows, LIGERS)
    (fastest, _), who = beside_fastest(rows, [*LIGERS, *UNMASKED])
    plain = faster(rows)["huggingface"]
    say = {"liger": liger, "arm": arm, "plain": plain, "fastest": fastest, "who": who}
    return say, 1 < fastest <= liger < plain and liger > 1.02


@claim(
    "llama/parts",
    of=lambda rows: rows.query(
        f"{OF_1B} and group == 'arms' and dtype == 'bfloat16' and "
        f"provider in {[*PARTS, 'huggingface', 'fused']}"
    ),
)
def parts(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Alone the fused norms make the model {norm:3×} as fast, more than any other part. The fused
    loss alone, which stores no logits, gives {share:2%} of the saving of memory."""
    speed = ratio(rows, over="huggingface").groupby("provider")["ratio"].median()
    speed, gib = speed.reindex(PARTS), medians(rows, "whole_gib")
    saved = gib["huggingface"] - gib[[*PARTS, "fused"]]
    norm = speed["fused-rms-norm"] if speed.notna().all() else None
    say = {"norm": norm, "share": saved["fused-loss"] / saved["fused"]}
    most = speed.idxmax() == "fused-rms-norm" and saved[PARTS].idxmax() == "fused-loss"
    return say, most and 0.5 < say["share"] < 0.7


@claim(
    "llama/loss",
    of=of_arms(LOSS, ["fused-least", "liger", "liger-chunks", "liger-cute", "inductor"]),
    optional=of_arms(LOSS, ["liger", *RIVAL_LOSSES]),
)
def loss(rows: pd.DataFrame) -> tuple[dict, bool]:
    """The loss over 128,256 words (8,192 tokens, hidden sizes 2,048 and 4,096) is {liger:2×} as
    fast with fusedlib as with Liger's default, which peaks at {lean:2%} of its memory. Over the
    fastest others, {who}, it has no lead: it is {near:3×} as fast."""
    speed, peaks = (extent(ratio(rows, of="fused", value=n)) for n in ("median_ms", "peak_mib"))
    near, who = beside_fastest(rows, RIVAL_LOSSES)
    say: dict = {"liger": speed["liger"], "lean": peaks["liger"], "near": near, "who": who}
    return say, speed["liger"][0] > 1.2 and near[0] < 1


OF_150K = "vocabulary == 151936 and hidden_size == 4096"


@claim(
    "llama/log-probs",
    of=lambda rows: rows.query(
        f"{OF_150K} and ((provider == 'fused' and experiment in ['loss', 'log-probs']) or "
        "(provider in ['trl', 'liger', 'liger-scaled', 'inductor'] and ignored_share == 0 and "
        "experiment == 'log-probs'))"
    ),
)
def log_probs(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Log-probabilities of 8,192 tokens over a vocabulary of 151,936, with all gradients, take
    {trl:3×} as long with TRL as with fusedlib, and {liger:3×} with Liger's GRPO loss without CuTe
    (bf16, hidden size 4,096). Forward alone takes {forward:3×} as long with TRL. fusedlib takes
    {compiled:3×} the time of the plain formula through torch.compile, for it computes the logits
    twice. It peaks at {peak:2%} of the memory of any of them, or less. With half of the tokens
    ignored it takes {half:2%} of the time, and the loss {loss:2%}."""
    both = rows[rows["direction"] == "forward+backward"]
    whole = both.query("experiment == 'log-probs' and ignored_share == 0")
    over = medians(ratio(whole, of="fused"), "ratio")
    forward = ratio(rows.query("direction == 'forward' and ignored_share == 0"), of="fused")
    peaks, ms = medians(whole, "peak_mib"), both[both["provider"] == "fused"]
    ms = ms.pivot_table("median_ms", "experiment", "ignored_share", "median")
    half = ms[0.5] / ms[0.0]
    say = {"trl": over["trl"], "liger": over["liger"], "compiled": 1 / over["inductor"]}
    say |= {"forward": medians(forward, "ratio")["trl"], "half": half["log-probs"]}
    say |= {"peak": peaks["fused"] / peaks.drop("fused").min(), "loss": half["loss"]}
    of_liger = over.reindex(["liger", "liger-scaled"]).min()  # its Hopper op where it ran
    ahead = min(say["trl"], of_liger) > 1 and say["forward"] >= 0.95
    near = say["compiled"] <= 4 / 3 and say["peak"] <= 0.55
    return say, ahead and near and half.max() <= 0.56


@claim(
    "llama/log-probs-hopper",
    of=lambda rows: rows.query(
        f"{OF_150K} and experiment == 'log-probs' and ignored_share == 0 and "
        "direction == 'forward+backward' and provider in ['fused', 'liger-scaled', 'inductor']"
    ),
)
def log_probs_hopper(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Log-probabilities, with all gradients, of 8,192 tokens over a vocabulary of 151,936 take as
    long with Liger's kernels in CuTe for Hopper as with fusedlib. They take {scaled:3×} the time,
    at {peak:2%} of its peak memory. The plain formula under torch.compile is faster: beside it
    fusedlib is {compiled:3×} as fast, at {held:2%} of its memory."""
    over, peaks = (
        ratio(rows, of="fused", value=n).set_index("provider")["ratio"]
        for n in ("median_ms", "peak_mib")
    )
    over, peaks = (of_all.reindex(["liger-scaled", "inductor"]) for of_all in (over, peaks))
    say = {"scaled": over["liger-scaled"], "peak": peaks["liger-scaled"]}
    say |= {"compiled": over["inductor"], "held": 1 / peaks["inductor"]}
    return say, 0.95 < say["scaled"] < 1.05 and say["compiled"] < 1


@claim("llama/invariant", of=lambda rows: rows.query("group == 'invariant'"))
def invariant(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Inside of `fusedlib.batch_invariant` forward and backward of Llama-3.2-1B (bf16, 4 × 2,048)
    take at most 5 % longer: {large:3×} the time. They take {middle:3×} with 4 × 512 tokens and
    {few:3×} with 64, where the CPU sets the pace of this one process."""
    over = ratio(rows, of="fused").groupby("tokens")["ratio"].median()
    say = {"large": over[8192], "middle": over[2048], "few": over[64]}
    return say, say["large"] <= 1.05 and say["middle"] <= 1.1 and say["few"] <= 1.3


@claim(
    "llama/families",
    of=of_arms(CUT, ["huggingface", "liger", "inductor"]),
    optional=of_arms(CUT, LIGERS),
    first="Gemma 2 is 1.3 times as fast as with Liger, whose larger chunks were not timed",
)
def families(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With 8 of its 26 layers Gemma 2 is {gemma:3×} as fast with fusedlib as with {arm}, and
    {compiled:3×} as with torch.compile with its mask and logits. Besides weights and gradients
    Liger holds {liger:3 GiB} by default and {few:3 GiB} there. fusedlib holds more,
    {fused:3 GiB}."""
    (gemma, _), arm = beside_fastest(rows, LIGERS)
    (compiled, _), _ = beside_fastest(rows, ["inductor"])
    held = medians(rows, "activations_gib")
    held["few"] = held.get("liger-chunks-32", held["liger"])
    say: dict = {"gemma": gemma, "arm": arm, "compiled": compiled}
    say |= {name: held[name] for name in ("liger", "few", "fused")}
    return say, min(gemma, compiled) > 1 and max(say["liger"], say["few"]) < say["fused"]


@claim(
    "llama/gradients",
    of=lambda rows: rows.query("experiment == 'gradients'"),
)
def gradients(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At equal weights, four times in each of two trainings, none of {n:,d} gradients of a patched
    four-layer Llama has more than twice the error of Hugging Face's worse attention: the largest
    has {fused:2×}. With Liger's default it is {liger:2×}, with its sums in fp32 {summed:2×}."""
    same = rows[rows["family"].isin(["fused", "liger"]) & rows["missed"].notna()]
    worst = same.groupby("provider")["worst_gradient"].max()
    say = {"fused": worst["fused"], "liger": worst["liger"], "summed": worst["liger-fp32"]}
    count = same["parameters"].map(len).groupby(same["family"]).sum()
    good = max(say.values()) <= 2 and same["missed"].sum() == 0
    return say | {"n": int(count["fused"])}, good
