"""Study 06 on a GPU: real exhaustion, real providers, real compilation."""

import pytest
import torch

from fusedlib.bench import sweep
from fusedlib.bench.end_to_end import cases, gate, measure, running
from fusedlib.bench.end_to_end.watching import MIB
from fusedlib.models import mlps

pytestmark = pytest.mark.gpu
SHORT = cases.Setting("cuda", warmup=1, seconds=0.0, least=2, most=2)


@pytest.mark.parametrize("mode", ["eager", "compiled blocks"])
def test_a_case_out_of_memory_leaves_the_process_able_to_measure_the_next(mode):
    free, _ = torch.cuda.mem_get_info()
    # Attention matrices of a batch that fills the card, but not by so much that it is not tried.
    pairs = 12 * 12 * 1024**2 * 4
    fills = cases.Setting("cuda", batch_size=free // pairs, warmup=1, seconds=0, least=1, most=1)
    run = measure.Measure()
    [case] = cases.steps(fills, ["small"], [1024], ["fp32"], mode=mode)
    _, status, reason = sweep.outcome(run, case)
    assert status == "oom", reason
    [following] = cases.steps(SHORT, ["small"], [128], ["fp32"], mode=mode)
    figures, status, reason = sweep.outcome(run, following)
    assert status == "ok", reason
    assert figures["peak_mib"] < 8192, "what ran out was given back"
    assert torch.cuda.memory_allocated() < free / 4


@pytest.mark.parametrize("precision", list(cases.PRECISIONS))
@pytest.mark.parametrize("provider", [p for p in mlps.PROVIDERS if p != "eager"])
def test_every_mlp_is_right_in_a_model(provider, precision):
    try:
        mlps.check_available(provider, "cuda")
    except mlps.ProviderUnavailableError as error:
        pytest.skip(str(error))
    [case] = cases.mlp_cases(SHORT, ["small"], [128], [precision], [provider])
    found = gate.verdict(case)
    assert "status" not in found, found["reason"]


def test_compiled_blocks_share_a_graph_and_do_not_compile_again():
    [case] = cases.steps(SHORT, ["small"], [128], ["bf16"], mode="compiled blocks")
    row = measure.Measure()(case)
    assert (row["graphs"], row["recompiled"]) == (1, 0)


@pytest.mark.parametrize("mode", ["compiled", "compiled blocks"])
def test_a_compiled_model_is_freed_with_its_case(mode):
    [case] = cases.steps(SHORT, ["small"], [128], ["fp32"], mode=mode)
    row = measure.Measure()(case)
    assert row["recompiled"] == 0 and row["compile_s"] > 0
    running.clear("cuda")
    assert torch.cuda.memory_allocated() / MIB < row["weights_mib"] / 2


def test_mlps_take_turns_without_compiling_again_and_hold_no_more_than_eager():
    todo = cases.mlp_cases(SHORT, ["small"], [256], ["bf16"], mlps.PROVIDERS)
    run = measure.Measure()
    found = {case["mlp"]: sweep.outcome(run, case) for case in todo}
    rows = {name: row for name, (row, status, _) in found.items() if status == "ok"}
    assert {status for _, status, _ in found.values()} <= {"ok", "unavailable"}, found
    assert {"eager", "inductor", "fused"} <= set(rows)
    for name, row in rows.items():
        assert row["recompiled"] == 0 and row["both_speedup"] > 0, name
    assert rows["fused"]["held_mib"] < rows["eager"]["held_mib"]


def test_the_profile_sees_kernels_and_casts():
    plain, cast = (
        measure.Measure()(case)
        for case in cases.profile_cases(SHORT, ["small"], 128, ["fp32", "bf16 autocast"])
    )
    assert plain["busy_ms"] > 0 and plain["kernels"] < cast["kernels"]
    assert plain["casts"] < cast["casts"] and plain["casts_ms"] < cast["casts_ms"]
