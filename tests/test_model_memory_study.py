"""Study 09's tables, sentences and pictures from rows, and its cases."""

import model_memory_rows
import pandas as pd
import pytest
from card_rows import EMPTY

from fusedlib.bench.model_memory import cases, measure
from fusedlib.study import style
from fusedlib.study.model_memory import figures, findings, selected, tables

FULL = pd.DataFrame(model_memory_rows.full())


def without(*, status="oom", **fields):
    """FULL where the rows of these fields have no figures."""
    rows = model_memory_rows.full()
    for at, row in enumerate(rows):
        if all(row.get(name) == value for name, value in fields.items()):
            case = {k: v for k, v in row.items() if k in ("experiment", "mode", *_SETTING)}
            rows[at] = model_memory_rows.oom(case, status=status)
    return pd.DataFrame(rows)


_SETTING = (
    "model", "context_length", "batch_size", "attention", "precision", "device", "plan", "blocks",
    "repetitions",
)  # fmt: skip


# --- sentences -----------------------------------------------------------------------------------


def test_the_answer_is_computed():
    said = findings.answer(FULL)
    assert "2.7b at context 512, batch 4, plain attention, fp32 peaks at 63.5 GiB" in said
    assert "in AdamW's update on Test Card: AdamW's moments 40 %, weights 20 %" in said
    assert "autograd's own saved tensors agree to the byte. So do the peaks of" in said
    assert "with one every block, as by formula; with one every 6 blocks it holds" in said
    assert "The square root of 32 blocks, 5.7, would be best if a block kept no more" in said


def test_findings_are_computed():
    said = " ".join(findings.findings(FULL))
    assert "peaks at 100 % in bf16 autocast, where kept activations are 16.4 GiB and cast" in said
    assert "; at 50 % in bf16, where kept activations are 11.5 GiB. Autocast keeps" in said
    assert "only the attention weights grow with the square" in said
    assert "1.00 times the weights, because list-wise AdamW" in said
    assert "rounding to whole blocks adds at most 1.00 MiB" in said
    assert "asked for agree to the byte; rounding" in said
    assert "up to 99.0 MiB more lie in reserve" in said
    assert "A step's peak lies there at every context from 128 to 512: 63.5 GiB." in said
    assert "With one at the first 16 blocks alone it holds" in said
    assert "to 1.33× (1.33 to 1.34); a backward being two forwards" in said
    assert "in bf16 autocast 2.7b does not fit without checkpoints (141 GiB by formula" in said
    assert "Nested checkpoints, least with segments of 6 blocks, take" in said
    assert "6.30 GiB of the 11.8 GiB that 2.7b at context 5120 holds at the least" in said


def test_what_plans_hold_over_the_count_is_named_with_its_blocks():
    assert findings.plans.inside_sentence(FULL) is None, "no row says where its peak lies"
    rows = model_memory_rows.full()
    for row in rows:
        if row.get("plan") == "segments":
            more = {"peak_in": "backward", "largest_count": [9, 3], "largest_bytes": [2**30, 2**20]}
            row |= more | {
                "largest_where": [model_memory_rows.LINE, "no Python frame (autograd's)"]
            }
            row["peak_mib"] += 7.0 if row["blocks"] > 1 else 5.0
    said = findings.plans.inside_sentence(pd.DataFrame(rows))
    assert ": 5.00 MiB to 7.00 MiB in 6 plans at context 5120 in bf16; the largest" in said
    assert said.endswith("asked for itself are 3 of 1.00 MiB.")


def test_the_headline_is_one_short_sentence_first():
    first = findings.headline(FULL)[0]
    assert len(first.split()) <= 60
    assert first.startswith("A step of 2.7b at context 512, batch 4 in fp32 peaks at 63.5 GiB on")
    assert "from 99.7 GiB to" in first and first.endswith("1.33 times the time (1.33 to 1.34).")


def test_a_difference_is_found_and_named():
    rows = model_memory_rows.full()
    for row in rows:
        if row.get("mode") == "forward" and row["precision"] == "bf16":
            row["saved_mlp_bytes"] *= 1.5
    said = findings.counted_sentence(pd.DataFrame(rows))
    assert (
        "agree to the byte" not in said
        and "saved tensors differ by at most 2,720 MiB of 11.5 GiB" in said
    )


@pytest.mark.parametrize(
    "frame",
    [
        EMPTY,
        FULL[FULL["status"] != "ok"],
        FULL[FULL["experiment"] == "pass"],
        FULL[FULL["experiment"] == "checkpoint"],
        FULL[FULL["precision"] == "bf16"],
        without(mode="step"),
        without(mode="forward", status="failed"),
        without(plan="none"),
        without(plan="segments"),
    ],
    ids=["none", "only-oom", "passes", "plans", "bf16", "no-step", "no-forward", "no-base", "flat"],
)
def test_whatever_is_missing_everything_else_is_shown(frame):
    for sentence in (findings.answer(frame), *findings.findings(frame), *findings.headline(frame)):
        assert sentence and "nan" not in sentence.lower()
    for shown in (
        tables.peaks(frame), tables.counted_and_measured(frame), tables.allocator(frame),
        tables.kept(frame), tables.one_tensor(frame), tables.largest(frame),
        tables.checkpointing(frame),
    ):  # fmt: skip
        assert len(shown.columns)
    for name in ("through_steps", "kept", "checkpointing"):
        assert style.svg(getattr(figures, name)(frame))
        assert getattr(figures, f"{name}_alt")(frame)


def test_without_rows_the_findings_say_how_to_get_them():
    assert findings.findings(EMPTY) == findings.headline(EMPTY) == [findings.MISSING]
    assert findings.answer(EMPTY) == findings.MISSING
    assert "make study ONLY=09_model_memory" in selected.lacking(selected.passes(EMPTY, None))


def test_a_cpu_compares_what_it_has():
    own = FULL[FULL["precision"] != "bf16"].assign(
        machine="mine", own=True, device_type="cpu", device="cpu", device_name="My CPU",
        profile="quick", requested_peak_mib=None, reserved_peak_mib=None,
    )  # fmt: skip
    own["peak_mib"] = own["peak_mib"].where(own["experiment"] == "checkpoint")
    assert "this machine (My CPU)" in findings.answer(own)
    assert findings.allocator_sentence(own) is None
    both = pd.concat([FULL, own], ignore_index=True)
    assert "Test Card" in findings.answer(both)


# --- tables --------------------------------------------------------------------------------------


def test_the_peak_table_has_every_mode_and_says_what_did_not_fit():
    shown = tables.peaks(without(mode="step", precision="fp32", context_length=512))
    assert shown.index.tolist() == [("plain", 128), ("plain", 256), ("plain", 512), ("sdpa", 512)]
    assert shown.loc[("plain", 512), ("fp32, GiB", "step")] == "oom"
    assert shown.loc[("plain", 512), ("bf16, GiB", "step")] == "31.7"
    assert shown.loc[("sdpa", 512), ("bf16, GiB", "no_grad")] == "—"


def test_a_predicted_oom_says_so():
    rows = without(mode="step", precision="fp32", context_length=512, status="oom (predicted)")
    shown = tables.peaks(rows)
    assert shown.loc[("plain", 512), ("fp32, GiB", "step")] == "oom (predicted)"
    told = selected.lacking(selected.passes(rows, None))
    assert "step at 512, sdpa, fp32: oom (predicted): CUDA out of memory." in told
    said = "no checkpoint at 5120, sdpa, bf16 autocast: oom: CUDA out of memory."
    assert selected.lacking(selected.checkpoints(FULL, None)) == said
    assert selected.lacking(selected.passes(FULL, None)) is None


def test_counted_and_measured_differ_by_what_the_row_says():
    rows = model_memory_rows.full()
    for row in rows:
        if row.get("mode") == "step" and row["precision"] == "fp32":
            row["forward_activations_mib"] += 20 / 2**20
            row["peak_in_step_mib"] -= 3
    shown = tables.counted_and_measured(pd.DataFrame(rows))
    assert shown.loc["weights", ("fp32", "difference")] == "0"
    assert shown.loc["kept activations", ("fp32", "difference")] == "+20 B"
    assert shown.loc["peak, AdamW's update", ("fp32", "difference")] == "−3.00 MiB"
    assert shown.loc["AdamW's moments", ("bf16", "counted")] == "12,996"


def test_one_tensor_is_its_shape_times_its_width():
    shown = tables.one_tensor(FULL)
    row = shown.loc[("fp32", 512)]
    assert row["batch · context · d_model · bytes"] == "4 · 512 · 2560 · 4"
    assert row["MiB"] == "20.00" and row["found"] == 7
    assert row["blocks counted"] == 32 * 10 + 3


def test_plans_show_what_they_hold_and_cost():
    shown = tables.checkpointing(FULL)
    large, fits = "5120, bf16 autocast", "5120, bf16"
    assert shown.loc[(large, "none", 0), "measured"] == "oom"
    assert shown.loc[(large, "segments", 8), "segments"] == 4
    assert shown.loc[(large, "nested", 4), "passes"] == 2.75
    assert shown.loc[(fits, "segments", 1), "times none"] == "1.33 (1.33 to 1.34)"
    assert shown.loc[(fits, "segments", 1), "ms"] == "400 (399 to 401)"


def test_figures_are_drawn_the_same_twice_and_told():
    for name in ("through_steps", "kept", "checkpointing"):
        draw = getattr(figures, name)
        assert style.svg(draw(FULL)) == style.svg(draw(FULL))
        assert "No rows" not in getattr(figures, f"{name}_alt")(FULL)


# --- cases ---------------------------------------------------------------------------------------


def test_the_largest_context_comes_first_and_each_case_once():
    found = cases.passes(
        "nano", [8, 16, 8], attentions=["plain", "sdpa"], precisions=["fp32"], device="cpu"
    )
    assert [c["context_length"] for c in found] == [16] * 5 + [8] * 3
    kinds = [c["attention"] for c in found if c["mode"] == "step"]
    assert kinds == ["plain", "sdpa", "plain"], "the second kind at the largest context alone"
    assert len({cases.label(c) for c in found}) == len(found)
    assert [c["attention"] for c in found if c["mode"] == "forward, no_grad"] == ["plain"] * 2
    names = {measure.snapshot_path(c).name for c in found}
    assert len(names) == len(found) and all(" " not in name for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "huge"}, "unknown model size 'huge'"),
        ({"attention": "flash"}, "unknown attention 'flash'"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"context_length": 0}, "context_length must be a positive whole number, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_a_bad_setting_is_refused(change, message):
    good = {
        "model": "nano", "context_length": 8, "attention": "plain", "precision": "fp32",
        "device": "cpu",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        cases.setting(**(good | change))


def test_bad_plans_are_refused():
    shared = cases.setting("nano", 8, attention="plain", precision="fp32", device="cpu")
    with pytest.raises(ValueError, match="segments of 3 blocks, but the model has 2"):
        cases.checkpoints(shared, [3], [], [], 1)
    with pytest.raises(ValueError, match="repetitions must be at least 1, got 0"):
        cases.checkpoints(shared, [1], [], [], 0)


def test_the_fingerprint_is_of_all_that_measures():
    assert len(cases.code()) == 12 and cases.code() == cases.code()
