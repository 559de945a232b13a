"""What the study claims of a whole model's memory, and of checkpoints."""

import pandas as pd

from press.say import claim

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
