"""Tables of study 05: pure functions from rows and published figures to frames of strings."""

from itertools import pairwise

import pandas as pd

from fusedlib.study import published
from fusedlib.study.anatomy.selected import (
    ASIDE,
    DIRECTIONS,
    STEPS,
    claim,
    experiment,
    panels,
    step,
    steps,
)
from fusedlib.study.display import MISSING, number

# NVIDIA's data sheet of the L4, the published card: memory bandwidth, fp32 rate, L2.
L4_BYTES_PER_S = 300e9
L4_FLOPS_PER_S = 30.3e12
L4_L2_BYTES = 48 * 2**20
DEEP_WIDTH = 2048  # of the published deep stack's script; its log does not state it
FP32 = 4
SIDES = {"liger": "Liger", "fused": "published fused"}
IMPLEMENTATIONS = {
    "published": "published (Triton)",
    "published, emulated": "published (emulated)",
    "published with weight gradients, emulated": "published, second version (emulated)",
    "whole sum": "with the whole sum",
    "eager": "eager PyTorch",
    "liger": "Liger",
    "fused": "fusedlib",
}
REPAIRS = {
    "reduction": "whole sum", "precision": "IEEE", "launch": "graphs", "kernels": "fusedlib",
    "fusion": "bf16",
}  # fmt: skip
PEAKS = {
    "liger": "Liger", "published": "published (wrong)", "whole sum": "with the whole sum",
    "fused": "fusedlib",
}  # fmt: skip
INPUTS = {"ones": "all ones, as published", "random": "random"}
GRADIENTS = {"d_x": "x", "d_w_gate_up": "gate and up weights", "d_w_down": "down weight"}


def waterfall(frame: pd.DataFrame) -> pd.DataFrame:
    """Liger's time over the other side's, step by step, a column a size and direction."""
    columns = {}
    for tokens, width, direction in panels(frame):
        told = claim(tokens, width, direction)
        cells = [MISSING if told is None else f"{told:.2f} (wrong)"]
        for name in [*list(STEPS)[1:], *ASIDE]:
            row = step(frame, name, tokens, width, direction)
            cells.append(MISSING if row is None else factor_cell(row))
        columns[(f"{tokens} × {width}", DIRECTIONS[direction])] = cells
    index = pd.Index([*STEPS.values(), *ASIDE.values()], name="comparison")
    return pd.DataFrame(columns, index=index)


def factor_cell(row: pd.Series) -> str:
    """A factor with its interval, labelled where the result is wrong."""
    low, high = number(row["ratio_low"], 3), number(row["ratio_high"], 3)
    text = f"{number(row['ratio'], 3)} [{low}, {high}]"
    return f"{text} (wrong)" if row["wrong"] else text


def sweep(frame: pd.DataFrame) -> pd.DataFrame:
    """The published forward sweep: claimed, redone with its error, and repaired, by width."""
    told = published.load("swiglu_ratios").query("quantity == 'forward time'")
    tokens = int(told["batch_size"].iloc[0])
    rows = steps(frame)
    measured = rows[(rows["tokens"] == tokens) & (rows["direction"] == "forward")]
    widths = sorted({*told["d_model"].astype(int), *measured["hidden_size"].astype(int)})
    lines = []
    for width in widths:
        line = {("published", "forward"): _told("forward time", width)}
        line[("published", "“backward”")] = _told("backward time", width)
        found = {n: step(frame, n, tokens, width, "forward") for n in list(STEPS)[1:]}
        redone = found["redone"]
        line[("redone (wrong)", "factor")] = _factor(redone)
        line[("redone (wrong)", "error of y")] = (
            MISSING if redone is None else number(redone["y_error"], 4)
        )
        for name, title in REPAIRS.items():
            line[("put right, one after another", title)] = _factor(found[name])
        lines.append(line)
    table = pd.DataFrame(lines, index=pd.Index(widths, name="width"))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def _told(quantity: str, width: int) -> str:
    rows = published.load("swiglu_ratios")
    rows = rows[(rows["quantity"] == quantity) & (rows["d_model"] == width)]
    return f"{rows['liger_over_fused'].iloc[0]:.2f}" if len(rows) else MISSING


def _factor(row: pd.Series | None) -> str:
    if row is None:
        return MISSING
    return number(row["ratio"], 3) + (
        " (wrong)" if row["wrong"] and row["step"] != "redone" else ""
    )


def correctness(frame: pd.DataFrame) -> pd.DataFrame:
    """Errors of the published kernel by width and block, computed by Triton and emulated."""
    rows = experiment(frame, "correctness")
    rows = rows[rows["implementation"].isin(["published", "published, emulated"])]
    if rows.empty:
        return pd.DataFrame(columns=["y", "dx"])
    by = rows["implementation"].map(IMPLEMENTATIONS).str.extract(r"\((\w+)\)")[0]
    errors = {"y": rows["y_error"], "dx": rows["d_x_error"]}
    keys = [rows["inputs"].map(INPUTS), rows["block"].astype(int), rows["hidden_size"].astype(int)]
    index = pd.MultiIndex.from_arrays(keys, names=["inputs", "block", "width"])
    shown = pd.DataFrame(
        {
            (f"error of {what}", who): pd.Series(
                [number(v, 3) for v in error[by == who]], index=index[by == who]
            )
            for what, error in errors.items() for who in sorted(set(by))
        }
    ).sort_index()  # fmt: skip
    return shown.fillna(MISSING)


def gradients(frame: pd.DataFrame) -> pd.DataFrame:
    """Which gradients arrive and how far off they are, by implementation."""
    rows = experiment(frame, "correctness")
    rows = rows[(rows["inputs"] == "random") & (rows["block"] == rows["block"].max())]
    others = rows["implementation"].isin(["eager", "liger", "fused", "whole sum"])
    widths = rows[others]["hidden_size"]
    rows = rows[rows["hidden_size"] == widths.max()]
    index, lines = [], []
    for name, title in IMPLEMENTATIONS.items():
        for _, row in rows[rows["implementation"] == name].iterrows():
            index.append(title)
            lines.append([number(row["y_error"], 2), *_gradient_cells(row), _status(row)])
    columns = ["y", *GRADIENTS.values(), "verdict"]
    return pd.DataFrame(lines, index=pd.Index(index, name="implementation"), columns=columns)


def _status(row: pd.Series) -> str:
    return "wrong" if row["status"] == "wrong" else "right"


def _gradient_cells(row: pd.Series) -> list[str]:
    missing = row["missing_gradients"]
    cells = []
    for name in GRADIENTS:
        if name.removeprefix("d_") in missing:
            cells.append("none arrives")
            continue
        error = row[f"{name}_error"]
        if name == "d_w_gate_up" and pd.isna(error):
            error = max(row["d_w_gate_error"], row["d_w_up_error"])
        cells.append(number(error, 2))
    return cells


def counted_matrices(frame: pd.DataFrame) -> dict[str, int]:
    """Weight-sized matrices each side holds after a pass: three weights and a gradient for each of
    them that arrives, packed gate and up counting as two.
    """
    rows = experiment(frame, "correctness")
    rows = rows[rows["implementation"].isin(["published, emulated", "eager"])]
    held = {}
    for name, title in (("published, emulated", "published fused"), ("eager", "Liger")):
        found = rows[rows["implementation"] == name]
        if len(found):
            missing = found.iloc[-1]["missing_gradients"]
            held[title] = 6 - sum({"w_gate_up": 2}.get(m, 1) for m in missing)
    return held


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Published peak ratio by width, the counted limit's approach, and what was measured."""
    rows = experiment(frame, "memory")
    told = published.load("swiglu_ratios").query("quantity == 'peak memory'")
    held = counted_matrices(frame)
    widths = sorted({*told["d_model"].astype(int), *rows["hidden_size"].dropna().astype(int)})
    lines = []
    for width in widths:
        part = rows[rows["hidden_size"] == width].set_index("implementation")
        line = {("published", "Liger / fused"): _told("peak memory", width)}
        line[("counted", "Liger")] = _mib(held.get("Liger"), width)
        line[("counted", "published")] = _mib(held.get("published fused"), width)
        for name, title in PEAKS.items():
            line[("measured peak, MiB", title)] = _figure(part, name, "peak_mib")
        for name, title in list(PEAKS.items())[1:]:
            line[("measured Liger /", title)] = _peak_ratio(part, name)
        lines.append(line)
    table = pd.DataFrame(lines, index=pd.Index(widths, name="width"))
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table


def _mib(matrices: int | None, width: int) -> str:
    return MISSING if matrices is None else number(matrices * width**2 * FP32 / 2**20, 4)


def _figure(part: pd.DataFrame, name: str, figure: str) -> str:
    return number(part.loc[name, figure], 4) if name in part.index else MISSING


def _peak_ratio(part: pd.DataFrame, name: str) -> str:
    if not {"liger", name} <= set(part.index):
        return MISSING
    return f"{part.loc['liger', 'peak_mib'] / part.loc[name, 'peak_mib']:.2f}"


def deep_stack() -> dict[str, float]:
    """MB that one more layer takes in the published deep stack, by side."""
    rows = published.load("swiglu_memory")
    rows = rows[rows["num_layers"].notna()].sort_values("num_layers")
    slopes = {}
    for side, group in rows.groupby("implementation"):
        known = list(zip(group["num_layers"].astype(int), group["peak_mb"], strict=True))
        each = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(known)]
        slopes[str(side)] = sum(each) / len(each)
    return slopes


def roof() -> pd.DataFrame:
    """What the published forward times imply: bytes and operations a second, over the L4's own."""
    rows = published.load("swiglu_times").query("direction == 'forward'")
    index, lines = [], []
    for row in rows.sort_values(["batch_size", "d_model"]).itertuples():
        rate, speed = implied(int(row.batch_size), int(row.d_model), float(row.time_ms))
        index.append((f"{row.batch_size} × {row.d_model}", SIDES[row.implementation]))
        lines.append(
            {
                "ms": f"{row.time_ms:.2f}", "GB/s": number(rate / 1e9, 3),
                "of the data sheet's GB/s": f"{100 * rate / L4_BYTES_PER_S:.0f} %",
                "TFLOP/s": number(speed / 1e12, 3),
                "of its fp32 TFLOP/s": f"{100 * speed / L4_FLOPS_PER_S:.0f} %",
            }
        )  # fmt: skip
    return pd.DataFrame(lines, index=pd.MultiIndex.from_tuples(index, names=["size", "side"]))


def implied(tokens: int, width: int, ms: float) -> tuple[float, float]:
    """Bytes/s and FLOP/s that a forward pass in this time needs, if it does all the work: three
    fp32 weights and x read, y written; three products.
    """
    moved = FP32 * (3 * width**2 + 2 * tokens * width)
    return moved / (ms / 1e3), 3 * 2 * tokens * width**2 / (ms / 1e3)


def mnist() -> pd.DataFrame:
    """The published training logs: last epoch, and how many figures equal Liger's."""
    rows = published.load("mnist")
    figures = ["train_ms", "test_ms", "test_loss", "correct"]
    base = rows[rows["table"] == "Liger"].sort_values("epoch")
    index, lines = [], []
    for name in dict.fromkeys(rows["table"]):
        part = rows[rows["table"] == name].sort_values("epoch")
        same = int((part[figures].to_numpy() == base[figures].to_numpy()).sum())
        last = part.iloc[-1]
        index.append(name)
        lines.append(
            {
                "script": last["script"], "train, s": number(last["train_ms"] / 1e3, 3),
                "test, s": number(last["test_ms"] / 1e3, 3),
                "correct": f"{int(last['correct']):,} of {int(last['images']):,}",
                "figures equal to Liger's": f"{same} of {part[figures].size}",
            }
        )  # fmt: skip
    return pd.DataFrame(lines, index=pd.Index(index, name="log"))
