"""What holds of every operation of `operations.py`: in plain PyTorch, in Triton's interpreter and
on a GPU.

    python -m pytest tests/laws -k "rope and strides"                     plain PyTorch, or a GPU
    TRITON_INTERPRET=1 python -m pytest tests/laws -k "rope and strides"  the kernels, on a CPU
    … -k "rope or interleaved or without_triton"  all of one operation: two laws take all at once

**To add a law**, write a test of a `case`: a call with what it is given. It runs for each of
`OPERATIONS`, or for those of another table, as `@of(PUBLIC)`, or `@of(CALLS)` with all settings and
modules. `@PLAIN` if it holds of plain PyTorch too:

    @PLAIN
    def test_results_are_finite(case):
        assert all(y.isfinite().all() for y in case.results().values())

A law of other sizes or dtypes takes `operation` and `device`, and makes its own `Case` of them.
"""

import gc
import math
import random
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from itertools import combinations, product
from typing import Any

import faults
import hypothesis
import operations
import pytest
import torch
from copied import library_with
from hypothesis import strategies
from operations import Named, Operation, shape_of
from torch import Tensor
from torch.autograd import forward_ad, grad
from torch.autograd.graph import saved_tensors_hooks

import fusedlib
import gradient_checks as checks
from called import Called
from fusedlib import tuning
from gradient_checks import close, same
from interpreter import BACKEND, INTERPRETED

OPERATIONS = operations.operations(fusedlib)
CALLS = OPERATIONS | operations.more_calls(fusedlib)
PUBLIC = {name: each for name, each in OPERATIONS.items() if each.public}
PLAIN, HALF = pytest.mark.plain, "bfloat16"


class Case:
    """A call with what it is given: operands by name, and what flows back to its results."""

    def __init__(self, operation: Operation, device: str, dtype: str = "", **sizes: int) -> None:
        self.operation, self.device = operation, device
        usual = operation.gpu_sizes if device == "cuda" else operation.sizes
        self.sizes = usual | sizes
        self.dtype = getattr(torch, dtype or operation.dtypes[-1 if device == "cuda" else 0])
        self.operands: Named = {}
        for seed, (name, operand) in enumerate(operation.operands.items()):
            shape = shape_of(operand.shape, self.sizes)
            t = operand.draw(checks.drawn("cpu", torch.float32, *shape, seed=seed), self.sizes)
            t = t.to(device, self.dtype if t.is_floating_point() else t.dtype)
            self.operands[name] = t.requires_grad_(operand.learned)
        # To a single number a power of two flows back, as a loss's scale, which rounds nothing.
        self.upstream = {
            n: checks.drawn(device, y.dtype, *y.shape, seed=s) if y.ndim else torch.full_like(y, 4)
            for s, (n, y) in enumerate(self.results().items(), 50) if y.requires_grad
        }  # fmt: skip

    @property
    def leaves(self) -> Named:
        """The operands that want a gradient."""
        return {name: t for name, t in self.operands.items() if t.requires_grad}

    def with_operands(self, **others: Tensor) -> "Case":
        """The same call with others in place of some operands."""
        case = Case.__new__(Case)
        vars(case).update(vars(self), operands=self.operands | others)
        return case

    def results(self, call: Callable[..., Any] | None = None, **others: Any) -> Named:
        """Results by name, with others in place of some operands."""
        found = (call or self.operation.call)(**self.operands | others)
        found = found if isinstance(found, tuple) else (found,)
        return dict(zip(self.operation.outputs, found, strict=True))

    def step(self, upstream: Named | None = None, **others: Tensor) -> list[Tensor]:
        """Results and gradients, with others in place of some operands."""
        upstream, results = upstream or self.upstream, self.results(**others)
        leaves = [t for t in (self.operands | others).values() if t.requires_grad]
        gradients = grad([results[name] for name in upstream], leaves, [*upstream.values()])
        return [*(y.detach() for y in results.values()), *gradients]

    def named_step(self) -> Named:
        """What `step` gives, by name."""
        names = *self.operation.outputs, *(f"d_{name}" for name in self.leaves)
        return dict(zip(names, self.step(), strict=True))

    def bounds(self, found: Named) -> dict[str, tuple[Tensor, Tensor]]:
        """The truth and how far off an element may be, of those of `found` that have a bound."""
        if self.operation.bound is None:
            return {}
        given = map(wide, (self.operands, self.upstream, found))
        return self.operation.bound(*given, torch.finfo(self.dtype).eps / 2)

    def bounded(self) -> set[str]:
        """Names of what has a bound."""
        return {*self.bounds(self.named_step())}

    def __iter__(self) -> Iterator[Any]:
        """For `gradient_checks`: a function with one result, its leaves, and what flows back."""

        def joined(results: Named) -> Tensor:
            first, *others = results.values()
            return torch.cat([t.flatten() for t in results.values()]) if others else first

        yield lambda **leaves: joined(self.results(**leaves))
        yield self.leaves
        yield joined(self.upstream)


def of(chosen: dict[str, Operation]) -> pytest.MarkDecorator:
    """Run a law of these operations."""
    return pytest.mark.parametrize("operation", chosen.values(), ids=chosen.keys())


def dtypes_of(name: str, operation: Operation) -> tuple[str, ...]:
    """The dtypes in which a law runs that compares numbers."""
    return operation.dtypes[: None if name in OPERATIONS or not INTERPRETED else 1]


def of_all_dtypes(chosen: dict[str, Operation]) -> pytest.MarkDecorator:
    """Run a law of these operations in each of their dtypes; in the interpreter, where a call
    takes a second, further settings of an operation in one.
    """
    pairs = [(name, dtype) for name, each in chosen.items() for dtype in dtypes_of(name, each)]
    values = [(chosen[name], dtype) for name, dtype in pairs]
    return pytest.mark.parametrize(("operation", "dtype"), values, ids=map(", ".join, pairs))


@pytest.fixture(params=OPERATIONS.values(), ids=OPERATIONS)
def operation(request) -> Operation:
    return request.param


@pytest.fixture
def dtype() -> str:
    return ""


@pytest.fixture
def case(operation, device, dtype) -> Case:
    return Case(operation, device, dtype)


@contextmanager
def tuned(operation: Operation | None, library: Any = fusedlib) -> Iterator[None]:
    """Kernels are cut as the operation says. In the interpreter new memory is NaN: what nobody
    writes is not right by chance.
    """
    values = {} if operation is None else operation.tuning if INTERPRETED else operation.gpu_tuning
    torch.use_deterministic_algorithms(INTERPRETED, warn_only=True)
    try:
        with import_module(f"{library.__name__}.tuning").override(**values):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def as_the_operation_says(request):
    """With its tuning and its exceptions."""
    given = "operation" in request.fixturenames
    operation = request.getfixturevalue("operation") if given else None
    for part, why in operation.exceptions.items() if given else ():
        laws = [name for name in vars(request.module) if name.startswith("test_") and part in name]
        assert laws, f"an exception from no law: {part!r} is part of no law's name"
        if request.function.__name__ in laws and (
            INTERPRETED or request.node.get_closest_marker("gpu")
        ):
            request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    with tuned(operation) if "device" in request.fixturenames else nullcontext():
        yield


# --- results and gradients -----------------------------------------------------------------------


def wide(named: Named) -> Named:
    """In float64, but for whole numbers."""
    return {n: t.detach().double() if t.is_floating_point() else t for n, t in named.items()}


def misses(
    case: Case, call: Callable[..., Any] | None = None, times: float = 1.0,
    stated: dict[str, float] | None = None,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects of results and gradients, against float64."""

    def plain(**leaves: Tensor) -> Named:
        is_wide = next(iter(leaves.values())).dtype == torch.float64
        return case.results(
            case.operation.plain, **(wide(case.operands) if is_wide else {}) | leaves
        )

    compute = partial(case.results, call)
    return checks.misses(compute, plain, case.leaves, case.upstream, times, stated)


def differences(found: Named, wanted: Named) -> list[str]:
    """Which are not the same bits, and by how much."""
    assert found.keys() == wanted.keys()
    return [
        f"{name}: {int((t != wanted[name]).sum())} of {t.numel()} elements differ, "
        f"by {(t.double() - wanted[name].double()).abs().max():.2e} at most"
        for name, t in found.items() if not torch.equal(t, wanted[name])
    ]  # fmt: skip


def beyond_bound(case: Case) -> list[str]:
    """Results and gradients with an element that is further off than is stated.

    Tokens are of all sizes, for which the error of the largest is no measure.
    """
    if case.operation.bound is None:
        return []
    others = {}
    for name, t in case.leaves.items():
        if case.operation.operands[name].shape.startswith("t"):
            sizes = torch.logspace(1, -1, len(t), device=t.device)[:, None]
            others[name] = (t.detach() * sizes).to(t.dtype).requires_grad_()
    case = case.with_operands(**others)
    found = case.named_step()
    unit, tiny = torch.finfo(case.dtype).eps / 2, torch.finfo(case.dtype).tiny
    beyond = []
    for name, (true, allowed) in case.bounds(found).items():
        off = (found[name].double() - true).abs()
        off = off if allowed.shape == off.shape else off.norm(dim=-1, keepdim=True)
        allowed = (1 + 8 * unit) * allowed + tiny
        if not (off <= allowed).all():
            at = tuple(map(int, torch.unravel_index((off / allowed).argmax(), off.shape)))
            beyond.append(f"{name}: {off[at] / allowed[at]:.3g} times its bound at {at}")
    return beyond


def not_finite_elsewhere(case: Case) -> list[str]:
    """Results that are NaN or infinite in another place than PyTorch's, or where one row's NaN
    reaches another row.
    """
    operands, outputs = case.operation.operands, case.operation.outputs
    first = next(iter(operands))
    token = operands[first].shape.split().index("t")
    given = {name: t.detach().clone() for name, t in case.leaves.items()}
    for name in given.keys() - {first}:
        given[name][..., 0] *= -1e-30  # faint numbers beside
    good = case.results(**given)
    given[first] = given[first].clone()
    for row, place, value in ((3, -1, torch.nan), (4, 0, torch.inf), (5, 0, -torch.inf)):
        given[first].select(token, row)[..., place] = value
    found, plain = (case.results(call, **given) for call in (None, case.operation.plain))
    elsewhere = []
    for name, letters in outputs.items():
        kinds = torch.isnan, torch.isposinf, torch.isneginf
        differs = any(not torch.equal(kind(found[name]), kind(plain[name])) for kind in kinds)
        if "t" in letters and not differs:
            rows = [each[name].movedim(letters.split().index("t"), 0) for each in (found, good)]
            differs = not same(*([y[:3], y[6:]] for y in rows))
        elsewhere += [name] * differs
    return elsewhere


def wrong(case: Case) -> list[str]:
    """What is beyond its bound; where none is stated, what twice the rule rejects.

    With a term or two in a sum plain PyTorch may be exact, and of few numbers the worst is lucky.
    """
    stated = {name: of(case.sizes) for name, of in case.operation.stated.items()}
    bounded, missed = case.bounded(), misses(case, times=2, stated=stated)
    return beyond_bound(case) + [m for m in missed if m.partition(":")[0] not in bounded]


@PLAIN
@of_all_dtypes(CALLS)
def test_results_and_gradients_against_float64(case):
    assert misses(case) == []


@of_all_dtypes({name: each for name, each in CALLS.items() if each.bound})
def test_no_element_is_further_off_than_is_stated(case):
    assert beyond_bound(case) == []


def other_sizes(device: str, chosen: dict[str, Operation]) -> Iterator[Any]:
    """On a CPU without entries of `more_calls` that have the sizes of an operation's own entry."""
    known = [each.more_sizes for each in OPERATIONS.values()]
    for name, each in chosen.items():
        if device == "cpu" and name not in OPERATIONS and each.more_sizes in known:
            continue
        for sizes in each.more_gpu_sizes if device == "cuda" else each.more_sizes:
            words = " ".join(f"{letter}={size}" for letter, size in sizes.items())
            yield pytest.param(each, sizes, id=f"{name}, {words}")


ON = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@PLAIN
@pytest.mark.parametrize(("operation", "sizes"), [*other_sizes(ON, CALLS)])
def test_results_and_gradients_at_the_borders_of_routes(operation, sizes, device):
    for dtype in operation.dtypes[-2:] if device == "cuda" else operation.dtypes[:1]:
        case = Case(operation, device, dtype, **sizes)
        assert wrong(case) == []


@PLAIN
@hypothesis.settings(
    max_examples=4 if ON == "cpu" else 40, deadline=None, derandomize=True, database=None,
    phases=[hypothesis.Phase.generate], suppress_health_check=[*hypothesis.HealthCheck],
)  # fmt: skip
@hypothesis.given(data=strategies.data())
def test_results_and_gradients_at_drawn_sizes(operation, device, data):
    """Up to half more than usual, in any dtype; widths of heads stay what rope can turn."""
    usual = operation.gpu_sizes if device == "cuda" else operation.sizes
    step = operation.size_multiple
    sizes = {
        letter: step * data.draw(strategies.integers(1, size * 3 // 2 // step), label=letter)
        for letter, size in usual.items() if letter not in "drw"
    }  # fmt: skip
    dtypes = operation.dtypes if device == "cuda" else operation.dtypes[:1]
    assert wrong(Case(operation, device, data.draw(strategies.sampled_from(dtypes)), **sizes)) == []


SCALES = {"faint": 2.0**-30, "small": 2.0**-13, "large": 2.0**13}


@PLAIN
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@of(OPERATIONS | {n: CALLS[n] for n in CALLS if n.endswith(", plain")})
def test_numbers_far_from_one(operation, device, scale):
    """The first operand's. bf16 and fp32 have the range; what overflows in PyTorch may here."""
    wanted = [dtype for dtype in operation.dtypes if dtype != "float16"]
    case = Case(operation, device, wanted[-1 if device == "cuda" else 0])
    name = next(iter(case.operands))
    case = case.with_operands(**{name: (case.operands[name].detach() * scale).requires_grad_()})
    assert misses(case) == []


def test_nan_and_infinities_stay_in_their_rows(case):
    assert not_finite_elsewhere(case) == []


def test_the_same_bits_each_time_and_operands_as_they_were(case):
    given = [*case.operands.values(), *case.upstream.values()]
    before, wanted = [(t.detach().clone(), t._version) for t in given], case.named_step()
    for _ in range(3):
        assert differences(case.named_step(), wanted) == []
    for t, (values, version) in zip(given, before, strict=True):
        assert torch.equal(t, values) and t._version == version


def settings_of(device: str) -> list[tuple[str, Callable[[], Named]]]:
    """Calls that share sizes and differ in all else that a prepared call is found by."""
    found: list[tuple[str, Callable[[], Named]]] = []
    for name, operation in CALLS.items():
        every = device == "cuda" or name in OPERATIONS
        if not every and "split_span" in operation.tuning:
            continue  # as nothing is tuned here, its products are torch's
        kinds = operation.dtypes[:1] + operation.dtypes[2:] * every  # fp16 goes as bf16
        for dtype in operation.dtypes if device == "cuda" else kinds:
            case = Case(operation, device, dtype)
            frozen = {n: t.detach() for n, t in case.leaves.items()}
            found.append((f"{name}, {dtype}", case.named_step))
            found.append((f"{name}, {dtype}, frozen", partial(case.results, **frozen)))
    return found


def test_calls_of_all_settings_interleaved_give_what_each_gives_alone(device):
    calls, alone = settings_of(device), {}
    for name, call in calls:
        tuning.forget()
        alone[name] = call()
    tuning.forget()
    for seed in range(1 if INTERPRETED else 3):
        for name, call in random.Random(seed).sample(calls, len(calls)):
            assert differences(call(), alone[name]) == [], name


def test_lengths_one_after_another_give_what_each_gives_alone(operation, device):
    """What was prepared for one serves no other wrongly: of one, of a multiple of 16, of any."""
    usual = Case(operation, device).sizes["t"]
    cases = [Case(operation, device, t=t) for t in (usual, 16, usual + 1, 1)]
    after = [case.named_step() for case in cases]
    for case, found in zip(cases, after, strict=True):
        tuning.forget()  # of one token that is ignored the loss is NaN
        both = ({n: t.nan_to_num() for n, t in of.items()} for of in (case.named_step(), found))
        assert differences(*both) == [], case.sizes


OF_EACH_TOKEN = {n: o for n, o in OPERATIONS.items() if all("t" in s for s in o.outputs.values())}


@of(OF_EACH_TOKEN)
def test_a_token_s_bits_depend_on_no_other_where_that_is_promised(operation, device):
    """Results and gradients of the first tokens alone. On a GPU it holds of the products that are
    torch's, too, at these sizes; on a CPU they are taken row by row.
    """
    letters = {n: o.shape.split() for n, o in operation.operands.items()}
    letters |= {n: shape.split() for n, shape in operation.outputs.items()}
    letters |= {f"d_{n}": letters[n] for n in operation.operands}

    def first(count: int, named: Named) -> Named:
        return {
            n: t.detach().narrow(letters[n].index("t"), 0, count).requires_grad_(t.requires_grad)
            for n, t in named.items() if "t" in letters[n]
        }  # fmt: skip

    with fusedlib.batch_invariant(), nullcontext() if device == "cuda" else row_by_row():
        case = Case(operation, device, t=LONG[device])
        found = case.named_step()
        for count in (2, 5, 64, 65, 300, 1000):
            if count < LONG[device]:
                few = case.with_operands(**first(count, case.operands))
                few.upstream = case.upstream | first(count, case.upstream)
                alone = first(count, few.named_step())
                assert differences(alone, first(count, found)) == [], count


LONG = {"cpu": 70, "cuda": 4100}


@contextmanager
def row_by_row() -> Iterator[None]:
    """torch's products on a CPU, whose bits depend on the number of rows, by one row each."""

    def mm(a: Tensor, b: Tensor) -> Tensor:
        if not len(a):
            return a.new_empty(0, b.shape[1])
        return torch.stack([b.t().mv(row) for row in a])

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        assert beta == alpha == 1
        return c + mm(a, b)

    def into(
        product: Callable[..., Tensor], *operands: Tensor, out: Tensor, **scales: Any
    ) -> Tensor:
        return out.copy_(product(*operands, **scales))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that a kernel of torch's is replaced
        for name, product in (("mm", mm), ("addmm", addmm)):
            library.impl(name, product, "CPU")
            library.impl(f"{name}.out", partial(into, product), "CPU")
        library.impl(
            "addmm_",
            lambda c, *operands, **scales: into(addmm, c, *operands, out=c, **scales),
            "CPU",
        )
    try:
        yield
    finally:
        library._destroy()


# --- operands of any layout and size -------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "rows of a wider matrix": lambda t: torch.cat([t, -t], -1)[..., : t.shape[-1]],
    "every other": lambda t: torch.stack([t, -t], -1).flatten(-2)[..., ::2],
    "off 16 bytes": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "one token for all": lambda t: t[1:2].expand_as(t),
}


@PLAIN
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_any_strides(case, layout, device):
    """And what flows back."""
    letters = {n: operand.shape for n, operand in case.operation.operands.items()}
    letters |= case.operation.outputs

    def each(how: Callable[[Tensor], Tensor], named: Named) -> Named:
        return {
            n: how(t.detach()).requires_grad_(t.requires_grad) if t.ndim else t
            for n, t in named.items()
            if layout != "one token for all" or letters[n].startswith("t")
        }

    laid = [each(LAYOUTS[layout], named) for named in (case.upstream, case.operands)]
    upstream, operands = (each(Tensor.contiguous, named) for named in laid)
    laid[0], upstream = case.upstream | laid[0], case.upstream | upstream
    if not close(case.step(laid[0], **laid[1]), case.step(upstream, **operands)):
        # On a GPU cuBLAS rounds a half-precision logit another way where its factors lie otherwise.
        own = case.with_operands(**case.operands | laid[1])
        own.upstream = laid[0]
        assert device == "cuda" and misses(own) == []


@PLAIN
def test_no_tokens(operation, device):
    """Or no sequences."""
    for letter in {"t", "b"} & operation.sizes.keys():
        case = Case(operation, device, **{letter: 0})
        shapes = [shape_of(letters, case.sizes) for letters in operation.outputs.values()]
        assert [y.shape for y in case.results().values()] == shapes
        for leaf, gradient in zip(case.leaves.values(), case.step()[len(shapes) :], strict=True):
            assert gradient.shape == leaf.shape and not gradient.any()


@PLAIN
@of({n: o for n, o in OPERATIONS.items() if next(iter(o.operands.values())).shape[0] == "t"})
def test_tokens_in_several_dimensions(operation, device):
    """Or one token without a dimension."""
    case, deep = Case(operation, device, t=12), lambda t: t.unflatten(0, (2, 3, 2))
    tokens = {n: t for n, t in case.operands.items() if operation.operands[n].shape[0] == "t"}
    laid = [{n: deep(t) if t.ndim else t for n, t in of.items()} for of in (case.upstream, tokens)]
    found, flat = case.step(laid[0], **laid[1]), case.step()
    assert all(y.shape[:3] == (2, 3, 2) for y in found[: len(operation.outputs)] if y.ndim)
    assert close([t.reshape(w.shape) for t, w in zip(found, flat, strict=True)], flat)
    found, flat = (
        case.step({n: t[at] if t.ndim else t for n, t in case.upstream.items()},
                  **{n: t[at] for n, t in tokens.items()})
        for at in (1, slice(1, 2))
    )  # fmt: skip
    assert close([t.reshape(w.shape) for t, w in zip(found, flat, strict=True)], flat)


OWN_DTYPES = {
    name: each for name, each in CALLS.items()
    if HALF in each.dtypes and any(operand.own_dtype for operand in each.operands.values())
}  # fmt: skip


@PLAIN
@of(OWN_DTYPES)
def test_operands_of_a_dtype_of_their_own(operation, device):
    """In fp32 where the first is in half precision; results have the dtypes of PyTorch's."""
    case = Case(operation, device, HALF)
    own = {n: t.detach().float().requires_grad_(t.requires_grad)
           for n, t in case.operands.items() if operation.operands[n].own_dtype}  # fmt: skip
    case = case.with_operands(**own)
    found, plain = (case.results(call) for call in (None, operation.plain))
    assert [y.dtype for y in found.values()] == [y.dtype for y in plain.values()]
    assert misses(case) == []


# --- autograd ------------------------------------------------------------------------------------


@contextmanager
def right_or(words: str) -> Iterator[None]:
    """What is asserted here holds, or there is an error that says why not."""
    try:
        yield
    except RuntimeError as error:
        assert words in str(error)


HOLD = {
    "of each subset of operands": checks.check_subsets,
    "again": checks.check_repeated,
    "accumulated": checks.check_accumulated,
    "checkpointed": checks.check_checkpointed,
    "switched off": lambda compute, leaves, _: checks.check_no_grad(compute, leaves),
}


@PLAIN
@pytest.mark.parametrize("holds", HOLD.values(), ids=HOLD)
def test_gradients(case, holds):
    holds(*case)


@PLAIN
@of({name: each for name, each in CALLS.items() if len(each.outputs) > 1})
def test_gradients_of_one_result_alone(case):
    """Are those where nothing flows back to the others, or zeros do."""
    leaves, count = [*case.leaves.values()], len(case.operation.outputs)
    for name, up in case.upstream.items():
        zeros = {n: torch.zeros_like(t) for n, t in case.upstream.items()}
        wanted = case.step(zeros | {name: up})[count:]
        y = case.results()[name]
        assert close(grad(y, leaves, up, allow_unused=True, materialize_grads=True), wanted)


@PLAIN
def test_kept_tensors_may_go_elsewhere_and_come_back(case):
    """As activations offloaded to another memory do; those that stay are not written over."""
    wanted, kept = case.named_step(), []
    with saved_tensors_hooks(lambda t: t.detach().to("cpu").clone(), lambda t: t.to(case.device)):
        assert close(case.step(), wanted.values())
    with saved_tensors_hooks(lambda t: kept.append((t, t.detach().clone())) or t, lambda t: t):
        assert differences(case.named_step(), wanted) == []
    assert all(torch.equal(t, before) for t, before in kept)


@PLAIN
def test_each_gradient_has_memory_of_its_own(case):
    """It may be written to, as by who clips it in place."""
    compute, leaves, upstream = case
    compute(**leaves).backward(upstream)
    for name, leaf in leaves.items():
        others = {f"d_{n}": t.grad for n, t in leaves.items() if n != name} | {"dy": upstream}
        before = {n: t.clone() for n, t in others.items()}
        leaf.grad.add_(1)
        assert differences(others, before) == [], name


@PLAIN
def test_nothing_outlives_a_call(operation, device):
    case = Case(operation, device)
    case.step()
    operands = {n: t.detach().clone().requires_grad_(n in case.leaves)
                for n, t in case.operands.items()}  # fmt: skip
    found, watched = case.step(**operands), [weakref.ref(t) for t in operands.values()]
    del operands
    gc.collect()
    assert not any(operand() is not None for operand in watched) and found


def test_gradients_are_of_what_forward_read(case):
    """Whatever memory operands get afterwards, by `.data`."""
    others = [t for name, t in case.operands.items() if name not in case.leaves]
    watched = [*checks.WATCHED][: None if case.operation.public else -1]  # no mode
    checks.check_what_forward_read(*case, others, watched)


@PLAIN
def test_a_change_in_place_is_noticed(case):
    """No gradient is wrong for it: it is what it would have been, or an error."""
    compute, leaves, upstream = case

    def gradients(y: Tensor) -> Named:
        return dict(zip(leaves, grad(y, [*leaves.values()], upstream), strict=True))

    wanted = gradients(compute(**leaves))
    for name, operand in case.operands.items():
        y, before = compute(**leaves), operand.detach().clone()
        operand.detach().zero_()
        with right_or("modified by an inplace operation"):
            assert differences(gradients(y), wanted) == [], name
        operand.detach().copy_(before)


def test_operands_may_come_from_inference_mode(case):
    """As a frozen encoder's features say: gradients of the others are what they were."""
    wanted = case.named_step()
    for name, operand in case.operands.items():
        with torch.inference_mode():
            frozen = operand.detach().clone()
        if others := [leaf for leaf in case.leaves if leaf != name]:
            results = case.results(**{name: frozen})
            upstream = {n: t for n, t in case.upstream.items() if results[n].requires_grad}
            found = grad([results[n] for n in upstream], [case.leaves[n] for n in others],
                         [*upstream.values()])  # fmt: skip
            assert close(found, [wanted[f"d_{n}"] for n in others]), name


@PLAIN
def test_results_may_be_written_to(case):
    results, changed = case.results(), case.results()
    for name, y in changed.items():
        if name in case.upstream:
            y += case.upstream[name]
            assert torch.equal(y, results[name] + case.upstream[name])
    leaves, upstream = [*case.leaves.values()], [*case.upstream.values()]
    wanted = grad([results[name] for name in case.upstream], leaves, upstream)
    with right_or("modified by an inplace operation"):
        found = grad([changed[name] for name in case.upstream], leaves, upstream)
        named = (dict(zip(case.leaves, each, strict=True)) for each in (found, wanted))
        assert differences(*named) == []


def subsets(case: Case) -> Iterator[tuple[set[str], Named]]:
    """Each subset of operands that may want gradients, and all operands, of which these do."""
    for count in range(len(case.leaves) + 1):
        for wanted in combinations(case.leaves, count):
            own = {n: t.detach().requires_grad_(n in wanted) for n, t in case.leaves.items()}
            yield {*wanted}, own


def test_nothing_else_is_kept_for_backward(case):
    """Of each subset of gradients, the operands that these read, and what is stated."""
    operation = case.operation
    stated = sum(math.prod(shape_of(letters, case.sizes)) for letters in operation.keeps)
    for wanted, own in subsets(case):
        kept: list[Tensor] = []
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            results = case.results(**own)
        read = {name for leaf in wanted for name in operation.reads.get(leaf, "").split()}
        memory = {t.data_ptr() for n, t in (case.operands | own | results).items() if n in read}
        more = sum(t.numel() for t in kept if t.data_ptr() not in memory)
        assert more <= stated * bool(wanted), wanted


@pytest.mark.gpu
def test_no_more_memory_is_held_between_the_passes(operation):
    """As the allocator counts: results, and what is stated."""

    def held() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    with tuned(operation):
        case = Case(operation, "cuda")
        case.step()  # which keeps a device's own buffers, too
        before = held()
        results = case.results()
        stated = sum(math.prod(shape_of(s, case.sizes)) for s in operation.keeps)
        own = sum(y.numel() * y.itemsize for y in results.values())
        assert held() - before <= operation.kept_itemsize(case.dtype) * stated + own


# --- second derivatives and transforms -----------------------------------------------------------

FEW = dict.fromkeys("hidqrk", 8) | dict.fromkeys("tov", 3) | {"b": 1, "n": 2, "m": 1, "w": 16}


def penalty(
    case: Case, call: Callable[..., Any], operands: Named, first: str, by: str,
    constant: bool = False,
) -> Tensor:  # fmt: skip
    """The derivative by one operand of a penalty on the gradient of another.

    What flows back to the results depends on the operands, or is a `constant`.
    """
    results = [y for y in case.results(call, **operands).values() if y.requires_grad]
    sums = [y.sum() if constant else y.exp().sum() for y in results]
    [gradient] = grad(sums, operands[first], create_graph=True)
    return grad(gradient.square().sum() + operands[by].sum(), operands[by])[0]


def test_second_derivatives_are_right_or_refused(operation, device):
    """Whichever operands want gradients; of leaves with a constant that flows back, and of what has
    a graph, with what depends on it.
    """
    case = Case(operation, device, **FEW)
    for first, by in product(case.leaves, repeat=2):
        for wanted, inner in (({first, by}, False), ({*case.leaves}, True)):
            own = {n: t.detach().requires_grad_(n in wanted) for n, t in case.leaves.items()}
            own = {n: t * 1 if inner and t.requires_grad else t for n, t in own.items()}
            with right_or("no second derivative"):
                found = penalty(case, operation.call, own, first, by, constant=not inner)
                exact = {n: t.requires_grad_(n in wanted) for n, t in wide(case.operands).items()}
                true = penalty(case, operation.plain, exact, first, by, constant=not inner)
                allowed = 1e-4 if case.dtype == torch.float32 else 4e-2
                assert (found.double() - true).norm() <= allowed * true.norm(), (first, by)


def test_a_penalty_s_backward_is_right_or_refused(operation, device):
    """`backward()`, which goes to all leaves, of a penalty on each gradient."""
    case = Case(operation, device, **FEW)
    for first, constant in product(case.leaves, (False, True)):
        both = []
        for call, operands in (
            (operation.call, case.operands),
            (operation.plain, wide(case.operands)),
        ):
            own = {n: operands[n].detach().requires_grad_() for n in case.leaves}
            results = [y for y in case.results(call, **operands | own).values() if y.requires_grad]
            sums = [y.sum() if constant else y.exp().sum() for y in results]
            [gradient] = grad(sums, own[first], create_graph=True)
            both.append((own, gradient.square().sum()))
        (own, found), (exact, true) = both
        if not true.requires_grad:  # of a bias, say: its gradient is what flows back
            continue
        with right_or("no second derivative"):
            found.backward()
            true.backward()
            for name, leaf in own.items():
                wanted = exact[name].grad
                allowed = 1e-4 if case.dtype == torch.float32 else 4e-2
                given = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                wanted = torch.zeros_like(exact[name]) if wanted is None else wanted
                assert (given.double() - wanted).norm() <= allowed * wanted.norm(), (first, name)


@PLAIN
def test_transforms_of_torch_func_and_forward_mode(operation, device):
    checks.check_transforms(*Case(operation, device, "float32"), by_row=False)


def test_a_tensor_that_a_transform_left_over(case):
    """Its wrapper is dead: it has no address of its own."""
    left: list[Tensor] = []
    name, leaf = next(iter(case.leaves.items()))
    torch.func.grad(lambda t: (left.append(t * 1), t.sum())[1])(leaf.detach())
    wanted = case.results()
    for mode in (nullcontext, torch.no_grad):
        with mode():
            assert differences(case.results(**{name: left[0]}), wanted) == []


def test_batched_gradients_are_right_or_refused(case):
    compute, leaves, upstream = case
    own, y = [*leaves.values()], compute(**leaves)
    wanted = grad(y, own, upstream, retain_graph=True)
    with right_or("no batched gradients"):
        batched = grad(y, own, torch.stack([upstream, upstream]), is_grads_batched=True)
        assert close([t for pair in batched for t in pair], [t for t in wanted for _ in "12"])


def test_tangents_of_gradients_are_right_or_refused(case):
    """Where forward did not see them: gradients are linear in what flows back."""
    compute, leaves, upstream = case
    own, y = [*leaves.values()], compute(**leaves)
    wanted = grad(y, own, upstream, retain_graph=True)
    with forward_ad.dual_level(), right_or("no tangents"):
        gradients = grad(y, own, forward_ad.make_dual(upstream, 2 * upstream))
        found = [forward_ad.unpack_dual(t).tangent for t in gradients]
        assert close(found, [2 * t for t in wanted])


@PLAIN
@of(CALLS)
def test_float64_is_plain_pytorch(operation, device):
    """Results, gradients, and theirs."""
    case = Case(operation, device, "float64", **FEW)

    def plain_step(call: Callable[..., Any]) -> list[Tensor]:
        results = case.results(call)
        ups = [up.double() for up in case.upstream.values()]
        found = grad([results[name] for name in case.upstream], [*case.leaves.values()], ups)
        return [*results.values(), *found]

    found, wanted = plain_step(operation.call), plain_step(operation.plain)
    torch.testing.assert_close(found, wanted, check_dtype=False, rtol=1e-12, atol=1e-12)
    for first, by in product(case.leaves, repeat=2) if operation in OPERATIONS.values() else ():
        both = (penalty(case, call, case.operands, first, by)
                for call in (operation.call, operation.plain))  # fmt: skip
        torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)


@of(PUBLIC)
def test_without_memory_or_values(operation):
    """On the meta device, which has no autocast, and under a mode of fake tensors: shapes and
    dtypes, and gradients'.
    """
    case = Case(operation, "cpu")
    real = case.results()
    elsewhere = torch.autocast("cpu", torch.bfloat16)
    for mode in (nullcontext(), elsewhere, torch._subclasses.FakeTensorMode()):
        place = getattr(mode, "from_tensor", lambda t: t.to("meta"))
        given = {n: place(t.detach()).requires_grad_(t.requires_grad)
                 for n, t in case.operands.items()}  # fmt: skip
        with mode:
            found = case.results(**given)
            for name, y in real.items():
                assert (found[name].shape, found[name].dtype) == (y.shape, y.dtype), name
            sum(y.sum() for y in found.values() if y.requires_grad).backward()
            assert all(given[n].grad.shape == t.shape for n, t in case.leaves.items())


# --- who else looks ------------------------------------------------------------------------------


@PLAIN
def test_under_autocast(case):
    """Operands are cast as by hand, or stay as they are; gradients have the operands' dtypes."""
    operands = case.operation.operands if case.operation.casts else {}
    alike = [name for name, operand in operands.items() if not operand.own_dtype]
    cast = {n: case.operands[n].detach().bfloat16() for n in alike if n in case.leaves}
    wanted = case.results(**cast)
    with torch.autocast(case.device, torch.bfloat16):
        found = case.results()
    assert differences(found, wanted) == []
    wants = [y.sum() for y in found.values() if y.requires_grad]
    gradients = grad(wants, [*case.leaves.values()])
    assert [g.dtype for g in gradients] == [t.dtype for t in case.leaves.values()]


def test_compiled_in_one_graph_for_all_lengths(operation, device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(operation.call, fullgraph=True, dynamic=True, backend=BACKEND)
    tokens = Case(operation, device).sizes["t"]
    for length in (tokens, tokens + 2):
        assert misses(Case(operation, device, t=length), compiled, times=2) == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Arguments(Called):
    """What each operator was last given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.given[function] = args
        return super().__torch_dispatch__(function, types, args, kwargs)


@of(PUBLIC)
def test_operators_are_registered_as_torch_wants_them(case):
    """A call that is watched goes by them, and gives the same."""
    with tuning.override(**case.operation.watched):
        wanted = case.named_step()
    with Arguments() as called:
        assert differences(case.named_step(), wanted) == []
    own = {f: given for f, given in called.given.items() if f.namespace == "fusedlib"}
    assert len(own) > 1
    for function, given in own.items():
        alone = [t.detach() if isinstance(t, Tensor) else t for t in given]
        torch.library.opcheck(function, (*alone,))
        name = function.__name__.partition(".")[0]
        if name.endswith("_forward"):  # of the operator that has gradients
            function = getattr(torch.ops.fusedlib, name.removesuffix("_forward")).default
            torch.library.opcheck(function, given)


@pytest.mark.gpu
def test_a_cuda_graph_replays_what_a_call_gives(operation):
    """Also of operands, and of what flows back, that were written to since."""
    case = Case(operation, "cuda")

    def change() -> None:
        for t in (*case.operands.values(), *case.upstream.values()):
            t.mul_(-0.5) if t.is_floating_point() else t.copy_(t.flip(0))

    def eager() -> list[Tensor]:
        with tuning.override(**operation.watched):
            return case.step()

    with tuned(operation):
        checks.check_cuda_graph(case.step, change, eager)


@pytest.mark.gpu
@pytest.mark.alone
@of({name: each for name, each in OPERATIONS.items() if each.huge_gpu_sizes})
def test_beyond_2_to_the_31_elements(operation):
    """The last tokens of many have the results and gradients that they have alone."""
    tail = 64
    with tuned(operation):
        case = Case(operation, "cuda", **operation.huge_gpu_sizes)
        torch.cuda.empty_cache()
        first = next(iter(case.operands))
        letters = {n: operand.shape for n, operand in operation.operands.items()}
        letters |= operation.outputs

        def last(named: Named) -> Named:
            dims = {n: letters[n].split().index("t") for n in named if "t" in letters[n]}
            return {n: t.narrow(dims[n], t.shape[dims[n]] - tail, tail).detach().clone()
                    .requires_grad_(t.requires_grad) if n in dims else t.detach()
                    for n, t in named.items()}  # fmt: skip

        def step(operands: Named, upstream: Named) -> list[Tensor]:
            results = {n: y for n, y in case.results(**operands).items() if y.requires_grad}
            ups = [upstream[n] for n in results]
            [d_first] = grad([*results.values()], operands[first], ups)
            kept = results | {first: d_first}
            return [*last({n: t.detach() for n, t in kept.items()}).values()]

        only = {n: t.detach().requires_grad_(n == first) for n, t in case.operands.items()}
        found = step(only, case.upstream)
        assert close(found, step(last(only), last(case.upstream)))


@pytest.mark.gpu
def test_streams_and_threads_give_the_same(operation):
    case = Case(operation, "cuda")
    with tuned(operation):
        wanted = case.named_step()
        torch.cuda.synchronize()

        def elsewhere(_: int) -> Named:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = case.named_step()
            torch.cuda.synchronize()
            return found

        tuning.forget()
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(elsewhere, range(8)):
                assert differences(found, wanted) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_operands_need_not_lie_on_the_current_device(operation):
    here = Case(operation, "cuda")
    there = Case(operation, "cuda")
    move = {n: t.detach().to("cuda:1").requires_grad_(t.requires_grad)
            for n, t in there.operands.items()}  # fmt: skip
    upstream = {n: t.to("cuda:1") for n, t in there.upstream.items()}
    found = there.step(upstream, **move)
    assert all(t.device.index == 1 for t in found)
    assert same([t.to("cuda:0") for t in found], here.step())


# --- what is refused -----------------------------------------------------------------------------


def wrong_operands(case: Case) -> Iterator[tuple[str, str, Any]]:
    """Operands that do not fit: a name, the fault, and what has it. One alone fits anywhere."""
    operands = case.operation.operands
    letters = "".join(operand.shape for operand in operands.values())
    floating = [name for name, t in case.operands.items() if t.is_floating_point()]
    alike = [name for name in floating if not operands[name].own_dtype]
    for name, operand in operands.items():
        t = case.operands[name].detach()
        yield name, "no tensor", [1.0] if name != next(iter(operands)) else None
        if case.operation.dense:
            yield name, "sparse", t.to_sparse()
            yield name, "nested", torch.nested.nested_tensor([t.float()])
        yield name, "another kind of number", t.long() if name in floating else t.float()
        if name in alike[1:]:
            yield name, "another dtype", t.double()
        if len(operands) > 1:
            yield name, "another device", t.to("meta")
            yield name, "a dimension more", t[..., None]
            yield name, "a dimension less", t[..., 0]
        for dim, word in enumerate(operand.shape.split()):
            if letters.count(word[-1]) > 1:
                yield name, f"more of {word}", torch.cat([t, t.narrow(dim, 0, 1)], dim)


@PLAIN
@of(PUBLIC)
def test_wrong_operands_and_settings_are_refused(case):
    """By a TypeError or ValueError whose message has the operand's or the setting's name."""
    faulty = [(name, fault, {name: operand}) for name, fault, operand in wrong_operands(case)]
    faulty += [(n, str(v), {n: v}) for each in case.operation.refused for n, v in each.items()]
    for name, fault, given in faulty:
        with pytest.raises((TypeError, ValueError)) as refused:
            case.results(**given)
            pytest.fail(f"{name}: {fault} was accepted and should be refused")
        named = [other for other in case.operation.operands | given if other in str(refused.value)]
        assert named or (name.startswith("w_") and "w_gate_up" in str(refused.value)), refused.value


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import fusedlib
assert "torch" not in sys.modules
sys.path[:0] = {paths!r}
import torch, test_laws
for name, operation in test_laws.CALLS.items():
    test_laws.Case(operation, "cpu").step()
assert not any(module.startswith("triton.") for module in sys.modules)
"""


def test_without_triton_all_is_plain_pytorch():
    program = WITHOUT_TRITON.format(paths=[path for path in sys.path if path])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


# --- teeth ---------------------------------------------------------------------------------------


def each_fault(tables: Any) -> list[Any]:
    return [
        pytest.param(names, f"ops/{file}", right, wrong, id=f"{file}: {fault}")
        for names, file, table in tables for fault, (right, wrong) in table.items()
    ]  # fmt: skip


def is_noticed(operation: Operation, device: str, library: Any) -> bool:
    """True if a law of numbers rejects the operation."""
    with tuned(operation, library):
        case = Case(operation, device)
        return bool(misses(case) or beyond_bound(case) or not_finite_elsewhere(case))


@pytest.mark.interpreter
@pytest.mark.parametrize(("names", "file", "right", "fault"), each_fault(faults.INTERPRETED))
def test_a_fault_is_noticed(names, file, right, fault, device, tmp_path):
    with library_with(file, right, fault, tmp_path) as broken:
        table = operations.operations(broken) | operations.more_calls(broken)
        noticed = any(is_noticed(table[name], device, broken) for name in names)
        assert noticed, f"no law of numbers rejects {names} with {right!r} → {fault!r}"


@pytest.mark.gpu
@pytest.mark.parametrize(("names", "file", "right", "fault"), each_fault(faults.ON_GPU))
def test_a_fault_on_a_card_is_noticed(names, file, right, fault, tmp_path):
    test_a_fault_is_noticed(names, file, right, fault, "cuda", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(("names", "file", "right", "fault"), each_fault(faults.ON_HOPPER))
def test_a_fault_of_hopper_is_noticed(names, file, right, fault, tmp_path):
    """Of the kernels in Gluon, which nothing interprets."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are Hopper's")
    test_a_fault_is_noticed(names, file, right, fault, "cuda", tmp_path)
