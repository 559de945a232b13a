"""Broken kernels on a GPU: every path's faults are rejected by the assertion that holds it right.

The kernels of `tl` are broken in their text. Those in Gluon and of split precision, and cuBLAS's
products with a pointwise kernel, are given operands, or have a result changed, as that fault would:
whatever path runs, the check is the same.
"""

import broken_kernels
import pytest
import swiglu_checks as checks
import torch

from fusedlib import functional
from fusedlib.functional import _large_fp32, swiglu_mlp
from fusedlib.kernels import hopper, swiglu_calls
from fusedlib.kernels.swiglu_calls import BACKWARD_N, FORWARD_N
from fusedlib.kernels.swiglu_configs import architecture

pytestmark = pytest.mark.gpu

TL = {"tma": (130, 208, 272), "pointers": (130, 201, 275), "few tokens": (37, 272, 144)}
FEW = (37, 912, 976)  # enough tiles that a program of a weight's gradient writes a span of two
HOPPER = 90
# The first has more tiles than an H200 multiprocessors, in the backward too, where they are 256
# wide; the last two have enough work for split products, without a plan and with one.
PATHS = {
    "fixed roles": ("bfloat16", (1500, 272, 3088)),
    "apart": ("bfloat16", TL["tma"]),
    "few tokens": ("bfloat16", TL["few tokens"]),
    "split": ("float32", (520, 2056, 4104)),
    "split plan": ("float32", (512, 2064, 4112)),
}
BLOCK_K = 64


@pytest.mark.parametrize("path", TL)
@pytest.mark.parametrize("fault", broken_kernels.BROKEN)
def test_a_broken_kernel_of_tl_is_rejected(monkeypatch, tmp_path, fault, path):
    # Where Hopper's products would go to cuBLAS they are these kernels' on other cards.
    monkeypatch.setattr(swiglu_calls, "_apart", lambda *_: False)
    broken_kernels.forget(monkeypatch)
    assert checks.misses_mlp("cuda", "bfloat16", TL[path]) == []
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=2.0)
    assert checks.misses_mlp("cuda", "bfloat16", TL[path]) != []
    assert broken_kernels.names(started) == set(broken_kernels.NAMES)
    assert bool(functional._PLANS) == (path == "few tokens")
    if architecture(torch.device("cuda", 0)) == HOPPER:
        assert all(launched.config.descriptors == (path == "tma") for launched in started)


@pytest.mark.parametrize("fault", broken_kernels.BROKEN_FEW)
def test_a_broken_product_of_few_tokens_is_rejected(monkeypatch, tmp_path, fault):
    broken_kernels.forget(monkeypatch)
    assert checks.misses_mlp("cuda", "bfloat16", FEW) == []
    started = broken_kernels.put_few(monkeypatch, tmp_path, fault, off=2.0)
    assert checks.misses_mlp("cuda", "bfloat16", FEW) != []
    assert broken_kernels.names(started) == set(broken_kernels.FEW_NAMES)
    assert {launched.constants.get("SPAN", 2) for launched in started} == {2}


def only(x, columns):
    """x with zeros in all other columns: what is left when those terms are not summed."""
    kept = torch.zeros(x.shape[1], device=x.device, dtype=x.dtype)
    kept[columns] = 1
    return x * kept


def one_off(y):
    off = torch.zeros_like(y)
    off[-1, -1] = 2.0 if y.dtype == torch.bfloat16 else 1e-3
    return y + off


FAULTS = {
    "dropped K tile": lambda x, w, d, save: swiglu_mlp(only(x, slice(BLOCK_K, None)), w, d),
    "one K block": lambda x, w, d, save: swiglu_mlp(only(x, slice(0, BLOCK_K)), w, d),
    "gate and up swapped": lambda x, w, d, save: swiglu_mlp(x, w.roll(len(w) // 2, 0), d),
    "wrong last element": lambda x, w, d, save: one_off(swiglu_mlp(x, w, d)),
    "no gradient of w_gate_up": lambda x, w, d, save: swiglu_mlp(x, w.detach(), d),
    "no gradient of w_down": lambda x, w, d, save: swiglu_mlp(x, w, d.detach()),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_any_path_is_rejected(path, fault):
    dtype, shape = PATHS[path]
    (x, w_gate_up, _), _ = checks.small("cuda", dtype, shape)
    if architecture(x.device) == HOPPER:
        assert hopper.takes(x, shape[2]) == (path == "fixed roles")
        for width in (FORWARD_N, BACKWARD_N):
            assert swiglu_calls._apart(x, len(x), shape[2], width) == (path == "apart")
    assert _large_fp32(x, w_gate_up) == path.startswith("split")
    assert checks.misses_mlp("cuda", dtype, shape) == []
    if fault.startswith("no gradient"):
        with pytest.raises(ValueError, match=fault.replace("of", "arrived at")):
            checks.misses_mlp("cuda", dtype, shape, compute=FAULTS[fault])
    else:
        assert checks.misses_mlp("cuda", dtype, shape, compute=FAULTS[fault]) != []
