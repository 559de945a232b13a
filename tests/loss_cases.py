"""Drawn calls of the loss and of log-probabilities, and what the tolerance rule rejects of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import grad

from fusedlib import linear_cross_entropy, linear_log_probs, reference
from fusedlib.bench import check
from gradient_checks import Errors, Named, worse

SHAPE = TOKENS, WIDTH, VOCABULARY = 13, 8, 201  # a row is several of the interpreter's blocks
ALL = {"bias": True, "label_smoothing": 0.1, "z_loss": 1e-2, "token_weights": True,
       "class_weights": True, "softcap": 2.0}  # fmt: skip
SETTINGS = {
    "plain": {},
    "bias": {"bias": True},
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.3},
    "only smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 1e-2},
    "weighted": {"token_weights": True},
    "a class ignored": {"ignore_index": 7},
    "softcapped": {"softcap": 2.0},
    "by class": {"class_weights": True},
    "by class, smoothed, z-loss": {"class_weights": True, "label_smoothing": 0.3, "z_loss": 1e-2},
    "all, mean": ALL,
    "all, sum": {**ALL, "reduction": "sum"},
    "all, by token": {**ALL, "reduction": "none"},
}


class Operation(NamedTuple):
    """One of the two, and the names of its third operand and of its outputs."""

    compute: Callable
    reference: Callable
    target: str
    outputs: tuple[str, ...]


LOSS = Operation(linear_cross_entropy, reference.linear_cross_entropy, "target", ("loss",))
LOG_PROBS = Operation(
    linear_log_probs, reference.linear_log_probs, "tokens", ("log_probs", "entropy")
)


def cut_in_four(monkeypatch, kernels) -> None:
    """Rows of VOCABULARY are four blocks in the interpreter, whatever is computed of them.

    By their bytes those of more than a plain loss would be thirteen, and take three times as long.
    """
    cut = kernels.block_and_warps
    monkeypatch.setattr(kernels, "block_and_warps", lambda stride, *_: cut(stride, 4, 0))


def drawn(
    device: str, dtype: str, shape: tuple[int, int, int] = SHAPE, spread: float = 1.0,
    seed: int = 0, bias: bool = False, token_weights: bool = False, class_weights: bool = False,
    **settings,
):  # fmt: skip
    """Leaves by name, target (an ignored one in seven), and the settings; logits are O(spread)."""
    tokens, width, vocabulary = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(getattr(torch, dtype)).requires_grad_()

    leaves = {"hidden": normal(tokens, width),
              "weight": normal(vocabulary, width, scale=spread * width**-0.5)}  # fmt: skip
    leaves |= {"bias": normal(vocabulary)} if bias else {}
    target = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    target[::7] = settings.get("ignore_index", -100)
    target[-1] = vocabulary - 1
    if token_weights:
        settings["token_weights"] = torch.rand(tokens, generator=generator, device=device)
    if class_weights:
        settings["class_weights"] = torch.rand(vocabulary, generator=generator, device=device)
        settings["class_weights"][1::3] = 0
    return leaves, target, settings


def wide(leaves: Named) -> Named:
    return {n: t.detach().double().requires_grad_() for n, t in leaves.items()}


def misses(
    device: str, dtype: str, shape: tuple[int, int, int] = SHAPE, spread: float = 1.0,
    compute: Callable | None = None, operation: Operation = LOSS,
    of: tuple[str, ...] | None = None, **settings,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects in the outputs and the gradients of those in `of`.

    Outputs by token have the floor of fp32, which they are computed in. PyTorch's draw of few
    numbers may be lucky: its error is the worst of four, a per cent apart. What comes from above to
    a mean or sum is a power of two, as of `backward()` and loss scales: it rounds nothing. An
    output by token has any.
    """
    leaves, target, settings = drawn(device, dtype, shape, spread, **settings)
    by_token = operation is LOG_PROBS or settings.get("reduction") == "none"
    upstream = {name: torch.tensor(4.0, device=device) for name in of or operation.outputs}
    if by_token:
        upstream = {n: torch.randn(shape[0], device=device) for n in upstream}
    if by_token and operation is LOSS:
        upstream["loss"] = (upstream["loss"].abs() + 0.5).to(leaves["hidden"].dtype)

    def results(function: Callable, leaves: Named) -> Named:
        outputs = function(**leaves, **{operation.target: target}, **settings)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = {n: t for n, t in zip(operation.outputs, outputs, strict=True) if t is not None}
        ups = [up.to(found[name]) for name, up in upstream.items()]
        gradients = grad([found[name] for name in upstream], list(leaves.values()), ups)
        named = {f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)}
        return {n: t.detach() for n, t in found.items()} | named

    def errors(function: Callable, scale: float) -> tuple[Errors, dict]:
        own = {n: (t.detach() * scale).to(t.dtype).requires_grad_() for n, t in leaves.items()}
        found = results(function, own)
        kinds = {n: (t.dtype, t.shape) for n, t in found.items()}
        return check.errors(found, results(operation.reference, wide(own))), kinds

    drawn_apart = [errors(operation.reference, scale) for scale in (1.0, 1.01, 1.02, 1.03)]
    found, kinds = errors(compute or operation.compute, 1.0)
    assert kinds == drawn_apart[0][1]
    usual = worse(*(each for each, _ in drawn_apart))
    missed = []
    for name in usual:
        floor = torch.float32 if by_token and name in operation.outputs else getattr(torch, dtype)
        missed += check.misses(found, usual, floor, [name])
    return missed


def step(leaves: Named, target: Tensor, compute: Callable = linear_cross_entropy, **settings):
    loss = compute(**leaves, target=target, **settings)
    return [loss.detach(), *grad(loss.sum(), list(leaves.values()))]
