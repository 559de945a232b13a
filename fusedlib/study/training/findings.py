"""Study 10 in sentences: findings and the abstract's part, all from rows."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from fusedlib.study import published
from fusedlib.study.display import number
from fusedlib.study.selection import no_finding
from fusedlib.study.training.counted import LAYER_WEIGHTS, OPTIMIZER_PASSES, difference
from fusedlib.study.training.selected import (
    ALONE,
    BASELINE,
    CONVOLUTIONS,
    PARTS,
    UNTRAINED,
    epoch_means,
    experiment,
    gaps,
    runs,
    size,
    where,
)
from fusedlib.study.training.tables import correct, median

MISSING = no_finding("10_mnist")
_BASE = f"{BASELINE} fp32"
PRECISIONS = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16"}


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows and the published figures say."""
    measured = [
        _learning(frame), _band(frame), _accuracy(frame), _alone(frame), _parts(frame),
        _speed(frame), _data(frame), _repeat(frame), _again(frame),
    ]  # fmt: skip
    found = [s for s in measured if s]
    return [*(found or [MISSING]), _published()]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    found = [_accuracy(frame), _alone(frame), _parts(frame)]
    return [s for s in found if s] or [MISSING]


def _parts_of(frame: pd.DataFrame, network: str) -> dict[str, pd.DataFrame]:
    rows = runs(frame, network)
    return {str(name): part for name, part in rows.groupby("who", sort=False)}


def _trained(names: Iterable[str]) -> list[str]:
    return [n for n in names if n.split()[0] not in UNTRAINED]


def _learning(frame: pd.DataFrame) -> str | None:
    """Loss and gap of every arm at the same seeds."""
    rows = runs(frame, CONVOLUTIONS)
    arms = _parts_of(frame, CONVOLUTIONS)
    if _BASE not in arms:
        return None
    base = epoch_means(arms[_BASE])
    means = {
        name: found.mean(axis=1)
        for name, part in arms.items()
        if name != _BASE and (found := gaps(rows, part)).size
    }
    told = []
    for precision, label in PRECISIONS.items():
        same = [means[n].mean() for n in _trained(means) if n.split()[1] == precision]
        if same:
            told.append(f"in {label} the arms that train the gate ({len(same)}) {_from_to(same)}")
    told += [
        f"{name} {_signed(found.mean())} ({_from_to(found)})"
        for name, found in means.items() if name not in _trained(means)
    ]  # fmt: skip
    if not told:
        return None
    return (
        f"On {where(rows)} ({size(rows)}): {_BASE} ends with a mean training loss of "
        f"{number(base.mean(), 3)}. At the same seed and order of images, training loss less its, "
        f"mean over all windows: {'; '.join(told)}."
    )


def _from_to(values: Iterable[float]) -> str:
    ends = dict.fromkeys(_signed(v) for v in (min(values), max(values)))
    return " to ".join(ends)


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _band(frame: pd.DataFrame) -> str | None:
    """Which arms stay within the range that eager's own seeds span."""
    arms = _parts_of(frame, CONVOLUTIONS)
    if _BASE not in arms or len(arms[_BASE]) < 2:
        return None
    inside: list[str] = []
    outside: list[str] = []
    for name, part in arms.items():
        if name == _BASE:
            continue
        epochs = int(min(part["epochs"].min(), arms[_BASE]["epochs"].min()))
        base = epoch_means(arms[_BASE], epochs)
        mean = epoch_means(part, epochs).mean()
        (inside if base.min() <= mean <= base.max() else outside).append(f"{name} (epoch {epochs})")
    return (
        f"The band is what {_BASE} spans over its {len(arms[_BASE])} seeds, in the mean training "
        f"loss of the last epoch in common. Within it: {_listed(inside, arms)}; outside: "
        f"{_listed(outside, arms)}."
    )


def _listed(names: list[str], arms: Iterable[str]) -> str:
    """The names, or their number where they are all the arms that train the gate."""
    everybody = set(_trained(arms)) - {_BASE}
    if len(names) > 3 and {n.partition(" (epoch")[0] for n in names} == everybody:
        return f"all {len(names)} other arms that train the gate"
    return ", ".join(names) or "nobody"


def _accuracy(frame: pd.DataFrame) -> str | None:
    """What accuracy says beside a layer that does not learn, or is wrong."""
    arms = _parts_of(frame, CONVOLUTIONS)
    rest = [name for name in arms if name.split()[0] in UNTRAINED]
    if _BASE not in arms or not rest:
        return None
    said = [f"{name} {np.mean(correct(arms[name])):.2f} %" for name in (_BASE, *rest)]
    losses = [
        f"{np.mean([row[-1] for row in arms[name]['epoch_test_loss']]):.4f}"
        for name in (_BASE, *rest)
    ]
    facts = [_fact(name, arms[name]) for name in rest]
    return (
        f"Accuracy behind convolutions, on {where(arms[_BASE])} ({size(arms[_BASE])}): "
        f"{', '.join(said)}; test loss {', '.join(losses)} in the same order. {' '.join(facts)}"
    )


def _fact(name: str, part: pd.DataFrame) -> str:
    """Why an arm's accuracy cannot come from its layer having learned."""
    moved = max(max(row) for row in part["epoch_gate_change"])
    error = float(part["h_error"].max())
    wrong = f", and the error of its output is {number(error, 2)}" if part["wrong"].any() else ""
    return f"The gate weights of {name} have changed by {number(moved, 2)}{wrong}."


def _alone(frame: pd.DataFrame) -> str | None:
    """The same without convolutions."""
    arms = _parts_of(frame, ALONE)
    if _BASE not in arms or len(arms) < 2:
        return None
    said = [f"{name} {np.mean(correct(part)):.2f} %" for name, part in arms.items()]
    return f"Without convolutions ({size(arms[_BASE])}): {', '.join(said)} right."


def _steps(frame: pd.DataFrame) -> pd.DataFrame:
    rows = experiment(frame, "pace")
    return rows[(rows["source"] == "device") & (rows["launch"] == "python")]


def _parts(frame: pd.DataFrame) -> str | None:
    """Where a step's time goes, and how much of it goes when nothing is trained."""
    rows = _steps(frame)
    every = experiment(frame, "pace")
    graphs = every[every["launch"] == "graph"].set_index("who")["median_ms"]
    told = []
    for name in (_BASE, "frozen fp32"):
        for row in rows[rows["who"] == name].itertuples():
            split = ", ".join(f"{p} {number(median(row, p), 2)}" for p in PARTS)
            graph = f"; in a CUDA graph {number(graphs[name], 3)} ms" if name in graphs else ""
            told.append(f"{name} takes {number(row.median_ms, 3)} ms ({split}{graph})")
    if not told:
        return None
    width = int(rows["width"].iloc[0])
    return f"A step from Python on {where(rows)} (width {width:,}): {', '.join(told)}."


def _speed(frame: pd.DataFrame) -> str | None:
    """What the arms gain over eager in the same precision, from Python and in graphs."""
    every = experiment(frame, "pace")
    said = []
    for launch, title in (("python", "from Python"), ("graph", "in CUDA graphs")):
        rows = every[(every["source"] == "device") & (every["launch"] == launch)]
        rows = rows[~rows["arm"].isin([*UNTRAINED, BASELINE]) & rows["speedup"].notna()]
        if len(rows):
            told = [
                f"{r.who} {r.speedup:.2f} ({r.speedup_low:.2f}–{r.speedup_high:.2f})"
                for r in rows.itertuples()
            ]
            said.append(f"{title}: {', '.join(told)}")
    if not said:
        return None
    return f"Eager's time over the arm's, a whole step in the same precision, {'; '.join(said)}."


def _data(frame: pd.DataFrame) -> str | None:
    rows = experiment(frame, "data").drop_duplicates("source").set_index("source")
    if {"device", "loader"} - set(rows.index):
        return None
    device, loader = (float(rows.loc[s, "median_ms"]) for s in ("device", "loader"))
    return (
        f"A batch takes {number(device, 2)} ms when it is gathered on the device and "
        f"{number(loader, 2)} ms from a DataLoader with one worker, which alone bounds an epoch of "
        f"60,000 images to {number(loader * 60 / rows['batch_size'].iloc[0], 2)} s at best."
    )


def _repeat(frame: pd.DataFrame) -> str | None:
    rows = experiment(frame, "repeat")
    if rows.empty:
        return None
    said = []
    for title, column in (("run again", "repeat_difference"),
                          ("captured in a CUDA graph", "graph_difference")):  # fmt: skip
        known = rows[rows[column].notna()]
        if len(known):
            same = known[known[column] == 0]
            off = [f"{r.who} {number(getattr(r, column), 1)}" for r in known.itertuples()
                   if getattr(r, column) != 0]  # fmt: skip
            text = f"{title}, {len(same)} of {len(known)} arms give the same losses bit for bit"
            said.append(f"{text}; largest differences: {', '.join(off)}" if off else text)
    steps = int(rows["steps"].iloc[0])
    return f"Over the first {steps} steps, from the same seed: {'; '.join(said)}."


def _again(frame: pd.DataFrame) -> str | None:
    """The published accuracy without weight gradients beside those of the untrained arms."""
    arms = _parts_of(frame, CONVOLUTIONS)
    said = [
        f"{name} reaches {np.mean(correct(part)):.2f} % after {int(part['epochs'].min())}"
        for name, part in arms.items() if name.split()[0] in UNTRAINED
    ]  # fmt: skip
    if not said:
        return None
    told = published.load("mnist").query("table == 'Fused no weight-grad'").sort_values("epoch")
    last = told.iloc[-1]
    return (
        f"The published log without weight gradients ends at "
        f"{100 * last['correct'] / last['images']:.2f} % after {int(last['epoch'])} epochs. On "
        f"{where(next(iter(arms.values())))} ({size(runs(frame, CONVOLUTIONS))}), "
        f"{', '.join(said)}."
    )


def _published() -> str:
    """What counting says of the published times."""
    d = difference()
    return (
        f"The published epochs take {number(d.liger_s, 3)} s with Liger and "
        f"{number(d.kernel_s, 3)} s with the kernel that trains neither gate nor up: "
        f"{number(d.apart_ms, 3)} ms a step between them. Counted, torch's Adadelta passes "
        f"{OPTIMIZER_PASSES} times over each of the layer's {LAYER_WEIGHTS:,} weights a step, "
        f"{number(d.optimizer_s, 3)} s an epoch at the L4's data-sheet bandwidth: about the whole "
        "difference, before any kernel is counted. At the pace of its own test epoch the data "
        f"alone would take {number(d.data_s, 3)} s of the shorter one."
    )
