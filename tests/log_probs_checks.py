"""What must hold of `linear_log_probs` in plain PyTorch, Triton's interpreter and on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import grad

import gradient_checks
from fusedlib import linear_cross_entropy, linear_log_probs, reference
from fusedlib.bench import check
from gradient_checks import close, results_of, same, worse
from linear_cross_entropy_checks import SHAPE, TOKENS, VOCABULARY, drawn, wide

BOTH = "log_probs", "entropy"
ALL = {"bias": True, "temperature": 0.7, "softcap": 2.0}
SETTINGS = {
    "plain": {},
    "bias": {"bias": True},
    "cooler": {"temperature": 0.7},
    "softcapped": {"softcap": 2.0},
    "a token ignored": {"ignore_index": 7},
    "all": ALL,
}


def results(compute: Callable, leaves, tokens: Tensor, settings, upstream: dict[str, Tensor]):
    """The outputs, and the gradients of those that something flows back to, by name."""
    outputs = compute(**leaves, tokens=tokens, **settings)
    found = {n: t for n, t in zip(BOTH, outputs, strict=True) if t is not None}
    reached = [found[name] for name in upstream]
    ups = [up.to(t) for up, t in zip(upstream.values(), reached, strict=True)]
    gradients = grad(reached, list(leaves.values()), ups)
    named = {f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)}
    return {n: t.detach() for n, t in found.items()} | named


def misses(
    device: str, dtype: str, shape: tuple[int, int, int] = SHAPE, spread: float = 1.0,
    compute: Callable = linear_log_probs, seed: int = 0, of: tuple[str, ...] = BOTH, **settings,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects in the outputs and the gradients of those in `of`.

    Outputs have the floor of fp32, which they are computed in. PyTorch's error is the worst of four
    draws a per cent apart, as for the loss.
    """
    leaves, tokens, settings = drawn(device, dtype, shape, spread, seed, **settings)
    upstream = {n: torch.randn(shape[0], device=device) for n in of}

    def errors(function: Callable, scale: float):
        own = {n: (t.detach() * scale).to(t.dtype).requires_grad_() for n, t in leaves.items()}
        found = results(function, own, tokens, settings, upstream)
        true = results(reference.linear_log_probs, wide(own), tokens, settings, upstream)
        kinds = {n: (t.dtype, t.shape) for n, t in found.items()}
        return check.errors(found, true), kinds

    drawn_apart = [errors(reference.linear_log_probs, s) for s in (1.0, 1.01, 1.02, 1.03)]
    found, kinds = errors(compute, 1.0)
    assert kinds == drawn_apart[0][1]
    usual = worse(*(each for each, _ in drawn_apart))
    missed = []
    for name in usual:
        floor = torch.float32 if name in BOTH else getattr(torch, dtype)
        missed += check.misses(found, usual, floor, [name])
    return missed


def bound(tokens: Tensor, **settings) -> Callable[..., Tensor]:
    """Both outputs (2, tokens) of leaves by name."""
    return lambda **leaves: torch.stack(linear_log_probs(tokens=tokens, **leaves, **settings))


def drawn_bound(device: str, dtype: str = "float32", **settings):
    """The function of leaves, those, and what flows back to it."""
    leaves, tokens, settings = drawn(device, dtype, **settings)
    return bound(tokens, **settings), leaves, torch.randn(2, TOKENS, device=device)


def check_shapes_and_nothing_wanted(device: str) -> None:
    leaves, tokens, settings = drawn(device, "bfloat16", **ALL)
    flat = linear_log_probs(**leaves, tokens=tokens, **settings)
    deep = {**leaves, "hidden": leaves["hidden"][:12].reshape(2, 3, 2, -1)}
    found = linear_log_probs(**deep, tokens=tokens[:12].reshape(2, 3, 2), **settings)
    assert all(t.shape == (2, 3, 2) and t.dtype == torch.float32 for t in found)
    assert close([t.flatten() for t in found], [t[:12] for t in flat])
    log_probs, none = linear_log_probs(**leaves, tokens=tokens, **settings, entropy=False)
    assert none is None and same([log_probs], flat[:1])
    empty = {**leaves, "hidden": leaves["hidden"].detach()[:0].requires_grad_()}
    found = linear_log_probs(**empty, tokens=tokens[:0], **settings)
    gradients = grad([t.sum() for t in found], list(empty.values()))
    assert all(t.shape == (0,) for t in found) and not any(t.any() for t in gradients)


def check_ignored_tokens_are_zero(device: str) -> None:
    compute, leaves, up = drawn_bound(device, **ALL)
    y, d_hidden, *_ = results_of(compute, leaves, up)
    assert not y[:, ::7][:, :-1].any() and not torch.signbit(y[:, 0]).any() and y[:, 1].all()
    assert not d_hidden[0].any() and d_hidden[1].any()


def check_it_is_minus_the_loss(device: str) -> None:
    leaves, tokens, settings = drawn(device, "float32", bias=True, softcap=2.0)
    log_probs, _ = linear_log_probs(**leaves, tokens=tokens, **settings)
    losses = linear_cross_entropy(**leaves, target=tokens, **settings, reduction="none")
    assert close([log_probs], [-losses])


def check_a_banned_token_adds_nothing(device: str) -> None:
    """A bias of -inf: p log p is 0, and so are its derivatives."""
    leaves, tokens, _ = drawn(device, "float32", bias=True)
    banned = {n: t.detach().clone() for n, t in leaves.items()}
    banned["bias"][3] = -torch.inf
    fewer = {n: t if n == "hidden" else torch.cat([t[:3], t[4:]]) for n, t in banned.items()}
    tokens = tokens.where(tokens != 3, 5)
    up = torch.randn(2, TOKENS, device=device)
    found, wanted = (
        results_of(bound(labels), {n: t.requires_grad_() for n, t in own.items()}, up)
        for own, labels in ((banned, tokens), (fewer, tokens - (tokens > 3).long()))
    )
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-5, atol=1e-5)
    assert not found[2][3].any() and not found[3][3].any()


def check_one_of_one_and_huge_logits(device: str) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for of in (BOTH, BOTH[:1]):  # of entropies alone 10⁻¹⁸, which float64 rounds to 0 as well
            assert misses(device, dtype, spread=3e3, bias=True, of=of) == [], (dtype, of)
        leaves, tokens, _ = drawn(device, dtype, (TOKENS, 8, 1))
        up = {name: torch.ones(TOKENS, device=device) for name in BOTH}
        found = results(linear_log_probs, leaves, tokens, {}, up)
        assert not any(t.any() for t in found.values())


def check_what_any_function_keeps(device: str) -> None:
    """Strides, frozen operands, repeated and checkpointed backward, results written to, hooks."""
    compute, leaves, up = drawn_bound(device, bias=True)
    gradient_checks.check_layouts(compute, leaves, up)
    gradient_checks.check_subsets(compute, leaves, up)
    gradient_checks.check_checkpointed(compute, leaves, up)
    gradient_checks.check_written_to(compute, leaves, up)
    gradient_checks.check_no_grad(compute, leaves)
    gradient_checks.check_repeated(compute, leaves, up)


def check_functional_transforms(device: str) -> None:
    gradient_checks.check_transforms(*drawn_bound(device), by_row=False)


def check_autocast(device: str) -> None:
    compute, leaves, up = drawn_bound(device, bias=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = compute(**leaves)
    found = grad(y, list(leaves.values()), up)
    half = {n: t.detach().bfloat16().requires_grad_() for n, t in leaves.items()}
    assert y.dtype == torch.float32 and all(t.dtype == torch.float32 for t in found)
    assert same([y, *(t.bfloat16() for t in found)], results_of(compute, half, up))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def check_compiled(device: str, dtype: str = "float32") -> None:
    """In one graph, with shapes of its own and with any."""
    for dynamic, sizes in ((False, (TOKENS,)), (True, (TOKENS, 9))):
        torch._dynamo.reset()
        compiled = torch.compile(linear_log_probs, fullgraph=True, dynamic=dynamic or None)
        for tokens in sizes:
            shape = tokens, SHAPE[1], VOCABULARY
            assert misses(device, dtype, shape, compute=compiled, **ALL) == []
    alone = partial(misses, device, dtype, compute=compiled, **ALL)
    assert alone(of=BOTH[:1]) == [] and alone(of=BOTH[1:]) == []
