"""What the study claims of causal attention."""

import pandas as pd

from claims.kernels import SHEET
from press.say import claim
from study.rows import ratio

STEP = "experiment == 'race' and direction == 'forward+backward' and provider != 'sdpa'"
CONTEXTS = f"{STEP} and grid in ['course', 'long']"
AT_16K = f"{CONTEXTS} and context_length == 16384"
WIDE = "head_dim in [64, 128] and provider in ['flash', 'cudnn']"


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


@claim(
    "attention/memory",
    of=lambda rows: rows.query(
        f"{STEP} and grid != 'short' and (provider == 'plain' or grid != 'published' and "
        "context_length == 16384 and head_dim == 64 and dtype == 'bfloat16')"
    ),
    repeats="counted",
)
def memory(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At T = 16,384 in bf16 (batch 8) plain attention holds {plain:3 GiB} besides its operands at
    its peak, {squares:2} matrices of B × T × T. No implementation that stores none of them holds
    more than {fused:3 MiB}, {less:3×} less. A count of its tensors predicts plain attention's peak
    within one per cent in all {n:,d} shapes that hold more than a MiB."""
    large = rows.query("provider == 'plain' and peak_mib > 1")
    off = (large["peak_squares"] / large["peak_counted"] - 1).abs().max()
    there = rows.query(
        "context_length == 16384 and head_dim == 64 and dtype == 'bfloat16' "
        "and status != 'unavailable'"
    )
    fused = there[there["fused"].eq(True)]["peak_mib"].max(skipna=False)
    plain = there[there["provider"].eq("plain")].iloc[0]
    say = {"plain": plain["peak_mib"] / 1024, "squares": plain["peak_squares"], "fused": fused}
    say |= {"less": plain["peak_mib"] / fused, "n": len(large)}
    return say, off < 0.01 and fused < 0.1 * plain["peak_mib"]


@claim(
    "attention/bound",
    of=lambda rows: rows.query(
        f"{AT_16K} and head_dim == 64 and dtype == 'bfloat16' and provider == 'plain'"
    ),
)
def bound(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Memory traffic is the larger bound of plain attention: in bf16 at T = 16,384 its reads and
    writes would take {moved:2%} of its time at the bandwidth of a copy, its products {products:2%}
    at the rate of a large product. Together they do not explain the time."""
    plain = rows.iloc[0]
    moved, products = (plain[f"{name}_ms"] / plain["median_ms"] for name in ("traffic", "products"))
    bounded = moved > 0.3 and products < moved / 3 and moved + products < 0.8
    return {"moved": moved, "products": products}, bounded


@claim(
    "attention/backends",
    of=lambda rows: rows.query(f"{AT_16K} and dtype == 'bfloat16' and {WIDE}"),
)
def backends(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Among SDPA's backends cuDNN is {narrow:2×} as fast as flash at T = 16,384 in bf16 with heads
    64 wide, and {wide:2×} with heads 128 wide."""
    cudnn = ratio(rows, over="flash").groupby("head_dim")["ratio"].median()
    return {"narrow": cudnn[64], "wide": cudnn[128]}, cudnn.min() > 1.2


@claim(
    "attention/rates",
    of=lambda rows: rows.query(f"{AT_16K} and dtype == 'bfloat16' and {WIDE} and head_dim == 128"),
)
def rates(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With heads 128 wide SDPA cuDNN uses {cudnn:2%} of the data sheet's peak of dense products in
    bf16, and SDPA flash {flash:2%}."""
    flops = 7 * 8 * 16384**2 * 128  # six products and one again, half of each by the mask
    ms = rows.groupby("provider")["median_ms"].median()
    share = flops / (ms / 1e3) / SHEET["bf16"]
    say = {"cudnn": share["cudnn"], "flash": share["flash"]}
    return say, 0.2 < say["flash"] < say["cudnn"] < 0.8


@claim(
    "attention/fp32",
    of=lambda rows: rows.query(f"{AT_16K} and head_dim == 64 and dtype == 'float32'"),
)
def fp32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In fp32 at T = 16,384 SDPA flash and cuDNN refuse the dtype. SDPA efficient, with three TF32
    products for one, is {efficient:2×} as fast as plain attention; plain attention is {flex:2×} as
    fast as FlexAttention with its IEEE products."""
    status = rows.set_index("provider")["status"]
    refused = (status[["flash", "cudnn"]] == "unavailable").all()
    gain = far(rows, "plain")
    flex, efficient = 1 / gain["flex"], gain["efficient"]
    return {"flex": flex, "efficient": efficient}, refused and flex > 1.5 and efficient > 2
