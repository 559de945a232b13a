"""Liger's layer of MNIST in Triton's interpreter: `tests/test_mnist_liger.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.

The kernels are Liger's own, as its package has them; the interpreter is mended, not they.
"""

from dataclasses import replace

import float_arguments
import pytest
from liger_kernel.ops import swiglu as kernels

from fusedlib.bench.attempt import Wrong
from study import rivals
from study.mnist_network import TASK, Layer, get
from training_checks import check_layer, check_learning

float_arguments.apply()


def swapped(hidden, width, device):
    """Liger's layer with gate and up exchanged."""
    function = RIGHT.build(hidden, width, device).function
    return Layer(hidden, width, device, lambda x, gate, up: function(x, up, gate))


# The study trains it on NVIDIA cards only; here its kernels run without one.
RIGHT = rivals.RIVALS[TASK, "liger"] = replace(get(TASK, "liger"), needs_cuda=False)
rivals.rival(TASK, "swapped")(swapped)

# Liger has a program a row: 1.5 ms each way in the interpreter, whatever the row's length.
TEN_STEPS = {"passes": 1, "images": 160, "batch_size": 16}


@pytest.fixture
def exchanged_gradients(monkeypatch):
    """h is right, and each of gate and up gets the other's gradient."""
    right = kernels.swiglu_backward
    monkeypatch.setattr(kernels, "swiglu_backward", lambda *given: right(*given)[::-1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_h_and_every_gradient_agree_with_float64(precision):
    RIGHT.check_available("cpu", {"fp32": "float32", "bf16": "bfloat16"}[precision])
    check_layer("liger", precision)


@pytest.mark.parametrize("network", ["swiglu only", "convolutions"])
def test_its_loss_falls_as_eager_s(network):
    check_learning("liger", network, **TEN_STEPS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_swapped_gate_and_up_are_rejected(precision):
    with pytest.raises(Wrong, match="h: norm error"):
        check_layer("swapped", precision)


def test_swapped_gate_and_up_have_other_losses():
    with pytest.raises(AssertionError, match="first losses"):
        check_learning("swapped", "swiglu only", **TEN_STEPS)


@pytest.mark.usefixtures("exchanged_gradients")
def test_exchanged_gradients_are_rejected():
    with pytest.raises(Wrong, match="d_w_gate: norm error"):
        check_layer("liger", "fp32")
    with pytest.raises(AssertionError, match="first losses"):
        check_learning("liger", "swiglu only", **TEN_STEPS)
