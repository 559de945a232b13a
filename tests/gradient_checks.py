"""What must hold of any differentiable function of named tensors, wherever it runs.

Each check takes the function, its operands by name, and what flows back. The operations' tests call
them with theirs; `misses` is the one tolerance rule.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, grad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from called import Called
from fusedlib.bench import check

Named = dict[str, Tensor]
Function = Callable[..., Tensor]
Outputs = Callable[..., Named]
Errors = dict[str, check.Errors]


def same(found, wanted) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def close(found, wanted) -> bool:
    """Equal but for the order of sums, as in a product of another size.

    In fp32 two orders differ by some roundoffs, in fp16 and bf16 by what the last rounding makes of
    those.
    """

    def allowed(t: Tensor) -> float:
        return (16 if t.dtype == torch.float32 else 2) * torch.finfo(t.dtype).eps

    return all(
        (a.double() - b.double()).norm() <= allowed(b) * b.double().norm()
        for a, b in zip(found, wanted, strict=True)
    )


def drawn(device: str, dtype: torch.dtype, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)


def named_results(function: Outputs, leaves: Named, upstream: Named) -> Named:
    """The function's outputs by name, and the gradient of every leaf."""
    leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
    found = function(**leaves)
    gradients = grad([found[n] for n in upstream], list(leaves.values()), list(upstream.values()))
    named = dict(zip((f"d_{n}" for n in leaves), gradients, strict=True))
    return {n: t.detach() for n, t in found.items()} | named


def worse(*found: Errors) -> Errors:
    """By name the largest errors of those that have it."""
    of = {name: [each[name] for each in found if name in each] for each in found for name in each}
    return {
        n: check.Errors(max(e.norm for e in es), max(e.worst for e in es)) for n, es in of.items()
    }


def misses(
    function: Outputs, plain: Outputs, leaves: Named, upstream: Named, times: float = 1.0,
    stated: dict[str, float] | None = None,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects of the function's outputs and gradients.

    A draw of small tensors may be lucky for plain PyTorch: its error is the worst of four, a
    per cent apart. `times` the rule's error is accepted, and of a worst element what is `stated`.
    """
    dtype = next(iter(leaves.values())).dtype

    def errors(compute: Outputs, scale: float) -> Errors:
        scaled = {n: (t * scale).to(t.dtype) for n, t in leaves.items()}
        wide = [{n: t.double() for n, t in each.items()} for each in (scaled, upstream)]
        return check.errors(named_results(compute, scaled, upstream), named_results(plain, *wide))

    usual = worse(*(errors(plain, scale) for scale in (1.0, 1.01, 1.02, 1.03)))
    found = errors(function, 1.0)
    for name in found.keys() & (stated or {}).keys():
        if found[name].worst <= stated[name]:
            found[name] = check.Errors(found[name].norm, 0.0)
    return check.misses(found, usual, dtype, times=times)


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


def check_cuda_graph(
    step: Callable[[], Sequence[Tensor]], change: Callable[[], object],
    eager: Callable[[], Sequence[Tensor]],
) -> None:  # fmt: skip
    """Calls give the same bits each time, and a graph's replays give those of `eager`, also of
    operands that `change` has written to since.
    """
    first = [t.detach().clone() for t in step()]
    for _ in range(5):
        assert same(step(), first)
    wanted = [t.detach().clone() for t in eager()]
    graph, written = captured(step)
    graph.replay()
    assert same(written, wanted)
    with torch.no_grad():
        change()
    graph.replay()
    assert same([t.clone() for t in written], eager())


def results_of(compute: Function, leaves: Named, upstream: Tensor) -> list[Tensor]:
    """The result and the gradients of the leaves that want one."""
    y = compute(**leaves)
    return [y.detach(), *grad(y, [t for t in leaves.values() if t.requires_grad], upstream)]


def copied(leaves: Named) -> Named:
    return {name: t.detach().requires_grad_() for name, t in leaves.items()}


def check_subsets(compute: Function, leaves: Named, upstream: Tensor) -> None:
    """Where a subset of operands alone wants gradients, they are there, agree with those of all
    operands, and no other is.
    """
    wanted = dict(zip(leaves, results_of(compute, leaves, upstream)[1:], strict=True))
    for wants in product((False, True), repeat=len(leaves)):
        chosen = {name for name, want in zip(leaves, wants, strict=True) if want}
        own = {name: t.detach().requires_grad_(name in chosen) for name, t in leaves.items()}
        y = compute(**own)
        assert y.requires_grad == bool(chosen)
        if chosen:
            y.backward(upstream)
        for name, leaf in own.items():
            assert (leaf.grad is not None) == (name in chosen)
            assert leaf.grad is None or close([leaf.grad], [wanted[name]]), (chosen, name)


def check_repeated(compute: Function, leaves: Named, upstream: Tensor) -> None:
    """A second backward gives the same where the graph is kept, and raises where it is not."""
    y, own = compute(**leaves), list(leaves.values())
    first = grad(y, own, upstream, retain_graph=True)
    assert same(grad(y, own, upstream, retain_graph=True), first)
    assert same(grad(y, own, upstream), first)
    with pytest.raises(RuntimeError, match="second time"):
        grad(y, own, upstream)


def check_accumulated(compute: Function, leaves: Named, upstream: Tensor) -> None:
    """`.grad` is what backward gives, and twice that after another call's."""
    own = copied(leaves)
    wanted = grad(compute(**own), [*own.values()], upstream)
    for times in (1, 2):
        compute(**own).backward(upstream)
        assert close([t.grad for t in own.values()], [t * times for t in wanted])
        assert not any(t.grad.requires_grad for t in own.values())


def check_checkpointed(compute: Function, leaves: Named, upstream: Tensor) -> None:
    wanted = results_of(compute, leaves, upstream)[1:]

    def positional(*operands: Tensor) -> Tensor:
        return compute(**dict(zip(leaves, operands, strict=True)))

    for reentrant in (False, True):
        own = copied(leaves)
        checkpoint(positional, *own.values(), use_reentrant=reentrant).backward(upstream)
        assert same([t.grad for t in own.values()], wanted), reentrant


# Who may watch a forward: nobody, hooks that keep what they are given, a mode that sees operators.
WATCHED = {
    "by nobody": nullcontext,
    "by hooks": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "by a mode": Called,
}


def check_what_forward_read(
    compute: Function, leaves: Named, upstream: Tensor, others: Sequence[Tensor] = (),
    watched: Sequence[str] = tuple(WATCHED),
) -> None:  # fmt: skip
    """Gradients are of the operands' values in forward, whatever memory they get afterwards, and of
    forward's dtypes, also where autocast is on in backward alone.

    `others` are operands without gradients, which `compute` holds; `watched` names who may watch
    without sending the call to torch's own operators.
    """
    kept = [t.data for t in others]
    for how in watched:
        own = copied(leaves)
        with WATCHED[how]():
            y = compute(**own)
        wanted = grad(y, [*own.values()], upstream, retain_graph=True)
        with torch.autocast(y.device.type, torch.bfloat16):
            cast = grad(y, [*own.values()], upstream, retain_graph=True)
        assert same(cast, wanted), f"{how}, under autocast"
        for operand in (*own.values(), *others):
            operand.data = torch.zeros_like(operand)
        actual = grad(y, [*own.values()], upstream)
        for operand, memory in zip(others, kept, strict=True):
            operand.data = memory
        assert same(actual, wanted), f"{how}, with other memory"


def check_no_grad(compute: Function, leaves: Named) -> None:
    wanted = compute(**leaves).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = compute(**leaves)
        assert not y.requires_grad and close([y], [wanted])


def check_transforms(
    compute: Function, leaves: Named, upstream: Tensor, by_row: bool = True
) -> None:
    """torch.func and forward mode, where a second derivative works too: plain PyTorch runs.

    vmap as well, if a row of the result depends on that of the first operand. Inference tensors and
    disabled hooks, for transforms are so inside.
    """
    numbers = tuple(range(len(leaves)))
    plain = tuple(t.detach() for t in leaves.values())

    def positional(*operands: Tensor) -> Tensor:
        return compute(**dict(zip(leaves, operands, strict=True)))

    def loss(*operands: Tensor) -> Tensor:
        return (positional(*operands) * upstream).sum()

    y, *wanted = results_of(compute, leaves, upstream)
    assert close(torch.func.grad(loss, argnums=numbers)(*plain), wanted)
    again, pull = torch.func.vjp(positional, *plain)
    assert close([again, *pull(upstream)], [y, *wanted])
    if by_row:
        assert close([torch.vmap(lambda row: positional(row, *plain[1:]))(plain[0])], [y])
    step = torch.randn_like(plain[0])
    along = (step * wanted[0]).sum()
    _, pushed = torch.func.jvp(lambda x: loss(x, *plain[1:]), plain[:1], (step,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(plain[0], step)
        tangent = forward_ad.unpack_dual(loss(dual, *plain[1:])).tangent
    torch.testing.assert_close([pushed, tangent], [along, along], rtol=1e-3, atol=1e-4)
    with torch.inference_mode():
        inferred = [t.clone() for t in plain]
    assert close([positional(*inferred)], [y])
    with torch.autograd.graph.disable_saved_tensors_hooks("disabled"):
        assert close(results_of(compute, leaves, upstream), [y, *wanted])
