"""What the published memory tables say about themselves: counts of matrices, from their figures.

Hidden and intermediate size are alike there. W is one weight matrix, A one activation of
tokens · width, in fp32; a least-squares fit of peak = w W + a A + c gives whole numbers w and a.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fusedlib.study import published

GRID, STACK, SWEEP = "mlp_memory_compare.py", "deep_memory_compare.py", "benchmark_memory.py"
MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """Peak = weights · W + activations · A + constant_mib; `off_mib` is the worst row's error."""

    weights: int
    activations: int
    constant_mib: float
    off_mib: float

    def peak_mib(self, tokens: int, width: int) -> float:
        """The peak that the reading gives at this size."""
        return (
            self.weights * _mib(width, width)
            + self.activations * _mib(tokens, width)
            + self.constant_mib
        )


def _mib(rows: float, columns: float) -> float:
    return rows * columns * 4 / MIB


def readings() -> dict[str, Reading]:
    """The published grid read as counts of matrices, by implementation."""
    rows = published.load("swiglu_memory").query("table == @GRID")
    found = {}
    for name, group in rows.groupby("implementation"):
        tokens, width = (group[c].to_numpy(float) for c in ("batch_size", "d_model"))
        terms = np.stack([_mib(width, width), _mib(tokens, width), np.ones(len(group))], axis=1)
        peak = group["peak_mb"].to_numpy(float)
        weights, activations, _ = np.linalg.lstsq(terms, peak, rcond=None)[0]
        whole = np.rint([weights, activations])
        rest = peak - terms[:, :2] @ whole
        constant = float(np.median(rest))
        off = float(np.abs(rest - constant).max())
        found[str(name)] = Reading(int(whole[0]), int(whole[1]), constant, off)
    return found


def ratios() -> pd.DataFrame:
    """The published sweep of Liger over fused: `tokens`, `width`, `published`, `read`."""
    told = published.load("swiglu_ratios").query("table == @SWEEP")
    liger, fused = readings()["liger"], readings()["fused"]
    pairs = list(zip(told["batch_size"].astype(int), told["d_model"].astype(int), strict=True))
    read = [liger.peak_mib(*pair) / fused.peak_mib(*pair) for pair in pairs]
    return pd.DataFrame(
        {
            "tokens": [tokens for tokens, _ in pairs],
            "width": [width for _, width in pairs],
            "published": told["liger_over_fused"].to_numpy(float),
            "read": read,
        }
    )


def slopes() -> dict[str, tuple[float, float, float]]:
    """MB a layer of the published stack, MB without layers, and the worst row's distance."""
    rows = published.load("swiglu_memory").query("table == @STACK")
    found = {}
    for name, group in rows.groupby("implementation"):
        layers, peak = group["num_layers"].to_numpy(float), group["peak_mb"].to_numpy(float)
        slope, start = np.polyfit(layers, peak, 1)
        off = float(np.abs(peak - slope * layers - start).max())
        found[str(name)] = (float(slope), float(start), off)
    return found


def stack_reading() -> tuple[int, int, dict[str, tuple[int, int]]] | None:
    """The published stack's slopes as counts a layer: tokens, width, (w, a) by implementation.

    The source does not state the stack's size; the sizes of its grid are tried, with at most the
    grid's own counts. None unless exactly one of them fits both slopes to a published digit.
    """
    grid = published.load("swiglu_memory").query("table == @GRID")
    sizes = set(zip(grid["batch_size"].astype(int), grid["d_model"].astype(int), strict=True))
    most = readings()["liger"]
    fits = []
    for tokens, width in sorted(sizes):
        found = {}
        for name, (slope, _, _) in slopes().items():
            found[name] = [
                (w, a)
                for w in range(most.weights + 1)
                for a in range(most.activations + 1)
                if abs(w * _mib(width, width) + a * _mib(tokens, width) - slope) < 0.05
            ]
        if all(len(counts) == 1 for counts in found.values()):
            fits.append((tokens, width, {name: counts[0] for name, counts in found.items()}))
    return fits[0] if len(fits) == 1 else None
