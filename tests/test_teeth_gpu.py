"""Broken kernels on a GPU: every path's faults are rejected by the assertion that holds it right.

The kernels of `tl` are broken in their text. Those in Gluon and of split precision are given
operands, or have a result changed, as that fault would: whatever path runs, the check is the same.
"""

import broken_kernels
import pytest
import swiglu_checks as checks
import torch

from fusedlib.functional import _precise, swiglu_mlp
from fusedlib.kernels import hopper

pytestmark = pytest.mark.gpu

TL = {"tma": (130, 208, 272), "pointers": (130, 201, 275), "few tokens": (37, 272, 144)}
# The first has a tile for each multiprocessor of an H200, the last enough work for split products.
PATHS = {
    "fixed roles": ("bfloat16", (1500, 272, 1552)),
    "tma": ("bfloat16", TL["tma"]),
    "split": ("float32", (520, 2056, 4104)),
}
BLOCK_K = 64


@pytest.mark.parametrize("shape", TL)
@pytest.mark.parametrize("fault", broken_kernels.BROKEN)
def test_a_broken_kernel_of_tl_is_rejected(monkeypatch, tmp_path, fault, shape):
    assert checks.misses_mlp("cuda", "bfloat16", TL[shape]) == []
    broken_kernels.put(monkeypatch, tmp_path, fault, off=2.0)
    assert checks.misses_mlp("cuda", "bfloat16", TL[shape]) != []


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
    assert hopper.takes(x, shape[2]) == (path == "fixed roles")
    assert _precise(x, w_gate_up) == (path == "split")
    assert checks.misses_mlp("cuda", dtype, shape) == []
    if fault.startswith("no gradient"):
        with pytest.raises(ValueError, match=fault.replace("of", "arrived at")):
            checks.misses_mlp("cuda", dtype, shape, compute=FAULTS[fault])
    else:
        assert checks.misses_mlp("cuda", dtype, shape, compute=FAULTS[fault]) != []
