"""Study 08's tables, figures and sentences, from rows made by hand."""

import math
import shlex

import pandas as pd
import pytest
from card_rows import EMPTY, head

from fusedlib import paths
from fusedlib.bench.profiles import cases
from fusedlib.study.profiles import counted, figures, findings, selected, tables, typed
from fusedlib.study.running import config, parameters

TABLES = ("by_classes", "gemm_shares", "parts", "attention", "idle", "gaps", "overhead",
          "compiled", "traces")  # fmt: skip
FIGURES = ("shares", "gemm", "attention", "idle", "gaps")


def row(model="small", context=256, precision="fp32", scale=1.0, **fields):
    """A step of 10 ms of kernels, times `scale`; half of the forward pass are products."""
    case = cases.cases([model], [context], [precision], device="cuda", repetitions=10,
                       attention=fields.pop("attention", "plain"),
                       provider=fields.pop("provider", "eager"))[0]  # fmt: skip
    casts = 0.4 if precision == "bf16 autocast" else 0.1
    classes = [
        ["inference", "GEMM", 10, 0.8], ["inference", "element-wise", 20, 1.2],
        ["forward", "GEMM", 10, 1.0], ["forward", "element-wise", 20, 0.5],
        ["forward", "softmax", 2, 0.4], ["forward", "copy and cast", 5, casts],
        ["backward", "GEMM", 20, 4.0], ["backward", "element-wise", 40, 2.0 - casts],
        ["optimizer", "optimizer", 4, 2.1],
    ]  # fmt: skip
    classes = [[s, k, n, ms * scale] for s, k, n, ms in classes]
    sections = [
        [s, sum(n for t, _, n, _ in classes if t == s),
         sum(ms for t, _, _, ms in classes if t == s),
         sum(ms for t, _, _, ms in classes if t == s), 2.0]
        for s in ("inference", "forward", "backward", "optimizer")
    ]  # fmt: skip
    parts = [
        ["forward", "block/attention/scores", 2, 0.2],
        ["forward", "block/attention/values", 2, 0.2],
        ["forward", "block/attention/scale", 2, 0.1], ["forward", "block/attention/mask", 2, 0.1],
        ["forward", "block/attention/softmax", 2, 0.24], ["backward", "block/mlp", 9, 3.0],
        ["backward", "block/attention/scores", 2, 0.4],
        ["backward", "block/attention/values", 2, 0.4],
        ["backward", "block/attention/softmax", 2, 0.4],
        ["optimizer", "no part", 4, 2.1],
    ]  # fmt: skip
    total = 10.0 * scale
    figures = {
        "step_median_ms": 12.5 * scale, "profiled_ms": 15.0 * scale, "ranged_ms": 20.0 * scale,
        "on_device": True, "sections": sections, "classes": classes, "parts": parts,
        "kernels": [[s, k, f"{k} kernel", n, ms] for s, k, n, ms in classes[:-1]]
        + [["optimizer", "optimizer", "rest", 4, 2.1 * scale]],
        "kernels_ms": total, "busy_ms": total, "idle_ms": 5.0 * scale, "late_ms": 4.0 * scale,
        "gaps": 50, "late_gaps": 40, "gap_percentiles_us": [0.5 * 1.5**n for n in range(13)],
        "lead_us": 1500.0, "profiled_kernels": 101, "trace_mib": 3.0,
        "trace_file": "small.json.gz", "trace_kept_mib": 0.3, "trace_whole": context < 1024,
        "control_samples_ms": [12.75 * scale] * 3, "measured_at": "2026-11-21T22:00:02+00:00",
    }  # fmt: skip
    return head(cases.STUDY) | case | figures | fields


def frame(*rows):
    return pd.DataFrame(list(rows))


FULL = frame(
    *(row(m, c, p, k * c / 256) for k, m in enumerate(("small", "2.7b"), 1)
      for c in (128, 256, 1024) for p in ("fp32", "bf16 autocast")),
    row(provider="inductor", scale=0.8, parts=None, ranged_ms=None),
    row(attention="sdpa", scale=0.7),
    row("xl", 1024, status="oom", reason="out of memory. Tried to allocate", sections=None,
        classes=None, kernels=None, parts=None, trace_file=None),
)  # fmt: skip
CPU = frame(
    row("nano", 64, device_type="cpu", device_name="Test CPU", machine="cpu", profile="quick",
        own=True, on_device=False, busy_ms=None, idle_ms=None, gaps=None, profiled_ms=12.0)
)  # fmt: skip


def said(start, given=FULL):
    """The one finding that begins so."""
    [sentence] = [s for s in findings.findings(given) if s.startswith(start)]
    return sentence


def test_shares_are_of_the_sum_that_is_asked():
    small = selected.at_context(FULL).iloc[0]
    assert selected.time_ms(small, "step") == pytest.approx(10.0)
    assert selected.share(small, "inference", "GEMM") == pytest.approx(0.4)
    assert selected.share(small, "forward+backward", "GEMM") == pytest.approx(5.0 / 7.9)
    assert selected.share(small, "step", "GEMM") == pytest.approx(0.5)
    table = tables.gemm_shares(FULL)
    assert table.loc[("fp32", "small"), ("inference", "GEMM, %")] == "40.0"
    assert table.loc[("fp32", "small"), ("step", "GEMM, %")] == "50.0"
    assert table.loc[("fp32", "2.7b"), ("step", "ms")] == "20.0"


def test_classes_add_up_to_the_whole():
    table = tables.by_classes(FULL)
    ms = table[("step", "ms")].dropna()
    assert ms["all"] == "20.0"
    assert sum(float(v) for v in ms.drop("all")) == pytest.approx(20.0)
    assert table.loc["optimizer", ("forward", "ms")] != "0"


@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast"])
@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_the_top_kernels_and_the_rest_are_all_there_is(what, precision):
    table = tables.top(FULL, what, precision)
    row = selected.largest(FULL, precision)
    assert (row.model, row.precision) == ("2.7b", precision)
    assert sum(float(v) for v in table["ms"]) == pytest.approx(selected.time_ms(row, what))
    assert sum(float(v) for v in table["%"]) == pytest.approx(100, abs=0.5)
    called = sum(int(n.replace(",", "")) for n in table["calls"])
    assert called == selected.calls(row, what)
    assert table["kernel"].iloc[0] == "GEMM kernel"


def test_softmax_stands_beside_products_by_time_flops_and_bytes():
    table = tables.attention(FULL)
    line = table.loc[("fp32", "small", "256")]
    assert line[("forward, ms", "products")] == "0.400"
    assert line[("softmax / products", "time")] == "0.60"
    assert line[("softmax / products", "time, backward")] == "0.50"
    assert line[("softmax / products", "FLOPs")] == f"{5 / (4 * 64):.3f}"
    # 4 + 4 bytes a score against 4 + 4 and four operands of T·E.
    assert line[("softmax / products", "bytes")] == f"{8 / (8 + 4 * 4 * 64 / 256):.2f}"


def test_counted_bytes_by_hand():
    scores, operands = 16 * 16, 4 * 16 * 8
    assert counted.byte_ratio("bf16", 16, 8) == pytest.approx(
        (scores * 4) / (2 * (2 * scores + operands))
    )
    assert counted.byte_ratio("bf16 autocast", 16, 8) == pytest.approx(
        scores * 20 / (2 * (2 * scores + operands))
    )
    with pytest.raises(ValueError, match="no bytes counted for 'fp8'"):
        counted.byte_ratio("fp8", 16, 8)


def test_idle_time_is_told_of_the_unprofiled_step():
    assert tables.idle(FULL).loc[("fp32", "small"), "context 256, %"] == "20.0"
    gaps = tables.gaps(FULL).loc[("fp32", "small")]
    assert list(gaps["of the step, %"]) == ["33.3", "26.7"]
    assert gaps[("gap, µs", "median")] == f"{0.5 * 1.5**5:.2f}"
    assert list(gaps["host, ms"]) == ["6.00", "1.50"]
    [sentence] = [s for s in findings.findings(FULL) if "idle" in s and "unprofiled" in s]
    assert "20 %" in sentence and "12 of 12 cases" in sentence


def test_gaps_are_told_with_the_part_that_waits_for_a_launch():
    text = said("Under the profiler")
    assert f"shorter than {0.5 * 1.5**5:.2f} µs" in text
    assert "not launched yet are 27 % (small, fp32)" in text


def test_a_longer_step_at_a_shorter_context_is_told():
    assert not [s for s in findings.findings(FULL) if "longer step" in s]
    slow = FULL.copy()
    short = FULL["context_length"].eq(128) & FULL["model"].eq("small")
    slow.loc[short & FULL["precision"].eq("fp32"), "step_median_ms"] = 13.0
    text = said("In 1 of 8 pairs", slow)
    assert "small, fp32, 13.0 ms at context 128 and 12.5 ms at 256" in text


def test_the_command_is_folded_into_the_same_words():
    command = "nsys profile --trace=cuda,nvtx --output='a b' python -m fusedlib --model nano"
    lines = typed.folded(command).split("\n")
    assert [line.strip(" \\").split()[0] for line in lines] == [
        "nsys", "--trace=cuda,nvtx", "'--output=a", "python", "--model",
    ]  # fmt: skip
    assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")
    assert shlex.split(typed.folded(command).replace("\\\n", " ")) == shlex.split(command)


def test_watching_costs_what_the_rows_say():
    line = tables.overhead(FULL).loc[("fp32", "eager", "plain", "small")]
    assert list(line["over without"]) == ["1.20", "1.60", "1.02"]
    assert "1.20 times as long, with named ranges 1.60 times" in said("The profiler")
    early = row("medium", control_samples_ms=[25.0], measured_at="2026-11-21T22:00:01+00:00")
    text = said("Once the profiler", pd.concat([FULL, frame(early)], ignore_index=True))
    assert "2.00 times at the first case measured (size medium, context 256, fp32)" in text
    assert "and 1.02 times at the others" in text
    alone = said("Once the profiler", frame(early))
    assert alone.endswith("(size medium, context 256, fp32).")
    longer = FULL.assign(control_samples_ms=[[] for _ in range(len(FULL))])
    assert pd.isna(tables.overhead(longer)["over without", "after"]).all()


def test_the_headline_is_one_sentence_of_both_precisions():
    [first, *_] = findings.headline(FULL)
    assert "50 % (small) to 50 % (2.7b) in fp32 and 50 % (small) to 50 % (2.7b)" in first
    assert first.endswith("idle for up to 20 % of a step (small, fp32).")
    assert len(first.split()) <= 60
    gemm = said("Of the kernels' time matrix products take")
    assert "in fp32 40 %, 63 % and 50 % (small), 40 %, 63 % and 50 % (2.7b); in bf16" in gemm


def test_traces_are_counted_by_size():
    table = tables.traces(FULL)
    assert table.loc[("fp32", "small"), "files"] == 5
    assert table.loc[("fp32", "small"), "with operators"] == 4


def test_compiled_and_fused_stand_beside_eager_plain():
    table = tables.compiled(FULL)
    assert sorted(table["its kernels", "ms"]) == ["10.0", "7.00", "8.00"]
    assert tables.not_compiled(FULL) is None
    assert tables.not_compiled(CPU) == "No compiled model was measured."
    [sentence] = [s for s in findings.findings(FULL) if s.startswith("Compiled")]
    assert "a step 12.5 to 10.0 ms" in sentence and "10.0 to 8.00 ms" in sentence


def test_a_case_without_memory_is_told_not_dropped():
    assert selected.missing(FULL) == "Without figures: oom: size xl, context 1024, fp32."
    assert "make study ONLY=08_profile" in selected.missing(EMPTY)
    assert selected.missing(CPU) is None


def test_what_the_softmax_follows_is_computed():
    [sentence] = [s for s in findings.findings(FULL) if s.startswith("In plain attention")]
    assert sentence.count("nearer to the bytes") == 2, "in fp32 and under autocast"
    assert "0.60 in fp32" in sentence and "0.60 in bf16 autocast" in sentence
    few = FULL.copy()
    for parts in few["parts"].dropna():
        assert isinstance(parts, list)
    few["parts"] = [
        [[s, p, n, ms / 30 if p.endswith("softmax") else ms] for s, p, n, ms in parts]
        if isinstance(parts, list) else None
        for parts in few["parts"]
    ]  # fmt: skip
    [sentence] = [s for s in findings.findings(few) if s.startswith("In plain attention")]
    assert sentence.count("nearer to the FLOPs") == 2


def test_autocast_is_compared_with_fp32_of_the_same_size():
    [sentence] = [s for s in findings.findings(FULL) if s.startswith("From fp32")]
    assert "copies and casts 0.10 to 0.40 ms" in sentence and "2.7b:" in sentence


def test_a_cpu_speaks_of_operators():
    text = " ".join(findings.findings(CPU))
    assert "operators' time" in text and "in Python" in text and "idle for" not in text
    assert selected.unit(selected.at_context(CPU)) == "operators"
    assert math.isclose(selected.idle_share(selected.at_context(CPU).iloc[0]), 1 - 10 / 12)
    assert figures.idle(CPU).axes[0].get_ylabel() == "outside operators, % of a step"


@pytest.mark.parametrize("given", [EMPTY, CPU, FULL, FULL[FULL["status"] == "oom"]])
def test_whatever_is_missing_everything_still_speaks(given):
    for name in TABLES:
        assert len(getattr(tables, name)(given).columns), name
    for what in ("forward", "backward", "step"):
        assert len(tables.top(given, what).columns)
    for name in FIGURES:
        assert getattr(figures, name)(given).axes
        assert getattr(figures, f"{name}_alt")(given)
    assert all(findings.findings(given)) and all(findings.headline(given))


def test_without_rows_the_headline_says_how_to_get_them():
    assert findings.headline(EMPTY) == [findings.MISSING]


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_the_study_asks_for_cases_that_there_are(profile):
    study = next(s for s in config.load().studies if s.name == cases.STUDY)
    notebook = paths.NOTEBOOKS / f"{study.name}.ipynb"
    defaults = {n: p.default for n, p in parameters.read(notebook).items()}
    given = defaults | dict(study.parameters(profile))
    for name in ("fp32", "autocast", "half", "compiled", "fused"):
        cases.cases(given[name], given["contexts"], ["fp32"], device="cpu", repetitions=1)
    if profile == "full":
        assert given["fp32"] == given["autocast"] == ["small", "medium", "large", "xl", "2.7b"]
        assert set(given["spanning"]) <= set(given["fp32"])
        assert sorted(given["contexts"] + given["more_contexts"]) == [128, 256, 512, 1024]
