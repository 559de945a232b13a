"""What the study claims of the SwiGLU MLP alone."""

import math

import pandas as pd

from press.say import claim
from study.end_to_end import SHEETS
from study.rows import ratio

STEP = "direction == 'forward+backward'"
LARGE = "group == 'large fp32' and dtype == 'float32' and launch == 'python'"
OF_MODELS = f"group == 'models' and dtype == 'bfloat16' and launch == 'python' and {STEP}"
PAIR = ["eager", "liger", "fused-pair"]
PACKED = ["liger-packed", "quack", "fused"]
COMPILED = ["inductor", "inductor-searched", "inductor-packed"]
FACTORS = [f"{name}_error" for name in ("y", "d_x", "d_w_gate", "d_w_up", "d_w_down")]


def layouts(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """How many times as fast fusedlib is, by shape and rival: beside those with two weights of gate
    and up ours has two, beside those with one packed weight one."""
    pair, packed = (
        ratio(rows[rows["layout"] == layout], of=ours)
        .pivot_table("ratio", "shape", "provider", "median")
        .reindex(columns=names)  # where a package is not installed, nobody can tell
        for layout, ours, names in (
            ("two weights", "fused-pair", [*PAIR, "liger-cute", *COMPILED[:2]]),
            ("one weight", "fused", [*PACKED, "quack-searched", *COMPILED[2:]]),
        )
    )
    return pair, packed


@claim(
    "kernels/models",
    "In bf16 fusedlib's MLP takes about as long as Liger's in Triton at eight models' shapes",
    of=lambda rows: rows.query(
        "group == 'models' and dtype == 'bfloat16' and launch == 'python' "
        f"and {STEP} and provider in ['eager', 'inductor', 'liger', 'fused']"
    ),
    first="Liger's, QuACK's and fusedlib's take nearly the same time",
)
def models(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At {shapes:,d} shapes of real models that fusedlib was not tuned on, forward and backward, it
    is {liger:3×} as fast as Liger's SwiGLU in Triton, its weights of gate and up packed and theirs
    not. Over PyTorch's it is {eager:3×} as fast, and {inductor:3×} under torch.compile."""
    over = ratio(rows, of="fused").pivot_table("ratio", "shape", "provider", "median")
    say: dict = {name: (over[name].min(), over[name].max()) for name in over}
    near = over["liger"].between(1, 1.12).all() and over[["eager", "inductor"]].min().min() > 1
    return say | {"shapes": len(over)}, near


@claim(
    "kernels/models-by-layout",
    of=lambda rows: rows.query(
        f"{OF_MODELS} and provider in {[*PAIR, *PACKED, 'liger-cute', 'quack-searched']}"
    ),
)
def models_by_layout(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At {shapes:,d} shapes of real models that fusedlib was not tuned on, forward and backward,
    with weights of gate and up as models have them, it is {liger:3×} as fast as Liger's SwiGLU in
    Triton, {cute:3×} as in CuTe, and {eager:3×} as fast as PyTorch's. Where all have one packed
    weight it is {packed:3×} as fast as Liger's, {quack:3×} as QuACK's, which first searches for up
    to {seconds:2 s}, and {off:3×} as QuACK's with its search off."""
    pair, packed = layouts(rows)
    columns = {
        "liger": pair["liger"], "cute": pair["liger-cute"], "eager": pair["eager"],
        "packed": packed["liger-packed"], "quack": packed["quack-searched"],
        "off": packed["quack"],
    }  # fmt: skip
    say: dict = {name: (column.min(), column.max()) for name, column in columns.items()}
    ahead = min(say[name][0] for name in ("liger", "cute", "eager", "packed")) > 1
    near = ahead and say["liger"][1] < 1.12 and min(say["quack"][0], say["off"][0]) > 0.95
    searched = rows["provider"] == "quack-searched"
    return say | {"shapes": len(pair), "seconds": rows.loc[searched, "search_s"].max()}, near


@claim(
    "kernels/compiled",
    of=lambda rows: rows.query(f"{OF_MODELS} and provider in {[*COMPILED, 'fused', 'fused-pair']}"),
)
def compiled(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At the same shapes fusedlib's MLP is {pair:3×} as fast as PyTorch's under torch.compile, and
    {packed:3×} where both have one packed weight. Where torch.compile searches its products'
    kernels, at {shapes:,d} of the shapes for up to {seconds:2 s} each, it is {searched:3×} as
    fast."""
    pair, packed = layouts(rows)
    searched = pair["inductor-searched"].dropna()
    say: dict = {
        "pair": (pair["inductor"].min(), pair["inductor"].max()),
        "packed": (packed["inductor-packed"].min(), packed["inductor-packed"].max()),
        "searched": (searched.min(), searched.max()), "shapes": len(searched),
        "seconds": rows.loc[rows["provider"] == "inductor-searched", "search_s"].max(),
    }  # fmt: skip
    return say, min(say[name][0] for name in ("pair", "packed", "searched")) > 1


@claim(
    "kernels/fp32",
    'At "highest" fp32 products on tensor cores are faster and more exact than others we timed',
    of=lambda rows: rows.query(
        f"{LARGE} and {STEP} and precision == 'highest' and provider in "
        "['eager', 'inductor', 'liger', 'fused']"
    ),
)
def fp32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At torch's "highest" setting, forward and backward of large layers, fusedlib, gate and up
    packed, is {liger:2×} as fast as Liger. The relative error of its output and gradients is at
    most {error:2%} of Liger's."""
    speed = ratio(rows, of="fused").groupby("provider")["ratio"].agg(["min", "max"])
    errors = rows.pivot_table(FACTORS, "provider", "shape")
    error = (errors.loc["fused"] / errors.drop("fused")).max(axis=1)
    bound = math.ceil(100 * error["liger"]) / 100  # "at most" is rounded up
    say = {"liger": tuple(speed.loc["liger"]), "error": bound}
    return say, speed["min"].min() >= 2 and error.max() < 1 and error["liger"] < 0.5


@claim(
    "kernels/fp32-pair",
    of=lambda rows: rows.query(
        f"{LARGE} and {STEP} and provider in ['fused-pair', 'liger', 'triton-tf32x3-searched']"
    ),
    unchanged=True,  # in the recordings that have all three
)
def fp32_pair(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With two weights of gate and up, as models have them, fusedlib is {liger:2×} as fast as Liger
    at "highest", and {high:2×} at "high". Beside Triton's own products on tensor cores (`tf32x3`),
    each by the fastest of eight tiles, it is {triton:2×} as fast at "highest"."""
    over = ratio(rows, of="fused-pair").groupby(["precision", "provider"])["ratio"]
    ends = {key: (part.min(), part.max()) for key, part in over}
    say = {"liger": ends["highest", "liger"], "high": ends["high", "liger"]}
    say["triton"] = ends["highest", "triton-tf32x3-searched"]
    return say, say["liger"][0] >= 2 and say["high"][1] < 1.2 and say["triton"][0] > 1


@claim(
    "kernels/tf32",
    of=lambda rows: rows.query(f"{LARGE} and {STEP} and provider == 'eager'"),
    unchanged=True,
)
def tf32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At torch's "high", which rounds factors to TF32, PyTorch's own MLP is {gain:2×} as fast as at
    "highest" at {layers:,d} large layers, forward and backward."""
    ms = rows.pivot_table("median_ms", "shape", "precision").reindex(columns=["highest", "high"])
    gain = ms["highest"] / ms["high"]
    say: dict = {"gain": (gain.min(), gain.max()), "layers": len(gain)}
    return say, len(gain) == 4 and gain.min() > 4


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
