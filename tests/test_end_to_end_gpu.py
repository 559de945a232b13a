"""Study 06 on a GPU: real exhaustion, real providers, real compilation."""

import pytest
import torch

from fusedlib.bench import sweep
from fusedlib.bench.end_to_end import cases, gate, measure
from fusedlib.models import mlps

pytestmark = pytest.mark.gpu
SHORT = cases.Setting("cuda", warmup=1, seconds=0.0, least=2, most=2)


def test_a_case_out_of_memory_leaves_the_process_able_to_measure_the_next():
    free, _ = torch.cuda.mem_get_info()
    # Attention matrices of a batch that fills the card, but not by so much that it is not tried.
    pairs = 12 * 12 * 1024**2 * 4
    fills = cases.Setting("cuda", batch_size=free // pairs, warmup=1, seconds=0, least=1, most=1)
    run = measure.Measure()
    [case] = cases.steps(fills, ["small"], [1024], ["fp32"])
    assert sweep.outcome(run, case)[1] == "oom"
    [following] = cases.steps(SHORT, ["small"], [128], ["fp32"])
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


def test_the_profile_sees_kernels_and_casts():
    plain, cast = (
        measure.Measure()(case)
        for case in cases.profile_cases(SHORT, ["small"], 128, ["fp32", "bf16 autocast"])
    )
    assert plain["busy_ms"] > 0 and plain["kernels"] < cast["kernels"]
    assert plain["casts"] < cast["casts"] and plain["casts_ms"] < cast["casts_ms"]
