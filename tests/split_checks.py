"""What must hold of split products wherever they run: Triton's interpreter, a GPU.

`tests/split_interpreted.py` and `tests/test_split_gpu.py` call these with their device.
"""

from functools import partial

import torch
from torch import Tensor

from fusedlib.launch.config import Config
from fusedlib.launch.launch import cdiv
from fusedlib.ops.linear.split import parts
from fusedlib.ops.linear.split import product as products
from split_families import FAMILIES, drawn

SHAPE = (140, 300, 134)  # m, k, n: ragged, more than one 128-tile each way
TURNS = [(False, False), (False, True), (True, False), (True, True)]


def cut_for_the_interpreter(monkeypatch) -> None:
    """A tile is one block, in a third of the time of eight, and a span no longer than a tile: of a
    matrix that is narrower than a span, seven eighths of what is computed would be masked.
    """
    monkeypatch.setattr(parts, "SPAN", parts.TILE)
    monkeypatch.setattr(products, "INTERPRETER", Config(128, 128, 64, 4, 1, group_m=2))


def product(a: Tensor, b: Tensor, turned_a: bool = False, turned_b: bool = False) -> Tensor:
    """A B split, each factor stored as asked, however small they are."""
    a = a.mT.contiguous().mT if turned_a else a.contiguous()
    b = b.mT.contiguous().mT if turned_b else b.contiguous()
    return products.split_product(a, b)


def bound(a: Tensor, b: Tensor) -> Tensor:
    """What the contract of `fusedlib.ops.linear.split` allows, and roundings where fp32 ends."""
    a, b = a.double().abs(), b.double().abs()
    small = a.amax(1, True) * b.sum(0, True) + b.amax(0, True) * a.sum(1, True)
    return (
        (18 + a.shape[1] / 4096) * 2.0**-22 * (a @ b)
        + 2.0**-39 * small
        + (1 + cdiv(a.shape[1], parts.SPAN)) * 2.0**-150
    )


def errors(found: Tensor, a: Tensor, b: Tensor) -> tuple[float, float]:
    """In norm, and the largest of an element relative to |A||B|."""
    true, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    off = (found.double() - true).abs()
    norm = (off.norm() / true.norm().clamp_min(2.0**-1000)).item()
    return norm, (off / sizes.clamp_min(2.0**-1000)).max().item()


def misses(found: Tensor, a: Tensor, b: Tensor) -> list[str]:
    """What breaks the contract: an error above it, or inf and nan elsewhere than IEEE has them.

    fp32 sums of another order may overflow or not on the way to a number near the largest.
    """
    usual, true = a @ b, (a.double() @ b.double()).float()
    near_the_end = (a.abs().double() @ b.abs().double()) > 2.0**126
    finite = found.isfinite()
    missed = []
    for name, kind in (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        if ((kind(found) != kind(usual)) & ~near_the_end).any():
            missed.append(f"{name}: not where IEEE has it")
    rows, columns = a.isfinite().all(1), b.isfinite().all(0)
    a, b, found, true = a[rows], b[:, columns], found[rows][:, columns], true[rows][:, columns]
    finite = found.isfinite() & true.isfinite()
    if (found.isfinite() != true.isfinite()).any() and not near_the_end.any():
        missed.append("finite or not where the true one is otherwise")
    share = ((found.double() - a.double() @ b.double()).abs() / bound(a, b))[finite]
    if share.numel() and not share.max() <= 1:
        missed.append(f"{share.max():.2f} of what is allowed")
    return missed


def check_family(name: str, device: str, shape=SHAPE, turned=(False, False)) -> None:
    a, b = (t.to(device) for t in FAMILIES[name](*drawn(shape)))
    assert misses(product(a, b, *turned), a, b) == []


def check_not_finite(device: str, shape=SHAPE) -> None:
    """Beside zeros, faint elements, denormals, and each other."""
    a, b = (t.to(device) for t in drawn(shape))
    inf = float("inf")
    for place, value in (((3, 7), inf), ((4, 9), 0.0), ((5, 9), 1e-30), ((6, 9), inf),
                         ((7, 9), -1e-44), ((8, -1), -inf), ((9, 2), inf), ((9, 3), -inf),
                         ((-1, -1), inf), ((11, 5), float("nan"))):  # fmt: skip
        a[place] = value
    for place, value in (((7, 5), 0.0), ((9, 9), -inf), ((100, 20), float("nan")),
                         ((-1, -1), 1e-38), ((12, 30), inf)):  # fmt: skip
        b[place] = value
    a[20] = 0.0
    usual = (a.cpu() @ b.cpu()).to(device)
    for turned in TURNS:
        found = product(a, b, *turned)
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(found), kind(usual)), (turned, kind)


def check_strides(device: str) -> None:
    a, b = (t.to(device) for t in drawn(SHAPE))
    wanted = product(a, b)
    wide = torch.cat([a, -a], dim=1)[:, : a.shape[1]]
    turned = b.mT.contiguous().mT
    every_other = torch.stack([a, -a], dim=-1).flatten(-2)[:, ::2]
    unaligned = torch.cat([a[:, :1], a], dim=1)[:, 1:]
    for left, right in ((wide, b), (a, turned), (every_other, turned), (unaligned, b)):
        assert torch.equal(products.split_product(left, right), wanted)


def check_exact(device: str, shape=SHAPE) -> None:
    """Sums that fp32 holds, of factors that fp16 holds."""
    a, b = (t.to(device) for t in drawn(shape))
    for left, right in ((torch.ones_like(a), torch.ones_like(b)),
                        ((8 * a).round(), (8 * b).round())):  # fmt: skip
        assert torch.equal(product(left, right).double(), left.double() @ right.double())


def public_errors(device: str, shape: tuple[int, int, int], mlp, save: str) -> tuple[dict, dict]:
    """Errors in norm of y and every gradient, the library's own and torch's in fp32."""
    return _errors_beside_torch(
        device, shape, lambda leaves, dy: _with_gradients(partial(mlp, save=save), leaves, dy)
    )


def _errors_beside_torch(device: str, shape: tuple[int, int, int], ours) -> tuple[dict, dict]:
    tokens, hidden, inner = shape
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    x, w_gate_up = normal(tokens, hidden), normal(2 * inner, hidden) * hidden**-0.5
    w_down, dy = normal(hidden, inner) * inner**-0.5, normal(tokens, hidden)
    leaves, dy = [t.to(device) for t in (x, w_gate_up, w_down)], dy.to(device)
    true = _with_gradients(_plain_mlp, [t.double() for t in leaves], dy.double())
    names = ("y", "d_x", "d_w_gate_up", "d_w_down")

    def norms(results) -> dict[str, float]:
        return {
            name: ((r.double() - t).norm() / t.norm()).item()
            for name, r, t in zip(names, results, true, strict=True)
        }

    return norms(ours(leaves, dy)), norms(_with_gradients(_plain_mlp, leaves, dy))


def _with_gradients(mlp, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = mlp(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _plain_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    gate, up = (x @ w_gate_up.mT).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ w_down.mT
