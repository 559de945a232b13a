"""What the published warm-up tables tell: by hand, against numpy, and not by accident."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedlib.study import published
from fusedlib.study.display import number
from fusedlib.study.warmup import published_spread


def test_one_slow_step_by_hand():
    # Nine steps of 2 and one of 12: mean 3, squares 9 · 1 + 81 = 90 over nine, std √10.
    extra, rest = published_spread.one_slow_step(3.0, 10**0.5)
    assert (extra, rest) == (pytest.approx(10.0), pytest.approx(2.0))


@given(
    usual=st.floats(0.1, 1e4), extra=st.floats(0.0, 1e5), steps=st.integers(2, 50),
    place=st.integers(0, 49),
)  # fmt: skip
def test_one_slow_step_undoes_numpys_mean_and_sample_deviation(usual, extra, steps, place):
    sample = np.full(steps, usual)
    sample[place % steps] += extra
    found = published_spread.one_slow_step(sample.mean(), sample.std(ddof=1), steps)
    assert found == pytest.approx((extra, usual), rel=1e-6, abs=1e-6 * (extra + usual))


def test_two_slow_steps_leave_a_rest_above_the_usual_step():
    sample = np.array([12.0, 12.0, *[2.0] * 8])
    # Mean 4, squares 2 · 64 + 8 · 4 = 160 over nine, so the one step would be 40 / 3 slower.
    found = published_spread.one_slow_step(sample.mean(), sample.std(ddof=1))
    assert found == pytest.approx((40 / 3, 4 - 4 / 3))


def test_ten_steps_are_what_a_source_states():
    told = published.load("warmup").query("source == '004'")["benchmark_steps"]
    assert set(told) == {published_spread.STEPS}


# --- the table -----------------------------------------------------------------------------------


def without_warmup():
    rows = published.load("warmup")
    timed = rows["direction"].isin(["forward", "forward+backward"])
    return rows[timed & rows["warmup_steps"].eq(0).fillna(False)]


def test_table_has_every_published_row_without_warmup_once():
    table = published_spread.slow_step_table()
    wanted = {(f"seed {r.source}", r.direction, r.model) for r in without_warmup().itertuples()}
    assert set(table.index) == wanted
    assert table.index.is_unique
    assert len(table) == len(without_warmup()) > 0


def test_table_shows_the_published_figures_and_what_follows_from_them():
    table = published_spread.slow_step_table()
    rows = published.load("warmup")
    for row in without_warmup().itertuples():
        shown = table.loc[(f"seed {row.source}", row.direction, row.model)]
        cold = f"{number(row.mean_ms, 4)} ± {number(row.std_ms, 2)}"
        assert shown["no warm-up"] == cold
        extra = row.std_ms * 10**0.5
        assert shown["slow step +"] == number(extra, 3)
        assert shown["all others"] == number(row.mean_ms - extra / 10, 4)
        same = rows[rows[["source", "direction", "model"]].eq(
            [row.source, row.direction, row.model]
        ).all(axis=1)]  # fmt: skip
        warm = same[~same["warmup_steps"].eq(0).fillna(False)]
        told = {number(value, 4) for value in warm["mean_ms"]}
        assert shown["warmed up"] in told


def test_with_warmup_means_the_main_table_or_the_most_steps():
    rows = published.load("warmup")
    table = published_spread.slow_step_table()

    def shown(source):
        found = table.loc[(f"seed {source}", "forward", "small"), "warmed up"]
        return found, rows.query(f"source == '{source}' & direction == 'forward'")

    text, first = shown("001")
    main = first[first["warmup_steps"].isna() & first["model"].eq("small")]
    assert text == number(main["mean_ms"].item(), 4)
    text, fourth = shown("004")
    most = fourth[fourth["warmup_steps"].eq(5) & fourth["model"].eq("small")]
    assert text == number(most["mean_ms"].item(), 4)


def test_table_goes_by_source_direction_and_size():
    index = list(published_spread.slow_step_table().index)
    sizes = [size for source, direction, size in index if (source, direction) == index[0][:2]]
    assert sizes == [s for s in ("small", "medium", "large", "xl", "2.7b") if s in sizes]
    assert [key[:2] for key in index] == sorted(key[:2] for key in index)


# --- backward passes that nobody timed -----------------------------------------------------------


def test_all_published_backward_rows_are_differences():
    told = published.load("end_to_end").query("source == '001' & direction == 'backward'")
    assert published_spread.subtracted() == (len(told), len(told))
    assert len(told) == 12 + 6 * 5  # twelve rows on a laptop, six tables of five sizes


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("column", ["mean_ms", "std_ms"])
@pytest.mark.parametrize("model", ["small", "large"])
def test_one_figure_off_by_a_thousandth_is_not_counted(monkeypatch, column, direction, model):
    frame = published.load("end_to_end")
    hit = frame.index[
        frame["source"].eq("001") & frame["direction"].eq(direction) & frame["model"].eq(model)
    ][0]
    same, rows = published_spread.subtracted()
    # A thousandth of the row's largest figure, so that it shows in a root of squares as well.
    keys = ["table", "backend", "model", "precision", "compile"]
    row = frame[frame[keys].eq(frame.loc[hit, keys]).all(axis=1)]
    frame.loc[hit, column] += 1e-3 * row[column].abs().max()
    monkeypatch.setattr(published, "load", lambda table: frame)
    found, of = published_spread.subtracted()
    assert (found, of) == (same - 1, rows)


def test_the_finding_states_the_count():
    same, rows = published_spread.subtracted()
    [sentence] = published_spread.findings()
    assert sentence.startswith(f"In {same} of {rows} rows of seed 001 ")
