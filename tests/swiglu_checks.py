"""What must hold of the SwiGLU MLP wherever it runs: plain PyTorch, Triton's interpreter, a GPU.

Each check takes the device. `tests/test_swiglu_api.py` runs them on the CPU,
`tests/interpreted/swiglu.py` over interpreted kernels, `tests/test_swiglu_gpu.py` on a GPU.
"""

from collections.abc import Callable, Sequence
from functools import partial

import gradient_checks
import torch
from gradient_checks import close, same
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import silu

from fusedlib import reference
from fusedlib.bench import check
from fusedlib.bench.problems import Inputs, SwiGLUProblem, draw
from fusedlib.bench.rivals import Workload
from fusedlib.functional import SAVES, swiglu, swiglu_mlp

Leaves = tuple[Tensor, Tensor, Tensor]
Errors = dict[str, check.Errors]
SHAPE = TOKENS, HIDDEN, INNER = 37, 41, 35  # ragged, two of the interpreter's 32-tiles each way


def packed(inputs: Inputs) -> Leaves:
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    return inputs.x, w_gate_up, inputs.w_down


def small(device: str, dtype: str = "float32", shape: tuple[int, int, int] = SHAPE):
    """Leaves and dy of a ragged problem with several tiles each way."""
    inputs = draw(SwiGLUProblem(*shape, dtype), device)
    return packed(inputs), inputs.dy


def small_by_name(device: str) -> tuple[dict[str, Tensor], Tensor]:
    leaves, dy = small(device)
    return dict(zip(("x", "w_gate_up", "w_down"), leaves, strict=True)), dy


def captured(step: Callable[[], Sequence[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A CUDA graph of a step that has run once, and the tensors that its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = list(step())
    return graph, written


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
    compute: Callable[..., Tensor] = swiglu_mlp, seed: int = 0,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects in y and the gradients of a call of `swiglu_mlp`."""
    inputs = draw(SwiGLUProblem(*shape, dtype), device, seed)
    true = check.truth(inputs)

    def off(function: Callable[..., Tensor], leaves: dict[str, Tensor]) -> Errors:
        return check.errors(
            check.results_of(Workload(lambda: function(**leaves), leaves), inputs.dy), true
        )

    def at_once(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return halves_at_once(x, torch.cat([w_gate, w_up])) @ w_down.mT

    usual = [off(plain, inputs.leaves()) for plain in (reference.swiglu_mlp, at_once)]
    x, w_gate_up, w_down = packed(inputs)
    names = {"x": x, "w_gate_up": w_gate_up, "w_down": w_down}
    return check.misses(off(partial(compute, save=save), names), worse(*usual), x.dtype)


def misses_half(
    device: str, dtype: str, shape: tuple[int, int, int], save: str = "gate_up"
) -> list[str]:
    """The same for `swiglu`, without the down projection."""
    inputs = draw(SwiGLUProblem(*shape, dtype), device)
    (x, w_gate_up, _), inner = packed(inputs), shape[2]
    generator = torch.Generator(device).manual_seed(1)
    dh = torch.randn(shape[0], inner, device=device, generator=generator).to(x.dtype)

    def apart(x: Tensor, weight: Tensor) -> Tensor:
        return silu(x @ weight[:inner].mT) * (x @ weight[inner:].mT)

    def results(compute: Callable[..., Tensor], upstream: Tensor, *leaves: Tensor):
        h = compute(*leaves)
        d_x, d_weight = grad(h, leaves, upstream)
        return {"h": h.detach(), "d_x": d_x, "d_weight": d_weight}

    wide = [t.detach().double().requires_grad_() for t in (x, w_gate_up)]
    true = results(apart, dh.double(), *wide)
    plain = apart, halves_at_once
    usual = worse(*(check.errors(results(p, dh, x, w_gate_up), true) for p in plain))
    found = results(lambda *leaves: swiglu(*leaves, save=save), dh, x, w_gate_up)
    return check.misses(check.errors(found, true), usual, x.dtype)


def halves_at_once(x: Tensor, weight: Tensor) -> Tensor:
    """h in plain PyTorch with gate and up in one product, whose sums are added in another order: in
    29 of 800 draws at 70·83·101 on a CPU with AMX an element errs more than the rule allows.
    """
    gate, up = (x @ weight.mT).chunk(2, dim=-1)
    return silu(gate) * up


def worse(*found: Errors) -> Errors:
    """By name the largest errors of those that have it."""
    of = {name: [each[name] for each in found if name in each] for each in found for name in each}
    return {
        n: check.Errors(max(e.norm for e in es), max(e.worst for e in es)) for n, es in of.items()
    }


def check_leading_dimensions(device: str) -> None:
    (x, w_gate_up, w_down), _ = small(device)
    y = swiglu_mlp(x, w_gate_up, w_down)
    deep = swiglu_mlp(x[:36].reshape(2, 3, 6, -1), w_gate_up, w_down)
    assert deep.shape == (2, 3, 6, HIDDEN) and close([deep.reshape(36, -1)], [y[:36]])
    assert swiglu(x[:36].reshape(4, 9, -1), w_gate_up).shape == (4, 9, INNER)
    one = swiglu_mlp(x[3], w_gate_up, w_down)
    assert one.shape == (HIDDEN,) and close([one], [y[3]])


def check_any_strides(device: str) -> None:
    gradient_checks.check_layouts(swiglu_mlp, *small_by_name(device))


def check_zero_tokens(device: str) -> None:
    leaves, _ = small(device)
    for save in SAVES:
        empty = leaves[0].detach()[:0].reshape(3, 0, HIDDEN).requires_grad_()
        y = swiglu_mlp(empty, *leaves[1:], save=save)
        assert y.shape == (3, 0, HIDDEN)
        d_x, d_w_gate_up, d_w_down = grad(y.sum(), (empty, *leaves[1:]))
        assert d_x.shape == empty.shape
        assert not d_w_gate_up.any() and not d_w_down.any()
        h = swiglu(empty, leaves[1], save=save)
        assert h.shape == (3, 0, INNER) and not grad(h.sum(), leaves[1])[0].any()


def check_frozen_subsets(device: str) -> None:
    leaves, dy = small_by_name(device)
    for save in SAVES:
        gradient_checks.check_subsets(partial(swiglu_mlp, save=save), leaves, dy)


def check_backward_twice(device: str) -> None:
    leaves, dy = small_by_name(device)
    for save in SAVES:
        gradient_checks.check_repeated(partial(swiglu_mlp, save=save), leaves, dy)


def check_autocast(device: str) -> None:
    (x, w_gate_up, w_down), dy = small(device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            y = swiglu_mlp(x, w_gate_up, w_down.detach().to(dtype))
            h = swiglu(x, w_gate_up)
        assert y.dtype == h.dtype == dtype
        d_x, d_w_gate_up = grad(y, (x, w_gate_up), dy.to(dtype))
        assert d_x.dtype == d_w_gate_up.dtype == torch.float32
        half = [t.detach().to(dtype).requires_grad_() for t in (x, w_gate_up, w_down)]
        by_hand = swiglu_mlp(*half)
        assert same([y], [by_hand])
        assert same([d_x.to(dtype), d_w_gate_up.to(dtype)], grad(by_hand, half[:2], dy.to(dtype)))
        wide = [t.detach().double() for t in (x, w_gate_up, w_down)]
        with torch.autocast(device, dtype=dtype):
            assert swiglu_mlp(*wide).dtype == torch.float64


def check_changed_in_place(device: str) -> None:
    leaves, dy = small_by_name(device)
    leaves["x"] = leaves["x"].detach()[None].requires_grad_()
    gradient_checks.check_written_to(swiglu_mlp, leaves, dy[None])
    dh = torch.randn(1, len(dy), INNER, device=device).to(dy.dtype)
    del leaves["w_down"]
    gradient_checks.check_written_to(swiglu, leaves, dh)


def check_activation_checkpointing(device: str) -> None:
    gradient_checks.check_checkpointed(swiglu_mlp, *small_by_name(device))


def check_no_grad_and_inference(device: str) -> None:
    gradient_checks.check_no_grad(swiglu_mlp, small_by_name(device)[0])


def check_functional_transforms(device: str) -> None:
    gradient_checks.check_transforms(swiglu_mlp, *small_by_name(device))


ALL = [value for name, value in list(globals().items()) if name.startswith("check_")]


def check_compiled(device: str, dtype: str = "float32") -> None:
    """Both modes in one graph each, right by the same rule."""
    torch._dynamo.reset()
    compiled = torch.compile(swiglu_mlp, fullgraph=True)
    for save in SAVES:
        assert misses_mlp(device, dtype, SHAPE, save, compiled) == []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dynamic = torch.compile(swiglu_mlp, fullgraph=True, dynamic=True)
    for tokens in (SHAPE[0], 33, 2, 130):  # one way and the other of `down_last`
        assert misses_mlp(device, dtype, (tokens, HIDDEN, INNER), "gate_up", dynamic) == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def beyond_bound(device: str, dtype: str, shape: tuple[int, int, int] = SHAPE) -> list[str]:
    """Results of which an element errs by more than the docstring of `kernels.swiglu` allows.

    Tokens have sizes of their own, the last the smallest, so that PyTorch's error is no measure.
    """
    (x, *weights), dy = small(device, dtype, shape)
    x = (x.detach() * torch.logspace(1, -1, len(x), device=device)[:, None]).to(x.dtype)
    leaves = x.requires_grad_(), *weights
    y = swiglu_mlp(*leaves)
    found = y.detach(), *grad(y, leaves, dy)
    v, tiny = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype).tiny
    small_in_line = 2**-39 * (x.dtype == torch.float32)  # in split factors

    def rounded(t: Tensor) -> Tensor:
        return v * t.abs().clamp_min(tiny)

    def product(a: Tensor, b: Tensor, of_a: Tensor | float = 0.0, of_b: Tensor | float = 0.0):
        """A B and its error, of errors of A and of B."""
        a_size, b_size = a.abs(), b.abs()
        summed = a.shape[1] * 2**-22 * a_size @ b_size
        summed += small_in_line * (a_size.amax(1, True) * b_size.sum(0))
        summed += small_in_line * (a_size.sum(1, True) * b_size.amax(0))
        passed = (of_a + 0 * a_size) @ b_size + a_size @ (of_b + 0 * b_size)
        return a @ b, summed + passed + rounded(a @ b)

    x, w_gate_up, w_down, dy = (t.detach().double() for t in (*leaves, dy))
    gate_up, of_gate_up = product(x, w_gate_up.mT)
    (gate, up), (of_gate, of_up) = gate_up.chunk(2, 1), of_gate_up.chunk(2, 1)
    s, t = gate.sigmoid(), (8 + gate.abs()) * 2**-22
    act, slope = gate * s, s + gate * s * (1 - s)
    h, size = act * up, act.abs()
    of_h = 1.1 * up.abs() * of_gate + size * (of_up + t * up.abs()) + rounded(h)
    dh, of_dh = product(dy, w_down)
    d_up, d_gate = dh * act, dh * up * slope
    of_d_up = size * of_dh + dh.abs() * (1.1 * of_gate + t * size) + rounded(d_up)
    of_d_gate = (up * slope).abs() * of_dh + rounded(d_gate)
    of_d_gate += dh.abs() * (slope.abs() * of_up + up.abs() * (of_gate / 2 + t))
    d, of_d = torch.cat([d_gate, d_up], 1), torch.cat([of_d_gate, of_d_up], 1)
    true = {
        "y": product(h, w_down.mT, of_h),
        "d_x": product(d, w_gate_up, of_d),
        "d_w_gate_up": product(d.mT, x, of_d.mT),
        "d_w_down": product(dy.mT, h, 0.0, of_h),
    }
    return [
        name
        for (name, (value, error)), result in zip(true.items(), found, strict=True)
        # Errors of errors, at most four in a row.
        if not ((result.double() - value).abs() <= (1 + 8 * v) * error).all()
    ]
