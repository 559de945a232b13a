"""What must hold of split products wherever they run: Triton's interpreter, a GPU.

`tests/split_interpreted.py` and `tests/test_split_gpu.py` call these with their device.
"""

from functools import partial

import torch
from split_families import EXACT, FAMILIES, PARTS, THIRDS, drawn
from torch import Tensor

from fusedlib.kernels import split as splitting
from fusedlib.kernels import split_configs, split_exact, split_mlp, split_product
from fusedlib.kernels.swiglu_calls import unchecked_bwd
from fusedlib.kernels.swiglu_configs import Config

SHAPE = (140, 300, 134)  # m, k, n: ragged, more than one 128-tile each way
UNIT = 2.0**-24


def whole_tiles(monkeypatch) -> None:
    """A tile is one block, which takes the interpreter a third of the time of eight."""
    for name in ("INTERPRETER", "EXACT"):
        monkeypatch.setattr(split_configs, name, Config(128, 128, 128, 4, 1, group_m=2))


def product(a: Tensor, b: Tensor, turned_a: bool = False, turned_b: bool = False) -> Tensor:
    """A B, each factor stored as asked."""
    left, right = splitting.split(
        a.mT.contiguous() if turned_a else a, b.mT.contiguous() if turned_b else b
    )  # fmt: skip
    return split_product.split_product(left, right, transpose_a=turned_a, transpose_b=turned_b)


def edge(faint: int, near: int, missing: int, k: int = 256) -> tuple[Tensor, Tensor]:
    """A (16, k) and B (k, 16) of ±1 but for a row and a column, whose products are all alike in
    each tile: `faint` elements of A, 2⁻⁵⁰, which vanish in the parts, meet B's largest; `near`
    indices have 2⁻¹¹ in both; at `missing` ones B has zeros."""
    assert faint + near + missing == splitting.TILE
    a, b = torch.ones(16, k), torch.ones(k, 16)
    a[1:, ::2], b[::2, 1:] = -1.0, -1.0  # few are of one sign
    counts = torch.tensor([faint, near, missing])
    a[0] = torch.tensor([2.0**-50, 2.0**-11, 2.0**-11]).repeat_interleave(counts).repeat(k // 128)
    b[:, 0] = torch.tensor([1.0, 2.0**-11, 0.0]).repeat_interleave(counts).repeat(k // 128)
    return a, b


def check_edge(device: str) -> None:
    """The largest error that the certificate lets pass, and what is just beyond."""
    for counts, certified in (((80, 20, 28), True), ((80, 19, 29), False), ((101, 26, 1), True),
                              ((102, 26, 0), False)):  # fmt: skip
        a, b = (t.to(device) for t in edge(*counts))
        assert by_parts(a, b).all() == certified, counts
        found = product(a, b)
        assert misses(found, a, b) == []
        _, lost = errors(found[:1, :1], a[:1], b[:, :1])
        # Exactly summed, what is lost is the last rounding.
        wanted = counts[0] / counts[1] * 2.0**-28
        assert not certified or abs(lost - wanted) < 2.0**-30


def check_beyond_edge(device: str) -> None:
    """The parts alone would err by 2⁻²² and 2⁻²³ there."""
    for counts in ((80, 1, 47), (96, 3, 29)):
        a, b = (t.to(device) for t in edge(*counts))
        missed = misses(product(a, b), a, b)
        assert not missed, missed


def errors(found: Tensor, a: Tensor, b: Tensor) -> tuple[float, float]:
    """In norm, and the largest of an element relative to |A||B|."""
    true, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    off = (found.double() - true).abs()
    norm = (off.norm() / true.norm().clamp_min(2.0**-1000)).item()
    return norm, (off / sizes.clamp_min(2.0**-1000)).max().item()


def misses(found: Tensor, a: Tensor, b: Tensor, slack: float = 1.0, orders: int = 1) -> list[str]:
    """What is less accurate than torch's own fp32 product, the worst of some orders of its terms,
    or not finite elsewhere.

    Errors below fp32's roundoff pass: nobody's sum is better. So do finite numbers where torch
    overflows on the way to one.
    """
    usual, true = a @ b, (a.double() @ b.double()).float()
    if found.isfinite().logical_and(~true.isfinite()).any():
        return ["finite where it must not be"]
    if usual.isfinite().logical_and(~found.isfinite()).any():
        return ["not finite where torch is"]
    finite = usual.isfinite()
    if not finite.all():
        rows, columns = a.isfinite().all(1), b.isfinite().all(0)
        a, b, finite = a[rows], b[:, columns], finite[rows][:, columns]
        found, usual = found[rows][:, columns], usual[rows][:, columns]
        if not finite.all():
            return []
    lost = 2.0**-140 / a.abs().double().matmul(b.abs().double()).max().clamp_min(2.0**-1000).item()
    names = ("norm", "element")
    usually = errors(usual, a, b)
    for shift in range(1, orders):
        turn = torch.arange(a.shape[1]).roll(shift * a.shape[1] // orders)
        usually = tuple(map(max, usually, errors(a[:, turn] @ b[turn], a, b)))
    return [
        f"{name}: {own:.2e}, torch {its:.2e}"
        for name, own, its in zip(names, errors(found, a, b), usually, strict=True)
        if not own <= max(slack * its, UNIT, lost)
    ]


def paths(a: Tensor, b: Tensor) -> Tensor:
    """How each tile of A B is computed on Hopper: (tile rows, columns)."""
    return paths_of(*splitting.split(a, b))


def paths_of(left: splitting.Split, right: splitting.Split) -> Tensor:
    """The same of split factors, neither turned. Elsewhere what is not PARTS is EXACT."""
    a = left.source
    of_a, of_b = left.tiles[:, None, :, 0], right.tiles[:, :, 1].mT[None]  # m, n, k

    def field(words: Tensor, shift: int, width: int = 8) -> Tensor:
        return (words >> shift) & (2**width - 1)

    shares = [
        torch.where(
            field(x, 15, 7) < 127,
            (field(x, 15, 7) + field(y, 7, 7)).where(field(x, 15, 7) > 0, 0),
            128,
        )
        for x, y in ((of_a, of_b), (of_b, of_a))
    ]
    k = a.shape[1]
    lengths = (k - torch.arange(0, k, splitting.TILE, device=a.device)).clamp(max=splitting.TILE)
    factors = field(of_a, 0, 7) + field(of_b, 0, 7)
    counted = lengths.where(factors >= factors.amax(2, keepdim=True) - 13, 0)
    near = (field(of_a, 24, 4) * field(of_b, 24, 4) * counted) >> 8
    heard = counted << (field(of_a, 28, 2) + field(of_b, 28, 2))
    one_sign = (field(of_a, 23, 1) & field(of_b, 23, 1)) > 0
    plain = (field(of_a, 22, 1) & field(of_b, 22, 1)) > 0
    lacking = (torch.maximum(*shares) >= 128) | one_sign
    deep = (field(of_a, 14, 1) | field(of_b, 14, 1)) > 0
    near, counted = near.sum(2), counted.sum(2)
    few = near < split_exact.LEAST_TERMS
    few |= heard.sum(2) < counted * 64 // split_exact.LEAST_HEARD
    few |= (one_sign & ~plain).any(2)
    for words in (of_a, of_b):
        level = field(words, 30, 2)
        of_row = torch.tensor([0, 8, 0, 32], device=a.device)[level].sum(2)
        of_row = of_row.where(of_row > 0, torch.where((level == 0).any(2), 0, 128))
        few = few | (of_row < split_exact.LEAST_OF_ROW)
    exact = few | (lacking.any(2) & deep.any(2))
    return torch.where(exact, EXACT, torch.where(lacking.any(2), THIRDS, PARTS))


def by_parts(a: Tensor, b: Tensor) -> Tensor:
    """Which tiles of A B two fp16 parts give."""
    return paths(a, b) == PARTS


def check_family(name: str, device: str, shape=SHAPE, turned=(False, False)) -> None:
    make, allowed = FAMILIES[name]
    a, b = (t.to(device) for t in make(*drawn(shape)))
    split = splitting.split(a, b)
    taken = paths_of(*split)
    found = product(a, b, *turned) if any(turned) else split_product.split_product(*split)
    assert set(taken.unique().tolist()) <= set(allowed), taken
    missed = misses(found, a, b)
    assert not missed, missed
    exact = torch.kron(taken == EXACT, taken.new_ones(splitting.TILE, splitting.TILE))
    exact = exact[: len(a), : b.shape[1]].bool()
    # Two orders of a sum in fp64 may round apart, once in 10⁸.
    assert is_rounded(found, a, b)[exact].float().sum() >= 0.9999 * exact.sum()


def is_rounded(found: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Where results are the true ones rounded, or too small to tell: of the exact path in fp64."""
    true = (a.double() @ b.double()).float()
    return (found == true) | ~true.isfinite() | (true.abs() < 2.0**-120)


def check_not_finite(device: str, value: float, shape=SHAPE) -> None:
    for place in (0, 1):
        pair = [t.clone() for t in drawn(shape)]
        pair[place][5, 9] = value
        pair[place][-1, -1] = value
        a, b = (t.to(device) for t in pair)
        taken = by_parts(a, b)
        assert not taken[0, 0] and not taken[-1, -1]
        missed = misses(product(a, b), a, b)
        assert not missed, missed


def check_strides(device: str) -> None:
    a, b = (t.to(device) for t in drawn(SHAPE))
    wanted = product(a, b)
    wide = torch.cat([a, -a], dim=1)[:, : a.shape[1]]
    turned = b.mT.contiguous().mT
    every_other = torch.stack([a, -a], dim=-1).flatten(-2)[:, ::2]
    for left, right in ((wide, b), (a, turned), (every_other, turned)):
        assert torch.equal(product(left, right), wanted)


def check_empty(device: str) -> None:
    for m, k, n in ((0, 300, 5), (5, 300, 0), (5, 0, 7)):
        c = product(torch.ones(m, k, device=device), torch.ones(k, n, device=device))
        assert c.shape == (m, n) and not c.any()


def mlp_errors(device: str, shape: tuple[int, int, int]) -> tuple[dict, dict]:
    """Errors in norm of y and every gradient, ours by split products and torch's own in fp32."""

    def ours(leaves: list[Tensor], dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w_gate_up, w_down = leaves
        gate_up = split_product.split_product(*splitting.split(x, w_gate_up), transpose_b=True)
        _, h = unchecked_bwd(None, None, gate_up, True, False)
        y = split_product.split_product(*splitting.split(h, w_down), transpose_b=True)
        return y, *split_mlp.split_mlp_bwd(dy, x, w_gate_up, w_down, gate_up)

    return _errors_beside_torch(device, shape, ours)


def public_errors(device: str, shape: tuple[int, int, int], mlp, save: str) -> tuple[dict, dict]:
    """The same of the library's own function."""
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
