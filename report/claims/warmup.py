"""What the study claims of a process's first steps, and of published tables by warm-up."""

import pandas as pd

from press.published import as_cases
from press.say import claim
from study.warmup import BOTH, after_warmup

FRESH = "experiment == 'steps' and isolation == 'fresh'"


@claim(
    "warmup/first-step",
    "The first step of a process takes about as much extra time for a small model as for a large "
    "one",
    of=lambda rows: rows.query(f"{FRESH} and direction == '{BOTH}'"),
)
def first_step(rows: pd.DataFrame) -> tuple[dict, bool]:
    """The first step of a fresh process, forward and backward, takes about {about:2 ms} longer than
    a late one, at all sizes. Without warm-up the mean of ten steps of `{smallest}` is {small:3×} a
    late step."""
    ran = rows[rows["status"] == "ok"].sort_values("num_parameters")
    extra, over = ran["extra_ms"], ran.groupby("model", sort=False)["over_late"].median()
    say = {"about": extra.median(), "smallest": over.index[0], "small": over.iloc[0]}
    return say, extra.max() < 1.6 * extra.min() and over.iloc[0] > 1.6 and over.iloc[-1] < 1.1


@claim(
    "warmup/one-step",
    of=lambda rows: rows.query(FRESH),
    first="After one warm-up step it is off by less than 1 %",
)
def one_step(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Without warm-up the mean of ten steps, forward, backward or both, is {usual:2 ms} longer than
    a late step in the median process. After one warm-up step no process is off by more than
    {left:2 ms}."""
    ran = rows[rows["status"] == "ok"]
    none, one = (after_warmup(ran, n).eval("mean_ms - late_ms") for n in (0, 1))
    say = {"usual": none.median(), "left": one.abs().max()}
    return say, say["left"] < say["usual"] / 3


@claim("warmup/negative", of=lambda rows: as_cases("warmup").query("source == '001'"))
def negative(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In the course report, without warm-up, a backward pass of the smallest model takes
    {backward:5 ms}: the mean of forward and backward, {both:5 ms}, less that of forward,
    {forward:5 ms}. All {rows:,d} backward times of its tables by warm-up are such differences."""
    means = rows.pivot_table("mean_ms", ["table", "model"], "direction")
    apart = means[BOTH] - means["forward"] - means["backward"]
    small = means.loc["No Warm-up", "small"]
    say = {"backward": small["backward"], "both": small[BOTH]}
    same = (apart.abs() <= 2e-5 * means[BOTH]).all()  # six digits are published
    return say | {"forward": small["forward"], "rows": len(means)}, same and small["backward"] < 0


@claim("warmup/later-step", of=lambda rows: as_cases("warmup").query("source == '001'"))
def later_step(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In the course report the mean of forward and backward is longer after one warm-up step than
    without at {longer:,d} of {sizes:,d} sizes. At `{model}` it is {worst:3×} the settled mean: a
    later step was slow there."""
    ways = rows[rows["direction"] == BOTH]
    mean = ways.assign(n=ways["warmup_steps"].astype(float).fillna(-1))
    mean = mean.pivot_table("mean_ms", "model", "n")
    over = mean[1] / mean[-1]
    say = {"longer": (mean[1] > mean[0]).sum(), "sizes": len(mean), "model": over.idxmax()}
    return say | {"worst": over.max()}, say["longer"] > 0 and over.max() > 1.2


@claim("warmup/third", of=lambda rows: as_cases("warmup").query("source == '004'"))
def third(rows: pd.DataFrame) -> tuple[dict, bool]:
    """The warm-up notebook says that a forward pass takes around a third of forward and backward.
    In its tables the smallest model's takes {cold:2%} without warm-up and {small:2%} after five
    steps. That of the larger ones is then {least:2%} to {most:2%}."""
    mean = rows.pivot_table("mean_ms", "model", ["warmup_steps", "direction"])
    none, five = (mean[n]["forward"] / mean[n][BOTH] for n in (0, 5))
    large = five.drop("small")
    say = {"cold": none["small"], "small": five["small"]}
    say |= {"least": large.min(), "most": large.max()}
    return say, none["small"] > 0.5 and five["small"] > 0.38 and large.between(0.3, 0.36).all()


@claim(
    "warmup/one-process",
    of=lambda rows: rows.query(f"isolation == 'shared' and direction == '{BOTH}'"),
)
def one_process(rows: pd.DataFrame) -> tuple[dict, bool]:
    """When one process runs all sizes one after the other, the first pays {first:3 ms} and each
    later one less than a tenth of that: {later:2 ms} at most."""
    extra = rows[rows["status"] == "ok"].set_index("position")["extra_ms"]
    start = extra.index.min()
    first, later = extra[extra.index == start].median(), extra[extra.index > start].max()
    return {"first": first, "later": later}, first > 10 * later


@claim("warmup/corner", of=lambda rows: rows.query("experiment == 'stages'"))
def corner(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Hardly any of a first step's extra time depends on its data. A tiny matrix product pays
    {gemm:2 ms} of the start, and a step with AdamW on sixteen tokens {least:2 ms} to {most:2 ms}.
    The first whole step after them takes at most {left:2 ms} longer than late steps."""
    ran = rows[rows["status"] == "ok"]
    paid, left = ran["corner_extra_ms"], ran["whole_extra_ms"].max()
    say = {"gemm": ran["gemm_extra_ms"].median(), "left": left}
    return say | {"least": paid.min(), "most": paid.max()}, left < 0.05 * paid.min()


@claim("warmup/compiled", of=lambda rows: rows.query("experiment == 'compilation'"))
def compiled(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Compiled with Inductor, the first step of `{model}` takes {first:3 s}, as long as {steps:3}
    late steps of the same process. The cache on disk was off."""
    [one] = rows[rows["status"] == "ok"].to_dict("records")
    later = one["first_ms"] / one["settled_ms"]
    return {"model": one["model"], "first": one["first_ms"] / 1e3, "steps": later}, later > 200
