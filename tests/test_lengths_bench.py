"""The clock for lengths that change."""

from pathlib import Path

import pytest

import limits
from fusedlib.bench.attempt import Unavailable, Wrong
from study import fresh, lengths

SMALL = {"lengths": 4, "most": 40, "hidden_size": 16, "intermediate_size": 32,
         "dtype": "float32", "device": "cpu"}  # fmt: skip


def test_a_rival_is_timed_at_every_length_in_a_process_of_its_own():
    eager, ours, warmed = lengths.listed(["eager", "fused"], **SMALL)
    figures = lengths.calls(eager)
    assert len({*lengths.drawn(4, 40)}) == 4 and max(lengths.drawn(40, 40)) == 40
    for name in ("first_ms", "second_ms"):
        assert len(figures[name]) == 4 and min(figures[name]) > 0
    assert figures["first_use_ms"] == figures["first_ms"][0]
    assert (figures["made"], figures["binaries"], figures["compile_s"]) == ([0] * 4, 0, 0)
    assert figures["warm_s"] is None
    assert not ours["warmed"] and warmed == {**ours, "warmed": True}
    assert lengths.listed([], **SMALL) == []
    with pytest.raises(Unavailable, match="CUDA"):
        lengths.calls(ours)


def test_a_rival_that_is_wrong_at_a_length_has_no_time(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    arguments = {
        "rival_name": "deaf", "hidden_size": 16, "intermediate_size": 32, "dtype": "float32",
        "device": "cpu", "warmed": False, "tokens": [5, 3],
    }  # fmt: skip
    with pytest.raises(Wrong, match="y: norm error"):
        fresh.run("fresh_targets:lengths_of_a_wrong_rival", arguments, timeout_s=limits.PROCESS_S)


@pytest.mark.gpu
@pytest.mark.parametrize("warmed", [False, True])
def test_ours_compiles_a_few_kernels_for_all_lengths(warmed):
    case = {**SMALL, "dtype": "bfloat16", "device": "cuda", "hidden_size": 512, "lengths": 12,
            "intermediate_size": 1024, "most": 2000}  # fmt: skip
    figures = lengths.calls(lengths.listed(["fused"], **case)[warmed])
    assert 0 < figures["binaries"] <= 23
    assert (sum(figures["made"]) == 0) == warmed
