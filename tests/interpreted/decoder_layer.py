"""Decoder layers as a whole in Triton's interpreter: `tests/test_decoder_layer.py` runs this file
in a process of its own, where TRITON_INTERPRET=1 is set before Triton is imported.
"""

import pytest
import torch

import broken_rows
import decoder_layer_checks as checks
import llama_models
from fusedlib.ops.norm import kernels as norm_kernels
from fusedlib.ops.rope import kernels as rope_kernels
from fusedlib.patch import decoder_layer


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Two or three in each direction, the last one ragged; a program takes several."""
    monkeypatch.setattr(norm_kernels, "TILE", 512)
    monkeypatch.setattr(rope_kernels, "PAIRS", 512)
    monkeypatch.setattr(decoder_layer, "_PLANS", {})
    monkeypatch.setitem(llama_models.SIZES, "intermediate_size", 48)


@pytest.mark.parametrize(
    ("dtype", "case"),
    [*((torch.bfloat16, case) for case in checks.SETTINGS),
     (torch.float16, "Llama"), (torch.float16, checks.UNEVEN)],
    ids=str,
)  # fmt: skip
def test_loss_and_all_gradients_vs_float64(dtype, case):
    assert checks.misses("cpu", dtype, case) == []


@pytest.mark.parametrize("check", checks.ALL, ids=lambda f: f.__name__[6:])
def test_holds(check):
    check("cpu")


@pytest.mark.parametrize("fault", broken_rows.BROKEN_NORMED_ROPE)
def test_a_broken_rotation_of_normed_heads_is_rejected(monkeypatch, tmp_path, fault):
    text = broken_rows.BROKEN_NORMED_ROPE[fault]
    broken_rows.put(monkeypatch, tmp_path, rope_kernels, text)
    assert checks.misses("cpu", torch.bfloat16, checks.UNEVEN)
