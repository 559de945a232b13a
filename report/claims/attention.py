"""What the study claims of causal attention."""

import pandas as pd

from press.say import claim
from study.rows import ratio

STEP = "experiment == 'race' and direction == 'forward+backward' and provider != 'sdpa'"
CONTEXTS = f"{STEP} and grid in ['course', 'long']"


def far(rows: pd.DataFrame, over: str) -> pd.Series:
    """How many times as fast each is as one of them at 16,384 tokens."""
    speed = ratio(rows.query("context_length == 16384"), over=over)
    return speed.groupby("provider")["ratio"].median()


@claim(
    "attention/speed",
    "In bf16, at long contexts, SDPA's cuDNN is faster than its flash, and FlashAttention-4 faster "
    "still",
    of=lambda rows: rows.query(f"{CONTEXTS} and head_dim == 64 and dtype == 'bfloat16'"),
)
def speed(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In bf16 at T = 16,384, with heads 64 wide, SDPA cuDNN runs forward and backward {cudnn:3×} as
    fast as SDPA flash, and FlashAttention-4 {four:3×} as fast as SDPA cuDNN. All that store no
    score matrix are at least three times as fast as plain attention, and the fastest {gain:3×}."""
    fused = rows[rows["fused"].eq(True)]
    by = far(rows, "plain").reindex(fused["provider"].unique()).dropna()
    cudnn, four = far(rows, "flash")["cudnn"], far(rows, "cudnn").get("flash-4", float("nan"))
    compiled = far(rows, "inductor")[by.idxmax()]
    ran = fused["status"].isin(["ok", "unavailable"]).all()
    right = ran and cudnn > 1.2 and four > 1.02 and compiled > 3 and by.max() > 8 and by.min() >= 3
    return {"cudnn": cudnn, "four": four, "gain": by.max()}, right
