"""What the study claims of the published kernel that skips its work, and of its repairs."""

import pandas as pd

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
    "The fast MLP of a published table computes something else",
    of=lambda rows: rows.query(
        f"{PLAIN} and launch == 'python' and provider in ['published-kernel', 'liger']"
    ),
    unchanged=True,
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
    "anatomy/equal",
    of=lambda rows: rows.query(
        "experiment == 'time' and precision == 'high' and dtype == 'float32' and tokens == 1024 "
        f"and hidden_size == 4096 and {STEP} and provider in ['all-gradients', 'liger']"
    ),
    unchanged=True,
    first="From Python it is about as fast as Liger's",
)
def equal(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With all of its work done and TF32 on both sides, at 1,024 tokens and a width of 4,096, it is
    {python:3×} as fast as Liger's from Python, as published. In CUDA graphs, which leave out what a
    launch costs the CPU, it is slower: {graph:3×} as fast."""
    found = ratio(rows, over="liger").groupby("launch")["ratio"].median()
    say = {name: found.get(name) for name in ("python", "graph")}
    return say, 0.75 < say["python"] < 1.25 and say["graph"] < 0.9


@claim(
    "anatomy/few-tokens",
    of=lambda rows: rows.query(
        "experiment == 'time' and precision == 'high' and dtype == 'float32' and tokens == 64 "
        "and direction == 'forward' and provider in ['all-gradients', 'eager', 'liger'] "
        "and hidden_size <= 4096"
    ),
    unchanged=True,
)
def few_tokens(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With 64 tokens, widths to 4,096 and TF32 on both sides, its forward pass from Python is
    {python:3×} as fast as Liger's, and unfused PyTorch's {eager:3×}: there the cost of a call
    decides. In a CUDA graph, at the widths where all of its gradients are right, it is {graph:3×}
    as fast."""
    right = (rows["launch"] != "graph") | (rows["status"] == "ok")
    over = {n: ends(part) for n, part in rows[right].groupby("launch")}
    say = {n: pair(over[n], "all-gradients") for n in ("python", "graph") if n in over}
    say |= {"eager": pair(over["python"], "eager")}
    return say, min(say["python"][0], say["eager"][0]) > 1.2 and say["graph"][1] < 1.05


@claim(
    "anatomy/ieee",
    of=lambda rows: rows.query(
        f"{PLAIN} and {STEP} and hidden_size == 4096 and provider in ['ieee-products', 'liger']"
    ),
    unchanged=True,
)
def ieee(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With IEEE fp32 on both sides, at width 4,096, forward and backward, Liger's is {liger:3×} as
    fast as the repaired kernel, launched either way."""
    slow, fast = pair(ends(rows), "ieee-products")
    return {"liger": (1 / fast, 1 / slow)}, 1 / fast > 2


REPAIRS = ["published-kernel", "whole-sum", "all-gradients", "ieee-products"]


@claim(
    "anatomy/steps",
    of=lambda rows: rows.query(
        f"{PLAIN} and {STEP} and tokens == 1024 and hidden_size == 4096 and launch == 'python' "
        f"and provider in {[*REPAIRS, 'liger']}"
    ),
    unchanged=True,
)
def steps(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At 1,024 tokens and a width of 4,096, forward and backward, from Python, the published kernel
    is {published:3×} as fast as Liger's. With the whole sum it is {whole:3×}, with all gradients
    {gradients:3×} and with IEEE products, which Liger has, {ieee:3×}."""
    over = ratio(rows, over="liger").groupby("provider")["ratio"].median()
    as_published, whole, gradients, ieee = over.reindex(REPAIRS)
    say = {"published": as_published, "whole": whole, "gradients": gradients, "ieee": ieee}
    pieces = as_published - whole > max(whole - gradients, gradients - ieee)
    return say, pieces and gradients / ieee > max(as_published / whole, whole / gradients)


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
