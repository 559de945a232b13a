"""Broken kernels on a GPU: every path's faults are rejected by the assertion that holds it right.

The kernels of `tl` are broken in their text, the other paths by `broken_calls`: whatever path runs,
the check is the same.
"""

import pytest
import torch

import broken_calls
import broken_kernels
import plan_checks
import swiglu_checks as checks
from fusedlib.launch.device import architecture
from fusedlib.ops.mlp import plan_cache
from fusedlib.ops.mlp.function import path_of

pytestmark = pytest.mark.gpu

TL = {"tma": (130, 208, 272), "pointers": (130, 201, 275), "few tokens": (37, 272, 144)}
FEW = (37, 912, 976)  # enough tiles that a program of a weight's gradient writes a span of two
HOPPER = 90
# The first has more tiles than an H200 multiprocessors, in the backward too, where they are 256
# wide; the last has enough work for split products.
PATHS = {
    "fused by roles": ("bfloat16", (1500, 272, 3088)),
    "apart": ("bfloat16", TL["pointers"]),
    "fused by tiles": ("bfloat16", TL["tma"]),
    "few tokens": ("bfloat16", TL["few tokens"]),
    "split fp32": ("float32", (520, 2056, 4104)),
}


@pytest.mark.parametrize("path", TL)
@pytest.mark.parametrize("fault", broken_kernels.BROKEN)
def test_a_broken_kernel_of_tl_is_rejected(monkeypatch, tmp_path, fault, path):
    # Where Hopper's products would go to cuBLAS they are these kernels' on other cards.
    plan_checks.only_tiles(monkeypatch)
    broken_kernels.forget(monkeypatch)
    assert checks.misses_mlp("cuda", "bfloat16", TL[path]) == []
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=2.0)
    assert checks.misses_mlp("cuda", "bfloat16", TL[path]) != []
    assert broken_kernels.names(started) == set(broken_kernels.NAMES)
    wanted = path if path == "few tokens" else "fused by tiles"
    assert {plan.path for plan in plan_cache._PLANS.values()} == {wanted}
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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", broken_calls.FAULTS)
def test_a_fault_on_any_path_is_rejected(path, fault):
    dtype, shape = PATHS[path]
    if architecture(torch.device("cuda", 0)) == HOPPER:
        assert path_of(*checks.small("cuda", dtype, shape)[0]) == path
    broken_calls.check_rejected("cuda", dtype, shape, fault)
