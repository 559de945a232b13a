"""A race under load: rounds of turning order, one row each, with energy and clock."""

from dataclasses import replace

import pandas as pd
import pytest

from fusedlib.bench import machine
from fusedlib.bench import sustained as load
from fusedlib.bench.turns import Turn
from played_clock import PlayedClock
from study import kernels, rivals
from study.race import free
from study.run import grouped


def run(device="cpu", shape="37·45·83", names=("eager", "products"), dtype="float32", seconds=0.05):
    """Rows of the rounds under load of a shape."""
    listed = kernels.cases(
        device=device, models=[shape], under_load=list(names), load_seconds=seconds
    )  # fmt: skip
    loads = [case | {"dtype": dtype} for case in listed if case["experiment"] == "sustained"]
    races = grouped("kernels", loads).values()
    rows = [row.as_dict() for race in races for row in kernels.measure(race)]
    free()
    return pd.DataFrame(rows)


@pytest.fixture
def on_host(monkeypatch):
    """Under load on a host, for a moment."""
    monkeypatch.setattr(load, "HEAT_S", 0.02)
    monkeypatch.setattr(load, "BURST_MS", 1.0)
    used = machine.Energy(joules=35.0, seconds=0.05, sm_mhz=1400.0)
    monkeypatch.setattr(machine, "energy", lambda: _Given(used))
    monkeypatch.setattr(kernels, "available", lambda case: None)


def test_a_round_is_a_race_whose_order_turns_and_whose_rows_have_energy(on_host):
    rows = run()
    assert rows["status"].tolist() == ["ok"] * 8
    forward = rows[rows["direction"] == "forward"]
    assert list(zip(forward["round"], forward["provider"], strict=True)) == [
        (1, "eager"), (1, "products"), (2, "products"), (2, "eager"),
    ]  # fmt: skip
    assert rows.groupby(["direction", "round"])["session"].nunique().tolist() == [1] * 4
    assert rows["session"].nunique() == 4
    assert rows["power_w"].tolist() == [700.0] * 8 and rows["sm_mhz"].tolist() == [1400.0] * 8
    joules = 700 * rows["burst_mean_ms"] / 1e3
    assert rows["joules"].tolist() == pytest.approx(joules.tolist())
    assert rows["median_ms"].tolist() == pytest.approx(rows["burst_median_ms"].tolist(), abs=1e-5)
    assert (rows["burst_n"] >= 2).all() and not rows["in_turns"].any()
    assert {0.02, 0.25} >= {*rows["heat_s"]} >= {0.25}, "who comes next need not be heated anew"


class _Given:
    def __init__(self, used):
        self.used = used

    def __enter__(self):
        return self.used

    def __exit__(self, *error):
        pass


def test_a_call_takes_as_long_as_it_does_without_a_pause(monkeypatch):
    clock = PlayedClock()
    monkeypatch.setattr(load.timing, "time", clock)
    actual = load.under_load(Turn(lambda: clock.sleep(0.002)), "cpu", 0.01, 0.1)
    assert actual["burst_median_ms"] == pytest.approx(2.0)
    assert actual["joules"] is None and actual["sm_mhz"] is None


def test_a_wrong_rival_gets_no_time(on_host, monkeypatch):
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))

    @rivals.rival("swiglu", "wrong")
    def wrong(inputs):
        """Twice y."""
        work = rivals.get("swiglu", "eager").build(inputs)
        return replace(work, forward=lambda: 2 * work.forward())

    rows = run(names=["wrong"])
    assert {*rows["status"]} == {"wrong"}
    assert "median_ms" not in rows or rows["median_ms"].isna().all()


@pytest.mark.gpu
def test_a_card_under_load_tells_its_power_and_clock():
    rows = run("cuda", "4096·4096·4096", dtype="bfloat16", seconds=0.5)
    rows = rows[rows["direction"] == "forward+backward"]
    assert rows["status"].tolist() == ["ok"] * 4
    assert rows["power_w"].between(100, 1200).all() and rows["sm_mhz"].between(300, 3000).all()
    twice = rows.pivot(index="provider", columns="round", values="joules")
    assert (twice[1] / twice[2]).between(0.9, 1.1).all()
