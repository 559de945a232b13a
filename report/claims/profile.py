"""What the study claims of where the time of a training step goes."""

import numpy as np
import pandas as pd

from fusedlib.bench import machine as machines
from press import factors
from press.say import claim
from study.profile import with_busy_ends

PLAIN = "provider == 'eager' and attention == 'plain'"
PROFILES = f"experiment == 'profile' and {PLAIN}"
THREE = f"{PROFILES} and context_length == 256 and model in ['small', 'large', '2.7b']"
CAST = "precision == 'bf16 autocast'"
BUSY = " or ".join((
    "(context_length == 256 and precision == 'fp32' and model in ['large', '2.7b'])",
    f"(context_length <= 512 and {CAST} and model == 'small')",
    f"(context_length == 256 and {CAST} and model in ['large', '2.7b'])",
))  # fmt: skip


def eager_steps() -> pd.DataFrame:
    """Every eager training step that a session of two topics clocked on a GPU."""
    steps = factors.eager_steps()
    return steps.assign(machine=steps["machine"].astype(str).map(machines.label))


def extent(values: pd.Series) -> tuple[float, float]:
    """Least and greatest."""
    return values.min(), values.max()


@claim(
    "profile/profile-busy",
    "With short sequences under autocast small models wait for the CPU; in fp32 large ones wait "
    "for the GPU",
    of=lambda rows: rows.query(f"{PLAIN} and ({BUSY})"),
    first="Small models wait for the CPU, large ones for the GPU",
)
def busy(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In fp32 kernels fill {card:2%} of a step of `large` and `2.7b`. With sequences of 128 to 512
    tokens, four at a time, a GPU under autocast is busy for {busy:2%} of a step of `small`."""
    ran = rows.query("experiment == 'profile' and busy.notna()")
    card, cast = ran.query("precision == 'fp32'")["busy"], ran.query("precision != 'fp32'")
    small, large, most = (cast[cast["model"] == n]["busy"] for n in ("small", "large", "2.7b"))
    full = len(card) == 2 and card.between(0.93, 1.02).all() and (most > 0.8).all()
    waits = len(small) == 3 and small.between(0.1, 0.67).all() and (large < 0.67).all()
    return {"card": extent(card), "busy": extent(small)}, full and waits


@claim("profile/profile-products", of=lambda rows: rows.query(THREE))
def products(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Matrix products take {fp32:2%} of the kernels' time of a training step in fp32 (three sizes
    from `small` to `2.7b`, four sequences of 256 tokens), and {autocast:2%} under bf16 autocast."""
    share = rows["products_ms"] / rows["kernels_ms"]
    fp32, autocast = (share[rows["precision"] == n] for n in ("fp32", "bf16 autocast"))
    every = len(fp32) == len(autocast) == 3 and (rows["status"] == "ok").all()
    say = {"fp32": extent(fp32), "autocast": extent(autocast)}
    return say, every and fp32.min() > 0.6 and autocast.max() < 0.35


@claim("profile/profile-autocast", of=lambda rows: rows.query(THREE))
def autocast(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Autocast makes the products of these steps {products:2×} as fast, but all other kernels
    together run {rest:2×} as fast as in fp32. So a step's kernels are {whole:2×} as fast. At `2.7b`
    AdamW alone, in its default form, takes {adam:2%} of their time."""
    ran, parts = rows[rows["status"] == "ok"], ["products_ms", "others_ms", "kernels_ms"]
    fp32, cast = (ran[ran["precision"] == n].set_index("model") for n in ("fp32", "bf16 autocast"))
    times = fp32[parts] / cast[parts]
    adam = (cast["optimizer_ms"] / cast["kernels_ms"]).get("2.7b")
    gemm, rest, whole = (times[part] for part in parts)
    say = {"products": extent(gemm), "rest": extent(rest), "whole": extent(whole), "adam": adam}
    slower = (1 / rest).between(1, 1.5).all() and len(times.dropna()) == 3
    return say, slower and whole.max() < 5 < gemm.min() and adam > 0.4


@claim(
    "profile/profile-autocast-steps",
    of=lambda rows: rows.query(
        f"experiment == 'step' and {PLAIN} and context_length == 256 and "
        "model in ['small', '2.7b'] and precision in ['fp32', 'bf16 autocast']"
    ),
)
def autocast_steps(rows: pd.DataFrame) -> tuple[dict, bool]:
    """By the clock a training step of `2.7b` is {large:2×} as fast under autocast as in fp32, and
    one of `small` {small:2×} as fast: it is slower, for its CPU launches more kernels."""
    ms = rows.pivot_table("step_median_ms", "model", "precision")
    gain = ms["fp32"] / ms["bf16 autocast"]
    return {"large": gain["2.7b"], "small": gain["small"]}, gain["2.7b"] > 2 and gain["small"] < 1


@claim(
    "profile/profile-long",
    of=lambda rows: rows.query(
        f"{PROFILES} and step_ms.notna() and model == 'small' and {CAST} and "
        "context_length in [256, 1024]"
    ),
    first="1,024 tokens keep the GPU busy for at least four fifths",
)
def long(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Under autocast the GPU is busy for {busy:2%} of a step of `small` with four sequences of
    1,024 tokens, and for {short:2%} with four of 256."""
    ran = rows[rows["status"] == "ok"].groupby("context_length")
    by = ran["kernels_ms"].median() / ran["step_ms"].median()
    return {"busy": by[1024], "short": by[256]}, 1.5 * by[256] < by[1024] < 1.02


@claim(
    "profile/profile-sessions",
    of=lambda rows: with_busy_ends(
        rows.query(f"{PROFILES} and model == 'small' and {CAST} and context_length == 256"),
        eager_steps(),
    ),
)
def sessions(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Over all sessions the GPU is busy for {least:2%} to {most:2%} of a step of `small` under
    autocast with four sequences of 256 tokens."""
    least, most = rows["busy_low"].min(), rows["busy_high"].max()
    return {"least": least, "most": most}, 0.05 < least < most < 0.5


@claim("profile/profile-softmax", of=lambda rows: rows.query(f"{PROFILES} and model == 'small'"))
def softmax(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In plain attention of `small`, over contexts of 128 to 1,024 tokens, the softmax takes
    {fp32:2×} the forward time of both products in fp32 and {autocast:2×} under autocast, with
    {flops:2%} of their FLOPs. A count of bytes predicts {bytes32:2×} and {bytes16:2×}: too much,
    and nearer than a count of FLOPs in each case."""
    ran = rows[rows["status"] == "ok"]
    fp32, cast = (ran[ran["precision"] == n] for n in ("fp32", "bf16 autocast"))
    off = {n: np.log(ran[f"{n}_ratio"] / ran["softmax_ratio"]).abs() for n in ("flops", "bytes")}
    above = (ran["bytes_ratio"] > ran["softmax_ratio"]).all()
    say = {"fp32": extent(fp32["softmax_ratio"]), "autocast": extent(cast["softmax_ratio"])}
    say |= {"bytes32": extent(fp32["bytes_ratio"]), "bytes16": extent(cast["bytes_ratio"])}
    near = len(fp32) == len(cast) == 4 and above and (off["bytes"] < off["flops"]).all()
    return say | {"flops": ran["flops_ratio"].max()}, near and say["autocast"][1] > 2


@claim(
    "profile/profile-compiled",
    of=lambda rows: rows.query(
        f"experiment == 'profile' and model == 'small' and context_length == 256 and {CAST} and "
        "attention == 'plain'"
    ),
)
def compiled(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Compiled by Inductor, a step of `small` under autocast is {after:,d} kernels instead of
    {before:,d}. They take {now:2 ms} instead of {was:2 ms}, though the matrix products take
    {gemm:3 ms} as they did ({had:3 ms}): what was fused away is passes over memory."""
    ran = rows[rows["status"] == "ok"].set_index("provider")
    plain, ours = (ran.loc[name] for name in ("eager", "inductor"))
    say = {"after": ours["profiled_kernels"], "before": plain["profiled_kernels"]}
    say |= {"now": ours["kernels_ms"], "was": plain["kernels_ms"]}
    say |= {"gemm": ours["products_ms"], "had": plain["products_ms"]}
    alike, quicker = say["gemm"] / say["had"], say["now"] / say["was"]
    return say, say["after"] < 0.6 * say["before"] and 0.3 < quicker < 0.8 and 0.85 < alike < 1.15
