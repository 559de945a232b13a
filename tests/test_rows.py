"""`rms_norm`, `RMSNorm` and `rope`: plain PyTorch on the CPU, bad input, and the interpreter."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import rows_checks as checks
from fusedlib import RMSNorm, rms_norm, rope
from fusedlib.ops import recomputed
from fusedlib.ops.recomputed import recompute_in_backward
from interpreter import passed_in_the_interpreter


def test_in_the_interpreter():
    """What fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/rows.py") > 75


@pytest.mark.parametrize("check", checks.EVERYWHERE, ids=lambda f: f.__name__[6:])
def test_holds_in_plain_pytorch(check):
    check("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_pytorch_vs_float64(dtype):
    assert checks.misses_norm("cpu", dtype, 37, 83) == []
    assert checks.misses_rope("cpu", dtype, checks.SMALL, 6) == []


def test_derivatives_of_both_orders_in_float64():
    x, residual, weight = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (3, 5), (5,))
    )
    for cast in ("hf", "litgpt"):
        operands = x, weight, residual

        def both(x, weight, residual, cast=cast):
            return rms_norm(x, weight, residual=residual, cast=cast)

        assert gradcheck(both, operands) and gradgradcheck(both, operands)
    q, k = (torch.randn(2, h, 3, 6, dtype=torch.float64, requires_grad=True) for h in (2, 1))
    cos, sin = (t.requires_grad_() for t in checks.tables("cpu", torch.float64, 1, 3, 4))
    assert gradcheck(rope, (q, k, cos, sin)) and gradgradcheck(rope, (q, k, cos, sin))


def test_module_is_the_function_and_has_hf_s_checkpoint():
    module = RMSNorm(48, 1e-5, dtype=torch.bfloat16)
    assert list(module.state_dict()) == ["weight"] and (module.weight == 1).all()
    leaves, _ = checks.norm_case("cpu", "bfloat16", 7, 48, True)
    module.load_state_dict({"weight": leaves["weight"]})
    x, residual = leaves["x"], leaves["residual"]
    assert checks.same(module(x, residual), rms_norm(x, leaves["weight"], 1e-5, residual=residual))
    assert torch.equal(module(x), rms_norm(x, leaves["weight"], 1e-5))
    assert str(module) == "RMSNorm(48, eps=1e-05, cast='hf')"
    other = RMSNorm(48, 1e-5, cast="litgpt", dtype=torch.bfloat16)
    other.load_state_dict(module.state_dict())
    assert not torch.equal(other(x), module(x))
    module.reset_parameters()
    assert (module.weight == 1).all()


X, W, SPARSE = torch.zeros(3, 8), torch.zeros(8), torch.zeros(2, 4, 3, 8).to_sparse()
NESTED = torch.nested.nested_tensor([X, X[:2]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rms_norm(X, W[:7]), r"weight must be \(8,\).*got \(7,\)"),
        (lambda: rms_norm(X[0, 0], W), r"x must be \(..., width\).*got \(\)"),
        (lambda: rms_norm(X[:, :0], W[:0]), r"got \(3, 0\)"),
        (lambda: rms_norm(X, W, residual=X[:2]), r"residual must be \(3, 8\).*got \(2, 8\)"),
        (
            lambda: rms_norm(X, W, residual=X.half()),
            r"residual is torch.float16, x is torch.float32",
        ),
        (lambda: rms_norm(X, W.to("meta")), "weight is on meta, x on cpu"),
        (lambda: rms_norm(X.int(), W), "x must be fp16, bf16, fp32 or float64, got torch.int32"),
        (lambda: rms_norm(X, W, cast="gpt"), "cast must be one of hf, litgpt, got 'gpt'"),
        (lambda: rms_norm(NESTED, W), "x must be a dense tensor with strides, got a nested one"),
        (lambda: rms_norm(X, W.to_sparse()), "weight must be a dense tensor .*, got .*sparse_coo"),
        (lambda: rms_norm(X, W, residual=NESTED), "residual must be a dense .*, got a nested one"),
        (lambda: RMSNorm(True), "hidden_size must be a whole number of at least 1, got True"),
        (lambda: RMSNorm(0), "hidden_size must be a whole number of at least 1, got 0"),
        (lambda: rms_norm(X, W, "1"), "eps must be a number, got '1'"),
        (lambda: RMSNorm(8, eps="a"), "eps must be a number, got 'a'"),
        (lambda: RMSNorm(8, cast="no"), "cast must be one of hf, litgpt, got 'no'"),
    ],
)
def test_rms_norm_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


Q, COS, AT = torch.zeros(2, 4, 3, 8), torch.zeros(1, 3, 8), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rope(Q[0], Q, COS, COS), r"q must be \(batch, heads, tokens, head_dim\), got"),
        (
            lambda: rope(Q, Q[:, :, :2], COS, COS),
            r"k must be \(2, heads, 3, 8\), got \(2, 4, 2, 8\)",
        ),
        (lambda: rope(Q, Q.half(), COS, COS), "k must be torch.float32 as q, got torch.float16"),
        (lambda: rope(Q, Q, COS, COS[:, :2]), r"sin must be \(1, 3, 8\) as cos, got \(1, 2, 8\)"),
        (
            lambda: rope(Q, Q, COS[..., :3], COS[..., :3]),
            r"an even width of at most 8.*\(1, 3, 3\)",
        ),
        (lambda: rope(Q, Q, *2 * [torch.zeros(1, 3, 10)]), r"at most 8.*\(1, 3, 10\)"),
        (lambda: rope(Q, Q, *2 * [torch.zeros(3, 3, 8)]), r"cos must be \(2 or 1, 3, rotary_dim\)"),
        (
            lambda: rope(Q, Q, COS[0], COS[0]),
            r"cos must be \(2 or 1, 3, rotary_dim\).*got \(3, 8\)",
        ),
        (lambda: rope(Q, Q, COS.to("meta"), COS), "cos is on meta, q on cpu"),
        (lambda: rope(Q, Q, COS, COS, positions=AT), r"with positions cos must be \(length"),
        (lambda: rope(Q, Q, COS[0], COS[0], positions=AT[:2]), r"positions must be.*got \(2,\)"),
        (lambda: rope(Q, Q, COS[0], COS[0], positions=AT.float()), "int32 or int64, got torch.fl"),
        (lambda: rope(Q, Q, COS, COS, width=4), "width must be at least head_dim, 8, got 4"),
        (lambda: rope(Q, Q, COS, COS, width="16"), "width must be a whole number .* got '16'"),
        (lambda: rope(Q, Q, COS, COS, width=16.0), "width must be a whole number .* got 16.0"),
        (lambda: rope(Q, Q, COS, COS, width=True), "width must be a whole number .* got True"),
        (lambda: rope(Q, SPARSE, COS, COS), "k must be a dense tensor .*, got one of layout .*coo"),
        (lambda: rope(NESTED, Q, COS, COS), "q must be a dense tensor with strides, got a nested"),
    ],
)
def test_rope_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_position_outside_the_table_raises_in_plain_pytorch():
    for wrong in (3, -1):
        with pytest.raises(IndexError):
            rope(Q, Q, COS[0], COS[0], positions=AT + wrong)


class Scaled(torch.autograd.Function):
    """x w, of which a node keeps both, as the MLP's does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return upstream * w, upstream * x


@pytest.mark.parametrize("multiply", [Scaled.apply, torch.mul])
def test_a_node_computes_again_what_it_would_have_kept(monkeypatch, multiply):
    w, x = torch.randn(7, requires_grad=True), torch.randn(7, requires_grad=True)
    y, calls = x + 0, []
    again = lambda: calls.append(1) or y.detach()  # noqa: E731
    monkeypatch.setattr(recomputed, "computed_again", lambda y: again)
    recompute_in_backward(y, multiply(y, w)).sum().backward()
    assert torch.equal(w.grad, x) and torch.equal(x.grad, w) and calls == [1]


def test_what_is_compiled_behind_an_uncompiled_norm_keeps_its_graph_whole(monkeypatch):
    """A compiler saves its own; asking a tensor for its grad_fn would break the graph."""
    x = torch.randn(3, 4, requires_grad=True)
    monkeypatch.setattr(recomputed, "computed_again", lambda x: x.detach)
    torch.compiler.reset()
    torch.compile(lambda x: recompute_in_backward(x, x * 2), backend="eager", fullgraph=True)(
        x
    ).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
