"""`bench.verdict`: what published tables say against themselves; nothing of an honest one."""

import numpy as np
import pandas as pd
import pytest

from fusedlib import bench
from fusedlib.bench.verdicts import CARDS, Card
from press import published


def kinds(table, card=None) -> list[str]:
    return bench.verdict(table, card)["kind"].tolist()


def swiglu_forward() -> pd.DataFrame:
    """The forward times of source 000 with the work of three products in fp32."""
    times = published.load("swiglu_times").query("direction == 'forward'")
    tokens, width = times["batch_size"].astype(float), times["d_model"].astype(float)
    moved = 4 * (3 * width**2 + 2 * tokens * width)
    return times.assign(dtype="float32", flops=6 * tokens * width**2, bytes=moved)


# --- what notebook "Anatomy of a speed-up" says of them -------------------------------------------


def test_a_published_time_needs_nearly_twice_the_bandwidth_and_others_more_than_fp32_units():
    found = bench.verdict(swiglu_forward(), "L4").set_index("kind")
    cell = found.loc["impossible"]
    assert cell["where"] == "implementation fused, batch_size 64, d_model 4096"
    assert cell["factor"] == pytest.approx(1.94, abs=0.01) and "581 GB/s" in cell["finding"]
    precision = found.loc["precision"]
    assert precision["where"].str.startswith("implementation fused, batch_size").all()
    assert precision["factor"].between(1.02, 1.1).all() and len(precision) == 2
    assert len(found) == 4 and found.loc["no spread", "finding"].startswith("12 times have no")


def test_published_ratios_tend_to_three_products_to_one_and_six_matrices_to_four():
    ratios = published.load("swiglu_ratios").rename(columns={"liger_over_fused": "ratio"})
    found = bench.verdict(ratios).set_index("where")["factor"]
    assert found.to_dict() == {
        "table benchmark_forward.py, quantity forward time": 3.0,
        "table benchmark_backward.py, quantity backward time": 3.0,
        "table benchmark_memory.py, quantity peak memory": 1.5,
    }


@pytest.mark.parametrize(("table", "rows", "more"), [("attention", 8, 0), ("end_to_end", 42, 1)])
def test_a_published_backward_is_a_difference_of_means_and_once_negative(table, rows, more):
    times = published.load(table).rename(columns={"mean_ms": "time_ms"})
    found = bench.verdict(times)
    assert found["kind"].tolist() == ["negative"] * more + ["difference"]
    text = f"backward is forward+backward less forward in {rows} rows: it was not measured"
    assert found["finding"].iloc[-1] == text
    found = bench.verdict(times.drop(columns="std_ms"))
    assert found["kind"].tolist() == ["no spread"] + ["negative"] * more + ["difference"]
    assert "one of the two" in found["finding"].iloc[-1]


# --- an honest table ------------------------------------------------------------------------------


def honest() -> pd.DataFrame:
    """Times near the roofline with noise of a per cent."""
    noise = np.random.default_rng(0)
    rows = [
        {"by": by, "direction": direction, "width": width, "dtype": "bfloat16",
         "flops": 2.0 * width**3 * share, "bytes": 6.0 * width**2,
         "time_ms": 1e3 * max(2 * width**3 * share / 600e12, 6 * width**2 / 2e12) * slower
         * noise.normal(1, 0.01), "std_ms": 0.01}
        for by, slower in (("mine", 1.0), ("theirs", 1.2))
        for direction, share in (("forward", 1), ("backward", 2), ("both", 3))
        for width in (512, 1024, 2048, 4096, 8192)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_nothing_is_found_in_an_honest_table():
    table = honest()
    assert kinds(table, "H100") == [] == kinds(table.to_dict("records"), CARDS["H100"])
    wide = table.pivot(index=["direction", "width"], columns="by", values="time_ms").reset_index()
    assert kinds(wide.assign(ratio=wide["theirs"] / wide["mine"])) == []


def test_each_fault_in_it_is_found_alone():
    table = honest()
    slow_card = Card({"bfloat16": 300e12}, 1e15)
    assert set(kinds(table, slow_card)) == {"impossible"}
    assert set(kinds(table, Card({"bfloat16": 1e15}, 1e12))) == {"impossible"}
    assert kinds(table, Card({"bfloat16": 1e15}, 1e12, l2_bytes=1e9)) == [], "the L2 holds all"
    assert kinds(table.drop(columns="std_ms")) == ["no spread"]
    assert kinds(table.assign(time_ms=table["time_ms"].where(table.index != 3, -0.1))) == [
        "negative"
    ]
    assert (
        kinds(table.assign(time_ms=table["time_ms"].where(table.index > 7, 0.0)))
        == ["negative"] * 8
    )
    doubled = table.copy()
    mine, theirs = table["by"] == "mine", table["by"] == "theirs"
    doubled.loc[theirs, "time_ms"] = 2 * table.loc[mine, "time_ms"].to_numpy()
    found = bench.verdict(doubled)
    assert found[["kind", "factor"]].to_numpy().tolist() == [["repeat", 2.0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -1.0, "fast", None], ids=str)
@pytest.mark.parametrize("name", ["time_ms", "std_ms", "ratio", "flops", "bytes"])
def test_what_is_no_number_is_refused_with_its_row(name, value):
    """An empty table, which looks like nothing wrong, and a bare TypeError for text."""
    rows = honest().assign(ratio=1.2).to_dict("records")
    rows[3][name] = value
    if value == 0.0 and name == "std_ms":
        assert kinds(rows, "H100") == [], "a clock may be coarse"
    elif name == "time_ms" and value in (0.0, -1.0):
        assert "negative" in kinds(rows, "H100")
    else:
        message = rf"row 3 \(.*width 4096.*\) has the {name} ('fast'|nan|None|-?inf|0.0|-1.0), not"
        with pytest.raises(ValueError, match=message):
            bench.verdict(rows, "H100")


def test_mistakes_in_the_call_say_what_is_there_and_what_is_needed():
    times = honest()
    for message, table, card in (
        ("needs a column time_ms or ratio, it has mean: rename", [{"mean": 1.0}], None),
        ("it has none", [], None),
        ("a rate needs time_ms, and flops or bytes.*it has time_ms", [{"time_ms": 1.0}], "L4"),
        ("unknown card 'L5'; known: L4, A100, H100, H200; or give a Card", times, "L5"),
        ("one of float32, tf32.*got int4", times.assign(dtype="int4"), "L4"),
        ("got no dtype", times.drop(columns="dtype"), "L4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            bench.verdict(table, card)
