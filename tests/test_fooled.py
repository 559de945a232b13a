"""What notebook 01 calls; that each cheat is refused is in `tests/test_notebooks_quick.py`."""

import time

import pytest
import torch

import fooled


def test_a_timer_that_a_lie_replaced_is_back_after_its_calls():
    """Left replaced, it had the exercise at the notebook's end refused."""
    clock, inputs = time.perf_counter, {"x": torch.ones(2), "w": torch.ones(2)}
    lies = fooled.Lies(torch.mul, inputs, repetitions=2)

    def slows_the_timer(x, w):
        time.perf_counter = lambda: clock() / 42
        return x * w

    lies.functions["replaced timer"] = slows_the_timer, torch.mul, [*inputs.values()]
    rows = lies.call_by_call("replaced timer")
    assert time.perf_counter is clock
    assert rows.groupby("which")["call"].max().to_dict() == dict.fromkeys(
        ("same values", "new values", "honest"), 10
    )
    with pytest.raises(ValueError, match="lie is 'another', not one of replaced timer"):
        lies.call_by_call("another")
