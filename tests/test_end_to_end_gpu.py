"""Whole steps on a GPU: real exhaustion, real rivals, real compilation."""

import pytest
import torch

from fusedlib.bench.attempt import Unavailable
from outcomes import outcome
from study import end_to_end, rivals
from study.race import free
from study.trainers import WEIGHTS

pytestmark = pytest.mark.gpu
SHORT = end_to_end.setting("cuda", seconds=0.0, repetitions=2)


@pytest.fixture(autouse=True)
def freed():
    yield
    free()


def raced(experiment, precision, context=128, names=("all",), model="small"):
    race = end_to_end.races(SHORT, experiment, [model], [context], [precision], names)
    return {row.case["provider"]: row.as_dict() for row in end_to_end.measure(race)}


def test_a_case_out_of_memory_leaves_the_process_able_to_measure_the_next():
    free, _ = torch.cuda.mem_get_info()
    # Attention matrices of a batch that fills the card, but not by so much that it is not tried.
    fills = end_to_end.setting("cuda", batch_size=free // (12 * 12 * 1024**2 * 4), seconds=0.0)
    [case] = end_to_end.steps(fills, ["small"], [1024], ["fp32"])
    _, status, reason = outcome(end_to_end.figures, case)
    assert status == "oom", reason
    [following] = end_to_end.steps(SHORT, ["small"], [128], ["fp32"])
    figures, status, reason = outcome(end_to_end.figures, following)
    assert status == "ok", reason
    assert figures["peak_mib"] < 8192, "what ran out was given back"
    assert torch.cuda.memory_allocated() < free / 4


@pytest.mark.parametrize("precision", list(WEIGHTS))
@pytest.mark.parametrize("name", rivals.names("mlp"))
def test_every_mlp_is_right_in_a_model(name, precision):
    [case] = end_to_end.races(SHORT, "mlp", ["small"], [128], [precision], [name])
    try:
        end_to_end.available(case)
    except Unavailable as refusal:
        pytest.skip(str(refusal))
    with end_to_end.cold_compiler(case):
        assert end_to_end.checked(case)["gradients_error"] < 0.1


def test_compiled_models_are_right_compile_once_and_are_freed():
    row = raced("model", "fp32")["inductor"]
    assert row["status"] == "ok", row["reason"]
    assert row["graphs"] == 1 and row["compile_s"] > 1
    free()
    assert torch.cuda.memory_allocated() < 256 * 2**20


def test_mlps_take_turns_and_hold_no_more_than_eager():
    rows = raced("mlp", "bf16", context=256)
    assert {row["status"] for row in rows.values()} <= {"ok", "unavailable"}, rows
    measured = {name: row for name, row in rows.items() if row["status"] == "ok"}
    assert {"eager", "inductor", "fused"} <= set(measured)
    assert measured["fused"]["held_mib"] < measured["eager"]["held_mib"]
