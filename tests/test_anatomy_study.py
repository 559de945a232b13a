"""Study 05's tables, figures and sentences, from rows made by hand."""

import re

import pandas as pd
import pytest
from card_rows import EMPTY, head

from fusedlib.bench import anatomy
from fusedlib.study.anatomy import figures, findings, selected, tables

FACTORS = {
    "redone": 2.7, "reduction": 0.8, "gradients": 0.7, "tf32": 0.5, "precision": 0.45,
    "launch": 0.4, "kernels": 1.8, "fusion": 1.03,
}  # fmt: skip


def row(**fields):
    return head(anatomy.STUDY) | {"missing_gradients": []} | fields


def step_rows(factors=FACTORS):
    cases = anatomy.step_cases(
        [64, 1024], [4096], ["forward", "forward+backward"], device="cuda", repetitions=3
    )
    for case in cases:
        factor = factors[case["step"]]
        missing = case["step"] == "reduction" and case["direction"] != "forward"
        wrong = case["step"] == "redone" or missing
        figures = {
            "ms": 0.1, "liger_ms": 0.1 * factor, "ratio": factor, "ratio_low": 0.98 * factor,
            "ratio_high": 1.02 * factor,
        }  # fmt: skip
        prefix = "published_protocol_" if wrong else ""
        yield row(
            **case, **{prefix + k: v for k, v in figures.items()},
            y_error=1.0 if case["step"] == "redone" else 1e-6,
        ) | {"status": "wrong" if wrong else "ok"}  # fmt: skip


def correctness_rows():
    for case in anatomy.correctness_cases([64, 128], device="cpu", gradients_width=128):
        name, block = case["implementation"], case["block"]
        if name in ("published", "liger", "fused", "whole sum"):
            continue
        far = name != "eager" and case["hidden_size"] > block
        error = 1.0 if far else 1e-7
        missing = ["w_gate_up"] if name == "published, emulated" else []
        errors = dict.fromkeys(["y_error", "d_x_error", "d_w_down_error"], error)
        if not missing:
            errors["d_w_gate_up_error"] = error
        status = "ok" if name == "eager" else "wrong"
        yield row(**case, **errors) | {"missing_gradients": missing, "status": status}


def memory_rows():
    for case in anatomy.memory_cases(64, [4096], device="cuda"):
        held = {"published": 4}.get(case["implementation"], 6)
        yield row(**case, peak_mib=64.0 * held, weights_mib=192.0, gradients_mib=64.0 * (held - 3))


FULL = pd.DataFrame([*step_rows(), *correctness_rows(), *memory_rows()])


def test_the_waterfall_keeps_its_order_and_labels_what_is_wrong():
    links = selected.chain(FULL, 64, 4096, "forward+backward")
    assert links["step"].tolist() == list(selected.STEPS)
    assert links["wrong"].tolist() == [True, True, True, *[False] * 5]
    forward = selected.chain(FULL, 64, 4096, "forward")
    assert "gradients" not in set(forward["step"])
    assert forward.set_index("step").loc["redone", "factor"] == FACTORS["redone"]


def test_tables_say_wrong_beside_every_factor_of_a_wrong_row():
    table = tables.waterfall(FULL)
    wrong = table.loc[selected.STEPS["redone"]]
    assert len(wrong) == 4 and wrong.str.endswith("(wrong)").all()
    assert not table.loc[selected.STEPS["gradients"]].str.contains("wrong").any()
    sweep = tables.sweep(FULL)
    assert sweep.loc[4096, ("redone (wrong)", "error of y")] == "1.000"


def test_the_claims_are_the_published_times_and_ratios():
    assert selected.claim(64, 4096, "forward") == pytest.approx(0.99 / 0.35)
    assert selected.claim(1024, 4096, "forward+backward") == pytest.approx(28.86 / 9.22)
    assert selected.claim(64, 16384, "forward") == 2.94
    assert selected.claim(64, 16384, "forward+backward") is None


def test_a_computed_and_an_emulated_error_stand_in_one_line():
    table = tables.correctness(FULL)
    assert list(table.columns) == [("error of y", "emulated"), ("error of dx", "emulated")]
    assert table.loc[("random", 64, 128), ("error of y", "emulated")] == "1.00"
    triton = FULL.assign(implementation=FULL["implementation"].replace(
        {"published, emulated": "published"}))  # fmt: skip
    both = tables.correctness(pd.concat([FULL, triton[triton["hidden_size"] == 128]]))
    line = both.loc[("random", 16, 64)]
    assert line[("error of y", "Triton")] == "—" and line[("error of y", "emulated")] == "1.00"


def test_gradients_and_counted_matrices_come_from_what_arrives():
    table = tables.gradients(FULL)
    weights = tables.GRADIENTS["d_w_gate_up"]
    assert table.loc["published (emulated)", weights] == "none arrives"
    assert table.loc["eager PyTorch", "verdict"] == "right"
    assert tables.counted_matrices(FULL) == {"published fused": 4, "Liger": 6}
    memory = tables.memory(FULL)
    assert memory.loc[4096, ("measured Liger /", "published (wrong)")] == "1.50"
    assert memory.loc[4096, ("counted", "Liger")] == "384.0"


def test_a_layer_of_the_published_stack_by_hand():
    # 2 weights and 2 gradients of 16 MiB and 3 activations of 2; 2 weights and 1 activation.
    assert tables.deep_stack() == pytest.approx({"liger": 70.0, "fused": 34.0})


def test_implied_rates_by_hand():
    moved, speed = tables.implied(1, 10, 1.0)
    assert moved == pytest.approx(4 * (300 + 20) * 1e3) and speed == pytest.approx(600e3)


def test_the_published_logs_compare_digit_by_digit():
    same = tables.mnist()["figures equal to Liger's"]
    assert same["Fused with weight-grad"] == "16 of 16"
    assert same["Fused no weight-grad"] == "0 of 16"


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1.3, "faster than Liger in 4"),
        (0.7, "slower than Liger in 4"),
        (1.0, "within the interval"),
    ],
)
def test_the_sentence_on_fusion_reads_well_whoever_wins(factor, said):
    frame = pd.DataFrame(list(step_rows(FACTORS | {"fusion": factor})))
    [sentence] = [s for s in findings.headline(frame) if s.startswith("What fusion itself")]
    assert said in sentence
    others = {"faster", "slower"} - set(said.split())
    assert not [w for w in others if f"{w} than" in sentence]


def test_every_item_of_the_checklist_is_answered_from_rows():
    items = findings.checklist(FULL)
    assert len(items) >= 7 and all(re.search(r"\d", item) for item in items)
    assert not [i for i in items if "do not answer" in i]
    precision = next(i for i in items if "precision" in i)
    assert "0.700 to 0.450 at 64 × 4096, forward + backward" in precision


def test_findings_follow_the_rows():
    text = " ".join([findings.answer(FULL), *findings.findings(FULL)])
    told = (
        "at 64 × 4096, forward, on Test Card: claimed 2.83; redone 2.70, with a wrong result; that "
        "kernel put right 0.400 (most goes with the whole sum, 2.70 to 0.800)"
    )
    assert told in text
    assert "with fusedlib's kernels 1.80 in fp32 and 1.03 in bf16." in text
    assert "tends to 6/4 = 1.50" in text and "1.00 once all gradients arrive" in text


@pytest.mark.parametrize("frame", [EMPTY, pd.DataFrame(list(correctness_rows()))])
def test_without_steps_everything_still_speaks(frame):
    assert tables.waterfall(frame).iloc[1:].eq("—").all().all()
    assert all(findings.findings(frame)) and all(findings.checklist(frame))
    assert findings.headline(frame)
    for name in ("sweep", "correctness", "gradients", "memory"):
        assert len(getattr(tables, name)(frame).columns)
    for name in ("waterfall", "errors"):
        assert getattr(figures, name)(frame).axes
        assert getattr(figures, f"{name}_alt")(frame)


def test_the_waterfall_draws_a_bar_a_step_and_labels_the_wrong_ones():
    fig = figures.waterfall(FULL)
    texts = [t.get_text() for ax in fig.axes for t in ax.texts]
    assert len(texts) == 2 * (7 + 8)
    assert sum(t.endswith("wrong") for t in texts) == 2 * (2 + 3)
    assert "2.70 (wrong)" in figures.waterfall_alt(FULL)
