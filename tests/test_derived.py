"""What tables show beside measured figures follows from these; no claim says most of it."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from study import causal, compilers, patched, profile, run, warmup
from study.causal import AttentionProblem, flops, traffic

NONE = np.nan
SHARED = {"machine": "m", "set": "s", "status": "ok", "session": "one"}


def case(topic: str, rows: list[dict[str, Any]], **wanted: Any) -> Any:
    """Rows of a topic, of which the first have these values in derived columns."""
    return pytest.param(topic, [SHARED | row for row in rows], wanted, id=f"{topic}, {min(wanted)}")


ONE = AttentionProblem(256, 64, 8, "bfloat16")
HEADS = {"context_length": 256, "head_dim": 64, "batch_size": 8, "direction": "forward",
         "device": "cuda", "dtype": "bfloat16", "peak_mib": 8.0, "median_ms": 2.0}  # fmt: skip
ATTENDED = [
    *(HEADS | {"provider": name} for name in ("plain", "cudnn", "inductor")),
    {"ceiling": "copy", "device": "cuda", "dtype": "int8", "bytes_per_s": 1e12},
    {"ceiling": "gemm", "device": "cuda", "dtype": "bfloat16", "flops_per_s": 1e14},
]
TRAFFIC = [traffic(ONE, "forward", fused=fused) / 1e9 for fused in (False, True)]
PRODUCTS = [flops(ONE, "forward", fused=fused) / 1e11 for fused in (False, True)]
BOUND = [max(pair) / 2 for pair in zip(TRAFFIC, PRODUCTS, strict=True)]

LLAMA = patched.CONFIGS["two small layers"]
WIDTH, INNER, VOCABULARY = (
    LLAMA[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
)
PRODUCT_MS = 2 * 64 * (2 * (4 * WIDTH**2 + 3 * WIDTH * INNER) + WIDTH * VOCABULARY) / 1e9
CALL = {"model": "two small layers", "tokens": 64, "subject": "forward", "experiment": "forward"}
TOKEN = CALL | {"experiment": "generation", "subject": "decoding", "sampler": "race",
                "weights_bytes": 3e6, "cache_bytes": 1e6, "median_ms": 20 * 8.0}  # fmt: skip
TRAINING = CALL | {"experiment": "training", "subject": "training", "optimizer": "sgd"}
COMPILED = [
    TOKEN | {"provider": "fused-inductor"},
    TRAINING | {"provider": "inductor", "median_ms": 1.0},
    CALL | {"provider": "huggingface", "median_ms": 10.0, "compile_s": 0.1},
    CALL | {"provider": "inductor", "median_ms": 5.0, "compile_s": 2.0},
    {"experiment": "ceiling", "flops_per_s": 1e12, "bytes_per_s": 1e9},
]

STEP = {"experiment": "model", "model": "nano", "context_length": 16, "attention": "plain",
        "device": "cpu", "device_type": "cpu", "device_name": "a CPU", "flops": 2e9,
        "precision": "fp32", "provider": "eager", "both_median_ms": 20.0,
        "step_median_ms": 30.0}  # fmt: skip
STEPS = [
    STEP | {"experiment": "step"},
    STEP | {"experiment": "step", "precision": "bf16 autocast", "both_median_ms": 5.0},
    STEP,
    STEP | {"provider": "inductor", "both_median_ms": 10.0, "step_median_ms": 20.0, "compile_s": 5},
    {"experiment": "ceiling", "ceiling": "gemm", "dtype": "float32", "flops_per_s": 4e11,
     "device": "cpu", "device_type": "cpu"},
]  # fmt: skip

PROFILED = {"machine": "H200", "model": "small", "precision": "fp32", "context_length": 256,
            "attention": "plain", "provider": "eager"}  # fmt: skip
PROFILE = PROFILED | {
    "experiment": "profile", "kernels_ms": 8.0,
    "classes": [["inference", "GEMM", 1, 9.0], ["forward", "GEMM", 1, 1.0],
                ["backward", "GEMM", 2, 2.0], ["backward", "indexing", 1, 1.0],
                ["optimizer", "optimizer", 1, 4.0]],
    "parts": [["forward", f"block/attention/{name}", 1, ms]
              for name, ms in (("scores", 0.3), ("values", 0.1), ("softmax", 0.2))],
}  # fmt: skip
PROFILES = [
    PROFILE, PROFILED | {"experiment": "step", "step_median_ms": 10.0, "issue_ms": 4.0},
]  # fmt: skip

SERIES = {"experiment": "steps", "direction": "forward+backward", "isolation": "fresh",
          "samples_ms": [32.0, 4.0, *[2.0] * 18]}  # fmt: skip
JUDGED = {"parameters": ["a", "b"], "usual_errors": [0.1, 0.1], "dtype": "float32",
          "provider": "fused", "batch_size": 4, "context_length": 500}  # fmt: skip


@pytest.mark.parametrize(
    ("topic", "rows", "wanted"),
    [
        case("attention", ATTENDED, peak_squares=[8.0] * 3, bound_share=[*BOUND, NONE],
             peak_counted=[causal.plain_peak(ONE, "cuda") / ONE.square],
             traffic_ms=[*TRAFFIC, NONE], products_ms=[*PRODUCTS, NONE]),
        case("compilers", COMPILED, call_ms=[8.0, 1.0], published_as=[125.0, 0.045],
             over_least=[2.0, 1 / (3 * PRODUCT_MS), 10 / PRODUCT_MS],
             pays_after=[NONE, NONE, NONE, 400.0]),
        case("end_to_end", STEPS, mfu=[0.25], cast_gain=[NONE, 4.0],
             repaid=[NONE, NONE, NONE, 500.0]),
        case("profile", PROFILES, step_ms=[10.0], busy=[0.8], products_ms=[3.0],
             optimizer_ms=[4.0], others_ms=[5.0], softmax_ratio=[0.5], flops_ratio=[5 / 256],
             bytes_ratio=[8 / 12], pace=["CPU"]),
        case("warmup", [SERIES], late_ms=[2.0], extra_ms=[30.0], added_ms=[3.0],
             over_late=[5.2 / 2]),
        case("llama", [JUDGED | {"gradient_errors": e} for e in ([0.1, None], [0.1, 0.05], "NaN")],
             worst_gradient=[np.inf, 1.0, np.inf], missed=[1, 0, 2]),
        case("llama", [{"provider": "fused-mlp", "experiment": "step", "median_ms": 2.0,
                        "activations_mib": 512.0, "batch_size": 4, "context_length": 500}],
             tokens_per_s=[1e6], activations_gib=[0.5], switch=["MLP"]),
    ],
)  # fmt: skip
def test_what_follows_from_rows(topic, rows, wanted):
    found = run.topic(topic).derive(pd.DataFrame(rows))
    for column, values in wanted.items():
        actual = found[column].tolist()[: len(values)]
        assert actual == pytest.approx(values, nan_ok=True), column


def test_lists_in_rows_are_spread_over_steps_and_classes():
    left = warmup.after_warmup(warmup.derive(pd.DataFrame([SERIES])), 0, 1, 2)
    assert left["mean_ms"].tolist() == pytest.approx([5.2, 2.2, 2.0])
    steps = compilers.by_iteration(pd.DataFrame([
        {"provider": "huggingface", "lengths": [8, 9, 10], "samples_ms": [100.0, 200.0, 300.0]},
        {"provider": "inductor", "lengths": [8, 9, 10], "samples_ms": [5000.0, 50.0]},
    ]).assign(machine="H200", experiment="dynamic"))  # fmt: skip
    assert steps["behind_s"].tolist() == pytest.approx([0.0, 0.0, 0.0, 4.9, 4.75])
    profiled = profile.derive(pd.DataFrame([SHARED | row for row in PROFILES]))
    shares = profile.by_class(profiled.query("experiment == 'profile'")).set_index("class")
    shares = shares["step_share"].to_dict()
    assert sum(shares.values()) == pytest.approx(1)
    assert (shares["GEMM"], shares["GPU idle"]) == (0.3, pytest.approx(0.2))
