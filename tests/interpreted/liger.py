"""Study 10's Liger arm in Triton's interpreter: `tests/test_mnist_liger.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.

The kernels are Liger's own, as its package has them; the interpreter is mended, not they.
"""

import os
from dataclasses import replace

import bf16
import float_arguments
import pytest
from liger_kernel.ops import swiglu as kernels
from training_checks import check_layer, check_learning

from fusedlib.bench.training import arms

assert os.environ["TRITON_INTERPRET"] == "1"
bf16.apply()
float_arguments.apply()

# The study trains it on NVIDIA cards only; here its kernels run without one.
LIGER = replace(arms.ARMS["liger"], needs_cuda=False)
SWAPPED = replace(LIGER, function=lambda x, gate, up: LIGER.function(x, up, gate))

# Liger has a program a row: 1.5 ms each way in the interpreter, whatever the row's length.
TEN_STEPS = {"passes": 1, "images": 160, "batch_size": 16}


@pytest.fixture
def exchanged_gradients(monkeypatch):
    """h is right, and each of gate and up gets the other's gradient."""
    right = kernels.swiglu_backward
    monkeypatch.setattr(kernels, "swiglu_backward", lambda *given: right(*given)[::-1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_h_and_every_gradient_agree_with_float64(precision):
    LIGER.check_available("cpu", precision)
    assert check_layer(LIGER, precision)["layer_backward"] == "LigerSiLUMulFunctionBackward"


@pytest.mark.parametrize("network", ["swiglu only", "convolutions"])
def test_its_loss_falls_as_eager_s(network):
    check_learning(LIGER, network, **TEN_STEPS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_swapped_gate_and_up_are_rejected(precision):
    with pytest.raises(AssertionError, match="h: norm error"):
        check_layer(SWAPPED, precision)


def test_swapped_gate_and_up_have_other_losses():
    with pytest.raises(AssertionError, match="first losses"):
        check_learning(SWAPPED, "swiglu only", **TEN_STEPS)


@pytest.mark.usefixtures("exchanged_gradients")
def test_exchanged_gradients_are_rejected():
    with pytest.raises(AssertionError, match="d_w_gate: norm error"):
        check_layer(LIGER, "fp32")
    with pytest.raises(AssertionError, match="first losses"):
        check_learning(LIGER, "swiglu only", **TEN_STEPS)
