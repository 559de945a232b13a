"""What the study claims of training on MNIST: what an accuracy, a weight and a clock can tell."""

import numpy as np
import pandas as pd

from press.say import claim
from press.show import published
from study.mnist import from_tables
from study.rows import ratio

LONG = "experiment == 'run' and epochs == 4 and train_images == 60_000"
STEPS = "experiment == 'pace' and data_source == 'device' and width == 4096"
PASSES = 27 * 4 * 2 * 9216 * 4096
"""Bytes that torch's list-wise Adadelta reads and writes for gate and up weights, 27 times each."""


@claim(
    "mnist/accuracy",
    "After convolutions the accuracy on MNIST hardly tells whether a layer learns",
    of=lambda rows: rows.query(
        f"{LONG} and precision == 'fp32' and provider in ['eager', 'frozen']"
    ),
    repeats="same seeds",
)
def accuracy(rows: pd.DataFrame) -> tuple[dict, bool]:
    """After convolutions {frozen:4%} of the test digits are right with random gate and up weights,
    and {trained:4%} with trained ones. Without convolutions the accuracies lie further apart."""
    right = rows.pivot_table("correct", "provider", "network", "median")
    (frozen, f_alone), (trained, t_alone) = right.loc[["frozen", "eager"]].to_numpy()
    moved = rows.groupby("provider")["gate_change"].max()
    still = moved["frozen"] == 0 < moved["eager"] and frozen > 0.98
    say = {"frozen": frozen, "trained": trained}
    return say, still and 0 < trained - frozen < 0.01 and t_alone - f_alone > 0.03


@claim(
    "mnist/accuracy-alone",
    of=lambda rows: rows.query(
        f"{LONG} and precision == 'fp32' and provider in ['eager', 'frozen'] "
        "and network == 'swiglu only'"
    ),
    repeats="same seeds",
)
def accuracy_alone(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Without convolutions {frozen:4%} of the test digits are right with random gate and up
    weights, and {trained:4%} with trained ones."""
    right = rows.groupby("provider")["correct"].median()
    say = {"frozen": right["frozen"], "trained": right["eager"]}
    return say, say["trained"] - say["frozen"] > 0.03


@claim(
    "mnist/published-epochs",
    of=lambda rows: from_tables(published("mnist")),
)
def published_epochs(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A published epoch takes {liger:3 s} with Liger and {kernel:3 s} with the kernel that trains
    neither gate nor up, {apart:3 s} less. In Adadelta's passes each of the layer's weights is read
    or written 27 times, which takes {counted:3 s} an epoch at the bandwidth in the L4's data
    sheet, 300 GB/s."""
    liger, kernel = rows.groupby("provider")["train_s"].median()[["liger", "published-kernel"]]
    counted = -(-60_000 // 64) * PASSES / 300e9
    say = {"liger": liger, "kernel": kernel, "apart": liger - kernel, "counted": counted}
    return say, abs(counted / (liger - kernel) - 1) < 0.2


@claim(
    "mnist/published-kernel",
    of=lambda rows: rows.query(
        f"{LONG} and precision == 'fp32' and provider in ['frozen', 'published-kernel']"
    ),
    repeats="same seeds",
)
def published_kernel(rows: pd.DataFrame) -> tuple[dict, bool]:
    """The published kernel, whose h has a relative error of {error:2} and whose gate and up never
    move, still reads {after:3%} of the test digits after convolutions, and {alone:3%} without
    them: fewer than a frozen layer that computes the right thing."""
    right = rows.pivot_table("correct", "network", "provider", "median")
    wrong, kernel = right["published-kernel"], rows[rows["provider"] == "published-kernel"]
    less = (wrong < right["frozen"]).all() and kernel["gate_change"].max() == 0
    say = {"after": wrong["convolutions"], "alone": wrong["swiglu only"]}
    say["error"] = kernel["h_error"].min()
    return say, less and say["error"] > 0.9 and 0.95 < say["after"] < 1


@claim(
    "mnist/same",
    of=lambda rows: rows.query(
        f"{LONG} and network == 'convolutions' and provider not in ['frozen', 'published-kernel']"
    ),
    repeats="same seeds",
)
def same(rows: pd.DataFrame) -> tuple[dict, bool]:
    """All {arms:,d} others that train gate and up, Liger and fusedlib in fp32, and PyTorch and
    fusedlib in bf16, learn what PyTorch in fp32 learns: over {seeds:,d} seeds the mean training
    losses of their fourth epoch, {low:3} to {high:3}, lie within what its own seeds span, {least:3}
    to {most:3}. Their outputs err at most {times:2×} as much as PyTorch's in the same precision."""
    errors = rows.pivot_table("h_error", "precision", "provider")
    times = errors.div(errors["eager"], axis=0).max().max()
    base = rows.query("provider == 'eager' and precision == 'fp32'")["late_loss"]
    others = rows.drop(base.index).groupby(["provider", "precision"])["late_loss"].mean()
    say = {"arms": len(others), "times": times, "low": others.min(), "high": others.max()}
    say |= {"least": base.min(), "most": base.max(), "seeds": len(base)}
    within = say["least"] <= say["low"] and say["high"] <= say["most"]
    return say, within and len(others) == 4 and times < 2


@claim(
    "mnist/optimizer",
    of=lambda rows: rows.query(
        f"{STEPS} and precision == 'fp32' and provider in ['eager', 'frozen']"
    ),
)
def optimizer(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Of a training step's {step:3 ms} in fp32 from Python, Adadelta takes {share:2%}: its 11
    passes, 27 reads and writes of each of the layer's weights, go at {rate:2 TB/s}. With gate and
    up frozen a step is {python:2×} as fast, and in a CUDA graph {graph:2×}."""
    step = rows.pivot_table("median_ms", "provider", "launch")
    eager = rows.query("provider == 'eager' and launch == 'python'").iloc[0]
    update = np.median(eager["optimizer_samples_ms"])
    say = {"share": update / eager["median_ms"], "step": eager["median_ms"]}
    say |= {"rate": PASSES / update / 1e9, **step.loc["eager"] / step.loc["frozen"]}
    quicker = say["python"] > 1.02 and say["graph"] > 2.5
    return say, say["share"] > 0.5 and 2 < say["rate"] < 5 and quicker


@claim(
    "mnist/gain",
    of=lambda rows: rows.query(f"{STEPS} and precision == 'bf16' and launch == 'graph'"),
)
def gain(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At 64 images a step there is next to nothing to fuse: in bf16, in CUDA graphs,
    torch.compile's step is {inductor:4×} as fast as plain PyTorch's, fusedlib's {fused:4×} and
    Liger's {liger:4×}."""
    times = ratio(rows, over="eager").set_index("provider")["ratio"]
    return dict(times), len(times) > 2 and times.between(0.97, 1.06).all()
