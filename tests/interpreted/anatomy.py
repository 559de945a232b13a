"""Study 05's flawed kernels in Triton's interpreter: `tests/test_anatomy.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import os

import flawed_swiglu
import pytest
import torch

from fusedlib.bench import check
from fusedlib.bench.anatomy import Variant
from fusedlib.bench.problems import SwiGLUProblem, draw

assert os.environ["TRITON_INTERPRET"] == "1"
BLOCK = 16


def results(variant: Variant, tokens: int, width: int):
    """y and the gradients that arrive, with their errors."""
    inputs = draw(SwiGLUProblem(tokens, width, width, "float32"), "cpu")
    work = flawed_swiglu.build(inputs, variant)
    y = work.forward()
    y.backward(inputs.dy)
    found = {f"d_{n}": t.grad.clone() for n, t in work.leaves.items() if t.grad is not None}
    work.reset()
    return {"y": y.detach(), **found}, check.truth(inputs)


@pytest.mark.parametrize("width", [16, 48])
def test_the_emulation_does_what_the_published_kernel_does(width):
    kernel, _ = results(Variant(block=BLOCK), BLOCK, width)
    emulated, _ = results(Variant(block=BLOCK, emulated=True), BLOCK, width)
    assert set(kernel) == set(emulated) == {"y", "d_x", "d_w_down"}
    for name, tensor in kernel.items():
        torch.testing.assert_close(tensor, emulated[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_the_whole_sum_is_right_in_every_gradient(precision):
    variant = Variant(True, True, dot_precision=precision, block=BLOCK)
    found, true = results(variant, 24, 48)
    assert set(found) == {"y", "d_x", "d_w_gate_up", "d_w_down"}
    assert max(e.worst for e in check.errors(found, true).values()) < 1e-5


def test_without_the_whole_sum_it_is_wrong_beyond_one_block():
    for width, least, most in ((16, 0.0, 1e-5), (48, 0.5, 2.0)):
        found, true = results(Variant(block=BLOCK), BLOCK, width)
        assert least <= check.errors(found, true)["y"].norm < most
