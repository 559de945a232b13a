"""What must hold of `fusedlib.linear` wherever it runs: PyTorch, the interpreter, a GPU.

Each check takes the device and sizes. `tests/test_linear.py` runs them on the CPU in plain PyTorch,
`tests/interpreted/linear.py` over interpreted kernels, `tests/test_linear_gpu.py` on a GPU.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, grad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import gradient_checks
from fusedlib import linear
from fusedlib.bench.settings import matmul_settings
from fusedlib.ops.linear import route as linear_route
from gradient_checks import close, drawn, misses, same
from rewritten import rewritten
from split_checks import misses as contract_misses
from split_families import FAMILIES

Shape = tuple[int, int, int]  # tokens, inputs, outputs
SMALL: Shape = (36, 40, 24)
# Several 128-tiles, ragged; sums so long that the parts' own error is not the largest.
LONG: Shape = (264, 256, 272)


def split_everything(monkeypatch) -> None:
    """Products of any size are split."""

    gates = linear_route
    for name in ("MIN_SPLIT_SIZE", "MIN_SPLIT_RESULTS", "MIN_SPLIT_WORK"):
        monkeypatch.setattr(gates, name, 1)


def note_products(monkeypatch) -> list[tuple[torch.Size, torch.Size]]:
    """Sizes of the factors that are split from now on, product by product; a plan's are none."""
    from fusedlib.ops.linear.split.product import SplitProduct

    sizes = []
    original = SplitProduct.__call__

    def noted(self, a, b, below=None):
        if isinstance(a, Tensor):
            sizes.append((a.shape, b.shape))
        return original(self, a, b, below)

    monkeypatch.setattr(SplitProduct, "__call__", noted)
    return sizes


def operands(device: str, shape: Shape, dtype: str = "float32", bias: bool = True):
    """Leaves by name, and dy."""
    tokens, inputs, outputs = shape
    kind = getattr(torch, dtype)
    leaves = {
        "x": drawn(device, kind, tokens, inputs, seed=0),
        "weight": drawn(device, kind, outputs, inputs, seed=1, scale=inputs**-0.5),
    }
    if bias:
        leaves["bias"] = drawn(device, kind, outputs, seed=2)
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    return leaves, drawn(device, kind, tokens, outputs, seed=3)


def named(compute: Callable[..., Tensor]):
    return lambda **leaves: {"y": compute(**leaves)}


def misses_linear(
    device: str, shape: Shape, dtype: str = "float32", bias: bool = True,
    compute: Callable[..., Tensor] = linear,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects of y and the gradients."""
    leaves, dy = operands(device, shape, dtype, bias)
    return misses(named(compute), named(functional.linear), leaves, {"y": dy})


def step(leaves, dy: Tensor, compute: Callable[..., Tensor] = linear) -> list[Tensor]:
    return gradient_checks.results_of(compute, leaves, dy)


def contract_misses_of(
    device: str, shape: Shape, family: str, compute: Callable[..., Tensor] = linear
) -> list[str]:
    """Where an element of y, d_x or d_W errs by more than the docstring allows."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(5)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x, weight_t = FAMILIES[family](normal(tokens, inputs), normal(inputs, outputs))
    dy, _ = FAMILIES[family](normal(tokens, outputs), normal(outputs, inputs))
    x, weight, dy = (t.to(device).contiguous() for t in (x, weight_t.t(), dy))
    leaves = {"x": x.requires_grad_(), "weight": weight.requires_grad_()}
    y, d_x, d_weight = step(leaves, dy, compute)
    x, weight = x.detach(), weight.detach()
    pairs = {"y": (y, x, weight.t()), "d_x": (d_x, dy, weight), "d_W": (d_weight, dy.t(), x)}
    return [f"{name}: {miss}" for name, of in pairs.items() for miss in contract_misses(*of)]


# --- everywhere ----------------------------------------------------------------------------------


def check_leading_dimensions(device: str, shape: Shape = SMALL) -> None:
    leaves, dy = operands(device, shape)
    wanted, tokens = step(leaves, dy), shape[0]
    for leading in ((2, tokens // 2), (1, 2, tokens // 2), (tokens // 2, 1, 2)):
        deep = leaves | {"x": leaves["x"].detach().reshape(*leading, -1).requires_grad_()}
        y, d_x, *others = step(deep, dy.reshape(*leading, -1))
        assert y.shape == (*leading, shape[2]) and d_x.shape == (*leading, shape[1])
        found = [y.reshape(wanted[0].shape), d_x.reshape(wanted[1].shape), *others]
        assert same(found, wanted), leading
    one = linear(leaves["x"][0], leaves["weight"], leaves["bias"])
    assert one.shape == shape[2:] and close([one], [wanted[0][0]])


def check_empty(device: str, shape: Shape = SMALL) -> None:
    leaves, _ = operands(device, shape)
    for leading in ((0,), (3, 0), (0, 3)):
        x = torch.zeros(*leading, shape[1], device=device, requires_grad=True)
        y = linear(x, leaves["weight"], leaves["bias"])
        d_x, d_weight, d_bias = grad(y.sum(), (x, leaves["weight"], leaves["bias"]))
        assert y.shape == (*leading, shape[2]) and d_x.shape == x.shape
        assert not d_weight.any() and not d_bias.any()
    nothing = linear(torch.ones(3, 0, device=device), torch.ones(5, 0, device=device))
    assert nothing.shape == (3, 5) and not nothing.any()


def check_strides(device: str, shape: Shape = SMALL) -> None:
    gradient_checks.check_layouts(linear, *operands(device, shape))


def check_frozen_subsets(device: str, shape: Shape = SMALL) -> None:
    """Gradients where they are wanted alone, and what is kept for them."""
    leaves, dy = operands(device, shape)
    kept = []

    def noted(**own):
        kept.clear()
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            return linear(**own)

    for chosen in gradient_checks.subsets(noted, leaves, dy):
        factors = {"x": leaves["weight"], "weight": leaves["x"]}
        needed = sum(factors[name].numel() for name in chosen & factors.keys())
        assert sum(t.numel() for t in kept if t is not None) == needed, chosen


def check_backward_twice(device: str, shape: Shape = SMALL) -> None:
    leaves, dy = operands(device, shape)
    gradient_checks.check_repeated(linear, leaves, dy)
    gradient_checks.check_checkpointed(linear, leaves, dy)
    x = leaves["x"].detach().clone()
    y = linear(x, leaves["weight"])
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(y, leaves["weight"], dy)


def check_changed_in_place(device: str, shape: Shape = SMALL) -> None:
    for bias in (True, False):
        leaves, dy = operands(device, shape, bias=bias)
        leaves["x"] = leaves["x"].detach()[None].requires_grad_()
        gradient_checks.check_written_to(linear, leaves, dy[None])


def check_second_derivatives(device: str, shape: Shape = SMALL) -> None:
    """As of torch's linear: a penalty on the gradient."""

    def penalty(compute, dtype):
        leaves, dy = operands(device, shape)
        own = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
        dy = dy.to(dtype).requires_grad_()
        d_x, d_weight = grad(compute(**own).sin(), (own["x"], own["weight"]), dy, create_graph=True)
        wanted = *own.values(), dy
        return grad(d_x.square().sum() + d_weight.square().mean(), wanted)

    found, true = penalty(linear, torch.float32), penalty(functional.linear, torch.float64)
    for f, t in zip(found, true, strict=True):
        assert (f.double() - t).norm() <= 1e-5 * t.norm()


def check_autocast(device: str, shape: Shape = SMALL) -> None:
    leaves, dy = operands(device, shape)
    with torch.autocast(device, dtype=torch.bfloat16):
        found, wanted = (
            step(leaves, dy.bfloat16(), compute) for compute in (linear, functional.linear)
        )
        mixed = linear(leaves["x"].bfloat16(), leaves["weight"], leaves["bias"])
    assert found[0].dtype == mixed.dtype == torch.bfloat16 and same(found, wanted)


def check_no_grad(device: str, shape: Shape = SMALL) -> None:
    gradient_checks.check_no_grad(linear, operands(device, shape)[0])


def check_functional_transforms(device: str, shape: Shape = SMALL) -> None:
    gradient_checks.check_transforms(linear, *operands(device, shape))


def check_transforms_of_backward(device: str, shape: Shape = SMALL) -> None:
    """Those that the forward did not see: batched gradients, and forward mode over a gradient."""
    leaves, dy = operands(device, shape)
    own, both = list(leaves.values()), torch.stack([dy, 2 * dy])
    y, found = linear(**leaves), {}
    for by, each in (("ours", y), ("torch", functional.linear(**leaves))):
        batched = grad(each, own, both, retain_graph=True, is_grads_batched=True)
        with forward_ad.dual_level():
            pushed = grad(each, own, forward_ad.make_dual(dy, -dy), retain_graph=True)
            found[by] = [*batched, *(forward_ad.unpack_dual(d).tangent for d in pushed)]
    assert close(found["ours"], found["torch"])


def check_subclasses(device: str, shape: Shape = SMALL) -> None:
    """They see torch's linear: they may have rules for that alone."""

    class Noting(Tensor):
        seen: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs or {})

    leaves, _ = operands(device, shape)
    y = linear(leaves["x"].detach().as_subclass(Noting), leaves["weight"], leaves["bias"])
    assert "linear" in Noting.seen and close([y.as_subclass(Tensor)], [linear(**leaves)])


def check_other_dtypes(device: str, shape: Shape = SMALL) -> None:
    """Bit by bit torch's."""
    for dtype in ("bfloat16", "float16", "float64"):
        leaves, dy = operands(device, shape, dtype)
        assert same(step(leaves, dy), step(leaves, dy, functional.linear))


def check_module(device: str, shape: Shape = SMALL) -> None:
    from fusedlib import Linear

    leaves, dy = operands(device, shape)
    for bias in (True, False):
        plain = nn.Linear(shape[1], shape[2], bias, device=device)
        made = Linear(shape[1], shape[2], bias, device=device)
        made.load_state_dict(plain.state_dict())
        assert list(made.state_dict()) == list(plain.state_dict()) and str(made) == str(plain)
        shared = Linear.from_torch(plain.eval())
        assert shared.weight is plain.weight and shared.bias is plain.bias and not shared.training
        wanted = functional.linear(leaves["x"], plain.weight, plain.bias)
        for module in (made, shared):
            y = module(input=leaves["x"])
            assert close([y], [wanted])
            y.backward(dy)
        assert close([made.weight.grad], [plain.weight.grad])


ALL = [value for name, value in list(globals().items()) if name.startswith("check_")]


# --- where products are split --------------------------------------------------------------------


def check_compiled(device: str, shape: Shape = SMALL) -> None:
    """In one graph for all lengths, right by the same rule; at another precision traced anew."""
    torch._dynamo.reset()
    graphs = []

    def backend(module, example_inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return module.forward

    counted = torch.compile(linear, fullgraph=True, dynamic=True, backend=backend)
    tokens, *sizes = shape
    for each in (tokens, tokens + 2, 2 * tokens):
        assert misses_linear(device, (each, *sizes), compute=counted) == []
    assert len(graphs) == 1 and "fusedlib.linear.default" in graphs[0]
    with matmul_settings("high", False):
        counted(**operands(device, shape)[0])
    assert len(graphs) == 2 and "fusedlib.linear.default" not in graphs[1]
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True)
    assert misses_linear(device, shape, compute=compiled) == []
    assert misses_linear(device, shape, bias=False, compute=compiled) == []


def check_operator(device: str, shape: Shape = SMALL) -> None:
    from fusedlib.ops.linear import operator as kernels

    leaves, _ = operands(device, shape)
    torch.library.opcheck(kernels.linear_operator, tuple(leaves.values()))
    deep = leaves["x"].detach().reshape(2, shape[0] // 2, -1)
    torch.library.opcheck(kernels.linear_operator, (deep, leaves["weight"], None))


def check_watched(device: str, shape: Shape = SMALL) -> None:
    """A dispatch mode sees operators, in the backward too, and the same numbers."""
    from called import Called

    leaves, dy = operands(device, shape)
    wanted = step(leaves, dy)
    with Called() as called:
        found = step(leaves, dy)
    assert same(found, wanted)
    assert called.names.count("linear_forward") == 1 and called.names.count("split_mm") == 2


def check_precision(started: list, device: str, shape: Shape = SMALL) -> None:
    """At TF32 torch's runs, also when it is set between forward and backward."""
    leaves, dy = operands(device, shape)
    y = linear(**leaves)
    with matmul_settings("high", False):
        started.clear()
        grad(y, list(leaves.values()), dy)
        assert same(step(leaves, dy), step(leaves, dy, functional.linear))
    assert not started


def check_fake(device: str, shape: Shape = SMALL) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    leaves, dy = operands(device, shape)
    with FakeTensorMode() as mode:
        own = {n: mode.from_tensor(t) for n, t in leaves.items()}
        y, *gradients = step(own, mode.from_tensor(dy))
    assert y.shape == dy.shape
    assert [g.shape for g in gradients] == [t.shape for t in leaves.values()]


WHERE_SPLIT = [check_compiled, check_operator, check_watched, check_fake]


def name_of(check: Callable[..., None]) -> str:
    return check.__name__.removeprefix("check_")


# --- teeth ---------------------------------------------------------------------------------------

# What stands in `fusedlib.ops.linear.operator`, what the fault has there.
BROKEN = {
    "bias left out": ("y += bias", "pass"),
    "d_b of the first tokens": ("rows.sum(0)", "rows[1:].sum(0)"),
    "d_W of other tokens": ("product(rows.t(),", "product(rows.roll(1, 0).t(),"),
    "d_x a thousandth off": ("product(rows, weight)", "product(rows * 1.001, weight)"),
    "y a thousandth off": ("split_mm(rows, weight.t())", "split_mm(rows * 1.001, weight.t())"),
}  # fmt: skip


def broken(monkeypatch, folder, fault: str) -> None:
    """The module with that fault."""
    from fusedlib.ops.linear import operator as kernels

    made = rewritten(monkeypatch, folder, kernels, *BROKEN[fault])
    monkeypatch.setattr(kernels, "LinearFunction", made.LinearFunction)
