"""q, k and v of one x in Triton's interpreter: `tests/test_projections.py` runs this file."""

import pytest
import torch
from torch.autograd import grad

import gradient_checks
from fusedlib.ops.qkv import function as qkv
from fusedlib.ops.qkv import kernels
from projections_checks import SHAPES, Leaves, misses, operands, step


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Names of the kernels that start."""
    names, forward, backward = [], kernels.project, kernels.gradients

    def noted(name, call):
        def started(*given):
            results = call(*given)
            names.extend([name] if results is not None else [])
            return results

        return started

    monkeypatch.setattr(kernels, "project", noted("results", forward))
    monkeypatch.setattr(kernels, "gradients", noted("gradients", backward))
    return names


@pytest.mark.parametrize("many", ["at once", "joined", "apart"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_vs_float64(monkeypatch, started, shape, dtype, biased, many):
    monkeypatch.setattr(qkv, "MOST_JOINED", qkv.MOST_JOINED * (many == "joined"))
    monkeypatch.setattr(kernels, "_has_larger_tiles", lambda _: many == "at once")
    assert misses("cpu", dtype, shape, biased) == []
    assert started == ["results", "gradients"] * (shape[0] <= 64 or many == "at once")


def test_more_tiles_than_run_at_once_are_torch_s(monkeypatch, started):
    monkeypatch.setattr(kernels, "ONE_WAVE", 20)  # of 24 in tiles of 32
    assert misses("cpu", "float16", SHAPES[3], True) == []
    assert started == ["gradients"]
    monkeypatch.setattr(kernels, "MAX_TOKENS_OF_SMALL", 69)
    assert misses("cpu", "float16", SHAPES[3], True) == []
    assert started == ["gradients"]


@pytest.mark.parametrize("frozen", [("x",), ("w_q",), ("w_k", "w_v"), ("x", "w_q", "b_v")])
def test_what_is_frozen_gets_nothing(frozen):
    assert misses("cpu", "float16", SHAPES[1], True, frozen) == []


def test_one_result_alone_and_other_strides():
    leaves = operands("cpu", torch.float16, SHAPES[1], True)
    for index, name in enumerate("qkv"):
        y = qkv.projections(*leaves.given())[index]
        wanted = torch.nn.functional.linear(leaves["x"], leaves[f"w_{name}"], leaves[f"b_{name}"])
        torch.testing.assert_close(y, wanted, rtol=2e-3, atol=2e-3)
        actual = grad(y.sum(), [leaves["x"], leaves[f"w_{name}"], leaves[f"b_{name}"]])
        torch.testing.assert_close(
            actual,
            grad(wanted.sum(), [leaves["x"], leaves[f"w_{name}"], leaves[f"b_{name}"]]),
            rtol=2e-3, atol=2e-3,
        )  # fmt: skip
    leaves.lay("x", lambda t: t.t().contiguous().t())
    leaves.lay("w_k", lambda t: t.t().contiguous().t())
    assert all(t.isfinite().all() for t in step(leaves).values())


@pytest.mark.parametrize("name", ["b_q", "b_k", "b_v"])
def test_a_bias_of_other_strides(name):
    leaves = operands("cpu", torch.float16, SHAPES[1], True)
    wanted = step(leaves)
    leaves.lay(name, lambda t: torch.stack([t, 0 * t], 1)[:, 0])
    actual = step(leaves)
    torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("many", ["at once", "joined", "apart"])
@pytest.mark.parametrize("shape", SHAPES[1::2])
def test_gradients_are_of_what_forward_read(monkeypatch, shape, many):
    monkeypatch.setattr(qkv, "MOST_JOINED", qkv.MOST_JOINED * (many == "joined"))
    monkeypatch.setattr(kernels, "_has_larger_tiles", lambda _: many == "at once")
    leaves = operands("cpu", torch.float32, shape, True)

    def joined(**own):
        return torch.cat(qkv.projections(*Leaves(own).given()), dim=1)

    dy = torch.randn(shape[0], sum(shape[2:]))
    watched = "by nobody", "by hooks"
    gradient_checks.check_what_forward_read(joined, leaves, dy, watched=watched)


def test_a_second_derivative_is_torch_s():
    leaves = operands("cpu", torch.float32, SHAPES[1], False)
    actual = qkv.projections(*leaves.given())
    loss = sum(y.square().sum() for y in actual)
    (d_x,) = grad(loss, leaves["x"], create_graph=True)
    (second,) = grad(d_x.square().sum(), leaves["w_k"])
    plain = [torch.nn.functional.linear(leaves["x"], leaves[f"w_{n}"]) for n in "qkv"]
    (d_x,) = grad(sum(y.square().sum() for y in plain), leaves["x"], create_graph=True)
    wanted = grad(d_x.square().sum(), leaves["w_k"])[0]
    torch.testing.assert_close(second, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "fault", ["k left out of d_x", "v by k's weight", "a bias left out", "a row too few"]
)
def test_broken_kernels_are_rejected(monkeypatch, fault):
    if fault == "k left out of d_x":
        right = kernels.gradients
        monkeypatch.setattr(
            kernels, "gradients",
            lambda x, w, d: right(x, [w[0], w[1] * 0, w[2]], d),
        )  # fmt: skip
    elif fault == "v by k's weight":
        right = kernels.project
        monkeypatch.setattr(kernels, "project", lambda x, w, b: right(x, [w[0], w[1], w[1]], b))
    elif fault == "a bias left out":
        right = kernels.project
        monkeypatch.setattr(kernels, "project", lambda x, w, b: right(x, w, [b[0], b[1], b[2] * 0]))
    else:
        right = kernels.gradients

        def short(x, w, d):
            return right(x * (torch.arange(x.shape[0]) < x.shape[0] - 1)[:, None], w, d)

        monkeypatch.setattr(kernels, "gradients", short)
    assert misses("cpu", "float16", SHAPES[1], True) != []
