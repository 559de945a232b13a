"""What q, k and v of one x are held against: float64, and the same in plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusedlib.bench.check import errors
from fusedlib.bench.check import misses as misses_of
from fusedlib.ops.qkv import function as qkv

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
    found = torch.autograd.grad(results, list(wanted.values()), upstream)
    named = dict(zip("qkv", (y.detach() for y in results), strict=True))
    return named | {f"d_{n}": g for n, g in zip(wanted, found, strict=True)}


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
    usual, found = (errors(step(leaves, call), true) for call in (plain, None))
    return misses_of(found, usual, kind)
