"""What a list of samples says: location, spread, and how sure one can be of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap_median(samples: Sequence[float]) -> Interval:
    """Median with the percentile bootstrap's 95 % interval (Efron 1979); the seed is fixed.

    Raises:
        ValueError: no samples.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a median needs at least one sample, got none")
    draws = np.random.default_rng(0).integers(0, values.size, size=(2000, values.size))
    medians = np.median(values[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def summarize(samples_ms: Sequence[float], name: str = "") -> dict[str, Any]:
    """Figures of a row for samples in ms, every sample kept; `name_` is put before each.

    `std_ms` is the sample standard deviation (n - 1), None for a single sample.
    """
    prefix = f"{name}_" if name else ""
    values = np.asarray(samples_ms, dtype=np.float64)
    median = bootstrap_median(samples_ms)
    p10, p90 = np.percentile(values, [10, 90])
    figures = {
        "median_ms": median.value, "median_low_ms": median.low, "median_high_ms": median.high,
        "mean_ms": float(values.mean()),
        "std_ms": float(values.std(ddof=1)) if values.size > 1 else None,
        "p10_ms": float(p10), "p90_ms": float(p90), "n": int(values.size),
        "samples_ms": [round(float(v), 6) for v in values],
    }  # fmt: skip
    return {prefix + k: v for k, v in figures.items()}


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Median of the pairs' ratios with its interval; sample i of both ran in the same round.

    Raises:
        ValueError: the two differ in length.
    """
    if len(numerator) != len(denominator):
        raise ValueError(
            f"pairs need equally many samples, got {len(numerator)} and {len(denominator)}"
        )
    pairs = np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64)
    return bootstrap_median(pairs.tolist())
