"""The kernels with fixed roles on a Hopper GPU: the interpreter does not run Gluon."""

import pytest
import torch

import hopper_checks as checks
import measure.swiglu  # noqa: F401 (registers the rivals)
from fusedlib import reference
from fusedlib.bench import check, rivals
from fusedlib.bench.operation import exact_results
from fusedlib.ops.mlp.function import path_of
from measure.mlp_problem import SwiGLUProblem, draw

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

SHAPE = (300, 208, 272)


def results(x, w_gate_up, w_down, dy, pair=False):
    """What the kernels leave in memory that held something else."""
    tokens, inner = x.shape[0], w_down.shape[1]
    h, again = (x.new_full((tokens, inner), 7.0) for _ in range(2))
    gate_up, d_gate_up = (x.new_full((tokens, 2 * inner), 7.0) for _ in range(2))
    checks.forward(x, w_gate_up, h, gate_up, pair)
    checks.backward(dy, w_down, gate_up, d_gate_up, again)
    return {"h": h, "gate_up": gate_up, "d_gate_up": d_gate_up, "h again": again}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", checks.SHAPES, ids=str)
def test_results_vs_float64(shape, dtype, pair):
    operands = checks.drawn(shape, dtype, "cuda")
    assert checks.misses(results(**operands, pair=pair), operands) == []


def test_a_pair_gives_what_the_packed_weight_gives():
    operands = checks.drawn((2064, 1040, 2016), "bfloat16", "cuda")
    packed, paired = results(**operands), results(**operands, pair=True)
    assert all(torch.equal(packed[name], paired[name]) for name in packed)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("broken", checks.BROKEN_OPERANDS)
def test_broken_kernels_are_rejected(broken, pair):
    operands = checks.drawn(SHAPE, "bfloat16", "cuda")
    found = results(**checks.BROKEN_OPERANDS[broken](operands), pair=pair)
    assert len(checks.misses(found, operands)) >= 4


@pytest.mark.parametrize("broken", checks.BROKEN_RESULTS)
def test_broken_results_are_rejected(broken):
    operands = checks.drawn(SHAPE, "bfloat16", "cuda")
    found = results(**operands)
    for name in found:
        assert checks.misses(checks.BROKEN_RESULTS[broken](name, found), operands), name


@pytest.mark.parametrize("store", [True, False])
def test_d_gate_up_may_be_gate_up_itself(store):
    operands = checks.drawn(SHAPE, "bfloat16", "cuda")
    gate_up = torch.randn(300, 544, device="cuda").bfloat16()
    apart, h, h_too = torch.empty_like(gate_up), *(gate_up.new_zeros(300, 272) for _ in range(2))
    dy, w_down = operands["dy"], operands["w_down"]
    checks.backward(dy, w_down, gate_up, apart, h if store else None)
    checks.backward(dy, w_down, gate_up, gate_up, h_too if store else None)
    assert torch.equal(gate_up, apart)
    assert torch.equal(h, h_too) and bool(h.any()) == store


def test_what_is_not_wanted_changes_nothing():
    operands = checks.drawn(SHAPE, "bfloat16", "cuda")
    x, w_gate_up = operands["x"], operands["w_gate_up"]
    h, h_alone = (x.new_empty(300, 272) for _ in range(2))
    checks.forward(x, w_gate_up, h, x.new_empty(300, 544))
    checks.forward(x, w_gate_up, h_alone, None)
    assert torch.equal(h, h_alone)


def test_a_kept_launch_serves_other_addresses():
    """The second call takes the kept binary, with tensor maps of its own."""
    for seed in range(3):
        torch.manual_seed(seed)
        operands = checks.drawn(SHAPE, "bfloat16", "cuda")
        moved = {name: torch.randn_like(t) for name, t in operands.items()}
        assert checks.misses(results(**moved), moved) == []


def test_results_repeat_bit_by_bit():
    operands = checks.drawn((2064, 1040, 2016), "bfloat16", "cuda")
    first = results(**operands)
    for _ in range(10):
        again = results(**operands)
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_results_repeat_where_memory_is_the_bound():
    """Some thirty tiles a program, whose gate and up come later than the product: on the way from
    one part to the next nothing may be overtaken. h needs no product, so each element is known.
    """
    tokens, hidden, inner = 16384, 2048, 8192
    dy, gate_up = (
        torch.randn(tokens, n, device="cuda").bfloat16() for n in (hidden, 2 * inner)
    )  # fmt: skip
    w_down = (torch.randn(hidden, inner, device="cuda") * hidden**-0.5).bfloat16()
    h, first = gate_up.new_empty(tokens, inner), torch.empty_like(gate_up)
    checks.backward(dy, w_down, gate_up, first, h)
    gate, up = gate_up.float().chunk(2, dim=1)
    true = gate * torch.sigmoid(gate) * up
    assert bool(((h.float() - true).abs() <= 2**-7 * true.abs() + 1e-30).all())
    del gate, up, true
    for _ in range(20):
        again, h_too = gate_up.clone(), torch.empty_like(h)
        checks.backward(dy, w_down, again, again, h_too)
        assert torch.equal(again, first) and torch.equal(h_too, h)


def test_the_gate_holds_a_whole_mlp():
    inputs = draw(SwiGLUProblem(2048, 1024, 4096, dtype="bfloat16"), "cuda")
    true = exact_results(inputs, reference.swiglu_mlp)
    eager, fused = (
        check.errors(check.results_of(rivals.get("swiglu", name).build(inputs), inputs.dy), true)
        for name in ("eager", "fused")
    )
    weights = inputs.w_gate, inputs.w_up
    for each in (weights, torch.cat(weights)):
        assert path_of(inputs.x, each, inputs.w_down) == "fused by roles"
    assert check.misses(fused, eager, torch.bfloat16) == []
