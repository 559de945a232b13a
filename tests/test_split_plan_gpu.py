"""Plans with split products on a GPU: bit by bit what the operators give, graphs, peaks."""

import pytest
import torch
from torch.autograd import grad

import gradient_checks
import plan_checks
import swiglu_checks as checks
from called import Called
from fusedlib.ops.mlp import plan_cache
from fusedlib.ops.mlp.function import SAVES

pytestmark = pytest.mark.gpu

# A model 1024 wide; y and d_x torch's, of few results; more tokens.
MODEL, FEW, ALL = (1024, 1024, 4096), (256, 2048, 8192), (2048, 2048, 2048)


@pytest.fixture(autouse=True)
def _only_plans_made_here(monkeypatch):
    monkeypatch.setattr(plan_cache, "_PLANS", {})


def results(leaves, dy, save="gate_up"):
    y = checks.mlp(*leaves, save=save)
    return [y, *grad(y, leaves, dy)]


@pytest.mark.parametrize("shape", [MODEL, ALL, (1000, 1056, 4112)], ids=str)
def test_a_pair_gives_what_the_packed_weight_gives(shape):
    """Bit by bit, by the same parts; all gate and up products are split there."""
    found = [results(*checks.small("cuda", "float32", shape, pair)) for pair in checks.PAIRS]
    assert same([found[1][0], found[1][1], torch.cat(found[1][2:4]), found[1][4]], found[0])


@pytest.mark.parametrize("pair", checks.PAIRS)
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("shape", [MODEL, FEW, ALL, (1000, 1056, 4112)], ids=str)
def test_gives_what_the_operators_give(shape, save, scale, pair):
    """Badly scaled weights, and other weights in the same storage."""
    (x, *weights, w_down), dy = checks.small("cuda", "float32", shape, pair)
    leaves = x, *weights, (w_down.detach() * scale).requires_grad_()
    planned = [results(leaves, dy, save) for _ in range(3)]
    [plan] = plan_cache._PLANS.values()
    assert plan.path == "split fp32"
    leaves[1].data.mul_(2.0)
    changed = results(leaves, dy, save)
    leaves[1].data.mul_(0.5)
    with Called():  # calls go by the registered operators
        wanted = results(leaves, dy, save)
        assert all(same(each, wanted) for each in planned)
        leaves[1].data.mul_(2.0)
        assert same(changed, results(leaves, dy, save))


def same(found, wanted) -> bool:
    return all(
        torch.equal(f.nan_to_num(), w.nan_to_num()) for f, w in zip(found, wanted, strict=True)
    )


# The others compare with few tokens or turned weights, whose products are torch's and err more.
HOLDS = (
    checks.check_backward_twice,
    checks.check_activation_checkpointing,
    checks.check_no_grad_and_inference,
)


@pytest.mark.parametrize("check", HOLDS, ids=plan_checks.name_of)
def test_holds(monkeypatch, check):
    plan_checks.run_at(monkeypatch, check, "cuda", "float32", (1032, 1024, 4096))
    assert "split fp32" in {plan.path for plan in plan_cache._PLANS.values()}


def test_captured_in_a_graph():
    leaves, dy = checks.small("cuda", "float32", MODEL)
    for _ in range(3):  # a graph of autograd that lives on ties its stream
        wanted = [t.detach() for t in results(leaves, dy)]
    graph, found = gradient_checks.captured(lambda: results(leaves, dy))
    graph.replay()
    assert same(found, wanted)
    leaves[1].data.mul_(2.0)
    graph.replay()
    assert same(found, results(leaves, dy)) and not torch.equal(found[0], wanted[0])


def test_another_precision_goes_another_way():
    leaves, dy = checks.small("cuda", "float32", MODEL)
    split = results(leaves, dy)
    torch.set_float32_matmul_precision("high")
    try:
        coarse = results(leaves, dy)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.equal(split[0], coarse[0]) and same(split, results(leaves, dy))


@pytest.mark.parametrize("pair", checks.PAIRS)
def test_holds_what_is_counted(pair):
    """Peak over what was there: gate|up and h, dy, dh and the parts of the largest product."""
    leaves, dy = checks.small("cuda", "float32", MODEL, pair)
    peak = checks.peak_over(lambda: results(leaves, dy))
    f, d, w = (4 * n for n in (1024 * 4096, 1024 * 1024, 1024 * 4096))
    # y, d_x, d_w_down and d_w_gate_up, d(gate|up), and the parts of d(gate|up) and x.
    last = 2 * d + w + 2 * w + 2 * f + (2 * f + d)
    assert abs(peak - last) <= 2**21
