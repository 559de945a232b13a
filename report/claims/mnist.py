"""What the study claims of training on MNIST: what an accuracy, a weight and a clock can tell."""

import pandas as pd

from press.say import claim

LONG = "experiment == 'run' and epochs == 4 and train_images == 60_000"


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
