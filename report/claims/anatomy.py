"""What the study claims of the published kernel that skips its work, and of its repairs."""

import pandas as pd

from press.published import load
from press.say import claim
from study.rows import ratio

PLAIN = "experiment == 'time' and dtype == 'float32' and precision == 'highest'"
STEP = "direction == 'forward+backward'"


def ends(rows: pd.DataFrame, by: str = "provider") -> pd.DataFrame:
    """The least and the greatest factor over Liger's kernel, by a column."""
    return ratio(rows, over="liger").groupby(by)["ratio"].agg(["min", "max"])


def pair(found: pd.DataFrame, name: str) -> tuple[float, float]:
    """The two ends of one; not a number where it was not measured."""
    least, most = found.reindex([name]).iloc[0]
    return least, most


@claim(
    "anatomy/unrelated",
    "The largest published speed-up of an MLP is of a kernel that computes something else",
    of=lambda rows: rows.query(
        f"{PLAIN} and launch == 'python' and provider in ['published-kernel', 'liger']"
    ),
)
def unrelated(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Launched from Python, the published kernel, rebuilt from the arithmetic of its code, is
    {factor:3×} as fast as Liger's. Its result has a relative error of {error:3}: the error is as
    large as the right result."""
    factor = pair(ends(rows), "published-kernel")
    error = rows.query("provider == 'published-kernel'")["y_error"]
    return {"factor": factor, "error": error.max()}, (
        factor[0] > 1.2 and error.between(0.9, 1.1).all()
    )


@claim(
    "anatomy/mended",
    of=lambda rows: rows.query(
        "experiment == 'time' and dtype == 'float32' "
        "and provider in ['all-gradients', 'ieee-products', 'liger']"
    ),
)
def mended(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With the whole sum and all gradients, launched from Python, the rebuilt kernel is still
    {tf32:3×} as fast as Liger's. In CUDA graphs, with TF32 on both sides, it is {both:3×} as fast
    at width 4,096, forward and backward. With IEEE fp32 on both sides it is several times
    slower."""
    highest, high = (rows.query(f"precision == '{one}'") for one in ("highest", "high"))
    tf32 = pair(ends(highest.query("launch == 'python'")), "all-gradients")
    fast = pair(ends(highest.query("launch == 'graph'")), "ieee-products")[1]
    both = pair(ends(high.query(f"launch == 'graph' and {STEP}")), "all-gradients")
    return {"tf32": tf32, "both": both}, tf32[0] > 1 > both[1] and 1 / fast > 3


@claim("anatomy/host", of=lambda rows: rows.query(f"{PLAIN} and provider in ['eager', 'liger']"))
def host(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Plain PyTorch, which launches more kernels than Liger, is {python:3×} as fast as Liger from
    Python with 64 tokens and widths of 512 to 2,048, forward. In a CUDA graph it is no faster:
    {graph:3×}."""
    few = rows.query("tokens == 64 and direction == 'forward' and 512 <= hidden_size <= 2048")
    found = ends(few, "launch")
    say = {name: pair(found, name) for name in ("python", "graph")}
    return say, say["python"][0] > 1.2 and say["graph"][1] < 1


@claim(
    "anatomy/mended-ieee",
    of=lambda rows: rows.query(
        f"{PLAIN} and launch == 'graph' and provider in ['ieee-products', 'liger']"
    ),
)
def mended_ieee(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In CUDA graphs, with IEEE fp32 on both sides, Liger's kernel is {ieee:3×} as fast as the
    rebuilt one with the whole sum and all gradients."""
    slow, fast = pair(ends(rows), "ieee-products")
    return {"ieee": (1 / fast, 1 / slow)}, 1 / fast > 2


REPAIRS = ["published-kernel", "whole-sum", "all-gradients", "ieee-products"]


@claim(
    "anatomy/steps",
    of=lambda rows: rows.query(
        f"{PLAIN} and {STEP} and tokens == 1024 and hidden_size == 4096 and launch == 'python' "
        f"and provider in {[*REPAIRS, 'liger']}"
    ),
)
def steps(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At 1,024 tokens and a width of 4,096, forward and backward, from Python, the published kernel
    is {published:3×} as fast as Liger's. With the whole sum it is {whole:3×}, with all gradients
    {gradients:3×} and with IEEE products {ieee:3×}: the sum takes the largest piece, and precision
    is the largest factor."""
    over = ratio(rows, over="liger").groupby("provider")["ratio"].median()
    as_published, whole, gradients, ieee = over.reindex(REPAIRS)
    say = {"published": as_published, "whole": whole, "gradients": gradients, "ieee": ieee}
    pieces = as_published - whole > max(whole - gradients, gradients - ieee)
    return say, pieces and gradients / ieee > max(as_published / whole, whole / gradients)


@claim(
    "anatomy/split",
    of=lambda rows: rows.query(f"{PLAIN} and launch == 'graph' and provider in ['fused', 'liger']"),
)
def split(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In fp32 and in CUDA graphs fusedlib is {split:3×} as fast as Liger at 1,024 tokens. It splits
    its products for the tensor cores, with an error of {ours:2} where Liger's IEEE products have
    {theirs:2}. At 64 tokens fusedlib runs plain PyTorch, gate and up in one product, and is
    {plain:3×} as fast as Liger."""
    many, few = rows.query("tokens == 1024"), rows.query("tokens == 64")
    fast, near = (pair(ends(part), "fused") for part in (many, few))
    paths = [{*part.query("provider == 'fused'")["path"]} for part in (many, few)]
    ours = many.query("provider == 'fused'")["y_error"].max()
    theirs = many.query("provider == 'liger'")["y_error"].min()
    say = {"split": fast, "plain": near, "ours": ours, "theirs": theirs}
    ran = paths == [{"split fp32"}, {"plain PyTorch"}]
    return say, ran and 0.9 <= near[0] <= near[1] <= 1.5 and fast[0] > 2 and ours < theirs


@claim(
    "anatomy/fusion",
    of=lambda rows: rows.query(
        "experiment == 'time' and dtype == 'bfloat16' and launch == 'graph' "
        "and provider in ['fused', 'liger']"
    ),
)
def fusion(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In bf16 and in CUDA graphs fusion saves microseconds: up to a width of {up_to:,d} fusedlib's
    forward pass of 64 tokens takes {saved:2 µs} less than Liger's. So fusedlib is {narrow:3×} as
    fast as Liger at widths 512 and 1,024, and {wide:3×} at {width:,d}. The published log has
    {claim:3×} there, in fp32, from Python, on an L4."""
    forward = rows.query("direction == 'forward' and tokens == 64")
    ms = forward.pivot(index="hidden_size", columns="provider", values="median_ms").sort_index()
    up_to, width = ms.index[-2:]
    each = ratio(forward, over="liger").set_index("hidden_size")["ratio"].sort_index()
    saved = 1e3 * (ms["liger"] - ms["fused"]).loc[:up_to]
    log = load("swiglu_ratios").query("quantity == 'forward time' and d_model == @width")
    narrow, wide, there = each.loc[:1024], each.loc[width], log["liger_over_fused"].mean()
    say = {"saved": (saved.min(), saved.max()), "narrow": (narrow.min(), narrow.max())}
    say |= {"wide": wide, "width": width, "up_to": up_to, "claim": there}
    low, high = pair(ends(rows), "fused")
    small = saved.between(1, 20).all() and low >= 0.85 and high <= 1.8
    return say, small and wide < narrow.min() and wide < 0.6 * there


@claim(
    "anatomy/memory",
    of=lambda rows: rows.query(
        "experiment == 'peak' and provider in ['liger', 'published-kernel', 'all-gradients']"
    ),
    repeats="counted",
)
def memory(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At width {width:,d} Liger's peak is {ratio:3×} that of the published kernel. Liger holds
    {liger:,d} matrices, three weights and their gradients, where the kernel holds {kernel:,d}. Once
    the kernel computes every gradient, the ratio is {mended:3×}."""
    wide = rows[rows["hidden_size"] == rows["hidden_size"].max()].set_index("provider")
    peak, one = wide["peak_mib"], wide["weights_mib"]["liger"] / 3
    matrices = (wide["weights_mib"] + wide["gradients_mib"]) / one
    saved, of_all = peak["liger"] / peak["published-kernel"], peak["liger"] / peak["all-gradients"]
    counted = matrices["liger"] / matrices["published-kernel"]
    say = {"width": wide["hidden_size"].max(), "ratio": saved, "mended": of_all}
    say |= {"liger": matrices["liger"], "kernel": matrices["published-kernel"]}
    right = abs(counted - 6 / 4) < 0.01 and abs(saved - counted) < 0.05
    return say, right and abs(of_all - 1) < 0.03
