"""Decoder layers as a whole on a GPU."""

import pytest
import torch

import decoder_layer_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", checks.SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loss_and_all_gradients_vs_float64(dtype, case):
    assert checks.misses("cuda", dtype, case) == []


@pytest.mark.parametrize("check", checks.ALL, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cuda")
