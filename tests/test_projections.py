"""q, k and v of one x: in Triton's interpreter and on a GPU, beside torch's own layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import linear

import gradient_checks
from fusedlib.bench import check
from fusedlib.ops.qkv import function as qkv
from fusedlib.ops.qkv import kernels
from interpreter import passed_in_the_interpreter

# Tokens, inputs, and outputs of q, k and v: ragged in tiles of 32; the last has many tokens.
SHAPES = [(1, 48, 80, 16, 16), (37, 80, 144, 48, 48), (64, 160, 48, 48, 16), (70, 80, 144, 48, 48)]


class Leaves(dict[str, Tensor]):
    """x, weights and biases by name; frozen ones want no gradient."""

    def given(self) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """As `projections` takes them."""
        return self["x"], [self[f"w_{n}"] for n in "qkv"], [self.get(f"b_{n}") for n in "qkv"]

    def lay(self, name: str, how: Callable[[Tensor], Tensor]) -> None:
        """Give an operand other strides."""
        self[name] = how(self[name].detach()).requires_grad_(self[name].requires_grad)


def operands(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], biased: bool,
    frozen: tuple[str, ...] = (),
) -> Leaves:  # fmt: skip
    """Drawn on the CPU from a fixed seed."""
    tokens, inputs, *widths = shape
    draw = torch.Generator().manual_seed(3)
    leaves = {"x": torch.randn(tokens, inputs, generator=draw)}
    for name, width in zip("qkv", widths, strict=True):
        leaves[f"w_{name}"] = torch.randn(width, inputs, generator=draw) * inputs**-0.5
        if biased:
            leaves[f"b_{name}"] = torch.randn(width, generator=draw)
    return Leaves(
        {n: t.to(device, dtype).requires_grad_(n not in frozen) for n, t in leaves.items()}
    )


def step(
    leaves: Leaves, call: Callable[..., tuple[Tensor, ...]] | None = None
) -> dict[str, Tensor]:
    """Results and gradients by name."""
    results = (call or qkv.projections)(*leaves.given())
    draw = torch.Generator().manual_seed(5)
    upstream = [torch.randn(y.shape, generator=draw).to(y) for y in results]
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    actual = torch.autograd.grad(results, list(wanted.values()), upstream)
    named = dict(zip("qkv", (y.detach() for y in results), strict=True))
    return named | {f"d_{n}": g for n, g in zip(wanted, actual, strict=True)}


def plain(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
    """By torch's own layers."""
    return tuple(linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def misses(
    device: str, dtype: str, shape: tuple[int, ...], biased: bool, frozen: tuple[str, ...] = ()
) -> list[str]:
    """What the project's rule rejects."""
    kind = getattr(torch, dtype)
    leaves = operands(device, kind, shape, biased, frozen)
    wide = Leaves(
        {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in leaves.items()}
    )
    true = step(wide, plain)
    usual, actual = (check.errors(step(leaves, call), true) for call in (plain, None))
    return check.misses(actual, usual, kind)


def test_in_the_interpreter():
    assert passed_in_the_interpreter("test_projections.py") > 30


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


@pytest.mark.interpreter
@pytest.mark.parametrize("many", ["at once", "joined", "apart"])
@pytest.mark.parametrize(
    ("dtype", "biased"), [("float16", False), ("bfloat16", True), ("float32", True)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_vs_float64(device, monkeypatch, started, shape, dtype, biased, many):
    monkeypatch.setattr(qkv, "MOST_JOINED", qkv.MOST_JOINED * (many == "joined"))
    monkeypatch.setattr(kernels, "_has_larger_tiles", lambda _: many == "at once")
    assert misses(device, dtype, shape, biased) == []
    assert started == ["results", "gradients"] * (shape[0] <= 64 or many == "at once")


@pytest.mark.interpreter
def test_more_tiles_than_run_at_once_are_torch_s(device, monkeypatch, started):
    monkeypatch.setattr(kernels, "ONE_WAVE", 20)  # of 24 in tiles of 32
    assert misses(device, "float16", SHAPES[3], True) == []
    assert started == ["gradients"]
    monkeypatch.setattr(kernels, "MAX_TOKENS_OF_SMALL", 69)
    assert misses(device, "float16", SHAPES[3], True) == []
    assert started == ["gradients"]


@pytest.mark.interpreter
@pytest.mark.parametrize("frozen", [("x",), ("w_q",), ("w_k", "w_v"), ("x", "w_q", "b_v")])
def test_what_is_frozen_gets_nothing(device, frozen):
    assert misses(device, "float16", SHAPES[1], True, frozen) == []


@pytest.mark.interpreter
def test_one_result_alone_and_other_strides(device):
    leaves = operands(device, torch.float16, SHAPES[1], True)
    for index, name in enumerate("qkv"):
        y = qkv.projections(*leaves.given())[index]
        wanted = linear(leaves["x"], leaves[f"w_{name}"], leaves[f"b_{name}"])
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


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["b_q", "b_k", "b_v"])
def test_a_bias_of_other_strides(device, name):
    leaves = operands(device, torch.float16, SHAPES[1], True)
    wanted = step(leaves)
    leaves.lay(name, lambda t: torch.stack([t, 0 * t], 1)[:, 0])
    actual = step(leaves)
    torch.testing.assert_close(actual, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("shape", "many"), [(SHAPES[1], "joined"), (SHAPES[3], "at once"), (SHAPES[3], "apart")]
)
def test_gradients_are_of_what_forward_read(device, monkeypatch, shape, many):
    monkeypatch.setattr(qkv, "MOST_JOINED", qkv.MOST_JOINED * (many == "joined"))
    monkeypatch.setattr(kernels, "_has_larger_tiles", lambda _: many == "at once")
    leaves = operands(device, torch.float32, shape, True)

    def joined(**own):
        return torch.cat(qkv.projections(*Leaves(own).given()), dim=1)

    dy = torch.randn(shape[0], sum(shape[2:]))
    watched = "by nobody", "by hooks"
    gradient_checks.check_what_forward_read(joined, leaves, dy, watched=watched)


@pytest.mark.interpreter
def test_a_second_derivative_is_torch_s(device):
    leaves = operands(device, torch.float32, SHAPES[1], False)
    actual = qkv.projections(*leaves.given())
    loss = sum(y.square().sum() for y in actual)
    (d_x,) = grad(loss, leaves["x"], create_graph=True)
    (second,) = grad(d_x.square().sum(), leaves["w_k"])
    plain = [linear(leaves["x"], leaves[f"w_{n}"]) for n in "qkv"]
    (d_x,) = grad(sum(y.square().sum() for y in plain), leaves["x"], create_graph=True)
    wanted = grad(d_x.square().sum(), leaves["w_k"])[0]
    torch.testing.assert_close(second, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "fault", ["k left out of d_x", "v by k's weight", "a bias left out", "a row too few"]
)
def test_broken_kernels_are_rejected(device, monkeypatch, fault):
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
    assert misses(device, "float16", SHAPES[1], True) != []


@pytest.mark.parametrize("shape", [(5, 48, 80, 16, 16), (70, 80, 144, 48, 48)])
def test_without_kernels(shape):
    for dtype in ("float32", "bfloat16"):
        assert misses("cpu", dtype, shape, True) == []


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 16, 37, 64, 65, 700])
@pytest.mark.parametrize("sizes", [(896, 896, 128, 128), (2048, 2048, 512, 512), (80, 144, 48, 16)])
def test_on_a_gpu_vs_float64(sizes, tokens, dtype, biased):
    assert misses("cuda", dtype, (tokens, *sizes), biased) == []


@pytest.mark.gpu
def test_layers_of_another_device_and_at_odd_addresses():
    leaves = operands("cuda", torch.bfloat16, (7, 80, 144, 48, 48), True)
    wanted = step(leaves)
    leaves.lay("x", lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t))
    leaves.lay("w_v", lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t))
    torch.testing.assert_close(step(leaves), wanted, rtol=2e-2, atol=2e-2)
