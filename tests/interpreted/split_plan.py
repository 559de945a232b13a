"""Plans with split products in Triton's interpreter: `tests/test_split_plan.py` runs this file in a
process of its own.
"""

import pytest
import torch
from torch.autograd import grad

import plan_checks
import swiglu_checks as checks
from broken_kernels import without_scales
from called import Called
from fusedlib.bench.settings import matmul_settings
from fusedlib.launch.fixed import fixed_weights
from fusedlib.ops.linear import route as linear_route
from fusedlib.ops.linear.split import parts
from fusedlib.ops.mlp import plan_cache, route
from fusedlib.ops.mlp.function import SAVES, path_of, swiglu_mlp
from split_checks import cut_for_the_interpreter

SHAPE = (24, 32, 48)  # tokens, hidden, inner
LONG = (264, 256, 272)  # sums long enough that the parts' own error is not the largest
SEVERAL = (130, 48, 80)  # more than one 128-tile of tokens and of 2·inner, the last ones ragged
MULTIPLY = ["_split_product_kernel"]
PRODUCT = ["_split_kernel"] * 2 + MULTIPLY
POINTWISE = ["_swiglu_bwd_kernel"]
SPLIT = "split fp32"


@pytest.fixture(autouse=True)
def started(monkeypatch):
    cut_for_the_interpreter(monkeypatch)
    monkeypatch.setattr(route, "is_fp32_on_gpu", lambda dtype, device: dtype == torch.float32)
    for name in ("MIN_SPLIT_SIZE", "MIN_SPLIT_WORK"):
        monkeypatch.setattr(linear_route, name, 1)
    least(monkeypatch, SHAPE)
    return plan_checks.note_launches(monkeypatch)


def least(monkeypatch, shape, some=True):
    """`some`: tokens·hidden results are too few to be split, so that y and d_x are torch's."""
    monkeypatch.setattr(linear_route, "MIN_SPLIT_RESULTS", some * shape[0] * shape[1] + 1)
    route.any_mlp_product_splits.cache_clear()


def small(shape=SHAPE, dtype="float32", pair=False):
    return checks.small("cpu", dtype, shape, pair)


def results(leaves, dy, save="gate_up"):
    y = checks.mlp(*leaves, save=save)
    return [y, *grad(y, leaves, dy)]


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("some, save", [(True, "input"), (False, "gate_up")])
def test_swiglu_mlp_and_gradients_vs_float64(monkeypatch, some, save, pair):
    least(monkeypatch, LONG, some)
    assert checks.misses_mlp("cpu", "float32", LONG, save, pair=pair) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == SPLIT


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("scale", [1.0, 1e-20])
@pytest.mark.parametrize(
    "shape, some, save",
    [(SHAPE, True, "gate_up"), (SHAPE, True, "input"), (SHAPE, False, "gate_up"),
     (SEVERAL, True, "gate_up")],
    ids=["some", "some, input", "all", "ragged"],
)  # fmt: skip
def test_gives_what_the_operators_give(started, monkeypatch, shape, some, save, scale, pair):
    """Bit by bit, by the same kernels, badly scaled weights and leading dimensions too."""
    least(monkeypatch, shape, some)
    (x, *gate_up, w_down), dy = small(shape, pair=pair)
    w_down = (w_down.detach() * scale).requires_grad_()
    deep = x.detach().view(2, shape[0] // 2, -1).requires_grad_()
    leaves = deep, *gate_up, w_down
    started.clear()
    planned, by_plan = results(leaves, dy.view_as(deep), save), started.copy()
    assert plan_cache._PLANS
    started.clear()
    with Called():
        assert checks.same(results(leaves, dy.view_as(deep), save), planned)
    assert started == by_plan and MULTIPLY[0] in started


@pytest.mark.parametrize("some, save", [(True, "gate_up"), (False, "input")])
@pytest.mark.parametrize("shape", [SHAPE, SEVERAL], ids=str)
def test_a_pair_gives_what_the_packed_weight_gives(started, monkeypatch, shape, some, save):
    """Bit by bit where a product is split, in as many launches: the parts are the same."""
    least(monkeypatch, shape, some)
    leaves, dy = small(shape)
    packed, by_packed = results(leaves, dy, save), started.copy()
    started.clear()
    paired = results(small(shape, pair=True)[0], dy, save)
    found = [*paired[:2], torch.cat(paired[2:4]), paired[4]]
    assert started == by_packed and MULTIPLY[0] in started
    # d_x is torch's, of two products, where `some` are.
    assert checks.close(found, packed)
    assert checks.same(found[:1] + found[2:], packed[:1] + packed[2:])
    assert some or torch.equal(found[1], packed[1])


@pytest.mark.parametrize("check", plan_checks.HOLDS, ids=plan_checks.name_of)
def test_holds(monkeypatch, check):
    plan_checks.run_at(monkeypatch, check, "cpu", "float32", (36, *SHAPE[1:]))
    assert SPLIT in {plan.path for plan in plan_cache._PLANS.values()}


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("save", SAVES)
def test_frozen_subsets_get_what_they_want_and_cost_no_more(started, save, pair):
    leaves, dy = small(pair=pair)
    for chosen in plan_checks.frozen_subsets(started, leaves, dy, save, checks.same):
        gradient = chosen != {"w_down"}
        again = (PRODUCT + POINTWISE) * (save == "input")
        needed = POINTWISE * (gradient or save == "gate_up")
        of_gate_up = bool(chosen & {"w_gate_up", "w_gate", "w_up"})
        of_weights = PRODUCT * (of_gate_up + ("w_down" in chosen))
        assert started == again + PRODUCT * gradient + needed + of_weights


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_a_second_call_looks_nothing_up(monkeypatch, pair):
    plan_checks.check_second_call(monkeypatch, *small(pair=pair))


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_a_weight_changed_in_place_is_seen(pair):
    """Nothing of a weight is kept from call to call, not even unknown to its version counter."""
    leaves, dy = small(pair=pair)
    first = results(leaves, dy)
    for weight in leaves[1:]:
        weight.data.mul_(2.0)
    changed = results(leaves, dy)
    assert not torch.equal(changed[0], first[0])
    fresh = [t.detach().clone().requires_grad_() for t in leaves]
    assert checks.same(changed, results(fresh, dy))


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_fixed_weights_are_split_once_an_axis(started, monkeypatch, pair):
    """Bit by bit the same, for a second batch too; what is no parameter is split anew."""
    least(monkeypatch, SHAPE, some=False)
    (x, *weights), dy = small(pair=pair)
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    other = (x.detach() + 1).requires_grad_()
    wanted = [results([batch, *weights], dy) for batch in (x, other)]
    split, counts = PRODUCT[0], []
    with fixed_weights():
        for batch, of_batch in zip((x, other), wanted, strict=True):
            started.clear()
            with fixed_weights():  # the outermost block counts
                assert checks.same(results([batch, *weights], dy), of_batch)
            counts.append(started.count(split))
        started.clear()
        results([x, *(w.detach().requires_grad_() for w in weights)], dy)
        counts.append(started.count(split))
    assert counts == [12, 8, 12]
    weights[0].data.mul_(2.0)
    assert not checks.same(results([x, *weights], dy), wanted[0])


def test_a_fixed_weight_that_changes_raises(monkeypatch):
    least(monkeypatch, SHAPE, some=False)
    (x, *weights), dy = small()
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    with fixed_weights():
        results([x, *weights], dy)
        with torch.no_grad():
            weights[1].mul_(2.0)
        with pytest.raises(RuntimeError, match=r"weight of shape \(32, 48\) was changed in place"):
            results([x, *weights], dy)
    results([x, *weights], dy)


def test_the_next_block_splits_its_weights_anew(monkeypatch):
    """Also those that changed in between unknown to their version counter, as by fused AdamW."""
    least(monkeypatch, SHAPE, some=False)
    (x, *weights), dy = small()
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    with fixed_weights():
        before = results([x, *weights], dy)
    for weight in weights:
        weight.data.mul_(2.0)
    wanted = results([x, *weights], dy)
    with fixed_weights():
        assert checks.same(results([x, *weights], dy), wanted)
    assert not checks.same(before, wanted)


def test_fixed_weights_that_share_memory_count_their_changes_apart(monkeypatch):
    least(monkeypatch, SHAPE, some=False)
    (x, *weights), dy = small()
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    tied = [torch.nn.Parameter(torch.empty_like(w)) for w in weights]
    for one, other in zip(tied, weights, strict=True):
        one.data = other.data
    with torch.no_grad():
        weights[0].mul_(2.0)
    assert tied[0]._version != weights[0]._version
    with fixed_weights():
        by_owner = [results([x, *each], dy) for each in (weights, tied)]
    assert checks.same(*by_owner)


def test_another_precision_goes_another_way(started):
    """Between calls, and between forward and backward."""
    leaves, dy = small()
    results(leaves, dy)
    y = swiglu_mlp(*leaves)
    with matmul_settings("high", False):
        started.clear()
        grad(y, leaves, dy)
        assert started == POINTWISE
        started.clear()
        results(leaves, dy)
        assert started == POINTWISE * 2
        assert path_of(*leaves) == "fp32"


@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("pair", checks.PAIRS)
def test_a_mode_that_watches_the_backward_sees_its_products(monkeypatch, some, save, pair):
    least(monkeypatch, SHAPE, some)
    leaves, dy = small(pair=pair)
    wanted = grad(checks.mlp(*leaves, save=save), leaves, dy)
    y = checks.mlp(*leaves, save=save)
    with Called() as called:
        assert checks.same(grad(y, leaves, dy), wanted)
    # d_x is torch's, of few results.
    again = save == "input"
    by_gate_up = ((not some) + again) * pair
    assert called.names.count("split_mm_gate_up") == by_gate_up
    assert called.names.count("split_mm") == 3 + (not some) + again - by_gate_up
    assert called.names.count("mm") + called.names.count("addmm_") == some * (1 + pair)


def test_lengths_share_two_plans(started, monkeypatch):
    """One where no product is split; in the other each is split from its own length on."""
    hidden, inner = SHAPE[1:]
    monkeypatch.setattr(linear_route, "MIN_SPLIT_SIZE", 6)
    monkeypatch.setattr(linear_route, "MIN_SPLIT_RESULTS", 8 * 2 * inner)
    route.any_mlp_product_splits.cache_clear()
    plans, split = {}, {}
    for tokens in (1, 5, 6, 8, 15, 16, 40):
        leaves, dy = small((tokens, hidden, inner))
        started.clear()
        results(leaves, dy)
        operands = *leaves[:2], None, leaves[2]
        plans[tokens], split[tokens] = plan_cache.plan_for(*operands), started.count(MULTIPLY[0])
        assert plans[tokens] is plan_cache.lookup_plan(*operands)
    assert [plans[t].path for t in (5, 6)] == ["fp32", SPLIT]
    assert plans[1] is plans[5] and len({plans[t] for t in (6, 8, 15, 16, 40)}) == 1
    # The gradients of both weights; gate|up from 8 tokens on, dh from 16, y and d_x from 24.
    assert split == {1: 0, 5: 0, 6: 2, 8: 3, 15: 3, 16: 4, 40: 6}


def test_where_nothing_is_split_products_are_torch_s(monkeypatch):
    leaves, _ = small()
    assert path_of(*leaves) == SPLIT
    assert path_of(*small((24, 40, 56))[0]) == SPLIT  # whatever the sizes
    monkeypatch.setattr(linear_route, "is_faster_split", lambda *_: False)
    monkeypatch.setattr(plan_cache, "_PLANS", {})
    route.any_mlp_product_splits.cache_clear()
    assert path_of(*leaves) == "fp32"


@pytest.mark.parametrize("retained", [False, True])
def test_gate_up_is_written_over_only_where_nobody_sees_it(retained):
    for pair in checks.PAIRS:
        plan_checks.check_gate_up_written_over(*small(pair=pair), retained)


def test_a_second_derivative_raises():
    leaves, dy = small()
    [d_x] = grad(swiglu_mlp(*leaves), leaves[:1], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        d_x.sum().backward()


def test_a_broken_plan_is_rejected(monkeypatch):
    without_scales(monkeypatch)
    for pair in checks.PAIRS:
        assert checks.misses_mlp("cpu", "float32", LONG, pair=pair) != []


def test_gate_s_rows_taken_for_up_s_are_rejected(monkeypatch):
    split_factor = parts.FactorSplitter.__call__
    monkeypatch.setattr(
        parts.FactorSplitter,
        "__call__",
        lambda self, source, below=None: split_factor(self, source),
    )
    assert checks.misses_mlp("cpu", "float32", LONG, pair=True) != []
