"""What the study claims of the SwiGLU MLP alone."""

import math

import pandas as pd

from press.say import claim
from study.end_to_end import SHEETS
from study.rows import ratio

STEP = "direction == 'forward+backward'"
LARGE = "group == 'large fp32' and dtype == 'float32' and launch == 'python'"
FACTORS = [f"{name}_error" for name in ("y", "d_x", "d_w_gate", "d_w_up", "d_w_down")]


@claim(
    "kernels/models",
    "In bf16 fusedlib's MLP is a few per cent faster than Liger's at eight models' shapes",
    of=lambda rows: rows.query(
        "group == 'models' and dtype == 'bfloat16' and launch == 'python' "
        f"and {STEP} and provider in ['eager', 'liger', 'quack', 'fused']"
    ),
    first="Liger's, QuACK's and fusedlib's take nearly the same time",
)
def models(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At {shapes:,d} shapes of real models that fusedlib was not tuned on, forward and backward, it
    is {liger:3×} as fast as Liger's SwiGLU and {eager:3×} as fast as PyTorch's. Over QuACK's with
    its search off it is {quack:3×} as fast."""
    over = ratio(rows, of="fused").pivot_table("ratio", "shape", "provider", "median")
    names = ["liger", "eager", "quack"]
    over = over.reindex(columns=names)  # where QuACK is not installed, nobody can tell
    say: dict = {name: (over[name].min(), over[name].max()) for name in names}
    near = (
        over["liger"].between(1, 1.12).all() and over.min()[["eager", "quack"]].gt([1, 0.95]).all()
    )
    return say | {"shapes": len(over)}, near


@claim(
    "kernels/fp32",
    'At "highest" fp32 products on tensor cores are faster and more exact than others we timed',
    of=lambda rows: rows.query(
        f"{LARGE} and {STEP} and precision == 'highest' and provider not in ['products', 'quack']"
    ),  # QuACK takes no fp32
)
def fp32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At torch's "highest" setting, forward and backward of large layers, fusedlib is {liger:2×} as
    fast as Liger. The relative error of its output and gradients is at most {error:2%} of
    Liger's."""
    speed = ratio(rows, of="fused").groupby("provider")["ratio"].agg(["min", "max"])
    errors = rows.pivot_table(FACTORS, "provider", "shape")
    error = (errors.loc["fused"] / errors.drop("fused")).max(axis=1)
    bound = math.ceil(100 * error["liger"]) / 100  # "at most" is rounded up
    say = {"liger": tuple(speed.loc["liger"]), "error": bound}
    return say, speed["min"].min() >= 2 and error.max() < 1 and error["liger"] < 0.5


@claim(
    "kernels/tf32",
    of=lambda rows: rows.query(f"{LARGE} and {STEP} and provider in ['eager', 'fused', 'liger']"),
)
def tf32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At torch's "high", which rounds factors to TF32, PyTorch's own MLP is {gain:2×} as fast as at
    "highest" at {layers:,d} large layers, forward and backward. There fusedlib is {both:2×} as fast
    as Liger."""
    eager = rows.query("provider == 'eager'")
    ms = eager.pivot_table("median_ms", "shape", "precision").reindex(columns=["highest", "high"])
    gain = ms["highest"] / ms["high"]
    beside = ratio(rows.query("precision == 'high'"), over="liger").query("provider == 'fused'")
    both = beside["ratio"].min(), beside["ratio"].max()
    say: dict = {"gain": (gain.min(), gain.max()), "layers": len(gain), "both": both}
    return say, len(gain) == 4 and gain.min() > 4 and both[1] < 1.2


@claim(
    "kernels/fp32-rates",
    of=lambda rows: rows.query(
        f"{LARGE} and {STEP} and precision == 'highest' and provider in ['fused', 'liger'] "
        "and tokens == 4096 and hidden_size == 4096"
    ),
)
def fp32_rates(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Forward and backward of an MLP of 4096·4096·4096 in fp32 run at {ours:3} TFLOP/s with
    fusedlib's split products, and at {liger:3} TFLOP/s with Liger's. The data sheet has {sheet:2}
    TFLOP/s without tensor cores."""
    rate = rows.groupby("provider")["tflops"].median()
    sheet = SHEETS.get(rows["device_name"].iloc[0], {}).get("fp32", math.nan) / 1e12
    say = {"ours": rate["fused"], "liger": rate["liger"], "sheet": sheet}
    return say, rate["fused"] > 2.5 * sheet and 0.5 * sheet < rate["liger"] < sheet


@claim(
    "kernels/quack",
    of=lambda rows: rows.query(
        f"group == 'models' and shape == '8192·3584·18944' and launch == 'python' and {STEP} "
        "and provider in ['fused', 'quack', 'quack-searched', 'liger-cute', 'eager']"
    ),
)
def quack(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At 8192·3584·18944 fusedlib is {searched:3×} as fast as QuACK as it ships, after a search of
    {seconds:2 s}. It is {off:3×} as fast as QuACK with its search off, and {cute:3×} as fast as
    Liger's CuTe kernels."""
    over = ratio(rows, of="fused").groupby("provider")["ratio"].median()
    say = {"searched": over["quack-searched"], "off": over["quack"], "cute": over["liger-cute"]}
    say["seconds"] = rows.loc[rows["provider"] == "quack-searched", "search_s"].max()
    return say, min(say["searched"], say["off"], say["cute"]) > 1 and max(over) < 1.2
