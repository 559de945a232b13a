"""`fusedlib.linear` and `fusedlib.Linear` on the CPU: plain PyTorch, bad input, the interpreter."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.prune import l1_unstructured

import fusedlib
import linear_checks as checks
from fusedlib import Linear, linear
from fusedlib.ops.fused_class import fuse
from fusedlib.patch.apply import FusedLinear
from interpreter import passed_in_the_interpreter


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_in_the_interpreter(part):
    """What fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/linear.py", part) > 30


@pytest.mark.parametrize("check", checks.ALL, ids=checks.name_of)
def test_holds_in_plain_pytorch(check):
    check("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_pytorch_vs_float64(dtype):
    assert checks.misses_linear("cpu", checks.LONG, dtype) == []


def test_derivatives_of_both_orders_in_float64():
    shapes = (2, 3, 5), (4, 5), (4,)
    operands = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert gradcheck(linear, operands) and gradgradcheck(linear, operands)


def test_a_module_is_drawn_as_torch_s():
    for bias in (True, False):
        torch.manual_seed(3)
        plain = nn.Linear(7, 5, bias, dtype=torch.float64)
        torch.manual_seed(3)
        made = Linear(7, 5, bias, dtype=torch.float64)
        assert all(map(torch.equal, made.parameters(), plain.parameters()))
    assert isinstance(made, nn.Linear) and Linear(7, 5, device="meta").weight.is_meta
    assert torch.equal(copy.deepcopy(made).weight, made.weight)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(nn.Linear):
    """Nothing of its own."""


def test_from_torch_takes_what_computes_the_same():
    for kind in (nn.Linear, Named, Linear):
        plain = kind(3, 4)
        plain.weight.requires_grad_(False)
        assert Linear.from_torch(plain).weight is plain.weight
    hooked, own, fused, pruned = (nn.Linear(3, 4) for _ in range(4))
    hooked.register_forward_hook(lambda module, given, y: 2 * y)
    own.forward = own.forward
    fuse(fused, FusedLinear)
    l1_unstructured(pruned, "bias", 1)
    for wrong, words in (
        (hooked, "has hooks or a forward of its own"),
        (own, "has hooks or a forward of its own"),
        (fused, "apply_to has changed this one"),
        (pruned, "the bias is a Tensor, not a torch.nn.Parameter"),
        (nn.Conv1d(1, 1, 1), "takes a torch.nn.Linear with its own forward, got torch.nn.*Conv1d"),
        (Doubling(3, 4), "got test_linear.Doubling"),
        (torch.ones(3), "got torch.Tensor"),
        (nn.LazyLinear(3), "the weight is a UninitializedParameter"),
    ):
        with pytest.raises(TypeError, match=words):
            Linear.from_torch(wrong)


X, W, B = torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linear(X[0, 0], W), r"x must be \(..., in_features\), got a scalar"),
        (lambda: linear(X[:, :7], W), r"x must be \(..., 8\) for weight \(5, 8\), got \(3, 7\)"),
        (lambda: linear(X, W[0]), r"weight must be \(out_features, in_features\), got \(8,\)"),
        (lambda: linear(X, W, B[:4]), r"bias must be \(5,\) for weight \(5, 8\), got \(4,\)"),
        (lambda: linear(X, W, B[:, None]), r"bias must be \(5,\).*got \(5, 1\)"),
        (lambda: linear(X, W.half()), "weight is torch.float16, x is torch.float32.*autocast"),
        (lambda: linear(X, W, B.double()), "bias is torch.float64, x is torch.float32"),
        (lambda: linear(X, W.to("meta")), "weight is on meta, x on cpu"),
        (lambda: linear(X, W, B.to("meta")), "bias is on meta, x on cpu"),
        (lambda: Linear(0, 3), "in_features must be a whole number of at least 1, got 0"),
        (lambda: Linear.from_torch(nn.Linear(0, 3)), "in_features must be .* at least 1, got 0"),
        (lambda: Linear(True, 3), "in_features must be a whole number of at least 1, got True"),
        (lambda: Linear(3, 2.5), "out_features must be a whole number of at least 1, got 2.5"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_what_is_no_tensor_is_refused(name):
    operands = {"x": X, "weight": W, "bias": B} | {name: [1.0]}
    with pytest.raises(TypeError, match=rf"{name} must be a torch.Tensor, got the list \[1.0\]"):
        linear(**operands)


def test_traced_by_torch_fx():
    layer, x = Linear(8, 5), torch.randn(3, 8)
    assert torch.equal(torch.fx.symbolic_trace(layer)(x), layer(x))


def test_what_has_no_strides_is_torch_s():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    wanted = torch.nn.functional.linear(x, weight)
    nested = torch.nested.nested_tensor([x, x[:2]])
    torch.testing.assert_close(linear(nested, weight).unbind()[0], wanted)
    for operands in ((x.to_sparse(), weight), (x, weight.to_sparse()), (x.to_sparse_csr(), weight)):
        torch.testing.assert_close(linear(*operands), wanted)


def test_both_are_public():
    assert fusedlib.linear is linear and fusedlib.Linear is Linear
    assert {"linear", "Linear"} <= set(fusedlib.__all__) & set(dir(fusedlib))
