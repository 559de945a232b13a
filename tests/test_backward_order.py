"""Which product of a backward pass comes last: by counting, and by every allocation of a pass whose
kernels start nothing (what they allocate, and how long it lives, is the same).
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest

import swiglu_checks as checks
from called import Called
from fusedlib import swiglu_mlp, tuning
from fusedlib.ops.mlp.function import SAVES
from fusedlib.ops.mlp.products import is_d_w_down_last
from study import ledger
from study.allocator import passed
from study.ledger import FUSED, FUSED_INPUT, SPLIT, SPLIT_INPUT, total
from study.mlp import SwiGLUProblem

ALL = True, True, False, True  # of a packed weight
SIZES = (64, 256, 1024, 4096, 28672)


@pytest.mark.parametrize(
    ("splits", "books"), [(False, (FUSED, FUSED_INPUT)), (True, (SPLIT, SPLIT_INPUT))]
)
def test_the_rule_takes_the_order_of_the_lower_peak(splits, books):
    chosen = set()
    for shape in product(SIZES, repeat=3):
        problem = SwiGLUProblem(*shape, "float32")
        last = is_d_w_down_last(*shape, ALL, splits=splits)
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


# tokens·hidden·inner: d_w_down last, first, and level.
SHAPES = [(128, 384, 512), (384, 256, 256), (128, 128, 192)]
ROUTES = {
    "fused": {},
    "apart": {"mlp_unfused_tokens": 1 << 40},
    "split": {"mlp_fuses_fp32": False, "split_least_size": 1, "split_least_results": 1,
              "split_least_work": 1},
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("route", [*ROUTES, "watched"])
def test_a_pass_holds_what_is_counted(device, monkeypatch, route, shape, save, pair):
    from fusedlib.launch import Launch

    monkeypatch.setattr(Launch, "__call__", lambda *_: None)
    (x, *gate_up, w_down), dy = checks.small(device, "float32", shape, pair)

    def forward():
        with Called() if route == "watched" else nullcontext():
            return swiglu_mlp(x, gate_up if pair else gate_up[0], w_down, save=save)

    with tuning.override(**ROUTES.get(route, {})):
        found = passed(forward, dy).figures()["peak_mib"]
    problem = SwiGLUProblem(*shape, "float32")
    books = (SPLIT, SPLIT_INPUT) if route == "split" else (FUSED, FUSED_INPUT)
    counted = total(books[SAVES.index(save)].peak(problem)[1]).mib(problem)
    if route == "apart":  # dh is no allocation of the fused kernels; it goes before d(gate|up)'s
        counted = max(counted, (ledger.F * 4 + ledger.D).mib(problem))
    if route == "watched" and save == "gate_up":  # registered operators have a second one
        counted += (ledger.F * 2).mib(problem)
    more = 0.02 * (route == "split")  # parts' words, and what is seen of columns
    assert counted <= found <= counted + more
