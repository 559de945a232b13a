"""What torch.compile gets of norms and rotations: formulas of few tokens, operators of others."""

import pytest
import torch

import fusedlib
from fusedlib.ops.norm import function as norms
from fusedlib.ops.rope import function as rotary

WIDTH, HEADS, LENGTHS = 32, 2, (1, 64, 65, 128)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """As on a GPU, whose kernels a graph that is only looked at does not run."""
    for module in norms, rotary:
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


@pytest.mark.parametrize("make", [norm, rotation])
def test_few_rows_of_a_fixed_number_are_the_compilers(make):
    for tokens in LENGTHS:
        torch.compiler.reset()
        graphs = Graphs()
        call, operands = make(tokens)
        torch.compile(call, backend=graphs, dynamic=False)(*operands)
        assert [bool(found) for found in graphs.operators] == [tokens > 64], tokens


@pytest.mark.parametrize("make", [norm, rotation])
def test_a_number_of_rows_that_is_open_stays_so(make):
    torch.compiler.reset()
    graphs = Graphs()
    call = make(128)[0]
    compiled = torch.compile(call, backend=graphs, dynamic=True)
    for tokens in (128, 40, 200):
        compiled(*make(tokens)[1])
    assert [bool(found) for found in graphs.operators] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_norm_of_few_rows_is_that_of_eager(dtype):
    """By a backend that runs the graph as it is; the eager one has no kernels here either."""
    torch.compiler.reset()
    x, weight = torch.randn(3, WIDTH).to(dtype), torch.randn(WIDTH).to(dtype)
    found = torch.compile(fusedlib.rms_norm, backend="eager", dynamic=False)(x, weight)
    torch.testing.assert_close(found, norms._plain(x, weight, 1e-6, None, "hf"))


@pytest.mark.parametrize("longest", [64, 200])
def test_an_export_keeps_the_number_of_tokens_open(monkeypatch, longest):
    for module in norms, rotary:
        monkeypatch.setattr(module, "has_kernels", lambda device: False)
    tokens = torch.export.Dim("tokens", min=2, max=longest)
    norm = fusedlib.RMSNorm(WIDTH)
    program = torch.export.export(norm, (torch.randn(1, 10, WIDTH),), dynamic_shapes=({1: tokens},))
    x = torch.randn(1, 33, WIDTH)
    torch.testing.assert_close(program.module()(x), norm(x))
