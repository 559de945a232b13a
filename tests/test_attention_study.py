"""Study 07's tables, figures and sentences, from rows made by hand."""

import re

import attention_rows as made
import pandas as pd
import pytest
from card_rows import EMPTY

from fusedlib import paths
from fusedlib.bench.attention import cases
from fusedlib.study import style
from fusedlib.study.attention import (
    figures,
    findings,
    memory_sentences,
    selected,
    tables,
    time_sentences,
)
from fusedlib.study.running import config, parameters

FULL = pd.DataFrame(made.full())
CARD = made.CARD_MIB
ALL_OOM = FULL[FULL["status"] == "oom"]
MACHINES = pd.DataFrame(
    [{"machine": "gpu", "device_memory_gib": 140.0, "memory_gib": 500.0, "device_type": "cuda"}]
)


def changed(**where_and_what):
    """FULL with other figures in the rows of one way: `plain={"kept_mib": 0.0}`."""
    frame = FULL.copy()
    for name, figures_of in where_and_what.items():
        for column, value in figures_of.items():
            frame.loc[frame["provider"] == name, column] = value
    return frame


def test_the_courses_table_holds_times_memory_and_statuses():
    table = tables.course(FULL)
    assert list(table.index) == [(w, t) for w in (16, 64) for t in (256, 1024, 4096, 8192, 16384)]
    row = table.loc[(64, 16384)]
    [plain] = made.with_speedups(
        [made.measured(c) for c in cases.grid(
            "course", [16384], [64], ["float32"], ["plain"], batch_size=8, repetitions=3,
            device="cuda",
        )]
    )  # fmt: skip
    assert float(row[("eager, ms", "forward")]) == pytest.approx(
        plain["forward_median_ms"], rel=5e-3
    )
    whole = float(row[("eager, MiB", "peak")].replace(",", ""))
    assert whole == pytest.approx(plain["operands_mib"] + plain["peak_mib"], rel=1e-3)
    assert table.loc[(16, 256), ("compiled, ms", "forward")] == "—"
    assert row[("compiled, ms", "forward")] != "—"


def test_backends_show_what_refused_and_what_did_not_fit():
    table = tables.backends(FULL)
    assert table.loc[("fp32", 4096), "flash"] == "unavailable"
    assert table.loc[("fp32", 65536), "plain"] == "oom"
    assert float(table.loc[("bf16", 16384), "flash"]) < float(table.loc[("bf16", 16384), "plain"])
    assert table.index[0] == ("bf16", 256)
    note = selected.not_run(FULL)
    assert "flash in fp32, cudnn in fp32: unavailable, Expected dtype: {Half, BFloat16}" in note
    assert "Tried to allocate 128.00 GiB" in note and "GPU 0 has" not in note


def test_rates_are_work_over_time_and_only_counted_traffic_has_a_share():
    table = tables.rates(FULL)
    row = table.loc[("bf16", "plain")]
    problem = cases.AttentionProblem(16384, 64, 8, "bfloat16")
    seconds = problem.traffic("forward", fused=False) / made.BANDWIDTH + made.LAUNCH_MS / 1e3
    told = float(row[("forward", "TFLOP/s")])
    assert told == pytest.approx(problem.flops("forward", fused=False) / seconds / 1e12, rel=5e-3)
    assert row[("forward", "of the roof")] == "99 %"
    assert table.loc[("bf16", "math"), ("forward", "of the roof")] == "—"


def test_memory_sets_counted_beside_measured():
    table = tables.memory(changed(plain={"peak_mib": 7.0}))
    row = table.loc[("fp32", "plain")]
    assert row[("kept, MiB", "counted")] == row[("kept, MiB", "hooks")] == "8,448"
    assert row[("in B T² elements", "kept")] == "1.03"
    assert row[("over Q, K, V and dout, MiB", "peak")] == "7.000"
    assert row[("over Q, K, V and dout, MiB", "peak, counted")] == "33,088"
    assert table.loc[("fp32", "inductor"), ("kept, MiB", "counted")] == "—"


def test_published_figures_stand_beside_those_of_every_machine():
    mine = FULL.assign(machine="mine", own=True, device_name="My GPU")
    table = tables.beside_published(pd.concat([FULL, mine], ignore_index=True))
    places = list(dict.fromkeys(name for name, _ in table.columns))
    assert places == ["published, Apple M4", "Test Card", "this machine (My GPU)"]
    row = table.loc[("eager", "16·1024")]
    assert row[("published, Apple M4", "backward")] == "7.12"
    assert row[("Test Card", "both")] == row[("this machine (My GPU)", "both")] != "—"
    assert table.shape == (8, 9) and (table != "—").all().all()


def test_the_script_s_grid_has_its_five_columns():
    table = tables.published_grid(FULL)
    columns = [title for group, title in table.columns if group == "eager, MiB"]
    assert columns == ["model", "model+fwd", "model+fwd+back", "fwd", "back"]
    row = table.loc[(1024, 16)]["eager, MiB"].astype(float)
    assert row["model"] + row["fwd"] == pytest.approx(row["model+fwd"], rel=1e-2)
    assert row["model+fwd"] + row["back"] == pytest.approx(row["model+fwd+back"], rel=1e-2)


def test_findings_are_computed():
    said = " ".join([findings.answer(FULL, CARD), *findings.findings(FULL)])
    assert "plain attention keeps 4,352 MiB for its backward pass" in said
    assert "at a context of 48,043 in bf16 and 34,088 in fp32" in said
    assert "plain attention's peak, in" in said and "cases (to the byte)" in said
    assert "plain in bf16 3.98 and 4.00 (from 16,384 to 32,768)" in said
    assert "memory is its roof" in said
    assert "at context 65,536 plain in bf16 (Tried to allocate 64.00 GiB)" in said
    assert "what ran there, with its peak: flash in bf16 (" in said
    assert "Inductor" in said and ", at 256·64)" in said
    assert "40 of 40 are 0" in said
    assert "it cannot show what the matrix costs" in said


def test_a_formula_that_misses_is_named_with_its_case():
    text = memory_sentences.agreement_sentence(changed(flash={"kept_mib": 77.0}))
    assert "furthest off flash" in text and "77.0 MiB for" in text


def test_the_roof_is_that_of_what_would_take_longer(monkeypatch):
    assert "arithmetic" not in time_sentences.bound_sentence(FULL)
    monkeypatch.setattr(time_sentences, "roof", lambda frame, kind: (1e12, 4e12))
    said = time_sentences.bound_sentence(FULL)
    assert "arithmetic is its roof" in said and "memory" not in said


def test_captions_say_where_and_how_wide_the_intervals_are():
    assert selected.shown_at(FULL) == "16,384·64"
    said = selected.spread(FULL)
    assert "4.0 % of the median wide in the middle case, 4.0 % in the worst" in said
    frame = FULL.assign(
        median_high_ms=FULL["median_high_ms"].where(FULL["provider"] != "math", 1e6)
    )
    assert ", math in bf16 at 256·" in selected.spread(frame, "course")
    assert selected.spread(EMPTY) is None and "not measured" in selected.shown_at(EMPTY)


def test_a_rejected_case_is_told_with_its_reason():
    frame = changed(flash={"status": "wrong", "reason": "y: norm error 1"})
    text = findings.check_sentence(frame)
    assert "rejected: flash in bf16 at 256·16, 1,024·16" in text
    assert text.count("y: norm error 1") == 2, "once a format"
    note = selected.not_run(frame)
    assert note.count("flash in bf16 at 256·16, 1,024·16") == 1
    assert note.count("flash in bf16 at") == 1 and "wrong, rejected by the check" in note


def test_the_memory_there_is_comes_from_the_rows_machine():
    assert selected.card_mib(FULL, MACHINES) == 140 * 1024
    assert selected.card_mib(FULL, MACHINES.assign(device_type="cpu")) == 500 * 1024
    assert selected.card_mib(FULL, MACHINES.assign(machine="other")) is None


@pytest.mark.parametrize("frame", [EMPTY, ALL_OOM, FULL[FULL["experiment"] == "ceiling"]],
                         ids=["none", "only-oom", "only-ceilings"])  # fmt: skip
def test_whatever_is_missing_everything_still_speaks(frame):
    for table in (tables.course, tables.published_grid, tables.backends, tables.rates,
                  tables.memory, tables.beside_published):  # fmt: skip
        assert len(table(frame).columns)
    for draw in (figures.times, figures.roofline, lambda f: figures.memory(f, None)):
        assert style.svg(draw(frame))
    for alt in (figures.times_alt, figures.roofline_alt, figures.memory_alt):
        assert "No rows yet" in alt(frame)
    assert all(findings.findings(frame)) and findings.headline(frame) == [findings.MISSING]
    assert findings.answer(frame, None) == findings.MISSING


def test_a_machine_without_mps_says_so_and_shows_nothing_of_it():
    lacking = {"status": "unavailable", "reason": "this machine has no MPS device", "device": "mps"}
    both = pd.concat([FULL, FULL.head(3).assign(**lacking)], ignore_index=True)
    said = "Device type MPS, as published, is unavailable on Test Card: this machine has no MPS"
    assert selected.lacking_mps(both) == f"{said} device."
    assert selected.lacking_mps(FULL) is selected.lacking_mps(EMPTY) is None
    assert len(selected.rows(both, None, None)) == len(selected.rows(FULL, None, None))


def test_without_rows_the_note_says_how_to_get_them():
    assert "make study ONLY=07_attention" in selected.not_run(EMPTY)


def test_a_laptop_shows_the_width_and_the_formats_it_has():
    small = FULL[(FULL["head_dim"] == 16) & (FULL["dtype"] == "float32")].assign(device_type="cpu")
    assert len(figures.times(small).axes) == 1
    assert "width 16" in figures.times(small).axes[0].get_title(loc="left")
    assert len(figures.times(FULL).axes) == 2


def test_the_memory_figure_reaches_to_where_plain_attention_fills_the_card():
    left, right = figures.memory(FULL, CARD).axes
    assert left.get_xlim()[1] > 54_000
    assert "65,536" in figures.memory_alt(FULL)
    for ax in (left, right):
        assert [line for line in ax.get_lines() if line.get_label() == "all there is"]


def test_a_case_measured_twice_is_shown_once():
    again = FULL[FULL["provider"] == "plain"].assign(repetitions=99, median_ms=1.0)
    both = pd.concat([FULL, again, again.assign(grid="long")], ignore_index=True)
    assert len(selected.at_width(both, None)) == len(selected.at_width(FULL, None))
    assert tables.backends(both).loc[("fp32", 4096), "plain"] == "1.00"
    assert all(findings.findings(both))


def test_each_format_is_told_at_the_longest_context_that_plain_attention_ran_at():
    stopped = FULL["dtype"].eq("float32") & FULL["context_length"].gt(1024)
    oom = stopped & FULL["provider"].eq("plain")
    frame = FULL.assign(status=FULL["status"].mask(oom, "oom"))
    found = selected.longest(frame).groupby("format")["context_length"].unique()
    assert list(found["fp32"]) == [1024] and list(found["bf16"]) == [16384]
    for rows in (frame, FULL[~stopped], FULL[FULL["provider"] != "plain"]):
        assert all(findings.findings(rows)) and len(tables.rates(rows)) > 1


def test_headlines_hold_figures_of_the_rows():
    text = " ".join(findings.headline(FULL))
    assert text.startswith("Forward and backward at context 16,384, width 64, batch 8 in bf16, on")
    assert re.search(r"flash, without a .*, 80.0 MiB and \d\S* ms, \d\S* times as", text)
    assert len(findings.headline(FULL)[0].split()) <= 60
    assert "in fp32 plain attention keeps 8,448 MiB" in findings.answer(FULL, CARD)


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_the_study_asks_for_what_there_is(profile):
    study = next(s for s in config.load().studies if s.name == cases.STUDY)
    notebook = paths.NOTEBOOKS / f"{study.name}.ipynb"
    given = {n: p.default for n, p in parameters.read(notebook).items()}
    given |= dict(study.parameters(profile))
    asked = cases.grid(
        "course", given["contexts"], given["widths"], given["dtypes"], given["ways"],
        compiled=given["compiled"], batch_size=given["batch_size"],
        repetitions=given["repetitions"], device="cpu",
    )  # fmt: skip
    script = cases.published(
        given["published_contexts"], given["published_widths"], bool(given["compiled"]),
        batch_size=8, repetitions=1, device="cpu",
    )  # fmt: skip
    shapes = {(c["context_length"], c["head_dim"]) for c in asked}
    told = {(c["context_length"], c["head_dim"]) for c in script}
    assert told >= {(t, d) for t in (16, 32) for d in (256, 1024)}, "what was published"
    assert given["batch_size"] == 8
    if profile == "full":
        course = {(t, e) for t in (256, 1024, 4096, 8192, 16384) for e in (16, 32, 64, 128)}
        assert shapes >= course
        eager = {(c["head_dim"], c["dtype"]) for c in asked if c["provider"] == "plain"}
        compiled = {(c["head_dim"], c["dtype"]) for c in asked if c["provider"] == "inductor"}
        assert len(eager) == 8 and compiled >= {(e, "float32") for e in (16, 32, 64, 128)}
        assert told == {
            (t, d) for t in (16, 32, 64, 128) for d in (256, 1024, 4096, 8192, 16384)
        }  # fmt: skip
