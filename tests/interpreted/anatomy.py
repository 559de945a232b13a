"""The flawed kernels in Triton's interpreter: `tests/test_anatomy.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import pytest
import torch

import flawed_swiglu
from flawed_swiglu import TASK
from fusedlib.bench import check
from study import anatomy, rivals


def results(name: str, tokens: int, width: int):
    """y and the gradients that arrive, beside the truth."""
    [case] = anatomy.alone("errors", [(tokens, width)], [name], "cpu")
    setup = anatomy.Setup(case)
    work = rivals.get(TASK, name).build(setup.inputs)
    return check.results_of(work, setup.inputs.dy), setup


@pytest.mark.parametrize("width", [16, 48])
def test_the_emulation_does_what_the_published_kernel_does(width):
    kernel, _ = results("published-kernel", 16, width)
    emulated, _ = results("published-kernel-emulated", 16, width)
    assert set(kernel) == set(emulated) == {"y", "d_x", "d_w_down"}
    for name, tensor in kernel.items():
        torch.testing.assert_close(tensor, emulated[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["all-gradients", "ieee-products"])
def test_the_whole_sum_is_right_in_every_gradient(name):
    actual, setup = results(name, 24, 48)
    assert max(e.worst for e in check.errors(actual, setup.drawn.true).values()) < 1e-5
    assert "wrong" not in setup.check({"provider": name}).figures


def test_the_whole_sum_alone_is_right_in_y_and_lacks_gradients():
    actual, setup = results("whole-sum", 24, 48)
    assert set(actual) == {"y", "d_x", "d_w_down"}
    assert check.errors(actual, setup.drawn.true)["y"].worst < 1e-5
    wrong = setup.check({"provider": "whole-sum"}).figures["wrong"]
    assert wrong == "no gradient arrived at w_gate; no gradient arrived at w_up"


def test_without_the_whole_sum_it_is_wrong_beyond_one_block():
    for width, least, most in ((16, 0.0, 1e-5), (48, 0.5, 2.0)):
        actual, setup = results("published-kernel", 16, width)
        assert least <= check.errors(actual, setup.drawn.true)["y"].norm < most


def test_every_registered_repair_was_tried_here():
    assert flawed_swiglu.INTERPRETED
    assert set(rivals.names(TASK, "timed")) == {
        "published-kernel", "whole-sum", "all-gradients", "ieee-products"
    }  # fmt: skip
