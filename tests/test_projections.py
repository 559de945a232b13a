"""q, k and v of one x: in the interpreter, compiled ahead, and on a GPU."""

import pytest
import torch

from interpreter import passed_in_the_interpreter
from projections_checks import misses


def test_in_the_interpreter():
    """What fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/projections.py") > 30


@pytest.mark.parametrize("shape", [(5, 48, 80, 16, 16), (70, 80, 144, 48, 48)])
def test_without_kernels(shape):
    for dtype in ("float32", "bfloat16"):
        assert misses("cpu", dtype, shape, True) == []


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 16, 37, 64, 65, 700])
@pytest.mark.parametrize("sizes", [(896, 896, 128, 128), (2048, 2048, 512, 512), (80, 144, 48, 16)])
def test_results_and_gradients_vs_float64(sizes, tokens, dtype, biased):
    assert misses("cuda", dtype, (tokens, *sizes), biased) == []


@pytest.mark.gpu
def test_layers_of_another_device_and_at_odd_addresses():
    from projections_checks import operands, step

    leaves = operands("cuda", torch.bfloat16, (7, 80, 144, 48, 48), True)
    wanted = step(leaves)
    leaves.lay("x", lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t))
    leaves.lay("w_v", lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t))
    torch.testing.assert_close(step(leaves), wanted, rtol=2e-2, atol=2e-2)
