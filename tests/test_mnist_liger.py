"""Liger's layer of MNIST where there is no GPU: trained in the interpreter, refused to users."""

import pytest

from fusedlib.bench.attempt import Unavailable
from interpreter import passed_in_the_interpreter
from study import mlp, rivals
from study.mnist_network import TASK

pytest.importorskip("liger_kernel")


def test_in_the_interpreter():
    """Runs `interpreted/liger.py`; what fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/liger.py") == 3


@pytest.mark.parametrize("task", [TASK, mlp.TASK])
def test_an_installed_liger_says_that_it_lacks_a_gpu(task):
    with pytest.raises(Unavailable, match="CUDA GPU"):
        rivals.get(task, "liger").check_available("cpu", "float32")
