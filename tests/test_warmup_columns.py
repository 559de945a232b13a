"""What study 05 derives: of series of steps, and of published means and deviations."""

import numpy as np
import pandas as pd
import pytest

from measure import warmup
from measure.warmup import after_warmup, by_step, described, from_tables

SERIES = [32.0, 4.0, *[2.0] * 18]
LINE = {"experiment": "steps", "direction": "forward+backward", "isolation": "fresh"}


def rows(*series):
    lines = [LINE | {"samples_ms": s, "forward_samples_ms": [x / 4 for x in s]} for s in series]
    return described(pd.DataFrame(lines))


def test_a_first_step_stands_above_the_late_ones():
    [row] = rows(SERIES).to_dict("records")
    assert (row["late_ms"], row["extra_ms"], row["added_ms"]) == (2.0, 30.0, 3.0)
    assert row["over_late"] == pytest.approx((32 + 4 + 8 * 2) / 10 / 2)


def test_each_number_of_warm_up_steps_leaves_ten():
    left = after_warmup(rows(SERIES), 0, 1, 2).set_index("warmup_steps")
    assert left["mean_ms"].to_dict() == pytest.approx({0: 5.2, 1: 2.2, 2: 2.0})
    assert left["std_ms"][1] == pytest.approx(np.std([4.0, *[2.0] * 9], ddof=1))
    assert left["forward_share"].tolist() == pytest.approx([0.25] * 3)
    assert after_warmup(rows(SERIES), 11).empty, "nine steps are no ten"


def test_a_row_a_step():
    steps = by_step(rows(SERIES))
    assert steps["step"].tolist() == [*range(1, 21)]
    assert steps["over_late"].head(3).tolist() == [16.0, 2.0, 1.0]


def test_a_published_deviation_tells_the_slow_step():
    ten = [2.0] * 9 + [12.0]
    table = {
        "source": "001", "model": "small", "direction": ["forward", "forward+backward"] * 2,
        "warmup_steps": pd.array([0, 0, 1, 1], "Int64"), "mean_ms": [np.mean(ten), 4.0, 2.0, 4.0],
        "std_ms": [np.std(ten, ddof=1), 0.0, 0.0, 0.0],
    }  # fmt: skip
    tables = from_tables(pd.DataFrame(table))
    assert tables["added_ms"][0] == pytest.approx(10.0 / warmup.MEASURED_STEPS)
    assert tables["added_ms"][2:].isna().all(), "the table had a warm-up"
    assert tables["over_late"].tolist() == pytest.approx([1.5, 1.0, 1.0, 1.0])
    assert tables["forward_share"][1] == pytest.approx(0.75) and tables["forward_share"][3] == 0.5
    assert tables["forward_share"][[0, 2]].isna().all()
