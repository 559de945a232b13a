"""Study 03 from rows: pairs, shares, the roof, tables, figures, sentences, its notebook's cases."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from card_rows import EMPTY, head

from fusedlib import paths
from fusedlib.bench import kernel_sweep
from fusedlib.bench.problems import SwiGLUProblem
from fusedlib.study import published, style
from fusedlib.study.kernels import figures, findings, tables
from fusedlib.study.kernels import rows as select

# Times over the plain products' by provider: what a synthetic card makes of each rival.
TIMES = {"eager": 1.10, "inductor": 1.06, "liger": 1.05, "quack": 1.03, "fused": 1.0, "torch.mm": 1}
ROOF = {"float32": 50e12, "bfloat16": 700e12}
BANDWIDTH = 4e12
HOST_MS = {"eager": 0.2, "inductor": 0.3, "liger": 0.4, "quack": 0.4, "fused": 0.1, "torch.mm": 0}
HEAD = head(kernel_sweep.STUDY)


def ceiling_rows():
    yield HEAD | {"experiment": "ceiling", "ceiling": "copy", "size": 1, "bytes_per_s": BANDWIDTH}
    for dtype, rate in ROOF.items():
        precision = "highest" if dtype == "float32" else None
        yield HEAD | {
            "experiment": "ceiling", "ceiling": "gemm", "dtype": dtype, "precision": precision,
            "size": 8192, "flops_per_s": rate,
        }  # fmt: skip


def problem_rows(problem, launch, names=tuple(TIMES), factor=None):
    random = np.random.default_rng(abs(hash((problem, launch))) % 2**32)
    seconds = max(problem.flops / ROOF[problem.dtype], problem.compulsory_bytes / BANDWIDTH)
    shared = random.normal(1, 0.02, 15)
    for name in names:
        times = TIMES | (factor or {})
        ms = 1e3 * seconds / 0.9 * times[name] + (HOST_MS[name] if launch == "python" else 0)
        samples = (ms * shared * random.normal(1, 0.004, 15)).tolist()
        yield HEAD | problem.fields() | {
            "experiment": "products" if name == "torch.mm" else "swiglu", "provider": name,
            "launch": launch, "samples_ms": samples, "median_ms": float(np.median(samples)),
            "session": f"{problem} {launch}", "flops": problem.flops, "version": f"{name} 1.0",
            "compulsory_bytes": problem.compulsory_bytes, "settings": None, "y_error": 1e-3,
        }  # fmt: skip


def full_frame(factor=None):
    problems = [
        *kernel_sweep.square([64], [512, 2048, 8192, 32768], "float32"),
        *kernel_sweep.square([64], [512, 2048, 8192, 32768], "bfloat16"),
        *kernel_sweep.square([64, 256, 1024], [4096], "float32", frozen=True),
        *kernel_sweep.shaped(["8192·4096·14336", "4096·8192·28672"], "bfloat16"),
    ]
    rows = list(ceiling_rows())
    for problem in problems:
        for launch in ("python", "graph"):
            if launch == "python" or problem.direction != "backward":
                rows += problem_rows(problem, launch, factor=factor)
    absent = {"provider": "absent", "status": "unavailable", "reason": "not there"}
    rows.append(rows[-1] | {"experiment": "swiglu"} | absent)
    return pd.DataFrame(rows)


FULL = full_frame()
CPU = pd.DataFrame(
    [
        *[r | {"device_type": "cpu", "device": "cpu"} for r in ceiling_rows()],
        *problem_rows(SwiGLUProblem(16, 64, 64, "float32"), "python", ("eager", "torch.mm")),
        HEAD | SwiGLUProblem(16, 64, 64, "float32").fields()
        | {"experiment": "swiglu", "provider": "fused", "launch": "python",
           "status": "unavailable", "reason": "needs a CUDA GPU, the inputs are on cpu"},
    ]
)  # fmt: skip


def test_a_ratio_is_the_median_of_the_pairs_of_one_session():
    rows = select.compared(FULL)
    one = rows[(rows["session"] == rows["session"].iloc[0])].set_index("provider")
    found = select.versus(rows, "liger").set_index(["session", "provider"])
    row = found.loc[(one["session"].iloc[0], "fused")]
    pairs = np.divide(one.loc["liger", "samples_ms"], one.loc["fused", "samples_ms"])
    assert row["ratio"] == pytest.approx(np.median(pairs))
    assert row["low"] <= row["ratio"] <= row["high"]
    assert "liger" not in set(found.reset_index()["provider"])


def test_rows_of_different_sessions_are_never_paired():
    apart = FULL.copy()
    apart.loc[apart["provider"] == "liger", "session"] = "another day"
    assert select.versus(select.compared(apart), "liger").empty


def test_the_roof_is_the_slower_of_arithmetic_and_traffic_by_hand():
    rows = select.compared(FULL)
    row = rows[(rows["shape"] == "8192·4096·14336") & (rows["way"] == "forward")].iloc[0]
    assert row["bound"] == "compute"
    assert row["roof_ms"] == pytest.approx(1e3 * 3 * 2 * 8192 * 4096 * 14336 / 700e12)
    few = rows[(rows["shape"] == "64·8192·8192") & (rows["format"] == "bf16")]
    few = few[few["way"] == "forward"].iloc[0]
    assert few["bound"] == "bandwidth"
    assert few["roof_ms"] == pytest.approx(1e3 * 2 * (3 * 8192**2 + 2 * 64 * 8192) / 4e12)


def test_sweep_grid_and_shapes_take_their_problems():
    rows = select.compared(FULL)
    assert set(select.sweep(rows)["tokens"]) == {64}
    assert set(select.grid(rows)["shape"]) == {f"{t}·4096·4096" for t in (64, 256, 1024)}
    assert set(select.shapes(rows)["shape"]) == {"8192·4096·14336", "4096·8192·28672"}
    assert "frozen" in set(select.grid(rows)["way"])


def test_published_factors_are_those_of_the_tables():
    told = tables.published_factors()
    stated = published.load("swiglu_ratios").query("quantity == 'forward time' and d_model == 512")
    assert told[("forward", 64, 512)] == stated["liger_over_fused"].item()
    # 8.71 / 3.12 and 28.86 / 9.22 are published as times, not as factors.
    assert told[("forward", 1024, 4096)] == pytest.approx(8.71 / 3.12)
    assert told[("frozen", 1024, 4096)] == pytest.approx(28.86 / 9.22)
    assert told[("backward", 1024, 4096)] == pytest.approx(28.76 / 13.51)


@pytest.mark.parametrize("frame", [FULL, CPU, EMPTY], ids=["full", "cpu", "empty"])
def test_every_table_figure_and_sentence_stands_on_any_rows(frame):
    for part in (select.sweep, select.grid, select.shapes):
        for launch in select.LAUNCHES:
            assert tables.times_table(frame, part, launch, ["fp32", "bf16"]) is not None
            assert tables.fusion_table(frame, part, launch) is not None
    assert len(tables.ceilings_table(frame)) == (0 if frame is EMPTY else 2)
    assert tables.rivals_table(frame).shape[1] == {id(FULL): 6, id(CPU): 5}.get(id(frame), 1)
    assert len(tables.published_table(frame)) == len(tables.published_factors())
    for draw in (
        figures.speedup_by_width, figures.published_and_measured, figures.roofline,
        figures.over_products,
    ):  # fmt: skip
        assert style.svg(draw(frame)).startswith("<?xml")
    for text in (
        figures.ratios_alt(frame, "eager"), figures.ratios_alt(frame, "liger", "fused"),
        figures.roofline_alt(frame), figures.over_products_alt(frame),
    ):  # fmt: skip
        assert text.endswith(".")
    answer = [findings.answer(frame)]
    for sentences in (findings.findings(frame), findings.headline(frame), answer):
        assert sentences and all(s.endswith((".", ".)")) and "nan" not in s for s in sentences)


def test_sentences_tell_faster_from_slower():
    better, worse = findings.answer(FULL), findings.answer(full_frame({"fused": 1.2}))
    part = "bf16, shapes of language models (8 of 8 cases, down to 0.8"
    assert part not in better and part in worse
    assert "(bf16, shapes of language models, from Python)" in better
    assert better.startswith(findings.headline(FULL)[0])


def test_a_rival_without_a_time_says_why():
    text = findings.answer(CPU)
    assert "fused and Liger were not timed side by side" in text
    assert "needs a CUDA GPU" in text
    cells = tables.times_table(CPU, select.sweep, "python", ["fp32"])
    assert list(cells.columns) == ["eager", "torch.mm"], "who has no time has no column"
    told = tables.rivals_table(FULL)
    assert any("unavailable: not there" in cell for cell in told[("", "without a time")])
    assert set(told[("largest error of y", "bf16")].drop("absent", level="rival")) == {"0.0010"}


def test_protocol_is_read_from_the_published_memory():
    assert "4.03 bytes" in findings.protocol()


def test_the_notebooks_full_profile_names_the_published_sizes():
    import tomllib

    config = tomllib.loads((paths.NOTEBOOKS / "study.toml").read_text(encoding="utf-8"))
    full = next(s for s in config["study"] if s["name"] == "03_kernels")["full"]
    ratios = published.load("swiglu_ratios").query("quantity == 'forward time'")
    assert full["sweep_widths"] == ratios["d_model"].tolist()
    assert {full["sweep_tokens"]} == set(ratios["batch_size"])
    times = published.load("swiglu_times")
    assert set(full["grid_tokens"]) == set(times["batch_size"])
    assert set(full["grid_widths"]) == set(times["d_model"])
    assert set(full["searched"]) <= set(full["shapes"])


def test_the_notebook_measures_before_it_shows():
    cells = json.loads((paths.NOTEBOOKS / "03_kernels.ipynb").read_text(encoding="utf-8"))["cells"]
    text = ["".join(c["source"]) for c in cells]
    measured = max(i for i, t in enumerate(text) if "measure(" in t)
    assert all("(rows" not in t for t in text[: measured + 1])


@pytest.mark.parametrize("text", ["64", "64·8", "a·b·c", "64·8·"])
def test_a_shape_that_is_none_is_told(text):
    with pytest.raises(ValueError, match="a shape is tokens·hidden·intermediate"):
        kernel_sweep.shaped([text], "bfloat16")


def test_the_error_in_fp32_is_compared_problem_by_problem():
    rows = FULL.assign(y_error=[3e-6 if p == "fused" else 2e-6 for p in FULL["provider"]])
    text = " ".join(findings.findings(rows))
    assert re.search(r"our y is 1\.50 times Liger's, and larger than it in (\d+) of \1", text)


def test_formats_measured_at_single_sizes_have_no_column_beside_the_sweep():
    tf32 = FULL[(FULL["dtype"] == "float32") & (FULL["hidden_size"] == 4096)]
    both = pd.concat([FULL, tf32.assign(precision="high")], ignore_index=True)
    columns = tables.published_table(both).columns.get_level_values(1)
    assert "fp32 python" in columns and "TF32 python" not in columns


def test_what_the_check_rejected_is_said_first():
    assert select.rejected(FULL) == []
    ours = (FULL["provider"] == "fused") & (FULL["dtype"] == "bfloat16")
    case = ours & (FULL["tokens"] == FULL[ours]["tokens"].max())
    wrong = FULL.assign(reason=None)
    wrong.loc[case, ["status", "reason"]] = ["wrong", "d_x: worst error 0.4, allowed 0.08"]
    shape = "·".join(str(v) for v in wrong[case].iloc[0][list(select.SHAPE)].astype(int))
    clause = f"fused in bf16 at {shape} (d_x: worst error 0.4, allowed 0.08)"
    assert clause in select.rejected(wrong)
    assert clause in findings.findings(wrong)[0]
    assert clause in " ".join(findings.headline(wrong))
