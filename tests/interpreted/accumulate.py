"""The study's own products in Triton's interpreter: `tests/test_tensor_core.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import pytest
import torch

from fusedlib.bench.attempt import Unavailable
from study.product_kernel import Linear, accumulate_fwd, split_product


@pytest.mark.parametrize("promote", [False, True])
def test_probe_vs_float64(promote):
    a, b = torch.randn(128, 192).half(), torch.randn(192, 64).half()
    for k in (192, 16):
        found = accumulate_fwd(a[:, :k].contiguous(), b[:k], promote=promote)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, a[:, :k].float() @ b[:k].float(), rtol=1e-5, atol=1e-4)


def test_a_linear_layer_by_tf32x3_and_its_gradients_vs_float64():
    """More tiles down than a group has, and across; the last group is smaller."""
    x, dy = torch.randn(9 * 128, 256).requires_grad_(), torch.randn(9 * 128, 128)
    weight = torch.randn(128, 256).requires_grad_()
    y = Linear.apply(x, weight, split_product)
    y.backward(dy)
    d_weight = dy.double().mT @ x.double()
    wanted = (x.double() @ weight.double().mT, dy.double() @ weight.double(), d_weight)
    for actual, right in zip((y, x.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=1e-5, atol=1e-3)
    with pytest.raises(Unavailable, match="multiples of 128, .* k of 32, not 100, 128 and 256"):
        Linear.apply(x[:100], weight, split_product)
