"""Study 01's figures from rows: windows, counts, tables, sentences."""

import json

import numpy as np
import pandas as pd
import pytest
from card_rows import EMPTY, head

from fusedlib.study.warmup import figures as plots
from fusedlib.study.warmup import findings as warmup
from fusedlib.study.warmup import tables

COLD = [50.0, 12.0] + [10.0] * 28


def row(model="small", direction="forward+backward", process=1, samples=COLD, **fields):
    base = {
        "experiment": "steps", "isolation": "fresh", "provider": "eager", "model": model,
        "direction": direction, "process": process, "samples_ms": samples, "position": 1,
        "backward_samples_ms": samples,
    }  # fmt: skip
    return head("01_warmup") | base | fields


def frame(*rows):
    return pd.DataFrame(list(rows))


FULL = frame(
    *[row(m, d, p, [s * k for s in COLD])
      for k, m in enumerate(("small", "medium"), 1)
      for d in tables.DIRECTIONS for p in (1, 2, 3)],
    *[row(m, d, 1, s, isolation="shared", position=i)
      for d in tables.DIRECTIONS
      for i, (m, s) in enumerate({"small": COLD, "medium": [22.0] + [20.0] * 29}.items(), 1)],
    row("xl", "forward", status="oom", reason="out of memory", samples_ms=None),
    row("small", "step", experiment="stages", **dict.fromkeys(tables.STAGES, 10.0),
        gemm_again_ms=1.0, corner_again_ms=2.0),
    row("small", "step", experiment="compilation", provider="inductor", first_ms=9000.0,
        settled_ms=4.0),
    row("small", "step", experiment="calls", step_first_ms=300.0, step_settled_ms=30.0,
        kernels_first_ms=20.0, kernels_settled_ms=20.0,
        **{f"{g}_{w}_ms": {"first": 9.0, "settled": 1.0}[w]
           for g in tables.CALLS for w in ("first", "settled")},
        **{f"{g}_{w}_count": 5 for g in tables.CALLS for w in ("first", "settled")}),
)  # fmt: skip


def test_a_warmup_setting_is_a_window_of_the_same_run():
    assert tables.after_warmup(COLD, 0).tolist() == COLD[:10]
    assert tables.after_warmup(COLD, 1).tolist() == COLD[1:11]
    assert tables.after_warmup(COLD, 5).tolist() == COLD[5:15]
    with pytest.raises(ValueError, match="30 recorded steps do not hold 21"):
        tables.after_warmup(COLD, 21)


def test_settled_is_the_median_of_the_last_ten():
    assert tables.settled([*COLD[:20], *range(1, 11)]) == 5.5


@pytest.mark.parametrize(
    ("samples", "until", "mean", "median"),
    [
        (COLD, 0, 2, 0),
        ([10.0] * 30, 0, 0, 0),
        ([20.0] * 6 + [10.0] * 24, 4, 6, 2),
        ([10.0, 30.0] * 15, None, None, 0),
        ([20.0] * 20 + [10.0] * 10, None, None, None),
    ],
    ids=["cold", "steady", "slow-start", "unsteady", "late"],
)
def test_steps_to_drop_by_hand(samples, until, mean, median):
    if until is None and mean is None and median == 0:
        # Alternating 10 and 30: any ten have the settled mean of ten, but no median of five.
        assert tables.steps_until_settled(samples) is None
        return
    assert tables.steps_until_settled(samples) == until
    assert tables.warmup_needed(samples, "mean") == mean
    assert tables.warmup_needed(samples, "median") == median


def test_a_window_that_overlaps_the_settled_steps_proves_nothing():
    drifting = [float(x) for x in np.linspace(40, 10, 30)]
    assert tables.warmup_needed(drifting, "median") is None


def test_table_pools_the_processes_and_stands_beside_the_published():
    shown = tables.table(FULL, "forward+backward")
    assert shown.loc[("small", "Test Card"), "0 warm-up"] == "14.20 ± 12"
    pooled = np.tile(COLD[:10], 3)
    assert f"{pooled.std(ddof=1):.0f}" == "12"
    assert shown.loc[("small", "Test Card"), "2 warm-up"] == "10.00 ± 0"
    assert shown.loc[("medium", "Test Card"), "5 warm-up"].startswith("20.00")
    published = shown.loc[("small", "published, seed 001 (RTX PRO 6000 WK)")]
    assert published["0 warm-up"] == "32.55 ± 22"
    assert published["5 warm-up"] == "—"
    sizes = list(dict.fromkeys(shown.index.get_level_values(0)))
    assert sizes == ["small", "medium", "large", "xl", "2.7b"]


def test_a_size_without_a_time_says_why():
    shown = tables.table(FULL, "forward")
    assert set(shown.loc[("xl", "Test Card")]) == {"oom"}


def test_isolation_table_tells_fresh_from_shared():
    shown = tables.isolation_table(FULL)
    assert shown.loc[("Test Card", "small"), "fresh: extra ms"] == "40.0 (40.0 to 40.0)"
    assert shown.loc[("Test Card", "medium"), "shared: extra ms"] == "2.00"
    assert shown.loc[("Test Card", "medium"), "place in the shared process"] == "2"


def test_findings_are_computed():
    said = " ".join(warmup.findings(FULL))
    for part in (
        "1.42 times the settled step for size small",
        "first size (small) pays 40.0 ms, the later ones at most 2.00 ms",
        "an effect of their place in the list",
        "270 ms",
        "222 ms outside any CUDA call that it shows",
        "2,250 settled steps; it has paid for itself after 1,500 steps",
        "−2.75 ms",
        "the shortest of 720 backward passes on Test Card took 10.0 ms",
    ):
        assert part in said


def test_findings_follow_the_rows():
    late = FULL.copy()
    shared = late["isolation"].eq("shared") & late["model"].eq("medium")
    slow = [90.0] + [20.0] * 29
    late["samples_ms"] = [
        slow if s else old for s, old in zip(shared, late["samples_ms"], strict=True)
    ]
    said = " ".join(warmup.findings(late))
    assert "the place in the list does not decide it" in said
    assert "an effect of their place" not in said


def test_recommendation_follows_the_rows():
    text = warmup.recommendation(FULL)
    assert "drop 2 steps. That brings the 10-step mean" in text
    assert "in 8 of 8 sizes and directions. Give the median" in text


def test_recommendation_says_where_no_warmup_helps():
    drifting = [20.0] * 20 + [10.0] * 10
    rough = FULL.copy()
    rough["samples_ms"] = [
        drifting if isinstance(s, list) and m == "small" else s
        for s, m in zip(rough["samples_ms"], rough["model"], strict=True)
    ]
    text = warmup.recommendation(rough)
    assert "in 4 of 8 sizes and directions; in 4 (small backward, small forward" in text
    assert "the steps go on getting shorter or longer" in text
    shaky = [10.0, 14.0, 9.0] * 10
    rough["samples_ms"] = [
        shaky if isinstance(s, list) and m == "small" else s
        for s, m in zip(FULL["samples_ms"], FULL["model"], strict=True)
    ]
    assert "settled steps themselves spread by up to 5" in warmup.recommendation(rough)
    rough["samples_ms"] = [drifting if isinstance(s, list) else s for s in FULL["samples_ms"]]
    assert "needs more repetitions and an interval" in warmup.recommendation(rough)


def test_full_rows_lead_and_own_quick_rows_stand_beside():
    own = frame(
        row(machine="mine", own=True, profile="quick", device_type="cpu", device_name="My CPU")
    )
    both = pd.concat([FULL, own], ignore_index=True)
    assert "Test Card" in warmup.headline(both)[0]
    shown = tables.table(both, "forward+backward")
    assert ("small", "this machine (My CPU)") in shown.index


@pytest.mark.parametrize("rows", [EMPTY, FULL[FULL["status"] != "ok"]], ids=["none", "only-oom"])
def test_without_rows_everything_says_so(rows):
    assert warmup.findings(rows) == [warmup.MISSING]
    assert warmup.headline(rows) == [warmup.MISSING]
    assert warmup.recommendation(rows) is None
    for direction in tables.DIRECTIONS:
        assert len(tables.table(rows, direction).columns) == 4
    for make in (tables.isolation_table, tables.settling_table, tables.stages_table):
        assert isinstance(make(rows), pd.DataFrame)
    assert tables.calls_note(rows)
    for draw in (plots.each_step, plots.bias_by_warmup, plots.fresh_and_shared, plots.stages):
        draw(rows)


@pytest.mark.parametrize("name", ["each_step", "bias_by_warmup", "fresh_and_shared", "stages"])
def test_figures_are_drawn_the_same_twice_and_told(name):
    from fusedlib.study import style

    draw = getattr(plots, name)
    assert style.svg(draw(FULL)) == style.svg(draw(FULL))
    told = getattr(plots, f"{name}_alt")(FULL)
    assert "small" in told


def test_rows_survive_the_file(tmp_path, monkeypatch):
    from fusedlib.bench import results

    recorder = results.Recorder("01_warmup", profile="full", code="c", directory=tmp_path)
    named = ("experiment", "isolation", "provider", "device", "model", "direction", "process")
    case = {name: row()[name] for name in named}
    recorder.append(case, {"samples_ms": COLD, "position": 1, "backward_samples_ms": COLD})
    loaded = results.load("01_warmup", directory=tmp_path)
    assert json.loads(json.dumps(loaded["samples_ms"].iloc[0])) == COLD
    assert len(warmup.findings(loaded)) >= 2
