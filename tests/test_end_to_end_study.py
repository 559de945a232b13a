"""Study 06's tables, figures and sentences, from rows made by hand."""

import dataclasses

import pandas as pd
import pytest
from card_rows import EMPTY, head

from fusedlib import paths
from fusedlib.bench.end_to_end import cases, running
from fusedlib.models import flops
from fusedlib.models.transformer import config
from fusedlib.study import published
from fusedlib.study.end_to_end import beside, figures, findings, peaks, selected, tables
from fusedlib.study.running import config as studies
from fusedlib.study.running import parameters

SETTING = cases.Setting("cuda")
MODELS = ["small", "2.7b"]
AUTOCAST = {"small": 1.5, "2.7b": 0.25}


def row(case, status="ok", reason=None, **figures):
    return (
        head(cases.STUDY) | {"device_name": "NVIDIA H200"} | case
        | {"status": status, "reason": reason} | figures
    )  # fmt: skip


def step(case, forward=10.0, backward=30.0, optimizer=5.0, **figures):
    samples = {
        "forward": [forward] * 3, "backward": [backward] * 3, "both": [forward + backward] * 3,
        "optimizer": [optimizer] * 3, "step": [forward + backward + optimizer] * 3,
    }  # fmt: skip
    sizes = {"peak_mib": 2048.0, "weights_mib": 512.0, "state_mib": 1024.0}
    return row(case, **running.figures(case, samples), **sizes, **figures)


def speedup(value):
    """The ratio of both passes with an interval of 1 % to each side, and of the step without."""
    both = {
        f"both_speedup{end}": value * k for end, k in (("", 1), ("_low", 0.99), ("_high", 1.01))
    }
    return both | {f"step_speedup{end}": value for end in ("", "_low", "_high")}


def rows():
    for case in cases.steps(SETTING, MODELS, [256, 1024], list(cases.PRECISIONS)):
        large = case["model"] == "2.7b"
        if large and case["context_length"] == 1024 and case["precision"] == "fp32":
            yield row(case, "oom", "CUDA out of memory")
            continue
        scale = 10.0 if large else 1.0
        if case["precision"] != "fp32":
            scale *= AUTOCAST[case["model"]]
        yield step(case, 10 * scale, 25 * scale, inference_median_ms=9.0)
    for case in cases.steps(SETTING, MODELS, [256], ["fp32"], mode="compiled"):
        large = case["model"] == "2.7b"
        parts = (100.0, 260.0) if large else (5.0, 15.0)
        yield step(
            case, *parts, compile_s=30.0, compile_steps=1, graphs=1, recompiled=int(large),
        )  # fmt: skip
    for case in cases.steps(SETTING, ["small"], [1024], ["fp32"], mode="compiled blocks"):
        yield step(case, 2.0, 3.0, compile_s=5.0, compile_steps=1, graphs=1, recompiled=0)
    for case in cases.steps(SETTING, MODELS, [1024], ["fp32"], attention="sdpa"):
        yield step(case, 5.0, 12.5)
    for case in cases.mlp_cases(SETTING, ["small"], [256], ["bf16"], ["eager", "liger", "fused"]):
        if case["mlp"] == "liger":
            yield row(case, "wrong", "logits: norm error", gradients_error=0.5)
            continue
        yield step(case, gradients_error=1e-3, **speedup(1.1))
    for case in cases.optimizer_cases(SETTING, ["small"]):
        yield row(
            case, optimizer_median_ms=5.0, optimizer_median_low_ms=4.0,
            optimizer_median_high_ms=6.0, least_bytes=7e9, state_mib=1024.0, weights_mib=512.0,
            transient_mib=0.0 if case["optimizer"] == "fused" else 512.0,
        )  # fmt: skip
    for case in cases.profile_cases(SETTING, ["small"], 256, ["fp32", "bf16 autocast"]):
        cast = case["precision"] != "fp32"
        yield step(
            case, kernels=1000 + 500 * cast, operators=3000, busy_ms=20.0, casts=400 * cast,
            casts_ms=5.0 * cast,
        )  # fmt: skip
    for case in cases.steps(dataclasses.replace(SETTING, device="mps"), ["small"], [256], ["fp32"]):
        yield row(case, "unavailable", "this machine has no mps device")
    shared = {"experiment": "ceiling", "device": "cuda", "size": 8192}
    for dtype, rate in (("float32", 50e12), ("bfloat16", 700e12)):
        yield row(shared | {"ceiling": "gemm", "dtype": dtype, "precision": "highest"},
                  flops_per_s=rate)  # fmt: skip


FULL = pd.DataFrame(list(rows()))


def sentence(start, frame=FULL):
    [found] = [s for s in findings.findings(frame) if s.startswith(start)]
    return found


def test_published_and_measured_steps_share_one_formula():
    table = beside.table(FULL, "cuda", "fp32", "eager")
    told = table.loc[("small", "published: RTX PRO 6000 WK")]
    shape = config("small", attention="plain")
    rate = flops.count(shape, 4, 256).model / 24.2399e-3
    assert told["forward, ms"] == "10.12 ± 0.044" and told["TFLOP/s"] == f"{rate / 1e12:.1f}"
    assert told["of peak"] == f"{100 * rate / peaks.peak('RTX PRO 6000 WK', 'fp32'):.0f} %"
    own = table.loc[("small", "NVIDIA H200")]
    assert own["forward+backward, ms"] == "35.00 ± 0"
    share = flops.count(shape, 4, 256).model / 35e-3 / 67e12
    assert own["of peak"] == f"{100 * share:.0f} %"


def test_all_published_tables_have_a_counterpart():
    rows = published.load("end_to_end")
    main = rows[rows["source"].eq("001") & rows["table"].isin(beside.MAIN)]
    told = [
        one for device in ("cuda", "cpu", "mps") for precision in cases.PRECISIONS
        for mode in ("eager", "compiled") for one in beside.told(device, precision, mode)
    ]  # fmt: skip
    assert 3 * len(told) == len(main)


def test_a_status_stands_in_place_of_a_time():
    assert beside.table(FULL, "mps", "fp32", "eager").loc[("small", "NVIDIA H200")].iloc[0] == (
        "unavailable"
    )
    grid = tables.grid(FULL, "fp32")
    assert grid.loc[("2.7b", "1024", "eager")].iloc[0] == "oom"
    assert tables.mlps(FULL).loc[("small·256", "bf16", "liger")].iloc[0] == "wrong"
    text = selected.lacking(FULL, "step")
    assert "2.7b 1024 fp32 eager on cuda: oom;" in text
    assert "on mps: unavailable" in text


def test_utilisation_is_of_the_formats_own_peak():
    grid = tables.grid(FULL, "bf16")
    line = grid.loc[("small", "256", "eager")]
    rate = flops.count(config("small", attention="plain"), 4, 256).model / 52.5e-3
    assert line["MFU"] == f"{100 * rate / 989.5e12:.1f} %"
    own = tables.rates(FULL).loc["small", "bf16"]
    assert dict(own) == {"MFU": line["MFU"], "of GEMM": f"{100 * rate / 700e12:.1f} %"}
    other = FULL.assign(device_name="Test Card")
    assert tables.grid(other, "bf16").loc[("small", "256", "eager"), "MFU"] == "—"


def test_compilation_is_repaid_by_what_a_step_saves():
    table = tables.compiling(FULL)
    line = table.loc[("small", "fp32", "whole")]
    assert line["repaid, steps"] == "2,000", "30 s over 15 ms"
    assert line["saved"] == "38 %" and line["again"] == "no"
    slow = table.loc[("2.7b", "fp32", "whole")]
    assert slow["repaid, steps"] == "never" and slow["again"] == "1×"
    text = sentence("On NVIDIA H200 at context 256 a compiled step")
    assert "62 % (small, compiled) to 103 % (2.7b, compiled) in fp32" in text
    assert "after 2,000 steps (small, fp32, compiled)" in text
    assert "never in 1 of 2 cases" in text
    again = sentence("Of 3 compiled cases")
    assert "in 2.7b, fp32, compiled; all compilation was in their first step." in again
    assert tables.grid(FULL, "fp32").loc[("2.7b", "256", "whole"), "compile, s"] == "30.0 †"
    assert tables.by_context(FULL).loc["small", ("fp32", "1024")] == "25 %", "10 of 40 ms"


def test_autocast_says_where_it_is_slower_and_why():
    text = sentence("On NVIDIA H200 bf16 autocast")
    assert "is 1.50 at small and 0.250 at 2.7b: slower at small." in text
    assert text.endswith("beside the profile it is 1.00 at small.")
    why = sentence("From fp32 to autocast")
    assert "small 3,000 to 3,000 operators, 1,000 to 1,500 kernels, their time 20.0 to 20.0" in why
    assert "(25 % of it 400 casts), the card busy 50 % to 50 % of the time" in why
    assert "not by its kernels" not in why, "no slower than fp32 beside the profile"
    assert tables.casts(FULL).loc[("small", "bf16 autocast"), "busy"] == "50 %"


@pytest.mark.parametrize(("busy", "told"), [(10.0, True), (20.0, False), (59.0, False)])
def test_launches_are_blamed_only_where_the_kernels_take_less_time(busy, told):
    cast = FULL["experiment"].eq("profile") & FULL["precision"].eq("bf16 autocast")
    slow = FULL.assign(
        both_median_ms=FULL["both_median_ms"].mask(cast, 60.0),
        busy_ms=FULL["busy_ms"].mask(cast, busy),
    )
    why = sentence("From fp32 to autocast", slow)
    assert ("autocast is slower at small not by its kernels" in why) == told


def test_backward_stands_beside_two():
    assert tables.ratios(FULL).loc["small", ("fp32", "eager")] == "2.50"
    text = sentence("By FLOPs a backward pass is 2 forwards")
    assert "2.50 at small and 2.50 at 2.7b" in text and "1.40 at small" in text
    assert "block by block" not in text, "compiled at another context only"


def test_published_backward_times_are_read_as_differences():
    text = sentence("Of 42 published backward times")
    assert "4 are smaller than their own standard deviation and 1 below zero" in text
    text = sentence("Published, medium compiled")
    assert "one step of 261 ms among 10, the others at 10.6 ms" in text
    assert "takes 25.3 ms, not 0.213 ms" in text


def test_cards_are_compared_by_their_peaks():
    text = sentence("Share of the card's peak")
    assert "on NVIDIA H200 and 76 % on RTX PRO 6000 WK (2.7b)" in text
    roofs = tables.roofs(FULL)
    assert roofs.loc["NVIDIA H200", "fp32, GEMM"] == "50.0"
    assert roofs.loc["RTX PRO 6000 WK", "fp32, GEMM"] == "—"
    assert peaks.peak("Test Card", "fp32") is None


def test_a_provider_that_was_rejected_is_told():
    text = sentence("Rejected before the clock")
    assert text.endswith("liger at small, context 256, in bf16 (logits: norm error).")


def with_fused(*values):
    """FULL and fp32 MLPs of 2.7b·256: eager's, and fused at these ratios; its forward is faster."""
    extra = []
    for mlp, value in zip(["eager", *["fused"] * len(values)], [1.0, *values], strict=True):
        [case] = cases.mlp_cases(SETTING, ["2.7b"], [256], ["fp32"], [mlp])
        parts = (20.0, 40.0) if mlp == "eager" else (10.0, 80.0)
        extra.append(step(case, *parts, held_mib=4096.0, **speedup(value)))
    return pd.concat([FULL, pd.DataFrame(extra)], ignore_index=True)


def test_where_an_mlp_is_slower_is_said_with_its_part():
    slow = with_fused(0.7)
    text = sentence("Slower than with eager's MLP", slow)
    assert "fused at 2.7b·256, fp32 0.700: its forward 2.00, its backward 0.500" in text
    assert "small" not in text
    assert "fused 1 and 1 of 2" in sentence("Cases in which", slow)
    second = findings.headline(slow)[1]
    assert "1.10 at best (small·256, bf16) and 0.700 at worst (2.7b·256, fp32: its" in second
    assert "in fp32 at context 256 eager 4.00 GiB and fused 4.00 GiB" in sentence("Over", slow)


def test_an_interval_that_holds_one_is_neither_faster_nor_slower():
    even = with_fused(0.995)
    assert "fused 1 and 0 of 2" in sentence("Cases in which", even)
    assert not [s for s in findings.findings(even) if s.startswith("Slower than")]


def test_the_same_step_measured_twice_is_told_with_both_times():
    text = sentence("Eager's forward and backward at context 256")
    # 35 in the grid and 40 beside the profile, 52.5 and 40 under autocast, 52.5 and 40 in bf16.
    assert "up to 2 of these experiments" in text and "small in fp32 35.0 to 40.0 ms" in text
    assert "small in bf16 40.0 to 52.5 ms" in text and "2.7b" not in text
    once = FULL[~FULL["experiment"].isin(["profile", "mlp"])]
    assert not [s for s in findings.findings(once) if s.startswith("Eager's forward and")]


def test_the_headline_is_the_study_in_one_sentence():
    first = findings.headline(FULL)[0]
    start = "On NVIDIA H200 (context 256, size small to 2.7b), eager forward and backward reach "
    assert first.startswith(start) and len(first.split()) <= 60
    assert "autocast takes 1.50 to 0.250 times fp32's time" in first
    assert first.endswith("a compiled step takes 62 % to 103 % of eager's.")
    one = findings.headline(FULL[FULL["model"] == "small"])[0]
    assert "size small)" in one and "autocast takes 1.50 times fp32's time" in one


def test_the_optimizer_has_its_share_and_its_memory():
    table = tables.optimizers(FULL)
    assert table.loc[("small", "fused"), "of a step"] == "12 %", "5 of 40 ms"
    assert table.loc[("small", "foreach"), "GB/s at least"] == "1,400"
    assert table.loc[("small", "foreach"), "of the peak"] == "50 %", "1 of 2 GiB"
    text = sentence("AdamW on NVIDIA H200 at small")
    assert "its state takes 1.00 GiB, 2.0 times the weights and 50 % of that step's peak" in text
    assert "foreach 0.500 GiB" in text


def test_attention_is_compared_in_the_same_step():
    assert tables.attention(FULL).loc[("small", "1024", "fp32"), "plain / sdpa"] == "2.00"
    assert "2.00 (small, fp32)" in sentence("Plain attention's forward and backward")
    line = tables.attention(FULL).loc[("2.7b", "1024", "fp32")]
    assert line["plain, ms"] == "oom" and line["plain / sdpa"] == "—"


def test_the_published_context_is_looked_at_where_it_is():
    assert selected.context(FULL) == 256
    quick = FULL[FULL["context_length"] == 1024]
    assert selected.context(quick) == 1024
    where = beside.table(quick, "cuda", "fp32", "eager").index.get_level_values("on")
    assert "NVIDIA H200, context 1024" in where


def test_figures_draw_what_there_is():
    assert len(figures.parts(FULL).axes) == len(cases.PRECISIONS)
    eager = figures.ratio(FULL).axes[1]
    assert {line.get_label() for line in eager.get_lines()} >= set(cases.PRECISIONS)
    labels = {line.get_label() for line in figures.shares(FULL).axes[0].get_lines()}
    assert labels == {"published, eager", "published, compiled", "measured, eager",
                      "measured, compiled"}  # fmt: skip
    assert "small·256, bf16, fused: 1.10" in figures.mlps_alt(FULL)
    axis = figures.mlps(FULL).axes[0].xaxis
    assert axis.get_major_formatter()(1.0) == "1", "not 1,000"


CPU = FULL[FULL["experiment"] == "step"].assign(
    device="cpu", device_type="cpu", device_name="Test CPU", peak_mib=None
)


@pytest.mark.parametrize(
    "frame",
    [EMPTY, CPU, FULL[FULL["status"] != "ok"], FULL[FULL["experiment"] == "optimizer"]],
    ids=["empty", "cpu", "nothing ok", "optimizer"],
)
def test_whatever_is_missing_everything_still_speaks(frame):
    for name in (
        "roofs", "rates", "ratios", "casts", "compiling", "by_context", "attention", "mlps",
        "optimizers",
    ):  # fmt: skip
        assert len(getattr(tables, name)(frame).columns)
    for precision in cases.PRECISIONS:
        assert len(tables.grid(frame, precision).columns)
    for device in ("cuda", "cpu", "mps"):
        assert len(beside.table(frame, device, "fp32", "compiled"))
    for name in ("parts", "ratio", "shares", "mlps"):
        assert getattr(figures, name)(frame).axes
        assert getattr(figures, f"{name}_alt")(frame)
    assert all(findings.findings(frame)) and all(findings.headline(frame))


def test_without_rows_the_headline_says_how_to_get_them():
    assert findings.headline(EMPTY) == [findings.MISSING]
    assert "make study ONLY=06_end_to_end" in selected.lacking(EMPTY, "step")


def test_full_asks_for_the_published_sizes_and_more():
    study = next(s for s in studies.load().studies if s.name == cases.STUDY)
    notebook = paths.NOTEBOOKS / f"{study.name}.ipynb"
    defaults = {name: p.default for name, p in parameters.read(notebook).items()}
    given = defaults | dict(study.parameters("full"))
    assert sorted(given["contexts"]) == [128, 256, 512, 1024] and given["contexts"][0] == 256
    assert set(given["models"]) == set(published.load("end_to_end")["model"])
    assert given["precisions"] == list(cases.PRECISIONS)
    assert set(given["blocks"]) == set(given["models"]), "a counterpart for every compiled table"
