"""The one tolerance rule: twice plain PyTorch's error and four unit roundoffs, in both measures."""

import pytest
import torch

from fusedlib.bench import check
from fusedlib.bench.check import Errors


@pytest.mark.parametrize(
    ("dtype", "own", "most"),
    [
        (torch.float32, 0.0, 4 * 2.0**-24),
        (torch.bfloat16, 0.0, 4 * 2.0**-8),
        (torch.float16, 0.01, 0.02 + 4 * 2.0**-11),
    ],
)
def test_twice_the_error_of_plain_pytorch_and_four_roundoffs_are_allowed(dtype, own, most):
    assert check.allowed(own, dtype) == most
    baseline = {"y": Errors(own, 1.0)}
    assert check.misses({"y": Errors(most, 1.0)}, baseline, dtype) == []
    [line] = check.misses({"y": Errors(most * 1.01, 1.0)}, baseline, dtype)
    assert line.startswith("y: norm error ")


def test_one_wrong_element_among_many_is_seen_by_the_worst_error_alone():
    true = torch.ones(1_000_000, dtype=torch.float64)
    off = true.float()
    off[-1] += 1e-4
    errors = check.errors({"y": off}, {"y": true})
    assert errors["y"].norm < check.allowed(0.0, torch.float32) < errors["y"].worst
    [line] = check.misses(errors, {"y": Errors(0.0, 0.0)}, torch.float32)
    assert line.startswith("y: worst error 1.00e-04, allowed 2.38e-07")
