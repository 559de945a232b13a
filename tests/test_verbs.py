"""Verbs over rows made by hand, whose answers are known."""

from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest

from fusedlib.bench import machine as machines
from measure import study as studies
from measure.study import Column, Experiment, Sizes, Study
from press import display, rows
from press.rows import Rows
from report_sample import outputs_of
from study import mlp  # noqa: F401  (registers the labels of implementations)

FAST, SLOW = "nvidia-h200", "nvidia-h100"
FIELDS = {"experiment": "time", "width": 1, "dtype": "bfloat16", "seed": 0}
TINY = Study(
    "09_tiny", Sizes, [Experiment("time", lambda case: {}, lambda sizes: [FIELDS])],
    {"dtype": Column("dtype", names={"float32": "fp32", "bfloat16": "bf16"}),
     "width": Column("hidden size", ",d", log=True), "error": Column("error", "2")},
)  # fmt: skip
TIMES = {  # ms by machine, recording, width and implementation
    (FAST, "a"): {64: (1.0, 2.0), 128: (3.0, 9.0)}, (FAST, "b"): {64: (1.2, 3.0), 128: (4.0, 8.0)},
    (SLOW, "c"): {64: (2.0, 2.0)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(studies, "load", lambda name: TINY)


def timed_rows(times=TIMES, **more):
    lines = [
        {"machine": machine, "recording": recording, "case": f"{width}{name}", "status": "ok",
         "provider": name, "width": width, "dtype": "bfloat16", "experiment": "time", "seed": 0,
         "session": f"{recording}{width}", "median_ms": ms, **more}
        for (machine, recording), widths in times.items() for width, both in widths.items()
        for name, ms in zip(("fused", "eager"), both, strict=True)
    ]  # fmt: skip
    frame = Rows(lines)
    frame["machine"] = pd.Categorical(frame["machine"], [FAST, SLOW])
    frame.attrs = {"study": TINY.name}
    return frame


def meaning_of(draw):
    [output] = outputs_of(draw)
    return output["metadata"]["fusedlib"]


def drawn(draw):
    """The data behind a figure."""
    return pd.read_csv(StringIO(meaning_of(draw)["data"]))


def cells(draw):
    """A table's lines."""
    [output] = outputs_of(draw)
    content = output["data"][display.TABLE_MIME]
    return content["columns"], content["rows"]


# --- choosing ------------------------------------------------------------------------------------


def test_a_value_is_chosen_as_recorded_or_as_shown():
    both = pd.concat([timed_rows(), timed_rows(dtype="float32")])
    both.attrs = timed_rows().attrs
    assert len(both.of(dtype="bf16")) == len(both.of(dtype="bfloat16")) == len(timed_rows())
    assert {*both.of(width=[64], provider="PyTorch")["provider"]} == {"eager"}
    assert {*both.but(provider="PyTorch")["provider"]} == {"fused"}
    assert {*both.of(machine="H100")["machine"]} == {SLOW}
    assert len(timed_rows(precision=None).of(precision=None)) == len(timed_rows())


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda r: r.of(widht=64), "widht"),
        (lambda r: r.of(width=65), "65"),
        (lambda r: r.of(width=64).of(dtype="fp32"), "fp32"),
        (lambda r: r.of(width=64, dtype="fp32"), "those with width = 64"),
        (lambda r: r.of(width=[64, 65]), "65"),
        (lambda r: r.speed(of="fused", over="eager"), "over"),
        (lambda r: r.of(provider="fused").speed(of="fused"), "fusedlib"),
        (lambda r: r.extent(), "H200, H100"),
        (lambda r: r.explore("depth"), "depth"),
        (lambda r: r.points(y="width", x="error"), "error"),
        (lambda r: r.lines(x="seed"), "differ in width"),
    ],
)  # fmt: skip
def test_a_verb_refuses_with_a_sentence(choose, words):
    with pytest.raises(ValueError, match=words) as refused:
        choose(timed_rows())
    # What IPython shows: without the lines of ours that the error went through.
    [shown] = refused.value._render_traceback_()
    assert shown.endswith(f"Error: {refused.value}")


def test_rows_without_figures_are_refused_but_kept_for_claims():
    failed = timed_rows().assign(status="failed", median_ms=None)
    assert len(failed.of(width=64)) == 6
    with pytest.raises(rows.NoRowsError, match="none of these rows has a time"):
        failed.per("width", "provider")


# --- comparing -----------------------------------------------------------------------------------


def test_speed_is_a_ratio_inside_a_session():
    """Across recordings 2.0 / 1.2 would be another number."""
    speed = timed_rows().of(machine="H200").speed(of="fused")
    assert {*speed["provider"]} == {"eager"}
    assert sorted(speed["ratio"]) == [2.0, 2.0, 2.5, 3.0]
    over = timed_rows().of(machine="H200").speed(over="eager")
    assert {*over["provider"]} == {"fused"} and sorted(over["ratio"]) == [2.0, 2.0, 2.5, 3.0]
    assert timed_rows().of(machine="H100").speed(of="fused").extent() == {"eager": (1.0, 1.0)}


def test_samples_that_were_timed_in_turns_are_compared_pair_by_pair():
    two = timed_rows({(FAST, "a"): {64: (1.0, 2.0)}})
    two["samples_ms"] = [[1.0, 1.0, 4.0], [3.0, 3.0, 4.0]]
    assert two.speed(of="fused")["ratio"].tolist() == [3.0]


def test_per_takes_the_newest_recording_and_the_range_over_all():
    lines = timed_rows().of(provider="fused", machine="H200").per("width")
    assert lines[["width", "value", "low", "high", "n"]].to_numpy().tolist() == [
        [64, 1.2, 1.0, 1.2, 2], [128, 4.0, 3.0, 4.0, 2]
    ]  # fmt: skip
    days = {"a": "2026-11-02", "b": "2026-11-01", "c": "2026-11-01"}
    rows = timed_rows()
    rows["measured_at"] = rows["recording"].map(days)
    assert rows.of(provider="fused", machine="H200").per("width")["value"].tolist() == [1.0, 3.0]


def test_the_extent_is_over_cases_of_the_newest_recording():
    extent = timed_rows().of(machine="H200").speed(of="fused").extent()
    assert extent == {"eager": (2.0, 2.5)}
    assert timed_rows().count("width") == 2


def test_repetitions_may_differ_and_other_fields_may_not():
    seeds = pd.concat([timed_rows(), timed_rows(seed=1)])
    seeds.attrs = timed_rows().attrs
    assert len(seeds.per("width", "provider")) == 6
    mixed = pd.concat([timed_rows(), timed_rows(dtype="float32")])
    mixed.attrs = timed_rows().attrs
    with pytest.raises(ValueError, match="differ in dtype .dtype: fp32, bf16."):
        mixed.per("width", "provider")
    assert len(mixed.per("width", "provider", "dtype")) == 12


# --- showing -------------------------------------------------------------------------------------


def test_points_tell_machines_apart_in_one_panel():
    speed = timed_rows().of(dtype="bf16").speed(of="fused")
    shown = meaning_of(lambda: speed.points(y="width", title="Speed.", name="tiny"))
    assert shown["caption"].startswith("Speed. ")
    assert "Filled marks: H200, open marks: H100" in shown["caption"]
    assert shown["name"] == "tiny" and shown["machines"] == [FAST, SLOW]
    data = drawn(lambda: speed.points(y="width"))
    assert data[["width", "provider", "machine", "value"]].to_numpy().tolist() == [
        [64, "eager", "H200", 2.5], [64, "eager", "H100", 1.0], [128, "eager", "H200", 2.0]
    ]  # fmt: skip


def test_lines_bars_and_panels_draw_the_value_that_is_asked_for():
    one = timed_rows(error=0.5).of(machine="H200")
    lines = drawn(lambda: one.lines(x="width", y="error", panel="dtype"))
    assert {*lines["value"]} == {0.5} and {*lines["panel"]} == {"bf16"}
    bars = drawn(lambda: one.bars(y="width", panel=["dtype", "experiment"]))
    assert {*bars["panel"]} == {"bf16, time"} and {*bars["value"]} == {1.2, 3.0, 4.0, 8.0}


def test_a_table_has_a_column_a_name_and_a_machine():
    columns, lines = cells(lambda: timed_rows().table("width"))
    assert columns[1:] == [["fusedlib", "H200"], ["fusedlib", "H100"], ["PyTorch", "H200"],
                           ["PyTorch", "H100"]]  # fmt: skip
    assert lines == [["64", "1.20 ms", "2.00 ms", "3.00 ms", "2.00 ms"],
                     ["128", "4.00 ms", "—", "8.00 ms", "—"]]  # fmt: skip
    columns, lines = cells(
        lambda: timed_rows().of(machine="H200").speed(of="fused").table("dtype", cell="extent")
    )
    assert columns == [["dtype"], ["PyTorch"]] and lines == [["bf16", "2.00–2.50×"]]


def test_figures_of_rows_that_differ_are_refused_and_texts_are_not():
    mixed = pd.concat([timed_rows(version="torch 2"), timed_rows(dtype="float32")])
    mixed.attrs = timed_rows().attrs
    mixed = mixed.of(machine="H200", width=64)
    with pytest.raises(ValueError, match="differ in dtype"):
        mixed.table("provider", value=["median_ms", "version"])
    assert cells(lambda: mixed.table("provider", value=["version", "session"]))[1]


def test_explore_chooses_the_first_and_says_which_others_there_are():
    chosen = []
    [said] = outputs_of(lambda: chosen.append(timed_rows().explore("width", "dtype")))
    assert "hidden size: 128." in said.data["text/markdown"]
    assert ".of(width=128)" in said.data["text/markdown"], "ready to be copied"
    assert {*chosen[0]["width"]} == {64}
    chosen.clear()
    assert outputs_of(lambda: chosen.append(timed_rows().of(width=128).explore("width"))) == []
    assert {*chosen[0]["width"]} == {128}
    assert "1,024" in timed_rows().assign(width=1024).of(width=1024).caption()


def test_explore_begins_with_choices_that_have_rows_together():
    short = timed_rows(dtype="float32").of(width=128)
    mixed = pd.concat([timed_rows().of(width=64), short])
    mixed.attrs = timed_rows().attrs
    caption = mixed.explore("width", "dtype").caption()
    assert "64" in caption and "bf16" in caption
    later = mixed.but(width=64).beside(timed_rows(status="unavailable").of(width=64))
    caption = later.explore("width", "dtype").caption()
    assert "128" in caption and "fp32" in caption


def test_unmeasured_says_why():
    failed = timed_rows().assign(status="unavailable", reason="the package quack is not installed")
    _, lines = cells(lambda: failed.unmeasured())
    assert lines == [["unavailable", "the package quack is not installed", "fusedlib, PyTorch",
                      "4"]]  # fmt: skip
    _, lines = cells(lambda: failed.unmeasured(by="dtype"))
    assert [line[2] for line in lines] == ["bf16"]
    with pytest.raises(ValueError, match="no column 'depth'"):
        failed.unmeasured(by="depth")


# --- where rows come from ------------------------------------------------------------------------


class Recorded:
    """A recorder of rows made by hand."""

    study = TINY.name

    def __init__(self, *_, **__):
        pass

    def rows(self):
        return pd.DataFrame(timed_rows())


def test_a_study_shows_recorded_machines_and_one_by_its_name(monkeypatch):
    monkeypatch.setattr(rows.results, "Recorder", Recorded)
    monkeypatch.setattr(rows, "_recorded_machines", lambda: {SLOW})
    assert {*rows.study("tiny")["machine"]} == {SLOW}
    assert {*rows.study("tiny", shown="H200")["machine"]} == {FAST}
    with pytest.raises(ValueError, match="A100"):
        rows.study("tiny", shown="A100")
    with pytest.raises(ValueError, match="this machine"):
        rows.study("tiny", shown="this machine")


def test_run_here_adds_this_machine_s_rows_to_the_recorded_ones(monkeypatch):
    asked = []

    def measured(name, sizes, **knobs):
        asked.append(sizes | knobs)
        return Recorded()

    monkeypatch.setattr(studies, "measure", measured)
    monkeypatch.setattr(rows, "_recorded_machines", lambda: {SLOW})
    monkeypatch.setattr(machines, "key", lambda: FAST)
    shown = rows.run_here("tiny", {"profile": "quick", "seeds": 1}, seeds=2)
    assert asked == [{"profile": "quick", "seeds": 2}]
    assert {*shown["machine"]} == {FAST, SLOW}
    assert "this machine" in meaning_of(lambda: shown.points(y="width"))["caption"]


def test_published_rows_stand_beside_and_are_of_no_machine():
    line = {
        "machine": "published", "recording": "as published", "status": "ok", "seed": 0,
        "provider": "eager", "experiment": "time", "dtype": "bfloat16", "session": "none",
    }  # fmt: skip
    widths = {"case": ["p", "q"], "width": [64, 128], "median_ms": [4.0, 5.0]}
    tables = pd.DataFrame(widths).assign(**line)
    both = timed_rows().of(machine="H200", provider="eager").beside(tables)
    columns, lines = cells(lambda: both.table("width"))
    assert [head[-1] for head in columns[1:]] == ["H200", "published"]
    assert lines == [["64", "3.00 ms", "4.00 ms"], ["128", "8.00 ms", "5.00 ms"]]
    more = timed_rows().of(machine="H100", provider="eager")
    assert set(both.beside(more)["machine"]) == {*both["machine"], *more["machine"]}
    shown = meaning_of(lambda: both.points(y="width"))
    assert shown["machines"] == [FAST] and "published" in shown["data"]
    assert "open marks: published" in shown["caption"], "both have marks of eager"
    apart = both.assign(source=both["machine"].eq("published").map({True: "a", False: "b"}))
    assert "published" not in meaning_of(lambda: apart.points(y="width", by="source"))["caption"]


def test_a_wrong_result_shows_where_the_study_is_about_it_alone(monkeypatch):
    wrong = timed_rows().assign(status="wrong")
    with pytest.raises(ValueError, match="PyTorch"):
        wrong.speed(over="eager")
    monkeypatch.setattr(studies, "load", lambda name: replace(TINY, shown=("ok", "wrong")))
    assert len(wrong.speed(over="eager")) == 5
