"""What the study claims of a whole model's memory, and of checkpoints."""

import pandas as pd

from press.say import claim
from study.model_memory import block_bytes, moments
from study.models.activations import cast_weights
from study.trainers import shape_of

MIB, GIB = 2**20, 2**30
LARGE = (
    "experiment == 'checkpoint' and model == '2.7b' and context_length == 2944 "
    "and attention == 'sdpa'"
)
LEAD = "H100"
"""It has all of the plans, in bf16 and under autocast."""


@claim(
    "model_memory/plans",
    "Checkpoints give back nearly all that a pass keeps, for less than a third more time",
    of=lambda rows: rows.query(f"{LARGE} and precision == 'bf16'"),
    lead=LEAD,
)
def plans(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With a checkpoint at every block a pass of `2.7b` (bf16, batch 4, 2,944 tokens each) holds
    {every:3 GiB} besides weights and gradients instead of {none:3 GiB}."""
    ran = rows[rows["status"] == "ok"].set_index(["plan", "blocks"])
    peak, time = ran["peak_gib"], ran["ratio"]
    say = {"every": peak["segments", 1], "none": peak.get(("none", 0), float("nan"))}
    return say, 10 * say["every"] < say["none"] and time["segments", 1] < 4 / 3


@claim(
    "model_memory/step",
    of=lambda rows: rows.query("model == '2.7b' and mode == 'step' and attention == 'plain'"),
    repeats="counted",
    lead=LEAD,
)
def step(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A training step of `2.7b` in fp32 (batch 4) peaks at {low:3 GiB} to {high:3 GiB} with 128 to
    512 tokens, {times:2×} its weights. The peak lies in the update by
    AdamW's default form, when no activation is left.
    At 512 tokens the peak is {autocast:2%} of that under bf16 autocast and {bf16:2%} with bf16
    weights."""
    peaks = rows.pivot_table("peak_mib", "context_length", "precision") * MIB
    fp32 = rows[rows["precision"] == "fp32"].set_index("context_length")
    left = (fp32["peak_activations_mib"] / fp32["peak_mib"]).max()
    times, share = peaks["fp32"] / fp32["weights_bytes"], peaks.loc[512] / peaks.loc[512, "fp32"]
    say = {"low": peaks["fp32"].min() / GIB, "high": peaks["fp32"].max() / GIB}
    say |= {"times": times.median(), "autocast": share["bf16 autocast"], "bf16": share["bf16"]}
    holds = len(times) == 3 and times.between(4.8, 5.2).all() and left < 0.01
    return say, holds and 0.95 < say["autocast"] < 1.05 and 0.45 < say["bf16"] < 0.55


@claim(
    "model_memory/counted",
    of=lambda rows: rows.query("model == '2.7b'"),
    repeats="counted",
    lead=LEAD,
)
def counted(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Over {forwards:,d} forward passes of `2.7b` the bytes kept for the backward pass by formula
    and by autograd's saved tensors differ by at most {bytes:,d}. Peaks of {passes:,d} passes lie at
    most {most:2%} above their count, those of {plans:,d} checkpoint plans at most {worst:2%}: what
    comes and goes inside a block's backward pass is not counted."""
    done = rows[rows["status"] == "ok"]
    forwards, plan = done[done["mode"] == "forward"], done["experiment"] == "checkpoint"
    held = [moments(row)["forward"] for row in forwards.to_dict("records")]
    counted = [parts["activations"] + parts["casts"] for parts in held]
    apart = (forwards.filter(regex="^saved_.*_bytes$").sum(axis=1) - counted).abs().max()
    passing, part = done["over"][~plan], done["over"][plan]

    say = {"forwards": len(forwards), "bytes": apart, "passes": len(passing), "plans": len(part)}
    say |= {"most": passing.max(), "worst": part.max()}
    right = done["over"].min() > -1e-3 and passing.max() < 0.05 and 0.05 < part.max() < 0.25
    return say, right and apart <= 4096


@claim(
    "model_memory/plans-time",
    of=lambda rows: rows.query(f"{LARGE} and precision == 'bf16'"),
    lead=LEAD,
)
def plans_time(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of `2.7b` (bf16, batch 4, 2,944 tokens each) take {time:3×} the time
    with a checkpoint at every block, and {longer:3×} with nested ones, which hold least of all."""
    ran = rows[rows["status"] == "ok"].set_index(["plan", "blocks"])
    time, peak = ran["ratio"], ran["peak_mib"]
    say = {"time": time["segments", 1], "longer": time["nested"].max()}
    return say, peak.idxmin()[0] == "nested" and say["time"] < 1.33 and 1.4 < say["longer"] < 1.7


@claim(
    "model_memory/root",
    of=lambda rows: rows.query(f"{LARGE} and plan == 'segments'"),
    repeats="counted",
    lead=LEAD,
)
def root(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A checkpoint every 6 of the 32 blocks of `2.7b`, near the textbook's square root, holds
    {low:2×} to {high:2×} what the best segments hold. The best have {bf16:,d} block in bf16 and
    {autocast:,d} under autocast, because a block keeps {least:2×} to {most:2×} its input."""
    ran = rows[rows["status"] == "ok"].set_index(["blocks", "precision"])
    peak = ran["peak_gib"].unstack("precision")
    over, best = peak.loc[6] / peak.min(), peak.idxmin()
    sizes = map(block_bytes, rows.drop_duplicates("precision").to_dict("records"))
    times = [kept / given for given, kept in sizes]
    say = {"low": over.min(), "high": over.max(), "least": min(times), "most": max(times)}
    say |= {"bf16": best["bf16"], "autocast": best["bf16 autocast"]}
    return say, over.min() > 1.3 and say["bf16"] == 1 and say["autocast"] == 2


@claim("model_memory/autocast", of=lambda rows: rows.query(LARGE), repeats="counted", lead=LEAD)
def autocast(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With nested checkpoints `2.7b` at 2,944 tokens holds {least:3 GiB} besides weights and
    gradients under bf16 autocast, against {bf16:3 GiB} in bf16. Its peak lies in the forward pass,
    to whose end autocast keeps the bf16 copies of weights. Without checkpoints it takes
    {whole:3 GiB} by the count, weights and gradients included, more than a GPU of 80 GB has."""
    cast = rows[rows["precision"] == "bf16 autocast"]
    without = cast[cast["plan"] == "none"].iloc[0]
    standing = 2 * moments(without)["forward"]["weights"] / GIB  # weights and gradients
    peak = rows[rows["status"] == "ok"].groupby("precision")["peak_gib"].min()
    least = cast.loc[cast["peak_gib"].idxmin()]
    casts = cast_weights(shape_of(least), least["precision"]) / GIB
    say = {"least": peak["bf16 autocast"], "bf16": peak["bf16"]}
    say |= {"whole": without["counted_gib"] + standing}
    frugal = least["plan"] == "nested" and least["peak_in"] == "forward"
    more = say["least"] > say["bf16"] + 0.5 * casts
    too_large = without["status"].startswith("oom") or without["peak_gib"] + standing > 80
    return say, say["whole"] > 80 and too_large and frugal and more
