"""Drawn calls of `swiglu_mlp`: shapes, strides, dtypes, scales and wanted gradients by hypothesis.

`interpreted/drawn.py` runs them over interpreted kernels, `test_swiglu_hypothesis.py` on a GPU. All
of them by the one rule of `fusedlib.bench.check`. Of few elements plain PyTorch may hit the truth
by luck, so its error is the largest over the drawn operands and three more sets a per cent away:
the same conditioning, other roundings. And over two ways to write it, `plain` and `packed`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from fusedlib import reference
from fusedlib.bench import check
from fusedlib.ops.mlp.function import SAVES, swiglu_mlp
from gradient_checks import worse
from swiglu_checks import halves_at_once, mlp

NAMES = ("x", "w_gate_up", "w_down", "dy")
OPERANDS = "x", "w_gate", "w_up", "w_down"  # that want gradients
LAYOUTS = (
    "contiguous",
    "transposed",
    "every other",
    "wide rows",
    "offset",
    "one row",
    "one column",
)
LEADS = ("matrix", "1 first", "1 second", "halves")
# Powers of ten. In fp16 sums of a hundred products must stay below 65504.
SCALES = {"float32": 20, "bfloat16": 20, "float16": 2}
NEIGHBOURS = 3
# Roundoffs of fp32, of the norms of its two factors, that a gate may be off by: at most 0.6 in 12.6
# million sums of 2090 terms on a CPU. Tensor cores add up less exactly.
REACH = 2
ENOUGH = 8  # elements a row, and terms, from which on a row's error is no matter of luck


@dataclass(frozen=True)
class Case:
    """One call; `scales` are powers of ten of `NAMES`, rows of x and w_gate_up differ by up to
    2^`spread`, and `odd` is a value that stands once in one of `NAMES`. Of a `pair` gate and up are
    views of w_gate_up; of a packed weight `wanted` of gate is that of both.
    """

    shape: tuple[int, int, int]
    dtype: str
    save: str
    wanted: tuple[bool, bool, bool, bool]
    pair: bool
    layouts: tuple[str, str, str, str]
    offset: int
    lead: str
    scales: tuple[int, int, int, int]
    spread: int
    odd: tuple[str, float] | None
    seed: int


def multiples(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(-(-least // 16), most // 16).map(lambda n: 16 * n)


SMALL = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40))
# What decides which kernel runs on a GPU: alignment, tokens, and tiles for all multiprocessors, 128
# wide in the forward and 256 in the backward.
ON_GPU = st.one_of(
    st.tuples(st.integers(0, 70), st.integers(1, 100), st.integers(1, 100)),
    st.tuples(st.integers(1, 64), multiples(16, 256), multiples(16, 256)),
    st.tuples(st.integers(65, 600), multiples(16, 512), multiples(16, 512)),
    st.tuples(st.integers(1500, 2000), multiples(16, 512), multiples(1500, 2000)),
    st.tuples(st.integers(1500, 2000), multiples(16, 256), multiples(2900, 3300)),
    st.tuples(st.integers(256, 400), st.integers(2000, 2100), st.integers(2000, 2100)),
)


@st.composite
def cases(draw, shapes: st.SearchStrategy[tuple[int, int, int]]) -> Case:
    """Half of the operands contiguous, half of the cases of ordinary scale."""
    dtype = draw(st.sampled_from(sorted(SCALES)))
    most = draw(st.sampled_from([0, SCALES[dtype]]))
    layout = st.one_of(st.just("contiguous"), st.sampled_from(LAYOUTS))
    values = [float("inf"), float("-inf"), float("nan")]
    odd = st.tuples(st.sampled_from(NAMES), st.sampled_from(values))
    return Case(
        shape=draw(shapes), dtype=dtype, save=draw(st.sampled_from(SAVES)),
        wanted=draw(st.tuples(*[st.booleans()] * 4)), pair=draw(st.booleans()),
        layouts=draw(st.tuples(*[layout] * 4)),
        offset=draw(st.integers(1, 9)), lead=draw(st.sampled_from(LEADS)),
        scales=draw(st.tuples(*[st.integers(-most, most)] * 4)),
        spread=draw(st.sampled_from([0, 0, 30])) if most > 2 else 0,
        odd=draw(st.one_of(st.none(), st.none(), odd)), seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


def laid_out(values: Tensor, how: str, offset: int) -> Tensor:
    """The values in that layout; of "one row" and "one column" the first alone, repeated."""
    if how == "transposed":
        return values.mT.contiguous().mT
    if how == "every other":
        return torch.stack([values, -values], dim=-1).flatten(-2)[:, ::2]
    if how == "wide rows":
        return torch.cat([values, -values[:, :1].expand(-1, offset)], dim=1)[:, : values.shape[1]]
    if how == "offset":
        padded = torch.cat([values.new_full((offset,), -7.0), values.flatten()])
        return padded[offset:].view_as(values)
    if how == "one row":
        return values[:1].expand(values.shape)
    if how == "one column":
        return values[:, :1].expand(values.shape)
    return values


def operands(case: Case, device: str) -> list[Tensor]:
    """x, w_gate_up, w_down and dy, of scales drawn together until all steps are `within` range."""
    tokens, hidden, inner = case.shape
    generator = torch.Generator(device=device).manual_seed(case.seed)
    sizes = (tokens, hidden), (2 * inner, hidden), (hidden, inner), (tokens, hidden)
    usual = 1.0, hidden**-0.5, inner**-0.5, 1.0
    drawn = [torch.randn(s, generator=generator, device=device, dtype=torch.float64) for s in sizes]
    spread = [torch.rand(len(t), 1, generator=generator, device=device) - 0.5 for t in drawn[:2]]
    dtype, shrink, quiet = getattr(torch, case.dtype), 1.0, 1.0
    while True:
        factors = [u * quiet * 10 ** (s * shrink) for u, s in zip(usual, case.scales, strict=True)]
        made = [t * f for t, f in zip(drawn, factors, strict=True)]
        for i, rows in enumerate(spread):
            made[i] = made[i] * torch.exp2((case.spread * shrink * rows).round())
        made = [laid_out(t.to(dtype), *how) for t, how in zip(made, layouts(case), strict=True)]
        if within(peaks([t.double() for t in made]), dtype, device):
            break
        # Sums of what is repeated are large even where nothing is scaled.
        shrink, quiet = (shrink / 2, 1.0) if shrink > 0.01 else (0.0, quiet / 2)
    if case.odd is not None:
        put(made[NAMES.index(case.odd[0])], case)
    return made


def layouts(case: Case) -> list[tuple[str, int]]:
    return [(how, case.offset) for how in case.layouts]


def put(operand: Tensor, case: Case) -> None:
    """Write the odd value at a drawn place; where rows or columns are one, into all of it."""
    if operand.numel() and case.odd is not None:
        row, column = case.seed % operand.shape[0], case.seed // 7 % operand.shape[1]
        operand[row, column].fill_(case.odd[1])


def peaks(made: list[Tensor]) -> list[float]:
    """Largest magnitude of each tensor on the way, in float64."""
    x, w_gate_up, w_down, dy = made
    if not x.numel():
        return []
    gate, up = (x @ w_gate_up.mT).chunk(2, dim=1)
    s, dh = torch.sigmoid(gate), dy @ w_down
    h, d_gate, d_up = gate * s * up, dh * up * s * (1 + gate * (1 - s)), dh * gate * s
    d_gate_up = torch.cat([d_gate, d_up], dim=1)
    # Unfused code multiplies dh with up or with silu(gate) first.
    steps = *made, gate, up, h, dh, dh * up, dh * gate, d_gate_up
    steps = *steps, h @ w_down.mT, d_gate_up @ w_gate_up, d_gate_up.mT @ x, dy.mT @ h
    return [t.abs().max().item() for t in steps]


def within(magnitudes: list[float], dtype: torch.dtype, device: str) -> bool:
    """Nothing can overflow, and in bf16 on a CPU nothing is near fp32's denormals, which torch's
    own bf16 product may take for zero there.
    """
    least = 2.0**-100 if dtype == torch.bfloat16 and device == "cpu" else 0.0
    most = torch.finfo(dtype).max / 1024
    return all(least <= m < most for m in magnitudes)


def plain(made: list[Tensor]) -> dict[str, Tensor]:
    """y and all gradients in plain PyTorch, in the operands' dtype."""
    x, w_gate_up, w_down, dy = made
    halves = [t.detach() for t in w_gate_up.chunk(2)]
    leaves = [t.detach().requires_grad_() for t in (x, *halves, w_down)]
    y = reference.swiglu_mlp(*leaves)
    names = "y", "d_x", "d_w_gate", "d_w_up", "d_w_down"
    return dict(zip(names, (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def packed(x: Tensor, w_gate_up: Tensor | list[Tensor], w_down: Tensor, *, save: str) -> Tensor:
    """Plain PyTorch with gate and up in one product, for which cuBLAS may take another algorithm.

    One that adds up partial sums in bf16, as torch allows it to, leaves an error of 2⁻⁹ of the
    largest terms in a gate near zero, where one sum in fp32 leaves 2⁻⁹ of that gate; and in any
    dtype roundoff decides on which side of zero a gate lies that is that near. At gates of 100 in
    bf16 that is ten times the worst error in d_w_gate, so the calls that are made of this product
    are held to it.
    """
    del save
    weights = w_gate_up if isinstance(w_gate_up, list) else [w_gate_up]
    return linear(halves_at_once(x, *weights), w_down)


def called(
    case: Case, made: list[Tensor], compute: Callable[..., Tensor] = swiglu_mlp
) -> dict[str, Tensor]:
    """y and the wanted gradients of the call itself, by the same names, as matrices."""
    *leaves, dy = made
    wants = dict(zip(OPERANDS, case.wanted, strict=True))
    if case.pair:
        leaves[1:2] = leaves[1].chunk(2)
    else:
        del wants["w_up"]
    leaves = [t.detach().requires_grad_(w) for t, w in zip(leaves, wants.values(), strict=True)]
    tokens, hidden = leaves[0].shape
    lead = {"1 first": (1, tokens), "1 second": (tokens, 1)}.get(case.lead, (tokens,))
    if case.lead == "halves" and tokens % 2 == 0:
        lead = (2, tokens // 2)
    y = mlp(leaves[0].view(*lead, hidden), *leaves[1:], save=case.save, compute=compute)
    assert y.shape == (*lead, hidden) and y.dtype == leaves[0].dtype
    found = {"y": y.detach().view(tokens, hidden)}
    own = {f"d_{n}": t for n, t in zip(wants, leaves, strict=True) if t.requires_grad}
    assert y.requires_grad == bool(own)
    if own:
        gradients = torch.autograd.grad(y, [*own.values()], dy.view(*lead, hidden))
        found |= dict(zip(own, gradients, strict=True))
    if not case.pair and wants["w_gate"]:
        found["d_w_gate"], found["d_w_up"] = found["d_w_gate"].chunk(2)
    return found


def with_rows(case: Case, results: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, Tensor]:
    """And y and d_x by rows of equal weight: each depends on its row of x alone.

    Not where a row is one sum or few, which may nearly cancel in the truth.
    """
    few = min(case.shape[1:]) < ENOUGH or any(how.startswith("one ") for how in case.layouts[1:3])
    more = {}
    for name in [] if few else ["y", "d_x"]:
        if name in results:
            rms = true[name].square().mean(dim=1, keepdim=True).sqrt()
            more[f"{name} by rows"] = results[name].double() / rms.clamp_min(2.0**-1000)
    return results | more


def usual_errors(
    case: Case, made: list[Tensor], finite: dict[str, Tensor]
) -> dict[str, check.Errors]:
    """Plain PyTorch's, written either way, the largest of the operands and their neighbours.

    The rule's floor is roundoffs of a mean element; here also of the largest, which of few elements
    is often far larger. What `torn` says is allowed once, not twice.
    """
    generator = torch.Generator(device=made[0].device).manual_seed(1)
    roundoffs = check.FLOOR_ROUNDOFFS / check.TIMES_EAGER * torch.finfo(made[0].dtype).eps / 2
    found = []
    for n in range(1 + NEIGHBOURS):
        near = made if n == 0 else [nudged(t, generator) for t in made]
        # A neighbour of what overflows nowhere overflows nowhere; a place of inf stays one.
        true = masked(plain([t.double() for t in near]), finite)
        rows = with_rows(case, true, true)
        largest = check.errors({name: torch.zeros_like(t) for name, t in rows.items()}, rows)
        for eager in (plain(near), called(case, near, packed)):
            errors = check.errors(with_rows(case, masked(eager, finite), true), rows)
            found.append(
                {
                    name: check.Errors(error.norm, error.worst + roundoffs * largest[name].worst)
                    for name, error in errors.items()
                }
            )
    more = torn(case, made, finite)
    return {
        name: check.Errors(
            error.norm + more[name].norm / check.TIMES_EAGER,
            error.worst + more[name].worst / check.TIMES_EAGER,
        )
        for name, error in worse(*found).items()
    }


def torn(case: Case, made: list[Tensor], finite: dict[str, Tensor]) -> dict[str, check.Errors]:
    """How far d_x and d_w_gate are off if every gate is on the other side of zero that may be.

    Where gates are of 10⁶ and more, roundoff in a sum of fp32 puts a few of them on the other side,
    where silu's slope is 1 and not 0: one in twenty million (fp32 on a CPU, 2090 terms). A single
    one at 256·2090·2046 makes an error of 5e-2 in d_w_gate's worst element, in any kernel.
    """
    x, w_gate_up, w_down, dy = (t.double() for t in made)
    w_gate, w_up = w_gate_up.chunk(2)
    reach = REACH * 2.0**-24 * x.norm(dim=1)[:, None] * w_gate.norm(dim=1)
    near = ((x @ w_gate.mT).abs() < reach) & (reach > 1)
    jump = ((dy @ w_down) * (x @ w_up.mT)).abs().where(near, 0.0)
    true = masked(plain([x, w_gate_up, w_down, dy]), finite)
    off = masked({"d_x": jump @ w_gate.abs(), "d_w_gate": jump.mT @ x.abs()}, finite)
    moved = true | {name: true[name] + t for name, t in off.items()}
    return check.errors(with_rows(case, moved, true), with_rows(case, true, true))


def nudged(operand: Tensor, generator: torch.Generator) -> Tensor:
    """A per cent away, rounded to the dtype."""
    noise = torch.randn(operand.shape, generator=generator, device=operand.device)
    return (operand.double() * (1 + 0.01 * noise)).to(operand.dtype)


def told_by_torch(
    case: Case, made: list[Tensor], device: str, finite: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Of the places that are finite in float64, those that are in plain PyTorch too.

    All, but in bf16 on a CPU with AMX: torch's own product spills a NaN into the row before it.
    """
    told = dict(finite)
    if case.odd is not None and case.dtype == "bfloat16" and device == "cpu":
        for eager in (plain(made), called(case, made, packed)):
            told |= {name: told[name] & t.isfinite() for name, t in eager.items()}
    return told


def masked(results: dict[str, Tensor], finite: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.where(finite[name], 0.0) for name, t in results.items()}


def misses(case: Case, device: str) -> list[str]:
    """What the rule rejects, or what is not finite elsewhere than in float64."""
    made = operands(case, device)
    found, true = called(case, made), plain([t.double() for t in made])
    finite = {name: t.isfinite() for name, t in true.items()}
    told = told_by_torch(case, made, device, finite)
    elsewhere = [
        n for n, t in found.items()
        if (t.isfinite() & ~finite[n]).any() or (told[n] & ~t.isfinite()).any()
    ]  # fmt: skip
    if elsewhere:
        return [f"{n}: not finite elsewhere than the truth" for n in elsewhere]
    if not case.shape[0]:
        return [n for n, t in found.items() if t.shape != true[n].shape or t.any()]
    usual = usual_errors(case, made, told)
    found, true = masked(found, told), masked(true, told)
    errors = check.errors(with_rows(case, found, true), with_rows(case, true, true))
    wanted = dict(zip(OPERANDS, case.wanted, strict=True)) | {"y": True}
    wanted["w_up"] = wanted["w_up" if case.pair else "w_gate"]
    asked = [n for n in usual if wanted[n.removesuffix(" by rows").removeprefix("d_")]]
    return check.misses(errors, usual, getattr(torch, case.dtype), asked)


def check_many(
    device: str, shapes: st.SearchStrategy[tuple[int, int, int]], examples: int, part: int = 0
) -> None:
    """That many cases, the same ones for the same part; all that miss are told."""
    held: list[Case] = []
    wrong: dict[Case, list[str]] = {}

    @seed(part)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(case=cases(shapes))
    def each(case: Case) -> None:
        found = misses(case, device)
        if found:
            wrong[case] = found
        else:
            held.append(case)

    each()
    told = "\n".join(f"{case}: {'; '.join(found)}" for case, found in wrong.items())
    assert not wrong, f"{len(wrong)} of {examples}:\n{told}"
    assert len(held) == examples
