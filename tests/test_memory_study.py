"""Study 04's figures from rows: readings of the published tables, tables, sentences, pictures."""

import memory_rows
import pandas as pd
import pytest
from card_rows import EMPTY

from fusedlib.study import style
from fusedlib.study.memory import figures as plots
from fusedlib.study.memory import findings, published_fit, tables

FULL = pd.DataFrame(memory_rows.full())


def changed(who, experiment, **fields):
    """FULL with other figures in the rows of one rival."""
    rows = memory_rows.full()
    for row in rows:
        if row["provider"] == who and row["experiment"] == experiment:
            row |= {name: row[name] + more for name, more in fields.items()}
    return pd.DataFrame(rows)


def test_the_published_grid_is_read_as_whole_counts():
    read = published_fit.readings()
    assert (read["liger"].weights, read["liger"].activations) == (6, 7)
    assert (read["fused"].weights, read["fused"].activations) == (4, 5)
    assert max(r.off_mib for r in read.values()) < 0.051


def test_the_reading_gives_the_published_sweep_to_its_last_digit():
    rows = published_fit.ratios()
    assert (rows["read"].round(2) == rows["published"]).all()


def test_the_published_stack_is_read_at_one_size_of_the_grid():
    tokens, width, counts = published_fit.stack_reading()
    assert (tokens, width) == (256, 2048)
    assert counts == {"fused": (2, 1), "liger": (4, 3)}


def test_findings_are_computed():
    said = " ".join([findings.answer(FULL), *findings.findings(FULL)])
    assert "in MiB: fused (input) 0 and 912.0; fused 448.0 and 912.0" in said
    assert "liger 672.0 and 1,072; quack" in said
    assert "within 3.0 % in 76 of 76 steps" in findings.agreement_sentence(FULL)
    assert "6 W + 7 A + 16.3 MB for Liger and 4 W + 5 A" in said
    assert "6/4 = 1.5, is that of three weights and three gradients" in said
    assert "liger over fused tends to 1.00" in said
    assert "3 F / 2 F = 1.50" in said and "tend to 1.30 (measured: 1.30)" in said
    assert "548.0 MiB with fused (counted: 548.0)" in said
    assert "the ratio liger / fused tends to 1.32" in said
    assert "tokens fused runs PyTorch's own lines" in said


def test_a_tensor_too_many_is_named_by_its_size():
    """As fused would measure that wrote d(gate|up) to a tensor of its own: 2 F more."""
    rows = changed("fused", "step", peak_mib=448.0)
    text = findings.agreement_sentence(rows)
    assert "fused differs in" in text
    assert "8192·4096·14336" in findings.shape_sentence(rows)
    largest = rows[(rows["tokens"] == 8192) & (rows["provider"] == "fused")]
    step = tables.steps(largest).iloc[0]
    assert "448 MiB, 2.0 times tokens · intermediate" in findings._difference(step)


def test_the_shape_table_sets_counted_beside_measured():
    shown = tables.shape_table(changed("liger", "step", peak_mib=10.0))
    row = shown.loc[("8192·4096·14336", "Test Card", "liger")]
    assert row[("peak over base, MiB", "counted")] == "1,072"
    assert row[("peak over base, MiB", "measured")] == "1,082"
    assert row[("kept, MiB", "hooks")] == "672.0"
    assert set(shown.index.get_level_values(0)) == {"8192·4096·14336", "4096·4096·11008"}


def test_the_published_table_shows_all_three_origins():
    shown = tables.published_table(FULL)
    row = shown.loc[(64, 2048)]
    assert row[("published, MB", "Liger")] == "115.8"
    assert row[("all gradients, counted", "Liger")] == "99.00"
    assert row[("all gradients, measured", "fused")] == "163.0"  # 64 MiB are allocated when idle


def test_a_stack_that_does_not_fit_says_oom_and_what_is_counted():
    shown = tables.stack_table(FULL, "bfloat16", held=True)
    assert shown.loc[256, ("measured (counted), MiB", "eager")] == "oom (230,880)"
    assert tables.not_run(FULL) == "Test Card: eager, liger oom, out of memory."


def test_of_a_library_s_message_the_first_clause_is_the_reason():
    long = FULL.assign(reason=["CUDA out of memory. Tried to allocate 1 GiB.\nSee"] * len(FULL))
    assert tables.not_run(long) == "Test Card: eager, liger oom, CUDA out of memory."
    published = tables.stack_table(FULL, "float32", held=True)
    assert published.loc[256, ("published, MB", "liger")] == "17,992"


def test_a_laptop_compares_what_it_has():
    own = FULL[FULL["provider"].isin(["eager", "inductor"])].assign(
        machine="mine", own=True, device_type="cpu", device_name="My CPU", profile="quick"
    )
    assert "this machine (My CPU)" in findings.answer(own)
    assert "its events, summed" in findings.agreement_sentence(own)
    both = pd.concat([FULL, own], ignore_index=True)
    assert "Test Card" in findings.headline(both)[0]
    assert "this machine (My CPU)" in tables.shape_table(both).index.get_level_values(1)


@pytest.mark.parametrize("rows", [EMPTY, FULL[FULL["status"] != "ok"]], ids=["none", "only-oom"])
def test_without_rows_everything_says_so(rows):
    assert findings.findings(rows) == [findings.MISSING]
    assert findings.headline(rows) == [findings.answer(rows)] == [findings.MISSING]
    assert findings.shape_sentence(rows) is None and findings.agreement_sentence(rows) is None
    assert len(tables.counted_table()) == len(memory_rows.EVERYBODY)
    for shown in (
        tables.shape_table(rows), tables.published_table(rows),
        tables.stack_table(rows, "bfloat16", held=True),
    ):  # fmt: skip
        assert len(shown.columns)
    for draw in (plots.through_a_step, plots.ratios, plots.stack):
        assert style.svg(draw(rows))


@pytest.mark.parametrize("name", ["through_a_step", "ratios", "stack"])
def test_figures_are_drawn_the_same_twice_and_told(name):
    draw = getattr(plots, name)
    assert style.svg(draw(FULL)) == style.svg(draw(FULL))
    assert "No rows" not in getattr(plots, f"{name}_alt")(FULL)
