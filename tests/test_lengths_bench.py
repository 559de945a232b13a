"""Study 03's clock for lengths that change."""

import pytest

from fusedlib.bench import lengths
from fusedlib.bench.attempt import Unavailable

SMALL = {"lengths": 4, "most": 40, "hidden_size": 16, "intermediate_size": 32,
         "dtype": "float32", "device": "cpu"}  # fmt: skip


def test_lengths_are_different_and_the_same_for_the_same_seed():
    found = lengths.drawn(70, 6000)
    assert len(set(found)) == 70 and found == lengths.drawn(70, 6000) and max(found) <= 6000
    with pytest.raises(ValueError, match="larger than population"):
        lengths.drawn(7, 6)


def test_a_rival_is_timed_at_every_length_in_a_process_of_its_own():
    eager, ours = lengths.cases(["eager", "fused"], **SMALL)
    figures = lengths.measure(eager)
    assert figures["tokens"] == lengths.drawn(4, 40)
    assert all(len(figures[name]) == 4 and min(figures[name]) > 0 for name in figures)
    assert lengths.over_known({"first_ms": [3.0, 1.0], "second_ms": [1.0, 2.0]}) == [2.0, -1.0]
    with pytest.raises(Unavailable, match="CUDA"):
        lengths.measure(ours)
