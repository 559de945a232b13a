"""The accumulation probe in Triton's interpreter: `tests/test_tensor_core.py` runs this file in a
process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import pytest
import torch

from measure.accumulate_kernel import accumulate_fwd


@pytest.mark.parametrize("promote", [False, True])
def test_probe_vs_float64(promote):
    a, b = torch.randn(128, 192).half(), torch.randn(192, 64).half()
    for k in (192, 16):
        found = accumulate_fwd(a[:, :k].contiguous(), b[:k], promote=promote)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, a[:, :k].float() @ b[:k].float(), rtol=1e-5, atol=1e-4)
