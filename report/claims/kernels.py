"""What the study claims of the SwiGLU MLP alone."""

import pandas as pd

from press.say import claim
from study.rows import ratio

SHEET = {"bf16": 989.5e12, "fp32": 67e12}
"""FLOP/s of dense products by the data sheet of H100 and H200, fp32 without tensor cores."""
A_CLOCK = 132 * 4096
"""FLOPs of 132 multiprocessors in a clock, bf16 products."""

STEP = "direction == 'forward+backward'"
MODELS = "group == 'models' and dtype == 'bfloat16' and launch in ['python', 'sustained']"
SWEEP = f"group == 'sweep' and tokens == 64 and hidden_size <= 4096 and {STEP}"
LARGE = "group == 'large fp32' and dtype == 'float32' and launch == 'python'"
FACTORS = [f"{name}_error" for name in ("y", "d_x", "d_w_gate", "d_w_up", "d_w_down")]


@claim(
    "kernels/models",
    "In bf16 the SwiGLU kernels of Liger, QuACK and fusedlib take nearly the same time",
    of=lambda rows: rows.query(f"{MODELS} and {STEP} and provider != 'liger-mlp'"),
    first="Interleaved and sustained each is within 15 %",
)
def models(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At {shapes:,d} shapes of real models that fusedlib was not tuned on, forward and backward, it
    is {liger:3×} as fast as Liger's SwiGLU. Over QuACK it depends on the shape: {quack:3×}. Under
    load both are within 10 % of fusedlib. Liger and, interleaved, PyTorch are slower."""
    over = ratio(rows, of="fused").pivot_table("ratio", ["launch", "shape"], "provider", "median")
    over = over.reindex(columns=["liger", "quack", "quack-searched", "eager"])
    turns, load = over.loc["python"], over.loc["sustained"].drop(columns="eager")
    say: dict = {name: (turns[name].min(), turns[name].max()) for name in ("liger", "quack")}
    say |= {"shapes": rows["shape"].nunique()}
    near = load.stack().dropna().between(1 / 1.1, 1.1).all()
    return say, near and over[["liger", "eager"]].min().min() > 1


@claim(
    "kernels/fp32",
    "In fp32 fusedlib's products, split onto tensor cores, are faster and more exact than all "
    "others that we timed",
    of=lambda rows: rows.query(
        f"{LARGE} and {STEP} and precision == 'highest' and provider not in ['products', 'quack']"
    ),  # QuACK takes no fp32
)
def fp32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At torch's "highest" setting, forward and backward, fusedlib is {liger:3×} as fast as Liger
    at all large layers, {split:3×} as fast as Triton's own split, tf32x3, and at least twice as
    fast as any other. Its output and gradients err at most {error:2%} as much as Liger's."""
    speed = ratio(rows, of="fused").groupby("provider")["ratio"].agg(["min", "max"])
    ends = speed.reindex(["liger", "triton-tf32x3"]).apply(tuple, axis=1)
    errors = rows.pivot_table(FACTORS, "provider", "shape")
    error = (errors.loc["fused"] / errors.drop("fused")).max(axis=1)
    say = {"liger": ends["liger"], "split": ends["triton-tf32x3"], "error": error["liger"]}
    return say, speed["min"].min() >= 2 and error.max() < 1 and error["liger"] < 0.5


@claim(
    "kernels/clock",
    of=lambda rows: rows.query(
        f"{MODELS} and {STEP} and launch == 'sustained' and provider == 'products'"
    ),
)
def clock(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Under sustained load in bf16 the nine products alone run at {clock:,d} MHz in the median over
    {shapes:,d} shapes. The data sheet's peak needs {sheet:,d} MHz. They reach {share:2%} of the
    peak at their own clock."""
    sheet = round(SHEET["bf16"] / A_CLOCK / 1e6)
    mhz = rows["sm_mhz"]
    share = (rows["tflops"] * 1e6 / (mhz * A_CLOCK)).median()
    say = {"clock": round(mhz.median()), "sheet": sheet, "shapes": rows["shape"].nunique()}
    return say | {"share": share}, mhz.max() < 0.9 * sheet and 0.7 < share < 1


@claim("kernels/few-tokens", of=lambda rows: rows.query(f"{SWEEP} and dtype == 'bfloat16'"))
def few_tokens(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With 64 tokens and widths of 512 to 4,096 (bf16, forward and backward) fusedlib is
    {python:3×} as fast as the fastest other implementation from Python and {graph:3×} in a CUDA
    graph. At {most:,d} of {widths:,d} widths most of the gain is gone in the graph: it was the cost
    of launching."""
    others = rows.query("provider not in ['fused', 'products']")["provider"].unique()
    over = ratio(rows, of="fused").pivot_table("ratio", ["shape", "launch"], "provider", "median")
    fastest = over.reindex(columns=others).min(axis=1, skipna=False)  # none, where one did not run
    speed = fastest.unstack("launch").reindex(columns=["python", "graph"])
    python, graph = speed["python"], speed["graph"]
    gone = graph - 1 < (python - 1) / 2
    say: dict = {"python": (python.min(), python.max()), "graph": (graph.min(), graph.max())}
    say |= {"most": gone.sum(), "widths": len(gone)}
    return say, python.min() > 1.2 and graph.min() > 1 and gone.any()


@claim(
    "kernels/few-fp32",
    of=lambda rows: rows.query(
        f"{SWEEP} and dtype == 'float32' and precision == 'highest' and launch == 'python' "
        "and provider in ['fused', 'eager'] and hidden_size in [512, 1024, 2048, 4096]"
    ),
)
def few_fp32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In fp32 with 64 tokens, from Python, fusedlib runs PyTorch's operations and takes within a
    fifth of its time, forward and backward: it is {speed:3×} as fast at {widths:,d} widths of 512
    to 4,096."""
    speed = ratio(rows, over="eager").groupby("hidden_size")["ratio"].median()
    plain = rows.query("provider == 'fused'")["path"].eq("plain PyTorch").all()
    say = {"speed": (speed.min(), speed.max()), "widths": len(speed)}
    return say, plain and speed.between(1 / 1.2, 1.2).all()


@claim(
    "kernels/tf32",
    of=lambda rows: rows.query(f"{LARGE} and provider in ['eager', 'fused', 'liger']"),
)
def tf32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At torch's "high", which rounds factors to TF32, PyTorch's own MLP is {gain:2×} as fast as at
    "highest", forward and backward, at {layers:,d} large layers in fp32; the two settings were
    measured one after the other. fusedlib's forward pass at "high" is slower than Liger's,
    {forward:3×} as fast; with the backward pass it is {both:3×}."""
    eager = rows.query(f"provider == 'eager' and {STEP}")
    ms = eager.pivot_table("median_ms", "shape", "precision").reindex(columns=["highest", "high"])
    gain = ms["highest"] / ms["high"]
    beside = ratio(rows.query("precision == 'high'"), over="liger").query("provider == 'fused'")
    ends = beside.groupby("direction")["ratio"].agg(["min", "max"])
    forward, both = ends.reindex(["forward", "forward+backward"]).itertuples(index=False, name=None)
    say: dict = {"gain": (gain.min(), gain.max()), "layers": len(gain)}
    say |= {"forward": forward, "both": both}
    return say, len(gain) == 4 and gain.min() > 4 and forward[1] < 1


@claim(
    "kernels/fp32-rates",
    of=lambda rows: rows.query(
        f"{LARGE} and {STEP} and precision == 'highest' and provider in ['fused', 'liger'] "
        "and tokens == 4096 and hidden_size == 4096"
    ),
)
def fp32_rates(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of an MLP of 4096·4096·4096 in fp32 run at {ours:3} TFLOP/s with
    fusedlib's split products, and at {liger:3} TFLOP/s with Liger's. The data sheet has 67 TFLOP/s
    without tensor cores."""
    rate = rows.groupby("provider")["tflops"].median()
    sheet = SHEET["fp32"] / 1e12
    say = {"ours": rate["fused"], "liger": rate["liger"]}
    return say, rate["fused"] > 2.5 * sheet and 0.5 * sheet < rate["liger"] < sheet


@claim(
    "kernels/lengths",
    of=lambda rows: rows.query(
        "experiment == 'lengths' and dtype == 'bfloat16' "
        "and provider in ['fused', 'eager', 'liger']"
    ),
)
def lengths(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In a process of its own fusedlib meets {lengths:,d} random numbers of tokens, up to
    {most:,d}, at a layer of TinyLlama's widths (bf16, forward and backward, by the CPU's clock). It
    compiles {binaries:,d} kernels in less than six seconds, {compile:3 s}, or none after `warm_up`,
    which takes {warm:3 s}. Liger compiles {few:,d} in {liger:3 s}. A first call that compiles
    nothing takes {ours:2 ms} longer than the second, as it does with PyTorch, {eager:2 ms}."""
    cold, warm = (rows[rows["warmed"].eq(warmed)] for warmed in (False, True))
    ours, eager, liger = (
        cold[cold["provider"] == name].iloc[0] for name in ("fused", "eager", "liger")
    )
    warmed = warm[warm["provider"] == "fused"].iloc[0]
    say = {"lengths": ours["lengths"], "most": ours["most"], "binaries": ours["binaries"]}
    say |= {"compile": ours["compile_s"], "warm": warmed["warm_s"]}
    say |= {"few": liger["binaries"], "liger": liger["compile_s"]}
    say |= {"ours": ours["new_length_ms"], "eager": eager["new_length_ms"]}
    soon = ours["compile_s"] < 6 and ours["first_use_ms"] < 4000 and not any(warmed["made"])
    return say, soon and ours["new_length_ms"] < eager["new_length_ms"] + 0.3
