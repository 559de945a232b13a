"""Which product of a backward pass comes last: by counting, and by every allocation of a pass whose
kernels start nothing (what they allocate, and how long it lives, is the same).
"""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

import swiglu_checks as checks

pytest.importorskip("triton")

from fusedlib import tuning
from fusedlib.launch import device
from fusedlib.launch.launch import Launch
from fusedlib.ops.linear import route as linear_route
from fusedlib.ops.mlp import function as functional
from fusedlib.ops.mlp import operator as mlp_operators
from fusedlib.ops.mlp import plan_cache, products, route
from fusedlib.ops.mlp.products import is_d_w_down_last
from measure import mlp_ledger, pass_memory
from measure.mlp_ledger import FUSED, FUSED_INPUT, SPLIT, SPLIT_INPUT, total
from measure.mlp_problem import SwiGLUProblem

ALL = True, True, False, True  # of a packed weight
SIZES = (64, 256, 1024, 4096, 28672)
# tokens·hidden·inner: d_w_down last, first, and level.
SHAPES = [(128, 384, 512), (384, 128, 96), (128, 128, 192)]


def test_llama_3_70b_by_hand():
    problem = SwiGLUProblem(4096, 8192, 28672)  # MiB in bf16: F is 224, D is 64, W is 448
    assert total(FUSED.peak(problem)[1]).mib(problem) == 224 + 64 + 2 * 448 + 448 + 64
    assert is_d_w_down_last(4096, 8192, 28672, ALL) and not is_d_w_down_last(8192, 4096, 14336, ALL)


@pytest.mark.parametrize(
    ("splits", "books"),
    [(False, (FUSED, FUSED_INPUT)), (True, (SPLIT, SPLIT_INPUT))],
    ids=["half", "split"],
)
def test_the_rule_takes_the_order_of_the_lower_peak(splits, books):
    chosen = set()
    for shape in product(SIZES, repeat=3):
        problem, last = (
            SwiGLUProblem(*shape, "float32"),
            is_d_w_down_last(*shape, ALL, splits=splits),
        )
        chosen.add(last)
        for book in books:
            order = book.otherwise if last else book.backward
            taken = replace(book, backward=order, otherwise=())
            peaks = [total(b.peak(problem)[1]).mib(problem) for b in (taken, book)]
            assert peaks[0] == peaks[1], shape
    assert chosen == {True, False}


def test_gradients_that_are_not_wanted_are_not_counted():
    # At 96·128·96 F is 3, D is 4, W is 4 (of 3072 elements). All wanted: 6 + 4 + 12 and 3 + 12 + 6;
    # without d_w_gate_up 6 + 4 + 4 and 3 + 4 + 6; without d_x 6 + 4 + 8 and 3 + 8 + 6.
    for wants in (ALL, (True, False, False, True), (False, True, False, True)):
        assert is_d_w_down_last(96, 128, 96, wants)
    # At 128·96·96 F is 4, D is 4, W is 3: 8 + 3 + 4 and 4 + 4 + 8 without d_w_gate_up.
    assert not is_d_w_down_last(128, 96, 96, (True, False, False, True))


def test_of_a_pair_the_order_is_the_packed_weight_s():
    for shape, splits, of_x in product(product(SIZES, repeat=3), (False, True), (False, True)):
        actual = {is_d_w_down_last(*shape, (of_x, *of_gate_up, True), splits=splits)
                 for of_gate_up in ((True, True), (True, False), (False, True))}  # fmt: skip
        assert len(actual) == 1


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that are taken for fp32 on the CPU and start nothing."""
    monkeypatch.setattr(device, "_find_kernels", lambda _: True)
    monkeypatch.setattr(route, "FUSED_KERNEL_DTYPES", (torch.float32,))
    monkeypatch.setattr(plan_cache, "_PLANS", {})
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)


def peak_mib(function, shape, pair=False):
    """Of `function(x, w_gate_up, w_down)` and its backward pass."""
    (x, *gate_up, w_down), dy = checks.small("cpu", "float32", shape, pair)
    operands = x, gate_up if pair else gate_up[0], w_down
    live = pass_memory.trace(lambda: function(*operands), dy).live_mib()
    return max(sum(parts) for parts in zip(*live.values(), strict=True))


def counted(book, shape):
    problem = SwiGLUProblem(*shape, "float32")
    return total(book.peak(problem)[1]).mib(problem)


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", functional.SAVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pass_holds_what_is_counted(kernels, shape, save, pair):
    book = mlp_ledger.of({"gate_up": "fused", "input": "fused-input"}[save])

    def mlp(*operands):
        y = functional.swiglu_mlp(*operands, save=save)
        assert type(y.grad_fn).__name__ == "SwiGLUFunctionBackward"
        return y

    assert peak_mib(mlp, shape, pair) == counted(book, shape)


def test_the_other_order_is_seen_to_hold_more(kernels, monkeypatch):
    monkeypatch.setattr(products, "is_d_w_down_last", lambda *_, **_named: False)
    assert peak_mib(functional.swiglu_mlp, SHAPES[0]) > 1.05 * counted(FUSED, SHAPES[0])


def test_registered_operators_hold_a_second_gate_up_and_no_more(kernels):
    actual = peak_mib(
        lambda x, *w: mlp_operators.swiglu_mlp(x, w[0], None, w[1], "silu", True)[0], SHAPES[0]
    )
    more = (mlp_ledger.F * 2).mib(SwiGLUProblem(*SHAPES[0], "float32"))
    assert actual == counted(FUSED, SHAPES[0]) + more


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", functional.SAVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pass_with_products_apart_holds_what_is_counted(kernels, shape, save, pair):
    book = mlp_ledger.of({"gate_up": "fused", "input": "fused-input"}[save])
    with tuning.override(mlp_unfused_tokens=1 << 40):
        mlp = partial(functional.swiglu_mlp, save=save)
        actual = peak_mib(mlp, shape, pair)
        paths = [plan.path for plan in plan_cache._PLANS.values()]
    # dh is no allocation of the fused kernels; it is gone before d(gate|up)'s products.
    with_dh = (mlp_ledger.F * 4 + mlp_ledger.D).mib(SwiGLUProblem(*shape, "float32"))
    assert actual == max(counted(book, shape), with_dh)
    assert paths == ["apart"]


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", functional.SAVES)
@pytest.mark.parametrize("shape", [SHAPES[0], (384, 256, 256)], ids=str)
def test_split_products_hold_what_is_counted(kernels, monkeypatch, shape, save, pair):
    monkeypatch.setattr(route, "is_fp32_on_gpu", lambda dtype, device: dtype == torch.float32)
    route.any_mlp_product_splits.cache_clear()
    for least in ("MIN_SPLIT_SIZE", "MIN_SPLIT_RESULTS", "MIN_SPLIT_WORK"):
        monkeypatch.setattr(linear_route, least, 1)
    book = {"gate_up": SPLIT, "input": SPLIT_INPUT}[save]
    actual = peak_mib(lambda *operands: functional.swiglu_mlp(*operands, save=save), shape, pair)
    # Beside the parts there are their words and what is seen of columns.
    assert counted(book, shape) <= actual < counted(book, shape) + 0.02
    assert [plan.path for plan in plan_cache._PLANS.values()] == ["split fp32"]
