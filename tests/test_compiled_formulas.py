"""What torch.compile gets: formulas of norms, rotations and MLPs of some tokens, else operators."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import fusedlib
from fusedlib.ops.mlp import route
from fusedlib.ops.norm import function as norms
from fusedlib.ops.rope import function as rotary

WIDTH, INNER, HEADS = 32, 48, 2


@pytest.fixture
def kernels(monkeypatch):
    """As on a GPU, whose kernels a graph that is only looked at does not run."""
    for module in norms, rotary, route:
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


class Graphs:
    """A backend that keeps the graphs it is given and runs nothing of them."""

    def __init__(self):
        self.operators = []

    def __call__(self, graph, example):
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        self.operators.append({name for name in called if "fusedlib" in name})
        return lambda *_: (torch.zeros(1), torch.zeros(1))


def norm(tokens):
    x = torch.randn(1, tokens, WIDTH)
    return lambda x: fusedlib.rms_norm(x, torch.ones(WIDTH), residual=x), (x,)


def rotation(tokens):
    q, k = (torch.randn(1, HEADS, tokens, 16) for _ in range(2))
    table = torch.randn(1, tokens, 16)
    return fusedlib.rope, (q, k, table, table)


def mlp(tokens, save="gate_up"):
    x, weights = torch.randn(1, tokens, WIDTH), torch.randn(2 * INNER, WIDTH)
    down = torch.randn(WIDTH, INNER)
    operands = (t.half() for t in (x, weights, down))
    return lambda *operands: fusedlib.swiglu_mlp(*operands, save=save), (*operands,)


def operators(make, lengths, dynamic=False, **settings):
    """Whether each graph of calls of these lengths has an operator of ours."""
    torch.compiler.reset()
    graphs = Graphs()
    compiled = torch.compile(make(lengths[0], **settings)[0], backend=graphs, dynamic=dynamic)
    for tokens in lengths:
        compiled(*make(tokens, **settings)[1])
    return [bool(names) for names in graphs.operators]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("make", "most"), [(norm, 1024 * norms.TOKEN_WIDTH // WIDTH), (rotation, 1024)]
)
def test_a_fixed_number_of_tokens_up_to_1024_is_the_compilers(make, most):
    """Also of a norm over heads, whose rows are short and many."""
    more = most + norms.TOKEN_WIDTH // WIDTH
    assert operators(make, (1, 64, most, more)) == [False, False, False, True]
    assert operators(make, (128, 40, 200), dynamic=True) == [True]


@pytest.mark.usefixtures("kernels")
def test_an_mlp_of_a_fixed_number_of_tokens_up_to_1024_is_the_compilers():
    assert operators(mlp, (64, 65, 1024, 1025)) == [True, False, False, True]
    assert operators(mlp, (128, 40, 2000), dynamic=True) == [True]
    assert operators(mlp, (128,), save="input") == [True]


@pytest.mark.long
def test_cosines_that_all_layers_read_are_computed_once():
    def layers(q, k, angles):
        tables = angles.cos(), angles.sin()
        for _ in range(3):
            q, k = (x @ torch.eye(16) for x in fusedlib.rope(q, k, *tables))
        return q, k

    q, k, angles, _ = rotation(20)[1]
    torch.compiler.reset()
    compiled = torch.compile(layers, fullgraph=True)
    actual, [code] = run_and_get_code(compiled, q, k, angles)
    torch.testing.assert_close(actual, layers(q, k, angles))
    assert code.count(".cos()") + code.count("std::cos(") == 1
