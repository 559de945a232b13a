"""The kernels with fixed roles on a Hopper GPU: the interpreter does not run Gluon."""

import pytest
import torch

from fusedlib.bench import check
from fusedlib.bench.problems import SwiGLUProblem, draw

hopper = pytest.importorskip("fusedlib.kernels.hopper")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

# Ragged in every direction; more K blocks than the ring has stages; more tiles than programs.
SHAPES = [(37, 64, 96), (300, 208, 272), (1000, 1040, 2000), (4096, 512, 4096), (5, 16, 16)]
NAMES = ("h", "gate_up", "d_gate_up", "h again")


def product(a, b):
    return a.double() @ b.double()


def expected(x, w_gate_up, dy, w_down):
    """The four results in float64, gate|up as given for the backward."""
    gate_up = product(x, w_gate_up.T)
    return gate_up, product(dy, w_down)


def activated(gate_up, dh):
    gate, up = gate_up.double().chunk(2, dim=1)
    s = torch.sigmoid(gate)
    d_gate = dh * up * s * (1 + gate * (1 - s))
    return gate * s * up, torch.cat([d_gate, dh * gate * s], dim=1)


def worst(found, true):
    return ((found.double() - true).abs().max() / true.square().mean().sqrt()).item()


def results(shape, dtype):
    tokens, hidden, inner = shape
    problem = SwiGLUProblem(tokens, hidden, inner, dtype=str(dtype).removeprefix("torch."))
    inputs = draw(problem, "cuda")
    x, w_down, dy = inputs.x.detach(), inputs.w_down.detach(), inputs.dy
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach()
    like = {"device": "cuda", "dtype": dtype}
    h, again = (torch.full((tokens, inner), 7.0, **like) for _ in range(2))
    gate_up, d_gate_up = (torch.full((tokens, 2 * inner), 7.0, **like) for _ in range(2))
    hopper.forward(x, w_gate_up, h, gate_up)
    hopper.backward(dy, w_down, gate_up, d_gate_up, again)
    true_gate_up, dh = expected(x, w_gate_up, dy, w_down)
    _, d_true = activated(gate_up, dh)
    h_true, _ = activated(true_gate_up, dh)
    found = dict(zip(NAMES, (h, gate_up, d_gate_up, again), strict=True))
    true = dict(zip(NAMES, (h_true, true_gate_up, d_true, h_true), strict=True))
    return found, true


def misses(found, true, dtype):
    # Half a unit of the worst element, a dozen deviations from the mean, and what rounding gate, up
    # or dh before the activation adds.
    allowed = 64 * torch.finfo(dtype).eps
    return [n for n in NAMES if not worst(found[n], true[n]) <= allowed]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_float64(shape, dtype):
    found, true = results(shape, dtype)
    assert misses(found, true, dtype) == []


def test_wrong_results_are_rejected():
    found, true = results((300, 208, 272), torch.bfloat16)
    found["h"][-1, -1] += 3.0  # one element of the last ragged tile
    found["gate_up"] = found["gate_up"].roll(272, dims=1)  # gate and up exchanged
    assert misses(found, true, torch.bfloat16) == ["h", "gate_up"]


def test_d_gate_up_may_be_gate_up_itself():
    problem = SwiGLUProblem(300, 208, 272, dtype="bfloat16")
    inputs = draw(problem, "cuda")
    gate_up = torch.randn(300, 544, device="cuda").bfloat16()
    apart, h, h_too = torch.empty_like(gate_up), *(gate_up.new_empty(300, 272) for _ in range(2))
    hopper.backward(inputs.dy, inputs.w_down.detach(), gate_up, apart, h)
    hopper.backward(inputs.dy, inputs.w_down.detach(), gate_up, gate_up, h_too)
    assert torch.equal(gate_up, apart)
    assert torch.equal(h, h_too)


def test_what_is_not_wanted_changes_nothing():
    inputs = draw(SwiGLUProblem(300, 208, 272, dtype="bfloat16"), "cuda")
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach()
    h, h_alone = (w_gate_up.new_empty(300, 272) for _ in range(2))
    hopper.forward(inputs.x.detach(), w_gate_up, h, w_gate_up.new_empty(300, 544))
    hopper.forward(inputs.x.detach(), w_gate_up, h_alone, None)
    assert torch.equal(h, h_alone)


def test_the_gate_holds_a_whole_mlp():
    from fusedlib.bench import providers

    inputs = draw(SwiGLUProblem(2048, 1024, 2048, dtype="bfloat16"), "cuda")
    true = check.truth(inputs)
    eager = check.errors(check.results_of(providers.get("eager").set_up(inputs), inputs.dy), true)
    fused = check.errors(check.results_of(providers.get("fused").set_up(inputs), inputs.dy), true)
    assert hopper.takes(inputs.x, 2048)
    assert check.misses(fused, eager, torch.bfloat16) == []
