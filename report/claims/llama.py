"""What the study claims of whole models that one line patches."""

import pandas as pd

from press.say import claim
from press.show import published
from study.llama import from_tables
from study.llama.steps import flops
from study.llama.training import loss_distances
from study.rows import ratio

SHEET = 989.5e12
"""FLOP/s of dense products in bf16 by the data sheet of H100 and H200."""
OF_1B = "experiment == 'step' and model == 'Llama-3.2-1B'"
ARMS = f"{OF_1B} and group == 'arms' and dtype == 'bfloat16'"
WEIGHTS_GIB = 2 * 1_235_814_400 * 2 / 2**30
"""Weights and gradients of Llama-3.2-1B, two bytes each."""
PARTS = ["fused-rms-norm", "fused-rope", "fused-mlp", "fused-loss", "fused-attention"]
PAIRS = {"loss": ("liger-flce", "fused-loss"), "mlp": ("liger-swiglu", "fused-mlp"),
         "norm": ("liger-rms-norm", "fused-rms-norm"), "rope": ("liger-rope", "fused-rope"),
         "all": ("liger", "fused")}  # fmt: skip
ALONE_128K = "(experiment == 'loss' and vocabulary == 128256 and ignored_share == 0)"
PAIRED = [name for pair in PAIRS.values() for name in pair]


def faster(rows: pd.DataFrame, by: str = "provider") -> pd.Series:
    """How many times as fast fusedlib is: the median of each other implementation."""
    return ratio(rows, of="fused").groupby(by)["ratio"].median()


def extent(rows: pd.DataFrame, by: str = "provider") -> dict[str, tuple[float, float]]:
    """The least and the largest ratio of each group."""
    ends = rows.groupby(by)["ratio"].agg(["min", "max"])
    return {str(name): (low, high) for name, low, high in ends.itertuples()}


def medians(rows: pd.DataFrame, value: str) -> pd.Series:
    """The median of each implementation."""
    return rows.groupby("provider")[value].median()


@claim(
    "llama/whole-step",
    "A patched Llama is as fast as the plain one compiled, in little more than half of its memory "
    "besides weights and gradients",
    of=lambda rows: rows.query(f"{ARMS} and provider in ['inductor', 'inductor-causal', 'fused']"),
)
def whole_step(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of Llama-3.2-1B (bf16, 4 × 2,048) take {compiled:2%} longer with
    torch.compile, the faster of with and without a mask, than with fusedlib. fusedlib holds
    {share:2%} of its memory besides weights and gradients, and {whole:2%} with these counted."""
    rows = rows.assign(whole_gib=rows["activations_gib"] + WEIGHTS_GIB)
    by = rows.groupby("provider")[["median_ms", "activations_gib", "whole_gib"]].median()
    time, share, whole = by.loc["fused"] / by.drop("fused").sort_values("median_ms").iloc[0]
    say = {"compiled": 1 / time - 1, "share": share, "whole": whole}
    return say, 1 / 1.05 < time < 1 and share < 0.6 and whole < 0.7


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
    of=lambda rows: rows.query("experiment == 'limit' and model == 'Llama-3.2-1B'"),
    repeats="counted",
)
def limits(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A whole step of Llama-3.2-1B with AdamW in bf16 fits at least {fused:,d} sequences of 1,024
    tokens with fusedlib, {liger:,d} with Liger and {huggingface:,d} with Hugging Face. Of four
    sequences each may have {fused_long:,d}, {liger_long:,d} and {huggingface_long:,d} tokens."""
    most = rows.pivot(index="provider", columns="grows", values="largest")
    batch, length = most["batch"], most["context"]
    ordered = all(n["fused"] > n["liger"] > n["huggingface"] for n in (batch, length))
    return {**batch, **length.add_suffix("_long")}, ordered


@claim(
    "llama/few-tokens",
    of=lambda rows: rows.query(
        f"{OF_1B} and group == 'sizes' and tokens in [1024, 2048] "
        "and provider in ['huggingface', 'liger', 'fused'] and repetitions >= 30"
    ),  # with three rounds the pace of a host is a guess
    first="With 2,048 tokens or fewer the CPU decides, and fusedlib is no faster",
)
def few_tokens(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With 1,024 or 2,048 tokens, where the CPU sets the pace, fusedlib is more than a tenth faster
    than Hugging Face, {few:3×} as fast, and {liger:3×} as fast as Liger, over {rounds:,d} rounds in
    turns."""
    speed = extent(ratio(rows, of="fused"))
    say = {"few": speed["huggingface"], "liger": speed["liger"]}
    say["rounds"] = rows["repetitions"].min()
    return say, say["few"][0] > 1.1 and say["liger"][0] > 1.02


@claim(
    "llama/switches",
    of=lambda rows: rows.query(f"{ARMS} and provider in {['huggingface', *PARTS]}"),
)
def switches(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Of fusedlib's {parts:,d} parts alone the norms speed up a step most: it is {norm:3×} as fast
    as Hugging Face's, and with any other part alone {next:3×} at most."""
    over = medians(ratio(rows, over="huggingface"), "ratio").reindex(PARTS)
    say = {"norm": over["fused-rms-norm"], "parts": len(PARTS)}
    say["next"] = over.drop("fused-rms-norm").max(skipna=False)
    return say, say["norm"] > 1.02 * say["next"]


@claim("llama/lead", of=lambda rows: rows.query(f"{ARMS} and provider in {PAIRED}"))
def lead(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With fusedlib's loss alone a step takes {loss:3 ms} less than with Liger's alone, and with
    its MLP alone {mlp:3 ms} less. No other part gives more, and together they give at least three
    quarters of the lead of all parts."""
    ms = medians(rows, "median_ms").reindex(PAIRED)
    less = {name: ms[liger] - ms[fused] for name, (liger, fused) in PAIRS.items()}
    most = min(less["loss"], less["mlp"]) > max(less["norm"], less["rope"])
    say = {name: less[name] for name in ("loss", "mlp")}
    return say, most and sum(say.values()) >= 0.75 * less["all"] > 0


@claim(
    "llama/mfu", of=lambda rows: rows.query(f"{ARMS} and provider in ['huggingface', 'fused']")
)  # fmt: skip
def mfu(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of Llama-3.2-1B (bf16, 4 × 2,048) use {plain:2%} of the peak of dense
    products on the GPU's data sheet with Hugging Face, and {fused:2%} with fusedlib."""
    work = [flops(case) / SHEET for case in rows.to_dict("records")]
    share = (work / (rows["median_ms"] / 1e3)).groupby(rows["provider"]).median()
    say = {"plain": share["huggingface"], "fused": share["fused"]}
    return say, 0.2 < say["plain"] < say["fused"] < 0.8


@claim(
    "llama/beside",
    of=lambda rows: rows.query(f"{ARMS} and provider in ['huggingface', 'liger', 'fused']"),
)
def beside(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of Llama-3.2-1B (bf16, 4 × 2,048) are {time:3×} as fast with fusedlib as
    with Liger, and {plain:3×} as fast as with Hugging Face."""
    over = faster(rows)
    return {"time": over["liger"], "plain": over["huggingface"]}, over.min() >= 1 / 0.93


@claim(
    "llama/large",
    of=lambda rows: rows.query(
        f"{OF_1B} and dtype == 'bfloat16' and group in ['arms', 'sizes'] "
        "and tokens in [32768, 98304] and provider in ['liger', 'fused']"
    ),
)
def large(rows: pd.DataFrame) -> tuple[dict, bool]:
    """From 32,768 tokens on fusedlib is 2 to 10 % faster than Liger: {large:3×} as fast."""
    ends = extent(ratio(rows, of="fused"))["liger"]
    return {"large": ends}, 1.02 <= ends[0] < ends[1] <= 1.1


@claim(
    "llama/adamw",
    of=lambda rows: rows.query(
        "experiment == 'step' and group == 'whole' and provider in ['huggingface', 'liger', "
        "'fused']"
    ),
)
def adamw(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A whole step of Llama-3.2-1B with AdamW (bf16, 4 × 2,048) is {liger:3×} as fast with fusedlib
    as with Liger, and {plain:3×} as fast as with Hugging Face."""
    over = faster(rows)
    say = {"liger": over["liger"], "plain": over["huggingface"]}
    return say, 1.02 < say["liger"] < say["plain"]


@claim(
    "llama/compiled-arms",
    of=lambda rows: rows.query(f"{ARMS} and provider in ['fused', 'fused-inductor']"),
)
def compiled_arms(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With torch.compile the time of the patched Llama-3.2-1B changes by less than 5 %: it takes
    {gain:2%} less."""
    ms = medians(rows, "median_ms")
    gain = 1 - ms["fused-inductor"] / ms["fused"]
    return {"gain": gain}, abs(gain) < 0.05


@claim(
    "llama/held",
    of=lambda rows: rows.query(
        f"{ARMS} and provider in ['huggingface', 'liger', 'inductor-causal', 'fused']"
    ),
    first="With fusedlib they hold at most 80 % of what they hold with Liger",
)
def held(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of Llama-3.2-1B (bf16, 4 × 2,048) hold {fused_gib:3 GiB} besides weights
    and gradients with fusedlib, at most 85 % of the {liger_gib:3 GiB} with Liger. They hold
    {huggingface_gib:3 GiB} with Hugging Face, and {compiled_gib:3 GiB} with torch.compile, told
    that attention is causal."""
    gib = medians(rows, "activations_gib")
    say = {"fused_gib": gib["fused"], "liger_gib": gib["liger"]}
    say |= {"huggingface_gib": gib["huggingface"], "compiled_gib": gib["inductor-causal"]}
    less = 1.5 * say["compiled_gib"] < say["huggingface_gib"]
    return say, less and gib["fused"] <= 0.85 * gib["liger"]


@claim(
    "llama/alone",
    of=lambda rows: rows.query("experiment == 'memory' and model == 'Llama-3.2-1B'"),
    repeats="counted",
)
def alone(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A whole step of Llama-3.2-1B with AdamW (bf16, 4 × 2,048), alone on a GPU, peaks at
    {fused:3 GiB} with fusedlib and at {liger:3 GiB} with Liger. With Hugging Face it peaks at
    {huggingface:3 GiB}."""
    say = medians(rows, "peak_gib").to_dict()
    return say, say["fused"] < 0.9 * say["liger"] and say["liger"] < 0.6 * say["huggingface"]


@claim(
    "llama/operations",
    of=lambda rows: rows.query(
        f"(experiment in ['norm', 'rope'] or {ALONE_128K}) and provider in "
        "['products', 'copy', 'fused', 'liger', 'liger-fp32', 'inductor']"
    ),
)
def operations(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With fusedlib the loss of 8,192 tokens over a vocabulary of 128,256 in bf16, with all its
    gradients, runs at {products:2%} of the speed of its three products. It is at least {liger:3×}
    as fast as Liger's, and {exact:3×} where Liger too sums the weight's gradient in fp32. With
    torch.compile the loss takes {narrow:2%} longer at hidden size 2,048, and {wide:2%} at 4,096.
    The norm moves bytes at {norm:2%} of a copy's rate or more, the rotation at {rope:2%} or
    more."""
    loss, moved = rows[rows["experiment"] == "loss"], rows[rows["experiment"] != "loss"]
    beside = ratio(loss, of="fused")
    ahead, near = extent(beside), extent(ratio(loss, over="products"))["fused"]
    share = extent(ratio(moved, over="copy").query("provider == 'fused'"), "experiment")
    say: dict = {"products": near, "liger": ahead["liger"][0], "exact": ahead["liger-fp32"][0]}
    say |= {name: low for name, (low, _) in share.items()}
    longer = beside.query("provider == 'inductor'").groupby("hidden_size")["ratio"].median()
    say |= {"narrow": longer[2048] - 1, "wide": longer[4096] - 1}
    fast = near[0] >= 1 / 1.30 and say["liger"] >= 1.35 and say["exact"] >= 2
    behind = min(say["narrow"], say["wide"]) > 0
    return say, fast and behind and min(say["norm"], say["rope"]) >= 0.85


OF_150K = "vocabulary == 151936 and hidden_size == 4096"


@claim(
    "llama/log-probs",
    of=lambda rows: rows.query(
        f"{OF_150K} and ((provider == 'fused' and experiment in ['loss', 'log-probs']) or "
        "(provider in ['trl', 'liger', 'inductor'] and experiment == 'log-probs' and "
        "ignored_share == 0))"
    ),
)
def log_probs(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Log-probabilities of 8,192 tokens over a vocabulary of 151,936, with all gradients, take
    {trl:3×} as long with TRL as with fusedlib, and {liger:3×} with Liger's GRPO loss (bf16, hidden
    size 4,096). Forward alone takes {forward:3×} as long with TRL. fusedlib takes {compiled:3×} the
    time of the plain formula through torch.compile, for it computes the logits twice. It peaks at
    {peak:2%} of the memory of any of them, or less. With half of the tokens ignored it takes
    {half:2%} of the time, and the loss {loss:2%}."""
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
    ahead = min(say["trl"], say["liger"]) > 1 and say["forward"] >= 0.95
    near = say["compiled"] <= 4 / 3 and say["peak"] <= 0.55
    return say, ahead and near and half.max() <= 0.56


@claim(
    "llama/fp32",
    of=lambda rows: rows.query("experiment == 'fp32' and provider in ['huggingface', 'fused']"),
)
def fp32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In IEEE fp32 forward and backward are {highest:3×} as fast with fusedlib as with Hugging
    Face, with gradients {error:3×} as exact; in TF32 they are {high:3×} as fast."""
    say = faster(rows, "precision").reindex(["highest", "high"]).to_dict()
    error = medians(rows[rows["precision"] == "highest"], "gradients_error").astype(float)
    say["error"] = error["huggingface"] / error["fused"]
    return say, say["highest"] > 1.5 and say["high"] > 1.02 and say["error"] > 1


@claim(
    "llama/families",
    of=lambda rows: rows.query(
        "experiment == 'families' and provider in "
        "['huggingface', 'liger', 'fused', 'inductor', 'fused-inductor']"
    ),
)
def families(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward (bf16, 4 × 2,048) of models of {n:,d} families are {compiled:3×} as fast
    with fusedlib as with torch.compile, which has a mask. For Llama, Phi-3 and Mistral fusedlib is
    {least:3×} to {llama:3×} as fast as Liger. For Gemma 2 it is {gemma:3×} and for Qwen3 {qwen:3×}
    as fast."""
    over = ratio(rows, of="fused").pivot_table("ratio", "model", "provider", "median")
    liger, mask = over["liger"], over["inductor"]
    say = {"gemma": liger["Gemma-2-2B, 8 layers"], "qwen": liger["Qwen3-0.6B"]}
    others = liger.drop(["Gemma-2-2B, 8 layers", "Qwen3-0.6B"])
    say |= {"n": len(liger), "least": others.min(), "llama": others.max()}
    say["compiled"] = mask.min(), mask.max()
    ms = rows.set_index(["provider", "model"])["median_ms"]
    both = (ms["fused-inductor"] / ms["inductor"]).max()
    ahead = min(over["huggingface"].min(), mask.min()) > 1 and both <= 1
    return say, ahead and liger.min() >= 1 / 0.97


@claim(
    "llama/gemma-memory",
    of=lambda rows: rows.query(
        "experiment == 'families' and model == 'Gemma-2-2B, 8 layers' "
        "and provider in ['liger', 'fused']"
    ),
    repeats="counted",
)
def gemma_memory(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of Gemma 2, cut to 8 layers, peak at {fused:3 GiB} with fusedlib and at
    {liger:3 GiB} with Liger: there Liger holds less."""
    say = medians(rows, "peak_gib").to_dict()
    return say, say["liger"] < say["fused"] < 1.2 * say["liger"]


@claim(
    "llama/gradients",
    of=lambda rows: rows.query("experiment in ['gradients', 'first-steps']"),
    repeats="same seeds",
)
def gradients(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At equal weights none of {n:,d} gradients of a patched Llama of four layers errs more than
    twice as much as Hugging Face's. The largest error is {fused:3×} Hugging Face's with fusedlib
    and {liger:3×} with Liger. With fusedlib the loss of a first step errs {losses:3×} as much."""
    same = rows[rows["family"].isin(["fused", "liger"]) & rows["missed"].notna()]
    first = rows[rows["experiment"] == "first-steps"]
    off, allowed = loss_distances(first.to_dict("records"))
    say = same.groupby("family")["worst_gradient"].max().to_dict()
    good = max(say.values()) <= 2 and same["missed"].sum() == 0 and max(off.values()) <= allowed
    say |= {"n": int(same["parameters"].map(len).sum())}
    return say | {"losses": off["fused"] / off["huggingface"]}, good
