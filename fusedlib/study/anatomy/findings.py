"""Study 05 in sentences: findings, the checklist and the abstract's part, all from rows."""

from collections.abc import Iterator
from itertools import pairwise

import pandas as pd

from fusedlib.study import published
from fusedlib.study.anatomy import tables
from fusedlib.study.anatomy.selected import (
    STEPS,
    chain,
    claim,
    claims,
    experiment,
    panels,
    step,
    steps,
    unavailable,
    where,
)
from fusedlib.study.display import number, quantity
from fusedlib.study.selection import no_finding

MISSING = no_finding("05_anatomy")
PRODUCTS = {"forward": (3, 1), "forward+backward": (9, 3)}
"""Products of matrix by matrix at full size, Liger's and the published kernel's."""
MENDING = ("reduction", "gradients", "precision", "launch")
"""Steps that put the published kernel right, in their order."""
OURS = {"kernels": "in fp32", "fusion": "in bf16"}


def answer(frame: pd.DataFrame) -> str:
    """The study's question answered: what the claimed factor is made of."""
    return " ".join(headline(frame))


def findings(frame: pd.DataFrame) -> list[str]:
    """What the rows and the published figures say besides the `answer`."""
    found = [
        *_chain_sentences(frame)[1:], _memory_sentence(frame), _deep_sentence(), _mnist_sentence(),
        _same_sweep_sentence(),
    ]  # fmt: skip
    return [s for s in found if s] or [MISSING]


def headline(frame: pd.DataFrame) -> list[str]:
    """The abstract's sentences about this study."""
    found = [*_chain_sentences(frame)[:1], _error_sentence(frame), _fusion_sentence(frame)]
    return [s for s in found if s] or [MISSING]


def _name(tokens: int, width: int, direction: str) -> str:
    return f"{tokens} × {width}, {direction.replace('+', ' + ')}"


def _chain_sentences(frame: pd.DataFrame) -> list[str]:
    """One sentence a waterfall; the size with both directions first is the published grid's."""
    found: list[str] = []
    for at in panels(frame):
        links = chain(frame, *at).set_index("step")["factor"]
        if not len(links.index.difference(["claimed"])):
            continue
        first = "" if found else f", on {where(steps(frame))}"
        parts = "; ".join(_chain_parts(links))
        found.append(f"Liger's time over the other side's at {_name(*at)}{first}: {parts}.")
    return found


def _chain_parts(factor: pd.Series) -> Iterator[str]:
    """Claimed, redone, put right, and ours; of what puts it right the step that takes most."""
    told = {name: number(value, 3) for name, value in factor.items()}
    if "claimed" in told:
        yield f"claimed {told['claimed']}"
    if "redone" in told:
        yield f"redone {told['redone']}, with a wrong result"
    if mended := [name for name in MENDING if name in told]:
        pairs = list(pairwise(name for name in ("redone", *mended) if name in told))
        text = f"that kernel put right {told[mended[-1]]}"
        if pairs:
            before, most = min(pairs, key=lambda pair: factor[pair[1]] / factor[pair[0]])
            text += f" (most goes {_phrase(most)}, {told[before]} to {told[most]})"
        yield text
    if ours := [f"{told[name]} {title}" for name, title in OURS.items() if name in told]:
        yield f"with fusedlib's kernels {' and '.join(ours)}"


def _phrase(name: str) -> str:
    return {
        "reduction": "with the whole sum", "gradients": "with all weight gradients",
        "precision": "with IEEE fp32 on both sides", "launch": "in CUDA graphs",
    }[name]  # fmt: skip


def _error_sentence(frame: pd.DataFrame) -> str | None:
    rows = steps(frame)
    redone = rows[rows["step"] == "redone"]
    if len(redone):
        low, high = redone["y_error"].min(), redone["y_error"].max()
        fastest, slowest = redone["ratio"].max(), redone["ratio"].min()
        return (
            f"The published protocol, redone, shows factors of {number(slowest, 3)} to "
            f"{number(fastest, 3)} for a result whose relative error is {_span(low, high, 4)}: it "
            "is unrelated to the right one."
        )
    known = _emulated(frame)
    beyond = known[known["hidden_size"] > known["block"]]
    if beyond.empty:
        return None
    return (
        "The published kernel's arithmetic, emulated, has a relative error of y between "
        f"{number(beyond['y_error'].min(), 3)} and {number(beyond['y_error'].max(), 3)} at every "
        "width beyond one block."
    )


def _span(low: float, high: float, digits: int) -> str:
    """Two values as a range, one where they look the same."""
    ends = dict.fromkeys((number(low, digits), number(high, digits)))
    return " to ".join(ends)


def _emulated(frame: pd.DataFrame) -> pd.DataFrame:
    rows = experiment(frame, "correctness")
    return rows[(rows["implementation"] == "published, emulated") & (rows["inputs"] == "random")]


def _fusion_sentence(frame: pd.DataFrame) -> str | None:
    rows = steps(frame)
    rows = rows[(rows["step"] == "fusion") & ~rows["wrong"]]
    if rows.empty:
        return None
    clear = {
        "faster than": rows[rows["ratio_low"] > 1.0], "slower than": rows[rows["ratio_high"] < 1.0]
    }  # fmt: skip
    parts = [f"{word} Liger in {len(part)}" for word, part in clear.items() if len(part)] or [
        "within the interval of Liger in all"
    ]
    return (
        "What fusion itself gives (the same dtype, gradients and launch, bf16 in CUDA graphs): "
        f"Liger's time over fusedlib's is {_span(rows['ratio'].min(), rows['ratio'].max(), 3)}; "
        f"by the intervals, fusedlib is {' and '.join(parts)} of {len(rows)} cases."
    )


def _memory_sentence(frame: pd.DataFrame) -> str | None:
    held = tables.counted_matrices(frame)
    if len(held) < 2:
        return None
    liger, fused = held["Liger"], held["published fused"]
    told = published.load("swiglu_ratios").query("quantity == 'peak memory'")
    most = told.loc[told["d_model"].idxmax()]
    text = (
        f"The published memory ratio tends to {liger}/{fused} = {liger / fused:.2f} "
        f"({most['liger_over_fused']:.2f} at width {most['d_model']:,}): both sides hold three "
        f"weights, Liger {liger - 3} gradients of them and the published kernel {fused - 3}."
    )
    rows = experiment(frame, "memory")
    width = rows["hidden_size"].max()
    part = rows[rows["hidden_size"] == width].set_index("implementation")["peak_mib"]
    if {"liger", "published", "whole sum"} <= set(part.index):
        text += (
            f" Measured at width {int(width):,}: {part['liger'] / part['published']:.2f} as "
            f"published (wrong), {part['liger'] / part['whole sum']:.2f} once all gradients arrive."
        )
    return text


def _deep_sentence() -> str:
    slopes = tables.deep_stack()
    rows = published.load("swiglu_memory")
    top = rows[rows["num_layers"].notna()]["num_layers"].max()
    gradients = 2 * tables.DEEP_WIDTH**2 * tables.FP32 / 2**20
    saved = slopes["liger"] - slopes["fused"]
    return (
        f"In the published deep stack (to {int(top)} layers) a layer takes "
        f"{quantity(slopes['liger'], 'MB')} with Liger and {quantity(slopes['fused'], 'MB')} with "
        f"the published kernel. Of the {quantity(saved, 'MB')} between them, "
        f"{quantity(gradients, 'MB')} are two weight gradients that it never makes."
    )


def _mnist_sentence() -> str:
    table = tables.mnist()
    copied = table.loc["Fused with weight-grad"]
    same = copied["figures equal to Liger's"]
    frozen = table.loc["Fused no weight-grad"]
    return (
        f"In the published MNIST logs, {same} figures under “Fused with weight-grad” "
        f"equal Liger's digit for digit, and the script is {copied['script']}: "
        "the log is a copy. The run without weight gradients still classifies "
        f"{frozen['correct']}: the layers around a frozen gate learn."
    )


def _same_sweep_sentence() -> str:
    rows = published.load("swiglu_ratios")
    wide = rows.pivot(index="d_model", columns="quantity", values="liger_over_fused")
    apart = (wide["backward time"] / wide["forward time"] - 1).abs().max()
    both = claims().query("direction == 'forward+backward'").set_index(["tokens", "width"])
    grid = both.loc[int(rows["batch_size"].iloc[0])]["factor"]
    off = (wide["backward time"].reindex(grid.index) / grid - 1).abs()
    width = int(off.idxmax())
    return (
        "The published backward sweep repeats the forward one: the two differ by at most "
        f"{number(100 * apart, 2)} % at any width. At width {width:,}, where the grid does run a "
        f"backward pass, the grid's factor is {grid[width]:.2f} and the sweep's "
        f"{wide.loc[width, 'backward time']:.2f}."
    )


def checklist(frame: pd.DataFrame) -> list[str]:
    """Questions to ask of such a table, each with the figures that answer it here."""
    asked = [
        ("Does the output match a reference?", _error_sentence(frame)),
        ("Is the test larger than one block?", _block_answer(frame)),
        ("Are the same gradients computed?", _gradient_answer(frame)),
        ("Is the precision the same?", _change(frame, "precision")),
        ("Is the launch the same, and does it count?", _change(frame, "launch")),
        ("Could the card have done the work in that time?", _roof_answer()),
        ("Does the ratio tend to a ratio of counts?", _count_answer()),
        ("Was there a warm-up, and was each time measured?", _negative_answer()),
        ("Is each log its own?", _mnist_sentence()),
    ]
    missing = unavailable(frame, "step") or "The rows do not answer it."
    return [f"**{question}** {answer or missing}" for question, answer in asked]


def _block_answer(frame: pd.DataFrame) -> str | None:
    rows = _emulated(frame)
    one = rows[rows["hidden_size"] == rows["block"]]
    two = rows[rows["hidden_size"] == 2 * rows["block"]]
    if one.empty or two.empty:
        return None
    return (
        f"With one block the kernel's error is {number(one['y_error'].max(), 2)}; with two it is "
        f"{_span(two['y_error'].min(), two['y_error'].max(), 3)}. The published test has one."
    )


def _gradient_answer(frame: pd.DataFrame) -> str | None:
    table = tables.gradients(frame)
    known = [t for t in tables.IMPLEMENTATIONS.values() if t in table.index]
    if not known:
        return None
    weights = tables.GRADIENTS["d_w_gate_up"]
    cells = [f"{name}: {table.loc[name, weights]}" for name in known]
    return f"Error of the gradients of the gate and up weights: {'; '.join(cells)}."


def _change(frame: pd.DataFrame, name: str) -> str | None:
    """What one step changed, over all sizes and directions."""
    order = list(STEPS)
    parts = []
    for at in panels(frame):
        after = step(frame, name, *at)
        names = reversed(order[1 : order.index(name)])
        before = next((r for n in names if (r := step(frame, n, *at)) is not None), None)
        if before is not None and after is not None:
            change = f"{number(before['ratio'], 3)} to {number(after['ratio'], 3)}"
            parts.append(f"{change} at {_name(*at)}")
    title = STEPS[name].removeprefix("+ ")
    return f"The step to {title} moves the factor from {'; '.join(parts)}." if parts else None


def _roof_answer() -> str:
    rows = published.load("swiglu_times").query(
        "direction == 'forward' and implementation == 'fused'"
    )
    found = []
    for row in rows.itertuples():
        moved, _ = tables.implied(int(row.batch_size), int(row.d_model), float(row.time_ms))
        if 3 * tables.FP32 * row.d_model**2 > 2 * tables.L4_L2_BYTES:  # no cache can hold them
            found.append((moved, row))
    moved, row = max(found, key=lambda f: f[0])
    over = sum(rate > tables.L4_BYTES_PER_S for rate, _ in found)
    return (
        f"To read all weights in the published {quantity(row.time_ms, 'ms', 2)} at "
        f"{row.batch_size} × {row.d_model}, {quantity(moved / 1e9, 'GB/s')} are needed; the L4's "
        f"data sheet says {quantity(tables.L4_BYTES_PER_S / 1e9, 'GB/s')}. So it is in {over} of "
        f"the {len(found)} published forward times whose weights exceed twice the card's L2."
    )


def _count_answer() -> str:
    liger, fused = PRODUCTS["forward"]
    told = published.load("swiglu_ratios").query("quantity == 'forward time'")
    top = told.loc[told["d_model"].idxmax()]
    large = claim(1024, 4096, "forward+backward")
    text = (
        f"Liger's forward has {liger} products and the published one {fused}: the factor tends to "
        f"{liger / fused:.0f}, and {top['liger_over_fused']:.2f} was published at width "
        f"{int(top['d_model']):,}."
    )
    both, few = PRODUCTS["forward+backward"]
    if large is not None:
        text += f" With the backward pass it is {both} to {few}; {large:.2f} was published."
    return text


def _negative_answer() -> str:
    rows = published.load("end_to_end")
    row = rows.loc[rows["mean_ms"].idxmin()]
    return (
        f"Seed {row['source']} has a {row['direction']} pass of {quantity(row['mean_ms'], 'ms')} "
        f"(size {row['model']}, {int(row['warmup_steps'])} warm-up steps): the difference of two "
        "averages, neither of which it was in."
    )
