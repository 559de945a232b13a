"""Kinds of factors that split products are tried with, and what the contract allows of these."""

import torch
from torch import Tensor

from fusedlib.launch.config import Config
from fusedlib.launch.launch import cdiv
from fusedlib.ops.linear.split import parts
from fusedlib.ops.linear.split import product as products


def drawn(shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    m, k, n = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)


def _powers(count: int, spread: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randint(-spread, spread + 1, (count,), generator=generator).float())


def _mostly_zero(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of few terms."""
    kept = torch.rand(a.shape, generator=torch.Generator().manual_seed(4)) > 0.95
    return torch.where(kept, a, 0.0), b


def _every_seventh(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same, no row having fewer than others."""
    i, j = torch.arange(len(a))[:, None], torch.arange(a.shape[1])
    return torch.where((i + j) % 7 == 0, a, 0.0), b


def _one_of_14(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """IEEE arithmetic hardly rounds for the other 13, which are 2⁻²⁵ of it."""
    return torch.where(torch.arange(a.shape[1]) % 14 == 0, a, a * 2.0**-25), b


def _lone_terms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """One large term a row: beside it all are faint."""
    i, j = torch.arange(len(a))[:, None], torch.arange(a.shape[1])
    return torch.where(j == 7 * i % 120, a, a * 2.0**-35), b


def _disjoint(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Large elements of A meet zeros of B; what is left is far below the row's largest."""
    far = torch.arange(a.shape[1]) % 2 == 0
    return torch.where(far, a, a * 2.0**-34), torch.where(far[:, None], 0.0, b)


def _peaked(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of one sign, and one of 25 terms makes most of the sum, which falls short most."""
    return torch.where(torch.arange(a.shape[1]) % 25 == 0, 1.0, 2.0**-15) * a.abs(), b.abs()


def _by_weight(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the elements are negative, and make a sixth of the magnitudes."""
    return torch.nn.functional.gelu(a), b.relu()


def _signs_by_row(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of one sign, some of each."""
    return a.abs() * torch.where(torch.arange(len(a)) % 2 == 0, 1.0, -1.0)[:, None], b.relu()


def _negative_zeros(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Which are of no sign."""
    kept = torch.rand(a.shape, generator=torch.Generator().manual_seed(2)) > 0.5
    return torch.where(kept, a, -0.0), b.abs()


def _every_other_row(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(torch.arange(len(a))[:, None] % 2 == 0, a, a * 2.0**-34), b


def _outliers(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(torch.arange(a.shape[1]) % 97 == 5, 100 * a, a), b


def _dropped(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.rand(a.shape, generator=torch.Generator().manual_seed(2)) > 0.5
    return torch.where(kept, a, 0.0), b


def _zero_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(torch.arange(a.shape[0])[:, None] % 3 == 0, 0.0, a), b


def _faint(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A few elements 2⁻⁴⁰ of the others."""
    a = a.clone()
    a[3, 7], a[-1, -1] = 2.0**-40, -(2.0**-37)
    return a, b


def _half_faint(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Every other element of A 2⁻⁴⁰ of the others, along rows and columns."""
    far = (torch.arange(a.shape[0])[:, None] + torch.arange(a.shape[1])) % 2 == 1
    return torch.where(far, a * 2.0**-40, a), b


def _learned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the gradients of tokens, most of them learned: down to 2⁻²⁵ of their neighbours."""
    return a * torch.exp2(-25.0 * (torch.arange(len(a)) % 6) / 5)[:, None], b


def _far_apart(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(torch.arange(len(a))[:, None] % 3 == 1, a * 2.0**-70, a), b


def _one_hot_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows have one element."""
    i, j = torch.arange(len(a))[:, None], torch.arange(a.shape[1])
    return torch.where((i % 5 == 2) & (j != 7 * i % a.shape[1]), 0.0, a), b


def _short_columns(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Some columns have eight elements."""
    i, j = torch.arange(len(b))[:, None], torch.arange(b.shape[1])
    return a, torch.where((j % 7 == 3) & ((i + j) % (len(b) // 8) != 0), 0.0, b)


def _few_large(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Few terms of each sum are large: one of 32."""
    return torch.where(torch.arange(a.shape[1]) % 32 == 0, a, a * 2.0**-16), b


def _seesaw(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Large where the other is small: all terms are alike, and all have a faint factor."""
    scale = torch.where(torch.arange(a.shape[1]) % 2 == 0, 2.0**12, 2.0**-12)
    return a * scale, b / scale[:, None]


FAMILIES = {
    "normal": lambda a, b: (a, b),
    "small weights": lambda a, b: (a, b * 2e-2),
    "gradients of 1e-9": lambda a, b: (a * 1e-9, b),
    "outlier channels": _outliers,
    "dropout": _dropped,
    "zero rows": _zero_rows,
    "rows of one element": _one_hot_rows,
    "columns of eight elements": _short_columns,
    "few large terms": _few_large,
    "a few faint elements": _faint,
    "half of the elements faint": _half_faint,
    "all zero": lambda a, b: (a * 0, b),
    "rows that differ by 2^30": lambda a, b: (a * _powers(len(a), 15)[:, None], b),
    "columns that differ by 2^30": lambda a, b: (a, b * _powers(b.shape[1], 15)),
    "terms that differ by 2^30": lambda a, b: (a * _powers(a.shape[1], 15), b),
    "weights of 1e-20": lambda a, b: (a, b * 1e-20),
    "weights of 1e20": lambda a, b: (a, b * 1e20),
    "near the end of the range by small weights": lambda a, b: (a * 2.0**124, b * 2.0**-12),
    "small weights by near the end of the range": lambda a, b: (a * 2.0**-12, b * 2.0**124),
    "both of 1e20": lambda a, b: (a * 1e20, b * 1e20),
    "denormals": lambda a, b: (a * 1e-40, b),
    "large elements meet zeros": _disjoint,
    "every other row 2^-34 of the others": _every_other_row,
    "learned tokens": _learned,
    "one of fourteen heard": _one_of_14,
    "one term a row heard": _lone_terms,
    "positive": lambda a, b: (a.abs(), b.abs()),
    "half positive, half zero": lambda a, b: (a.relu(), b.abs()),
    "signs by row": _signs_by_row,
    "positive by weight": _by_weight,
    "mostly positive": lambda a, b: (a + 1, b + 1),
    "positive by signed": lambda a, b: (a.abs(), b),
    "negative zeros": _negative_zeros,
    "positive and peaked": _peaked,
    "integers": lambda a, b: ((8 * a).round(), (8 * b).round()),
    "positive integers": lambda a, b: ((8 * a).round().abs(), (8 * b).round().abs()),
    "nineteen of twenty zero": _mostly_zero,
    "six of seven zero": _every_seventh,
    "rows that differ by 2^70": _far_apart,
    "large where the other is small": _seesaw,
    "lognormal": lambda a, b: ((4 * a).exp(), (4 * b).exp()),
    "all 0.1": lambda a, b: (a * 0 + 0.1, b * 0 + 0.1),
}


def cut_for_the_interpreter(monkeypatch) -> None:
    """A tile is one block, in a third of the time of eight, and a span no longer than a tile: of a
    matrix that is narrower than a span, seven eighths of what is computed would be masked.
    """
    monkeypatch.setattr(parts, "SPAN", parts.TILE)
    monkeypatch.setattr(products, "INTERPRETER", Config(128, 128, 64, 4, 1, group_m=2))


def bound(a: Tensor, b: Tensor) -> Tensor:
    """What the contract of `fusedlib.ops.linear.split` allows, and roundings where fp32 ends."""
    a, b = a.double().abs(), b.double().abs()
    small = a.amax(1, True) * b.sum(0, True) + b.amax(0, True) * a.sum(1, True)
    return (
        (18 + a.shape[1] / 4096) * 2.0**-22 * (a @ b)
        + 2.0**-39 * small
        + (1 + cdiv(a.shape[1], parts.SPAN)) * 2.0**-150
    )


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
