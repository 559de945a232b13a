"""Causal attention as a problem: inputs and counts, who computes it, and how that is checked.

    P = softmax(Q Kᵀ / √E + mask)      Q, K, V, O (B, 1, T, E): B sequences of T tokens, one head
    O = P V

A product of the T × T matrix with a T × E one takes 2 T² E FLOPs a sequence: two forward, four
backward. Who keeps no T × T matrix computes the scores again, a fifth, and leaves out what lies
above the diagonal, about half of each (Dao 2023). Plain attention keeps P and the mask; in its
backward pass P, dP and dS are alive at once, and on CUDA P ∘ dP, before torch sums its rows.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedlib.bench import check
from fusedlib.bench.attempt import Attempt, Unavailable, is_out_of_memory
from fusedlib.bench.problem import Operands
from fusedlib.bench.turns import Checked, Turn, workload_turn
from study import rivals
from study.allocator import kept, peak
from study.cases import Case
from study.fits import require_memory
from study.models.transformer import plain_attention
from study.rivals import Task, Workload, rival
from study.settings import DTYPES, MIB

SHAPE = ("context_length", "head_dim", "batch_size", "dtype")


class AttentionProblem(NamedTuple):
    """T tokens a sequence, E, the width of the one head, B sequences, and the tensors' dtype."""

    context_length: int
    head_dim: int
    batch_size: int
    dtype: str

    @classmethod
    def of(cls, case: Case) -> "AttentionProblem":
        """The problem that a case or a row speaks of."""
        context, width, batch = (int(case[name]) for name in SHAPE[:3])
        return cls(context, width, batch, str(case["dtype"]))

    @property
    def square(self) -> int:
        """Bytes of a B × T × T tensor."""
        return self.rows * self.context_length * DTYPES[self.dtype]

    @property
    def linear(self) -> int:
        """Bytes of a B × T × E tensor."""
        return self.rows * self.head_dim * DTYPES[self.dtype]

    @property
    def rows(self) -> int:
        """Rows of all T × T matrices: B × T, elements of a logsumexp."""
        return self.batch_size * self.context_length


def draw(problem: AttentionProblem, device: torch.device | str, seed: int = 0) -> Operands:
    """Normal query, key and value, which want gradients, and dO; the same ones for the same seed
    and device.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (problem.batch_size, 1, problem.context_length, problem.head_dim)
    query, key, value, dout = (
        torch.randn(shape, generator=generator, device=device).to(getattr(torch, problem.dtype))
        for _ in range(4)
    )
    leaves = {"query": query, "key": key, "value": value}
    return Operands({name: leaf.requires_grad_() for name, leaf in leaves.items()}, dout)


# --- counts --------------------------------------------------------------------------------------

BOTH = "forward+backward"
_PRODUCTS = {"forward": 2, "backward": 4}
# Reads and writes of a B × T × T tensor, operation by operation, in plain attention:
# forward   Q Kᵀ 1, scaling 2, masking 2, softmax 2, P V 1
# backward  dP 1, dV 1, softmax 3, masking 2, scaling 2, dQ 1, dK 1
SQUARE_PASSES = {"forward": 8, "backward": 11}
# Of the T × T mask: made of ones (1), its lower part zeroed (2), read; read again going backward.
_MASK_PASSES = {"forward": 4, "backward": 1}
# Of a B × T × E tensor: Q, K, V, O; going backward Q, K, V, dO, dQ, dK, dV, and in plain attention
# dO once more, in a fused kernel O.
_LINEAR_PASSES = {"forward": 4, "backward": 8}
_LOGSUMEXP_BYTES = 4
PEAK_SQUARES = {"cuda": 4, "cpu": 3, "mps": 3}


def flops(problem: AttentionProblem, direction: str, *, fused: bool) -> int:
    """FLOPs of the products. `fused`: on and below the diagonal, the scores computed twice."""
    if direction == BOTH:
        return sum(flops(problem, each, fused=fused) for each in _PRODUCTS)
    products, width = _PRODUCTS[direction], problem.head_dim
    if not fused:
        return products * 2 * problem.rows * problem.context_length * width
    pairs = problem.rows * (problem.context_length + 1) // 2
    return (products + (direction == "backward")) * 2 * pairs * width


def traffic(problem: AttentionProblem, direction: str, *, fused: bool) -> int:
    """Bytes that a direction's operations read and write at least.

    Plain: every operand and every result of each operation once. `fused`: those of the whole, and
    the logsumexp.
    """
    if direction == BOTH:
        return sum(traffic(problem, each, fused=fused) for each in _PRODUCTS)
    linear = _LINEAR_PASSES[direction] * problem.linear
    if fused:
        return linear + problem.rows * _LOGSUMEXP_BYTES
    mask = _MASK_PASSES[direction] * problem.context_length**2
    return linear + SQUARE_PASSES[direction] * problem.square + mask


def plain_peak(problem: AttentionProblem, device: str) -> int:
    """Most bytes that plain attention holds over Q, K, V and dO: in the softmax's backward pass,
    or, where T is far below E, in the product's or at the end; O and dV are there in each.
    """
    square, linear = problem.square, problem.linear
    softmax = PEAK_SQUARES[device] * square + problem.context_length**2 + 2 * linear
    return max(softmax, square + 4 * linear, 5 * linear)


# --- who computes it -----------------------------------------------------------------------------

TASK = Task[[Operands], Workload]("attention")
FUSED = "fused"
_KEEPS_NO_SQUARE = frozenset({FUSED})
# How torch begins its refusal, on CUDA and elsewhere.
_REFUSED = ("No available kernel", "No viable backend")


@rival(TASK, "plain")
def plain(operands: Operands) -> Workload:
    """Every step an operation of its own, as in `models.transformer`."""
    leaves = operands.leaves()
    return Workload(lambda: plain_attention(*leaves.values()), leaves)


def _attend(operands: Operands) -> Callable[[], Tensor]:
    query, key, value = operands.leaves().values()
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _backend(operands: Operands, backend: SDPBackend) -> Workload:
    plainly = _attend(operands)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return plainly()

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            forward()
        except RuntimeError as error:
            if not str(error).startswith(_REFUSED):
                raise
            raise Unavailable(_reasons(error, given)) from error
    return Workload(forward, operands.leaves())


BACKENDS = {
    "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
for _name, _sdpa in BACKENDS.items():
    rival(
        TASK, _name, traits=frozenset() if _name == "math" else _KEEPS_NO_SQUARE,
        settings=f"scaled_dot_product_attention, backend {_sdpa.name}",
    )(partial(_backend, backend=_sdpa))  # fmt: skip


def leave_to_torch(*names: str) -> None:
    """Leave torch these of its backends to choose from."""
    enable = torch.backends.cuda
    enable.enable_math_sdp("math" in names)
    enable.enable_flash_sdp("flash" in names)
    enable.enable_mem_efficient_sdp("efficient" in names)
    enable.enable_cudnn_sdp("cudnn" in names)


@contextmanager
def all_afterwards() -> Iterator[None]:
    """Leaves torch every backend when it ends."""
    try:
        yield
    finally:
        leave_to_torch(*BACKENDS)


def backend_of(output: Tensor) -> str:
    """Which backend made an output of `scaled_dot_product_attention`, by its node of autograd; math
    has none of its own, for it is made of operations. Where torch pads heads, others lie above it.
    """
    nodes = [output.grad_fn] if output.grad_fn else []
    for node in nodes:  # which grows
        if found := re.match(r"ScaledDotProduct(\w+?)Attention", node.name()):
            return found[1].lower()
        nodes += [above for above, _ in node.next_functions if above]
    return "math"


@rival(TASK, "sdpa", traits=frozenset({"on request"}))
def sdpa(operands: Operands) -> Workload:
    """scaled_dot_product_attention, is_causal=True, the backend that torch takes by itself."""
    forward = _attend(operands)
    return Workload(forward, operands.leaves(), figures={"backend": backend_of(forward())})


def chosen(case: Case) -> dict[str, Any]:
    """The backend that `scaled_dot_product_attention` takes by itself, by autograd's node."""
    query, key, value = draw(AttentionProblem.of(case), case["device"]).leaves().values()
    ones = torch.ones(2 * query.shape[-2:-1], dtype=torch.bool, device=case["device"])
    mask = ones.tril() if case["mask"] == "tensor" else None
    attended = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
    return {"backend": backend_of(attended)}


@rival(
    TASK, "flash-4", traits=_KEEPS_NO_SQUARE,
    requires=("flash_attn.cute", "cutlass"), needs_cuda=True, dtypes=rivals.HALVES,
    capability=(9, 0),
)  # fmt: skip
def flash_4(operands: Operands) -> Workload:
    """flash_attn.cute.flash_attn_func, causal=True, written in CuTe's DSL."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    leaves = operands.leaves()

    def forward() -> Tensor:  # it takes tokens before heads
        turned = (leaf.transpose(1, 2) for leaf in leaves.values())
        mixed: Tensor = flash_attn_func(*turned, causal=True)[0]
        return mixed.transpose(1, 2)

    return Workload(forward, leaves)


@rival(TASK, "flex", traits=_KEEPS_NO_SQUARE | {"on request"})
def flex(operands: Operands) -> Workload:
    """FlexAttention with a causal block mask, torch.compile, fullgraph=True, dynamic=False."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = operands.leaves().values()
    device = query.device
    if device.type != "cuda":
        raise Unavailable(f"torch has FlexAttention's backward pass on CUDA only, not {device}")
    length = query.shape[-2]
    mask = create_block_mask(_causal, None, None, length, length, device=str(device))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def forward() -> Tensor:
        mixed = compiled(query, key, value, block_mask=mask)
        assert isinstance(mixed, Tensor)  # it gives the logsumexp too, when asked for it
        return mixed

    return Workload(forward, operands.leaves())


@rival(TASK, "inductor", traits=frozenset({"on request"}))
def inductor(operands: Operands) -> Workload:
    """The plain one through torch.compile, default mode, fullgraph=True, dynamic=False."""
    leaves = operands.leaves()
    compiled = torch.compile(plain_attention, fullgraph=True, dynamic=False)
    return Workload(lambda: compiled(*leaves.values()), leaves)


def _reasons(error: RuntimeError, given: list[warnings.WarningMessage]) -> str:
    """Torch's reasons: it warns of each before it raises, and of the other backends too."""
    texts = [str(w.message).partition(" (Triggered internally")[0].strip() for w in given]
    others = ("not used because", "has been runtime disabled")
    reasons = [text for text in texts if not any(part in text for part in others)]
    return " ".join(dict.fromkeys(reasons)) or str(error).strip().splitlines()[0]


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def is_fused(name: str, task: Task[..., Any] = TASK) -> bool:
    """Whether a rival keeps no T × T matrix."""
    return FUSED in rivals.get(task, name).traits


# --- what is right -------------------------------------------------------------------------------

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


def exact(operands: Operands) -> Exact:
    """The truth in float64, on the operands' device; for MPS, which has none, on the host.

    dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)), dQ = dS K / √E, dK = dSᵀ Q / √E (Dao et al.
    2022) are written out by blocks of rows, so that the longest context is checked as it is.
    """
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
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(start + 1)
        p = scores.masked_fill_(future, float("-inf")).softmax(-1)
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


def baseline_errors(
    operands: Operands, true: Exact, *, whole: bool = True,
    attend: Callable[..., Tensor] | None = None,
) -> dict[str, check.Errors]:  # fmt: skip
    """The errors of plain attention in the operands' dtype, the measure of everybody's errors: the
    larger ones of two runs, one sequence at a time and, where `whole` asks for it and the memory
    suffices, all at once. cuBLAS splits the long sums of one product and not those of a batch,
    which then err up to 2.2 times more (fp32, T = 16384, H200). Gradients may also err by a
    roundoff of ln T in fp32: P = exp(S − L) is off by that of the logsumexp L that was kept.
    """
    batch, _, length, head_dim = operands.dy.shape
    step = min(batch, max(1, BLOCK // length**2))
    runs = [errors(_plain(operands, step, attend), true)]
    if whole and step < batch:
        try:
            runs.append(errors(_plain(operands, batch, attend), true))
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
    most = MOST_ROUNDOFFS * (length + head_dim) ** 0.5 * check.roundoff(operands.dy.dtype)
    allowed = {}
    for name in NAMES:
        norm, worst = (max(getattr(run[name], of) for run in runs) for of in ("norm", "worst"))
        if length > 1 and not norm <= most:  # one token's gradients are 0
            raise ValueError(
                f"plain attention misses float64 in {name} by {norm:.1e} in norm, more than "
                f"{MOST_ROUNDOFFS:g} √(T + E) roundoffs, {most:.1e}: it is wrong and no measure"
            )
        more = 0.0 if name == "y" else log(length) * check.roundoff(torch.float32)
        allowed[name] = check.Errors(norm + more, worst + more)
    return allowed


def _plain(
    operands: Operands, step: int, attend: Callable[..., Tensor] | None
) -> dict[str, Tensor]:
    """Plain attention's results, so many sequences at a time."""
    attend, parts = attend or plain_attention, []
    for start in range(0, len(operands.dy), step):
        own = slice(start, start + step)
        mine = {n: t.detach()[own].requires_grad_() for n, t in operands.leaves().items()}
        work = Workload(partial(attend, *mine.values()), mine)
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


def check_size(
    name: str, problem: AttentionProblem, device: str, task: Task[..., Any] = TASK
) -> None:
    """Whether a rival that holds T × T tensors is worth a try."""
    if not is_fused(name, task):
        require_memory((plain_peak(problem, device) + 4 * problem.linear) / 2**30, device)


class Setup:
    """One problem, drawn, with the truth and the errors that plain attention makes on it."""

    task: Task[..., Any] = TASK
    plain: Callable[..., Tensor] | None = None

    def __init__(self, case: Case) -> None:
        self.problem, self.device = AttentionProblem.of(case), case["device"]
        self.operands = draw(self.problem, self.device)
        self.true = self.truth()
        whole = Attempt.at(check_size, "plain", self.problem, self.device).ok
        self.baseline = baseline_errors(self.operands, self.true, whole=whole, attend=self.plain)

    def truth(self) -> Exact:
        """What is right."""
        return exact(self.operands)

    def check(self, case: Case) -> Checked:
        """Set a rival up, hold all that it gives against the truth, and weigh what it holds."""
        name, dout = case["provider"], self.operands.dy
        check_size(name, self.problem, self.device, self.task)
        one = rivals.get(self.task, name)
        work = one.build(self.operands)
        figures = {**one.facts(), **work.figures}
        figures |= self._errors(NAMES, check.results_of(work, dout))
        work.reset()
        saved = kept(work.forward, work.leaves.values())
        figures["kept_mib"] = sum(one.nbytes for one in saved) / MIB
        figures["peak_mib"] = peak(lambda: work.forward().backward(dout), self.device)
        work.reset()

        def turn(timed: Case) -> Turn:
            names = NAMES[:1] if timed["direction"] == "forward" else NAMES
            choose = partial(leave_to_torch, *([name] if name in BACKENDS else BACKENDS))
            choose()
            own = replace(work, forward=_attend(self.operands)) if name in BACKENDS else work
            made = workload_turn(own, dout, timed, partial(self._errors, names))

            def prepare(calls: int) -> None:
                choose()  # outside the clock: to enter sdpa_kernel takes the host 20 µs
                made.prepare(calls)

            return replace(made, prepare=prepare)

        return Checked(figures, turn)

    def _errors(self, names: Sequence[str], results: dict[str, Tensor]) -> dict[str, Any]:
        dtype = self.operands.dy.dtype
        return check.require(errors(results, self.true), self.baseline, dtype, names)
