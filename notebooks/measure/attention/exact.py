"""What is right: attention and its gradients in float64, a block of rows at a time.

    P = softmax(Q Kᵀ / √E)      dV = Pᵀ dO      dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O))
    O = P V                     dQ = dS K / √E      dK = dSᵀ Q / √E       (Dao et al. 2022)

These are written out, not left to autograd, so that no T × T matrix is ever whole and the longest
context is checked at its full size.
"""

from dataclasses import dataclass
from functools import partial
from math import log

import torch
from torch import Tensor

from fusedlib.bench import check
from fusedlib.bench.attempt import is_out_of_memory
from fusedlib.bench.problem import Operands
from measure.racing.rivals import Workload
from models.transformer import plain_attention

# Elements of a block of rows: 512 MiB in float64, of which a handful are alive at once.
BLOCK = 2**26
NAMES = ("y", "d_query", "d_key", "d_value")
# By so many √(T + E) roundoffs plain attention may be off in norm; its sums have T or E terms.
# Measured: at most 0.6 on a CPU (T 2 … 2048, E 16 … 16384), 0.34 on the H200 at T = 16384. TF32
# products would be off by 64 there.
MOST_ROUNDOFFS = 4.0


@dataclass(frozen=True)
class Exact:
    """True results by name, and the size of the terms that each token's values are sums of.

    `values` (B, 1, T, E) and `sizes` (B, 1, T, 1): y, d_query, d_key and d_value in float64. A
    size is the root of the mean over E of the sum of the squared terms: the values' own size if
    nothing cancelled. The first query sees itself alone, so its gradient is 0, its size is not.
    """

    values: dict[str, Tensor]
    sizes: dict[str, Tensor]


def results(operands: Operands) -> Exact:
    """The truth, on the operands' device; for MPS, which has no float64, on the host."""
    device = "cpu" if operands.dy.device.type == "mps" else operands.dy.device
    query, key, value = (t.detach().to(device, torch.float64) for t in operands.leaves().values())
    dout = operands.dy.to(device, torch.float64)
    y, d_query, d_key, d_value = (torch.zeros_like(dout) for _ in range(4))
    squares = [torch.zeros_like(dout[..., :1]) for _ in range(4)]
    batch, _, length, head_dim = dout.shape
    scale = head_dim**-0.5
    step = max(1, BLOCK // (batch * length))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        own = (..., rows, slice(None))
        seen = (..., slice(0, rows.stop), slice(None))  # beyond the last row's diagonal is nothing
        scores = scale * query[own] @ key[seen].mT
        p = scores.masked_fill_(_future(rows, dout.device), float("-inf")).softmax(-1)
        y[own] = p @ value[seen]
        dp, sums = dout[own] @ value[seen].mT, (dout[own] * y[own]).sum(-1, keepdim=True)
        ds = scale * p * (dp - sums)
        d_query[own] = ds @ key[seen]
        d_key[seen] += ds.mT @ query[own]
        d_value[seen] += p.mT @ dout[own]
        p, ds = p.square(), (scale * p).square() * (dp.square() + sums.square())
        squares[0][own] = p @ _mean_square(value[seen])
        squares[1][own] = ds @ _mean_square(key[seen])
        squares[2][seen] += ds.mT @ _mean_square(query[own])
        squares[3][seen] += p.mT @ _mean_square(dout[own])
    return Exact(
        dict(zip(NAMES, (y, d_query, d_key, d_value), strict=True)),
        {name: square.sqrt() for name, square in zip(NAMES, squares, strict=True)},
    )


def _mean_square(values: Tensor) -> Tensor:
    return values.square().mean(-1, keepdim=True)


def _future(rows: slice, device: torch.device) -> Tensor:
    """Which of the tokens 0 … rows.stop each row may not see."""
    here = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return torch.arange(rows.stop, device=device)[None] > here


def baseline_errors(
    operands: Operands, true: Exact, *, whole: bool = True
) -> dict[str, check.Errors]:
    """The errors of plain attention in the operands' dtype, the measure of everybody's errors.

    They are the larger ones of two runs: one sequence at a time and, where `whole` asks for it and
    the memory suffices, all at once. cuBLAS splits the long sums of one product and not those of a
    batch, which then err up to 2.2 times more (fp32, T = 16384, H200). To the gradients' errors is
    added what a logsumexp kept in fp32 costs: P = exp(S − L) is off by the roundoff of L, relative
    to itself, and L is about ln T.

    Raises:
        ValueError: plain attention errs by more than roundoff, so that it is no measure.
    """
    batch, _, length, head_dim = operands.dy.shape
    step = min(batch, max(1, BLOCK // length**2))
    runs = [errors(_plain(operands, step), true)]
    if whole and step < batch:
        try:
            runs.append(errors(_plain(operands, batch), true))
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
    largest = {name: _larger([each[name] for each in runs]) for name in NAMES}
    roundoff = torch.finfo(operands.dy.dtype).eps / 2
    most = MOST_ROUNDOFFS * (length + head_dim) ** 0.5 * roundoff
    for name, error in largest.items():
        if length > 1 and not error.norm <= most:  # one token's gradients are 0
            raise ValueError(
                f"plain attention misses float64 in {name} by {error.norm:.1e} in norm, more than "
                f"{MOST_ROUNDOFFS:g} √(T + E) roundoffs, {most:.1e}: it is wrong and no measure"
            )
    kept = log(length) * torch.finfo(torch.float32).eps / 2
    return {
        name: e if name == "y" else check.Errors(e.norm + kept, e.worst + kept)
        for name, e in largest.items()
    }


def _larger(runs: list[check.Errors]) -> check.Errors:
    return check.Errors(max(e.norm for e in runs), max(e.worst for e in runs))


def _plain(operands: Operands, step: int) -> dict[str, Tensor]:
    """Plain attention's results, so many sequences at a time."""
    parts: list[dict[str, Tensor]] = []
    for start in range(0, operands.dy.shape[0], step):
        own = slice(start, start + step)
        leaves = {
            name: t.detach()[own].clone().requires_grad_() for name, t in operands.leaves().items()
        }
        work = Workload(partial(plain_attention, *leaves.values()), leaves)
        parts.append(check.results_of(work, operands.dy[own]))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def errors(results: dict[str, Tensor], true: Exact) -> dict[str, check.Errors]:
    """`check.errors` with each token relative to the size of its terms where that is larger.

    Gradients of the first keys are sums over all queries, and those of the first queries are
    differences of large terms: one rounding there would outweigh every error elsewhere.
    """
    scaled, target = {}, {}
    for name, result in results.items():
        ref = true.values[name]
        whole = ref.square().mean().sqrt()
        weight = whole / torch.maximum(true.sizes[name], whole)
        target[name] = ref * weight
        scaled[name] = result.to(ref.device, ref.dtype) * weight
    return check.errors(scaled, target)
