"""Study 10's tables, figures and sentences, from rows made by hand."""

import re

import numpy as np
import pandas as pd
import pytest

from fusedlib import paths
from fusedlib.bench.training import arms, cases
from fusedlib.study import published
from fusedlib.study.running import config, parameters
from fusedlib.study.training import counted, figures, findings, selected, tables

SETTING = cases.Setting(60_000, 10_000, 4096, "cuda")
ALONE = cases.Setting(60_000, 10_000, 768, "cuda")
LEVELS = {"eager": 0.0, "liger": 0.001, "fused": -0.001, "frozen": 0.2, "flawed": 0.6}
"""What each arm's loss lies above eager's."""

EMPTY = pd.DataFrame(
    columns=["machine", "profile", "device_type", "device_name", "own", "status", "reason"]
)


def row(case, **figures):
    wrong = case.get("arm") == "flawed"
    if wrong:
        times = ("epoch_train_s", "epoch_test_s", "median_ms", "speedup", "speedup_low",
                 "speedup_high")  # fmt: skip
        figures = {
            (selected.PROTOCOL if k in times or k.endswith("samples_ms") else "") + k: v
            for k, v in figures.items()
        }
    base = {
        "machine": "gpu", "profile": "full", "device_type": "cuda", "device_name": "Test Card",
        "own": False, "status": "wrong" if wrong else "ok", "reason": "h" if wrong else None,
    }  # fmt: skip
    return base | case | figures


def run(case, level=None, correct=9800):
    """A run whose loss falls to 0.1 and a seed's own bit, above it by the arm's level."""
    level = LEVELS[case["arm"]] if level is None else level
    each = 60_000 // 64 // case["window"]
    windows = np.arange(case["epochs"] * each)
    losses = 2.0 / (windows + 1) + 0.1 + 0.01 * case["seed"] + level
    epochs = case["epochs"]
    moved = case["arm"] not in ("frozen", "flawed")
    confusion = np.diag([correct // 10] * 10)
    confusion[4, 9] = 10_000 - confusion.sum()
    return row(
        case, losses=losses.tolist(), confusion=confusion.flatten().tolist(),
        epoch_correct=[correct - 100] * (epochs - 1) + [correct],
        epoch_test_loss=[0.05 + level] * epochs, epoch_train_s=[3.0] * epochs,
        epoch_test_s=[0.1] * epochs, epoch_gate_change=[0.4 * moved] * epochs,
        epoch_up_change=[0.3 * moved] * epochs,
        epoch_gate_gradient_norm=[0.5 if moved else None] * epochs,
        epoch_up_gradient_norm=[0.5 if moved else None] * epochs,
        trained_parameters=75_557_258 if moved else 59_786, layer_backward="MulBackward0",
        h_error=1.0 if case["arm"] == "flawed" else 1e-6, d_x_error=1e-6,
        d_w_gate_error=1e-6 if moved else None,
    )  # fmt: skip


def rows():
    names = ["eager fp32", "fused bf16", "frozen fp32", "flawed fp32"]
    long = cases.runs(SETTING, names, network="convolutions", seeds=3, epochs=4, launch="graph")
    short = cases.runs(
        SETTING, ["liger fp32"], network="convolutions", seeds=3, epochs=1, launch="graph"
    )
    alone = cases.runs(ALONE, names, network="swiglu only", seeds=3, epochs=4, launch="graph")
    yield from (run(case) for case in long + short)
    yield from (run(case, correct=9800 - 400 * (case["arm"] == "frozen")) for case in alone)
    yield from (run(case) for case in cases.epochs(SETTING, names, source="device"))
    yield from (run(case) for case in cases.epochs(SETTING, ["frozen fp32"], source="loader"))
    every = [*names, "liger fp32"]
    for launch in ("python", "graph"):
        for case in cases.paces(SETTING, every, source="device", launch=launch, rounds=2, steps=3):
            parts = (0.1, 0.5, 1.0, 2.4 if case["arm"] not in ("frozen", "flawed") else 0.4)
            names_of = selected.PARTS if launch == "python" else ("data", "replay")
            samples = {f"{p}_samples_ms": [v, v] for p, v in zip(names_of, parts, strict=False)}
            yield row(
                case, **samples, median_ms=sum(parts), speedup=1.1, speedup_low=1.0,
                speedup_high=1.2,
            )  # fmt: skip
    for case in cases.repeats(SETTING, every, steps=30):
        off = 1e-3 if case["arm"] == "liger" else 0.0
        yield row(case, repeat_difference=0.0, graph_difference=off)
    for case in cases.data_cases(SETTING, batches=20):
        yield row(case, median_ms=2.0 if case["source"] == "loader" else 0.03)


FULL = pd.DataFrame(list(rows()))
SMALL = pd.DataFrame(
    [
        run(case, correct=9000)
        for case in cases.runs(
            cases.Setting(60_000 // 2, 10_000, 128, "cpu"), ["eager fp32", "frozen fp32"],
            network="convolutions", seeds=2, epochs=1,
        )
    ]
)  # fmt: skip


def test_gaps_are_those_of_the_same_seed():
    table = tables.outcomes(FULL, "convolutions")
    gaps = table["less eager's, same seed"]
    assert gaps["eager fp32"] == "—"
    assert gaps["fused bf16"] == "−0.0010" and gaps["frozen fp32"] == "+0.2000"
    assert gaps["liger fp32"] == "+0.0010", "its one epoch is compared with eager's first"
    assert table.loc["liger fp32", "epochs"] == 1 and table.loc["eager fp32", "seeds"] == 3


def test_an_epochs_mean_is_that_epochs():
    part = selected.runs(FULL, "convolutions").query("who == 'eager fp32'")
    each = 66
    wanted = [np.mean(losses[each : 2 * each]) for losses in part["losses"]]
    assert selected.epoch_means(part, 2) == pytest.approx(wanted)
    assert selected.epoch_means(part)[0] < selected.epoch_means(part, 1)[0]


def test_the_band_tells_who_learns_from_who_does_not():
    [sentence] = [s for s in findings.findings(FULL) if s.startswith("The band")]
    inside, outside = sentence.split("; outside: ")
    assert "fused bf16 (epoch 4)" in inside and "liger fp32 (epoch 1)" in inside
    assert "frozen fp32 (epoch 4)" in outside and "flawed fp32 (wrong)" in outside


def test_wrong_arms_are_named_wrong_everywhere():
    for table in (
        tables.layer(FULL), tables.outcomes(FULL, "convolutions"), tables.pace(FULL),
        tables.repeats(FULL), tables.alone(FULL),
    ):  # fmt: skip
        named = [n for n in table.index if n.startswith("flawed")]
        assert named == ["flawed fp32 (wrong)"]
    assert tables.layer(FULL).loc["flawed fp32 (wrong)", "of gate and up gradients"] == (
        "none arrives"
    )
    assert tables.layer(FULL).loc["frozen fp32", "of gate and up gradients"] == "frozen"


def test_weights_that_do_not_move_have_no_gradient():
    table = tables.change(FULL)
    assert set(tables.gradients(FULL).loc["frozen fp32"]) == {"none"}
    assert set(table.loc["frozen fp32"]) == {"0"}
    assert table.loc["eager fp32", ("gate", "epoch 4")] == "0.400"


def test_published_runs_stand_beside_the_measured_ones():
    table = tables.beside_published(FULL)
    liger = table.loc[("published: Liger", "NVIDIA L4")]
    assert liger["DataLoader, s an epoch"] == "37.8" and liger["correct, %"] == "99.22"
    assert not [n for n, _ in table.index if "with weight" in n], "its log is a copy"
    own = table.loc[("frozen fp32", "Test Card")]
    assert own["data on the device, s"] == own["DataLoader, s an epoch"] == "3.00"
    assert table.loc[("liger fp32", "Test Card"), "test, s"] == "—"


def test_a_step_is_shown_by_its_parts_and_in_a_graph():
    table = tables.pace(FULL)
    assert table.loc["eager fp32", "optimizer, ms"] == "2.40"
    assert table.loc["frozen fp32", "step, ms"] == "2.00"
    assert table.loc["frozen fp32", "steps/s"] == "500"
    assert table.loc["eager fp32", "in a graph, ms"] == "4.00"


def test_digits_are_counted_over_all_seeds():
    table = tables.missed(FULL)
    assert table.loc[4, ("eager fp32", "most often as")] == "9"
    assert table.loc[4, ("eager fp32", "missed, %")] == f"{100 * 200 / 1180:.2f}"
    assert table.loc[0, ("eager fp32", "missed, %")] == "0.00"


def test_a_graph_that_differs_is_told():
    table = tables.repeats(FULL)
    assert table.loc["liger fp32", "in a CUDA graph"] == "0.0010"
    assert table.loc["eager fp32", "in a CUDA graph"] == "none, bit for bit"
    [sentence] = [s for s in findings.findings(FULL) if s.startswith("Over the first 30")]
    assert "4 of 5 arms" in sentence and "liger fp32 0.001" in sentence


def test_the_optimizers_passes_are_counted_by_hand():
    d = counted.difference()
    assert d.steps == 938
    assert d.optimizer_s == pytest.approx(938 * 27 * 4 * 2 * 9216 * 4096 / 300e9)
    told = published.load("mnist")
    own = told[told["table"] == "Fused no weight-grad"]
    assert d.data_s == pytest.approx(6 * own["test_ms"].median() / 1e3)
    assert 0.8 < d.apart_ms * d.steps / 1e3 / d.optimizer_s < 1.2


@pytest.mark.parametrize("parts", ["", "swiglu only"])
def test_a_subset_says_so_in_every_caption_and_sentence(parts):
    size = selected.size(selected.runs(SMALL, "convolutions"))
    assert size.startswith("**a subset:** 30,000 of 60,000 training images")
    assert "width 128 instead of 4,096" in size and "1 of 4 epochs, 2 seeds" in size
    whole = selected.size(selected.runs(FULL, "convolutions"))
    assert "subset" not in whole and "1 or 4 of 4 epochs, 3 seeds" in whole
    sentences = [s for s in findings.findings(SMALL) if "Test Card" in s]
    assert sentences and all("a subset" in s for s in sentences)


def test_only_the_largest_setting_is_shown():
    both = pd.concat([FULL, SMALL], ignore_index=True)
    assert set(selected.runs(both, "convolutions")["train_images"]) == {60_000}
    assert set(selected.runs(both, "swiglu only")["width"]) == {768}


def test_what_is_missing_is_told_by_arm_and_reason():
    lacking = FULL[FULL["arm"] == "liger"].assign(status="unavailable", reason="no package liger")
    frame = pd.concat([FULL[FULL["arm"] != "liger"], lacking])
    assert selected.unavailable(frame, "run") == ("No figures for liger fp32: no package liger.")
    assert selected.unavailable(FULL, "run") is None


@pytest.mark.parametrize("frame", [EMPTY, SMALL, FULL[FULL["experiment"] == "data"]])
def test_whatever_is_missing_everything_still_speaks(frame):
    for name in ("layer", "beside_published", "change", "pace", "data", "repeats", "missed"):
        assert len(getattr(tables, name)(frame).columns)
    for name in ("curves", "apart", "parts", "confusions"):
        assert getattr(figures, name)(frame).axes
        assert getattr(figures, f"{name}_alt")(frame)
    assert all(findings.findings(frame)) and all(findings.headline(frame))


def test_without_rows_the_headline_says_how_to_get_them():
    assert findings.headline(EMPTY) == [findings.MISSING]
    assert "make study ONLY=10_mnist" in selected.unavailable(EMPTY, "run")


def test_the_curves_draw_a_line_and_a_band_an_arm():
    left, right = figures.curves(FULL).axes
    assert len(left.get_lines()) == len(left.collections) == 4
    assert len(right.get_lines()) == 4
    trained, untrained = figures.apart(FULL).axes
    assert len(trained.collections) == 2 and len(untrained.collections) == 2


def test_headlines_hold_figures_of_the_rows():
    text = " ".join(findings.headline(FULL))
    assert "frozen fp32 98.00 %" in text and "frozen fp32 94.00 %" in text
    assert "optimizer 2.4" in text and re.search(r"in a CUDA graph 4\.00 ms", text)


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_the_study_asks_for_arms_that_there_are(profile):
    study = next(s for s in config.load().studies if s.name == cases.STUDY)
    notebook = paths.NOTEBOOKS / f"{study.name}.ipynb"
    defaults = {n: p.default for n, p in parameters.read(notebook).items()}
    given = defaults | dict(study.parameters(profile))
    for name in ("whole", "once", "alone", "clocked", "fed"):
        cases.named(given[name])
    assert "eager fp32" in given["whole"] and "eager fp32" in given["alone"]
    if profile == "full":
        asked = cases.named([*given["whole"], *given["once"]])
        wanted = {(a, p) for a in ("eager", "liger", "inductor", "fused") for p in arms.PRECISIONS}
        assert set(asked) == wanted | {("frozen", "fp32"), ("flawed", "fp32")}
        assert (given["seeds"], given["epochs"]) == (5, 4)
