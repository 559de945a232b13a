"""What must hold of the SwiGLU MLP wherever it runs: plain PyTorch, Triton's interpreter, a GPU.

Each check takes the device. `tests/test_swiglu.py` runs them all, `tests/test_plans.py` some for
each kind of plan.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import gelu, silu

import gradient_checks
from fusedlib import reference
from fusedlib.bench import check
from fusedlib.bench.rivals import Workload
from fusedlib.ops.mlp.function import SAVES, geglu_mlp, swiglu, swiglu_mlp
from gradient_checks import Errors, close, same, worse
from measure.mlp_problem import Inputs, SwiGLUProblem, draw

Leaves = tuple[Tensor, ...]  # x, w_gate_up, w_down; of a pair x, w_gate, w_up, w_down
PAIRS = (False, True)  # a packed weight; w_gate and w_up
SHAPE = TOKENS, HIDDEN, INNER = 37, 41, 35  # ragged, two of the interpreter's 32-tiles each way


def packed(inputs: Inputs) -> Leaves:
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    return inputs.x, w_gate_up, inputs.w_down


def small(
    device: str, dtype: str = "float32", shape: tuple[int, int, int] = SHAPE, pair: bool = False
) -> tuple[Leaves, Tensor]:
    """Leaves and dy of a ragged problem with several tiles each way."""
    inputs = draw(SwiGLUProblem(*shape, dtype), device)
    return tuple(inputs.leaves().values()) if pair else packed(inputs), inputs.dy


def names(leaves: Leaves) -> list[str]:
    return ["x", *(["w_gate_up"] if len(leaves) == 3 else ["w_gate", "w_up"]), "w_down"]


def small_by_name(
    device: str, pair: bool = False, **settings: str
) -> tuple[dict[str, Tensor], Tensor]:
    leaves, dy = small(device, pair=pair, **settings)
    return dict(zip(names(leaves), leaves, strict=True)), dy


def mlp(
    x: Tensor, *weights: Tensor, save: str = "gate_up", compute: Callable[..., Tensor] = swiglu_mlp
) -> Tensor:
    """A call on leaves, in their order."""
    *gate_up, w_down = weights
    return compute(x, gate_up if len(gate_up) == 2 else gate_up[0], w_down, save=save)


def half(x: Tensor, *gate_up: Tensor, save: str = "gate_up") -> Tensor:
    """The same without w_down."""
    return swiglu(x, gate_up if len(gate_up) == 2 else gate_up[0], save=save)


def mlp_by_name(*, save: str = "gate_up", **leaves: Tensor) -> Tensor:
    return mlp(*leaves.values(), save=save)


def half_by_name(**leaves: Tensor) -> Tensor:
    return half(*leaves.values())


def peak_over(step: Callable[[], Sequence[Tensor]]) -> int:
    """Bytes that a step on the GPU takes at most over what is there, once it has run twice.

    Results live until the end: autograd's thread lets go of the last ones when it next gets
    Python's lock, which can be after the bytes that are there were read.
    """
    results = [step() for _ in range(2)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results.append(step())
    return torch.cuda.max_memory_allocated() - before


def misses_mlp(
    device: str, dtype: str, shape: tuple[int, int, int], save: str = "gate_up",
    compute: Callable[..., Tensor] = swiglu_mlp, seed: int = 0, pair: bool = False,
    plain: Callable[..., Tensor] = reference.swiglu_mlp,
    activation: Callable[[Tensor], Tensor] = silu,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects in y and the gradients of a call of `swiglu_mlp`, or of
    another function with its reference and activation.
    """
    inputs = draw(SwiGLUProblem(*shape, dtype), device, seed)
    wide = {n: t.detach().double().requires_grad_() for n, t in inputs.leaves().items()}
    true = check.results_of(Workload(lambda: plain(**wide), wide), inputs.dy.double())

    def off(function: Callable[..., Tensor], leaves: dict[str, Tensor]) -> Errors:
        return check.errors(
            check.results_of(Workload(lambda: function(**leaves), leaves), inputs.dy), true
        )

    def at_once(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return halves_at_once(x, w_gate, w_up, activation=activation) @ w_down.mT

    usual = [off(function, inputs.leaves()) for function in (plain, at_once)]
    leaves = tuple(inputs.leaves().values()) if pair else packed(inputs)
    by_name = dict(zip(names(leaves), leaves, strict=True))

    def called(**leaves: Tensor) -> Tensor:
        return mlp(*leaves.values(), save=save, compute=compute)

    return check.misses(off(called, by_name), worse(*usual), inputs.x.dtype)


def misses_half(
    device: str, dtype: str, shape: tuple[int, int, int], save: str = "gate_up", pair: bool = False
) -> list[str]:
    """The same for `swiglu`, without the down projection."""
    (*leaves, w_down), _ = small(device, dtype, shape, pair)
    x, of = leaves[0], [f"d_{name}" for name in names((*leaves, w_down))[:-1]]
    generator = torch.Generator(device).manual_seed(1)
    dh = torch.randn(shape[0], shape[2], device=device, generator=generator).to(x.dtype)

    def apart(x: Tensor, *weights: Tensor) -> Tensor:
        w_gate, w_up = weights if pair else weights[0].chunk(2)
        return silu(x @ w_gate.mT) * (x @ w_up.mT)

    def results(compute: Callable[..., Tensor], upstream: Tensor, *leaves: Tensor):
        h = compute(*leaves)
        return {"h": h.detach(), **dict(zip(of, grad(h, leaves, upstream), strict=True))}

    true = results(apart, dh.double(), *(t.detach().double().requires_grad_() for t in leaves))
    plain = apart, halves_at_once
    usual = worse(*(check.errors(results(p, dh, *leaves), true) for p in plain))
    found = results(partial(half, save=save), dh, *leaves)
    return check.misses(check.errors(found, true), usual, x.dtype)


def misses_geglu(
    device: str, dtype: str, shape: tuple[int, int, int], save: str = "gate_up",
    pair: bool = False, approximate: str = "tanh", compute: Callable[..., Tensor] = geglu_mlp,
) -> list[str]:  # fmt: skip
    """The same for `geglu_mlp`."""
    functions = (compute, reference.geglu_mlp, gelu)
    called, plain, activation = (partial(f, approximate=approximate) for f in functions)
    return misses_mlp(
        device, dtype, shape, save, called, pair=pair, plain=plain, activation=activation
    )


def halves_at_once(
    x: Tensor, *weights: Tensor, activation: Callable[[Tensor], Tensor] = silu
) -> Tensor:
    """h in plain PyTorch with gate and up in one product, whose sums are added in another order: in
    29 of 800 draws at 70·83·101 on a CPU with AMX an element errs more than the rule allows.
    """
    gate, up = (x @ torch.cat(weights).mT).chunk(2, dim=-1)
    return activation(gate) * up


def check_leading_dimensions(device: str) -> None:
    for pair in PAIRS:
        (x, *weights), _ = small(device, pair=pair)
        y = mlp(x, *weights)
        deep = mlp(x[:36].reshape(2, 3, 6, -1), *weights)
        assert deep.shape == (2, 3, 6, HIDDEN) and close([deep.reshape(36, -1)], [y[:36]])
        assert half(x[:36].reshape(4, 9, -1), *weights[:-1]).shape == (4, 9, INNER)
        one = mlp(x[3], *weights)
        assert one.shape == (HIDDEN,) and close([one], [y[3]])


def check_any_strides(device: str) -> None:
    for pair in PAIRS:
        gradient_checks.check_layouts(mlp_by_name, *small_by_name(device, pair))


def check_zero_tokens(device: str) -> None:
    for pair, save in product(PAIRS, SAVES):
        (x, *weights), _ = small(device, pair=pair)
        empty = x.detach()[:0].reshape(3, 0, HIDDEN).requires_grad_()
        y = mlp(empty, *weights, save=save)
        assert y.shape == (3, 0, HIDDEN)
        d_x, *of_weights = grad(y.sum(), (empty, *weights))
        assert d_x.shape == empty.shape
        assert [t.shape for t in of_weights] == [t.shape for t in weights]
        assert not any(t.any() for t in of_weights)
        h = half(empty, *weights[:-1], save=save)
        assert h.shape == (3, 0, INNER)
        assert not any(t.any() for t in grad(h.sum(), weights[:-1]))


def check_frozen_subsets(device: str) -> None:
    for pair, save in product(PAIRS, SAVES):
        leaves, dy = small_by_name(device, pair)
        gradient_checks.check_subsets(partial(mlp_by_name, save=save), leaves, dy)


def check_backward_twice(device: str) -> None:
    for pair, save in product(PAIRS, SAVES):
        leaves, dy = small_by_name(device, pair)
        gradient_checks.check_repeated(partial(mlp_by_name, save=save), leaves, dy)


def check_autocast(device: str) -> None:
    for pair, dtype in product(PAIRS, (torch.bfloat16, torch.float16)):
        (*leaves, w_down), dy = small(device, pair=pair)
        with torch.autocast(device, dtype=dtype):
            y = mlp(*leaves, w_down.detach().to(dtype))
            h = half(*leaves)
        assert y.dtype == h.dtype == dtype
        found = grad(y, leaves, dy.to(dtype))
        assert all(t.dtype == torch.float32 for t in found)
        own = [t.detach().to(dtype).requires_grad_() for t in (*leaves, w_down)]
        by_hand = mlp(*own)
        assert same([y], [by_hand])
        assert same([t.to(dtype) for t in found], grad(by_hand, own[:-1], dy.to(dtype)))
        wide = [t.detach().double() for t in (*leaves, w_down)]
        with torch.autocast(device, dtype=dtype):
            assert mlp(*wide).dtype == torch.float64


def check_changed_in_place(device: str) -> None:
    for pair in PAIRS:
        leaves, dy = small_by_name(device, pair)
        leaves["x"] = leaves["x"].detach()[None].requires_grad_()
        gradient_checks.check_written_to(mlp_by_name, leaves, dy[None])
        dh = torch.randn(1, len(dy), INNER, device=device).to(dy.dtype)
        del leaves["w_down"]
        gradient_checks.check_written_to(half_by_name, leaves, dh)


def check_activation_checkpointing(device: str) -> None:
    for pair in PAIRS:
        gradient_checks.check_checkpointed(mlp_by_name, *small_by_name(device, pair))


def check_no_grad_and_inference(device: str) -> None:
    for pair in PAIRS:
        gradient_checks.check_no_grad(mlp_by_name, small_by_name(device, pair)[0])


def check_functional_transforms(device: str) -> None:
    for pair, save in product(PAIRS, SAVES):
        compute = partial(mlp_by_name, save=save)
        gradient_checks.check_transforms(compute, *small_by_name(device, pair))


def check_gradients_of_a_pair_lie_apart(device: str) -> None:
    """Contiguous, without an element in common, and each may be written to."""
    (x, w_gate, w_up, w_down), dy = small(device, pair=True)
    y = mlp(x, w_gate, w_up, w_down)
    y.backward(dy)
    places = [
        range(t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in (w_gate.grad, w_up.grad)
    ]
    assert w_gate.grad.is_contiguous() and w_up.grad.is_contiguous()
    assert places[0].stop <= places[1].start or places[1].stop <= places[0].start
    of_up = w_up.grad.clone()
    w_gate.grad.zero_()
    assert torch.equal(w_up.grad, of_up)


ALL = [value for name, value in list(globals().items()) if name.startswith("check_")]


def check_compiled(device: str, dtype: str = "float32", backend: str = "inductor") -> None:
    """Both modes in one graph each, right by the same rule."""
    for pair in PAIRS:
        torch._dynamo.reset()
        compiled = torch.compile(swiglu_mlp, fullgraph=True, backend=backend)
        for save in SAVES:
            assert misses_mlp(device, dtype, SHAPE, save, compiled, pair=pair) == []
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        dynamic = torch.compile(swiglu_mlp, fullgraph=True, dynamic=True, backend=backend)
        for tokens in (SHAPE[0], 33, 2, 130):  # one way and the other of `is_d_w_down_last`
            shape = tokens, HIDDEN, INNER
            assert misses_mlp(device, dtype, shape, "gate_up", dynamic, pair=pair) == []
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def beyond_bound(
    device: str, dtype: str, shape: tuple[int, int, int] = SHAPE, pair: bool = False
) -> list[str]:
    """Results of which an element errs by more than the docstring of `kernels.swiglu` allows.

    Tokens have sizes of their own, the last the smallest, so that PyTorch's error is no measure.
    """
    (x, *weights), dy = small(device, dtype, shape, pair)
    x = (x.detach() * torch.logspace(1, -1, len(x), device=device)[:, None]).to(x.dtype)
    leaves = x.requires_grad_(), *weights
    y = mlp(*leaves)
    d_x, *of_gate_up, d_w_down = grad(y, leaves, dy)
    found = y.detach(), d_x, torch.cat(of_gate_up), d_w_down
    v, tiny = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype).tiny
    small_in_line = 2**-39 * (x.dtype == torch.float32)  # in split factors

    def rounded(t: Tensor) -> Tensor:
        return v * t.abs().clamp_min(tiny)

    def times(a: Tensor, b: Tensor, of_a: Tensor | float = 0.0, of_b: Tensor | float = 0.0):
        """A B and its error, of errors of A and of B."""
        a_size, b_size = a.abs(), b.abs()
        summed = a.shape[1] * 2**-22 * a_size @ b_size
        summed += small_in_line * (a_size.amax(1, True) * b_size.sum(0))
        summed += small_in_line * (a_size.sum(1, True) * b_size.amax(0))
        passed = (of_a + 0 * a_size) @ b_size + a_size @ (of_b + 0 * b_size)
        return a @ b, summed + passed + rounded(a @ b)

    x, *weights, w_down, dy = (t.detach().double() for t in (*leaves, dy))
    w_gate_up = torch.cat(weights)
    gate_up, of_gate_up = times(x, w_gate_up.mT)
    (gate, up), (of_gate, of_up) = gate_up.chunk(2, 1), of_gate_up.chunk(2, 1)
    s, t = gate.sigmoid(), (8 + gate.abs()) * 2**-22
    act, slope = gate * s, s + gate * s * (1 - s)
    h, size = act * up, act.abs()
    of_h = 1.1 * up.abs() * of_gate + size * (of_up + t * up.abs()) + rounded(h)
    dh, of_dh = times(dy, w_down)
    d_up, d_gate = dh * act, dh * up * slope
    of_d_up = size * of_dh + dh.abs() * (1.1 * of_gate + t * size) + rounded(d_up)
    of_d_gate = (up * slope).abs() * of_dh + rounded(d_gate)
    of_d_gate += dh.abs() * (slope.abs() * of_up + up.abs() * (of_gate / 2 + t))
    d, of_d = torch.cat([d_gate, d_up], 1), torch.cat([of_d_gate, of_d_up], 1)
    true = {
        "y": times(h, w_down.mT, of_h),
        "d_x": times(d, w_gate_up, of_d),
        "d_w_gate_up": times(d.mT, x, of_d.mT),
        "d_w_down": times(dy.mT, h, 0.0, of_h),
    }
    if pair and dtype != "float32":  # between the two products
        d_x, of_d_x = true["d_x"]
        true["d_x"] = d_x, of_d_x + rounded(d_gate @ weights[0])
    return [
        name
        for (name, (value, error)), result in zip(true.items(), found, strict=True)
        # Errors of errors, at most four in a row.
        if not ((result.double() - value).abs() <= (1 + 8 * v) * error).all()
    ]
