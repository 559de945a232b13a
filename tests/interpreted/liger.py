"""Liger's layer of MNIST in Triton's interpreter: `tests/test_mnist_liger.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.

The kernels are Liger's own, as its package has them; the interpreter is mended, not they.
"""

from dataclasses import replace

import float_arguments
import pytest

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


def test_h_and_every_gradient_agree_with_float64():
    RIGHT.check_available("cpu", "float32")
    check_layer("liger", "fp32")


def test_its_loss_falls_as_eager_s():
    check_learning("liger", "swiglu only", **TEN_STEPS)


def test_swapped_gate_and_up_are_rejected():
    with pytest.raises(Wrong, match="h: norm error"):
        check_layer("swapped", "fp32")
