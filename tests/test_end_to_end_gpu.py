"""Study 06 on a GPU: real exhaustion, real rivals, real compilation."""

import pytest
import torch

from fusedlib.bench.attempt import Unavailable, free_memory
from measure.end_to_end import cases, measure, races
from measure.racing import rivals, sustained
from measure.recording import results
from outcomes import outcome

pytestmark = pytest.mark.gpu
SHORT = cases.setting("cuda", seconds=0.0, repetitions=2)


def raced(folder, experiment, precision, context=128):
    own = results.Recorder("06_end_to_end", "quick", fresh=False, directory=folder)
    todo = cases.races(SHORT, experiment, ["small"], [context], [precision])
    own.race(races.RACE, todo)
    return {row["provider"]: row for row in results.read_rows(own.path)}


def test_a_case_out_of_memory_leaves_the_process_able_to_measure_the_next():
    free, _ = torch.cuda.mem_get_info()
    # Attention matrices of a batch that fills the card, but not by so much that it is not tried.
    fills = cases.setting("cuda", batch_size=free // (12 * 12 * 1024**2 * 4), seconds=0.0)
    [case] = cases.steps(fills, ["small"], [1024], ["fp32"])
    _, status, reason = outcome(measure.measure, case)
    assert status == "oom", reason
    [following] = cases.steps(SHORT, ["small"], [128], ["fp32"])
    figures, status, reason = outcome(measure.measure, following)
    assert status == "ok", reason
    assert figures["peak_mib"] < 8192, "what ran out was given back"
    assert torch.cuda.memory_allocated() < free / 4


@pytest.mark.parametrize("precision", list(cases.WEIGHTS))
@pytest.mark.parametrize("name", rivals.names("mlp"))
def test_every_mlp_is_right_in_a_model(name, precision):
    [case] = cases.races(SHORT, "mlp", ["small"], [128], [precision], [name])
    try:
        races.RACE.available(case)
    except Unavailable as refusal:
        pytest.skip(str(refusal))
    with races.cold_compiler(case):
        figures = races.checked(case)
    ours = name.startswith("fused")
    assert (figures["path"] is None) == (not ours)
    assert (figures["path"] == "plain PyTorch") == (ours and precision == "fp32")


def test_compiled_models_are_right_compile_once_and_are_freed(tmp_path):
    row = raced(tmp_path, "model", "fp32")["inductor"]
    assert row["status"] == "ok", row["reason"]
    assert (row["graphs"], row["recompiled"]) == (1, 0) and row["compile_s"] > 1
    free_memory()
    assert torch.cuda.memory_allocated() < 256 * 2**20


def test_mlps_take_turns_without_compiling_again_and_hold_no_more_than_eager(tmp_path):
    rows = raced(tmp_path, "mlp", "bf16", context=256)
    assert {row["status"] for row in rows.values()} <= {"ok", "unavailable"}, rows
    measured = {name: row for name, row in rows.items() if row["status"] == "ok"}
    assert {"eager", "inductor", "fused"} <= set(measured)
    assert all(row["recompiled"] == 0 for row in measured.values())
    assert measured["fused"]["held_mib"] < measured["eager"]["held_mib"]


def test_under_load_mlps_tell_their_energy(tmp_path):
    own = results.Recorder("06_end_to_end", "quick", directory=tmp_path)
    turns = cases.races(SHORT, "mlp", ["small"], [256], ["bf16"], ["eager", "fused"])
    own.race(races.LOADED, sustained.loaded_cases(turns, seconds=0.3))
    rows = results.read_rows(own.path)
    assert [(r["provider"], r["status"]) for r in rows] == [
        ("eager", "ok"), ("fused", "ok"), ("fused", "ok"), ("eager", "ok"),
    ]  # fmt: skip
    assert all(r["joules"] > 0 and 50 < r["power_w"] < 1500 and r["sm_mhz"] > 200 for r in rows)


def test_linear_is_right_in_a_model(tmp_path):
    own = results.Recorder("06_end_to_end", "quick", directory=tmp_path)
    wide = cases.races(SHORT, "model", ["large"], [256], ["fp32"], ["eager", "linear"])
    own.race(races.RACE, wide)
    rows = {row["provider"]: row for row in results.read_rows(own.path)}
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    assert rows["linear"]["gradients_error"] < 2 * rows["eager"]["gradients_error"]


def test_the_profile_sees_kernels_and_casts():
    plain, cast = (
        measure.measure(case)
        for case in cases.steps(
            SHORT, ["small"], [128], ["fp32", "bf16 autocast"], experiment="profile"
        )
    )
    assert plain["kernels_ms"] > 0 and plain["kernels"] < cast["kernels"]
    assert plain["casts"] < cast["casts"] and plain["casts_ms"] < cast["casts_ms"]
