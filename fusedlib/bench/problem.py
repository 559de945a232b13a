"""A problem with what is true of it, and how a function is held against that.

The truth is the reference in float64; how far the reference is off in the inputs' own dtype is the
measure of everybody's errors. Each sample has operands that are drawn anew, in the same memory. A
function must be right for those that were given and for others, drawn as a sample's are: before the
clock starts, in a timed call at a random sample, and after the clock.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, Protocol

from torch import Tensor

from fusedlib.bench import alarms, check
from fusedlib.bench.attempt import Wrong
from fusedlib.bench.turns import Checked, Figures, Turn, workload_turn
from fusedlib.bench.workload import Outputs, Workload, named

Results = dict[str, Tensor]
WAYS = alarms.scaled, alarms.resampled, alarms.resampled, alarms.resampled
"""To draw operands anew: the first by which all outputs become others, as not of a sign, scaled."""
FEW = 64
"""Below so many elements a draw may repeat the last one: whole numbers are drawn of themselves."""
TIMES_REWRITTEN = 4.0
"""How many times the rule's error is accepted there, which is other in every run: how accurate a
function is was judged on operands that were drawn; these find results that were kept.
"""


class Inputs(Protocol):
    """Operands by name, of which some require gradients, and the gradient of y."""

    @property
    def dy(self) -> Any:
        """Of y's shape; a tuple where the operation gives several outputs."""

    def leaves(self) -> Mapping[str, Tensor]:
        """As the reference names them."""


@dataclass(frozen=True)
class Operands:
    """Inputs that are a dictionary."""

    tensors: Mapping[str, Tensor]
    dy: Any = None

    def leaves(self) -> Mapping[str, Tensor]:
        """The tensors."""
        return self.tensors


@dataclass(frozen=True)
class Truth:
    """What is right for some values of the operands, and how far plain PyTorch is off.

    `when` says for people which values they are, empty for those that are timed. Of those that are
    far from them, `forward_only`, no gradients are asked for. `times` the rule's error is accepted.
    """

    when: str
    values: Mapping[str, Tensor]
    true: Results
    baseline: dict[str, check.Errors]
    forward_only: bool = False
    times: float = 1.0


def exact_results(inputs: Inputs, reference: Callable[..., Any]) -> Results:
    """y and all gradients by name, in float64 on the inputs' own device."""
    leaves = {
        n: (t.detach().double() if t.is_floating_point() else t).requires_grad_(t.requires_grad)
        for n, t in inputs.leaves().items()
    }
    dy = inputs.dy
    wide = tuple(d.double() for d in dy) if isinstance(dy, tuple) else dy.double()
    return check.results_of(Workload(lambda: reference(**leaves), leaves), wide)


def plain_results(inputs: Inputs, reference: Callable[..., Any]) -> Results:
    """The same in the inputs' own dtype."""
    leaves = inputs.leaves()
    return check.results_of(Workload(lambda: reference(**leaves), leaves), inputs.dy)


class Problem:
    """One problem with its truth.

    Args:
        inputs: operands by name, of any shapes and of dtypes that float64 holds.
        reference: y, or a tuple, of the operands by name, in plain PyTorch.
        outputs: their names in rows and reasons; by default y, of several y1, y2 and so on.
    """

    times = 1.0
    """How many times the rule's error is no reason to refuse (`check.misses`)."""

    def __init__(
        self, inputs: Any, reference: Callable[..., Any],
        outputs: str | tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.inputs, self.reference, self.names = inputs, reference, named(outputs)
        self.way = WAYS[0]
        self.drawn = self.truth("", inputs.leaves())

    def truth(self, when: str, values: Mapping[str, Tensor]) -> Truth:
        """What is right where the operands have these values."""
        leaves = self.inputs.leaves()
        given = {n: t.detach().clone().requires_grad_(leaves[n].requires_grad)
                 for n, t in values.items()}  # fmt: skip
        inputs = Operands(given, self.inputs.dy)
        true, plain = (
            self.called(make(inputs, self.reference)) for make in (exact_results, plain_results)
        )
        baseline = check.errors(plain, true)
        self.kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in plain.items()}
        self.dtype = max({t.dtype for t in plain.values()}, key=check.roundoff)
        return Truth(when, {n: t.detach() for n, t in given.items()}, true, baseline)

    def called(self, results: Results) -> Results:
        """Results by the names that this operation has for its outputs."""
        return {self.names.get(name, name): result for name, result in results.items()}

    @cached_property
    def rewritten(self) -> Truth:
        """For values drawn anew, in the way in which each sample's are."""
        few = all(t.numel() < FEW for t in self.drawn.values.values())  # often drawn as they were
        for self.way in WAYS * (8 if few else 1):
            other = self.anew()
            if all(self.distinguishes(other, name) for name in self.outputs):
                break
        return other

    def anew(self, change: Callable[[Tensor], Tensor] | None = None) -> Truth:
        """For changed values, by default for what nobody has seen, drawn as a sample's are."""
        values = self.changed(change or self.way)
        return replace(
            self.truth("once operands were rewritten in place", values), times=TIMES_REWRITTEN
        )

    def changed(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Changed values of floating-point operands. Whole numbers, which may be addresses, change
        where there are no others, and what shares memory does not.
        """
        own = {n: t for n, t in self.inputs.leaves().items() if alarms.has_own_elements(t)}
        drawn = {n for n, t in own.items() if t.is_floating_point()} or {*own}
        return {n: change(old) if n in drawn else old for n, old in self.drawn.values.items()}

    @property
    def outputs(self) -> list[str]:
        """Names of what a forward pass gives."""
        return [name for name in self.drawn.true if not name.startswith("d_")]

    def distinguishes(self, other: Truth, name: str) -> bool:
        """Whether the right result of the drawn values is wrong for other values."""
        kept = check.errors({name: self.drawn.true[name]}, other.true)
        times = max(self.times, other.times)
        return bool(check.misses(kept, other.baseline, self.dtype, [name], times))

    @cached_property
    def others(self) -> list[Truth]:
        """For what else a function must be right, before it is timed."""
        return [self.rewritten]

    def unforeseen(self) -> Truth:
        """For what it must be right in a timed call, and after the clock."""
        return self.rewritten

    def required(self, inputs: Inputs, direction: str = "forward+backward") -> list[str]:
        """Names of what must be given in a direction: outputs, and gradients of operands that
        are not frozen, but none that the reference lacks.
        """
        if direction == "forward":
            return self.outputs
        wanted = (f"d_{name}" for name, leaf in inputs.leaves().items() if leaf.requires_grad)
        return [*self.outputs, *(name for name in wanted if name in self.drawn.true)]

    def vary(self, work: Workload, seeds: Iterator[int]) -> None:
        """Draw the operands anew before a sample."""
        work.write(self.changed(self.way))

    def admit(
        self, name: str, work: Workload, inputs: Inputs | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Checked:  # fmt: skip
        """Hold all that a function gives against the truth, and admit it to the clock.

        Args:
            inputs: by default the problem's; of others the gradients alone that they ask for.
            facts: figures that are known of it.

        Raises:
            Wrong: it misses the truth, or is too good to be true.
        """
        inputs = inputs or self.inputs
        required, dy = self.required(inputs), inputs.dy
        figures: Figures = dict(facts or {})
        first: Results = {}
        calls = partial(check.results_of, work, dy, handed_out=first)
        figures |= self.hold(name, work, dy, self.drawn, required, calls)
        first = self.called(first)
        alarms.require_own_memory(first, work.leaves, {})
        for truth in self.others:
            again: Results = {}
            names = self.outputs if truth.forward_only else required
            backward = not truth.forward_only
            calls = partial(check.results_of, work, dy, backward=backward, handed_out=again)
            self.hold(name, work, dy, truth, names, calls)
            alarms.require_own_memory(self.called(again), work.leaves, first)
        return Checked(figures, partial(self.turn, name, work, inputs))

    def turn(
        self, name: str, work: Workload, inputs: Inputs, timed: Mapping[str, Any]
    ) -> Turn:  # fmt: skip
        """The turn of a function that was found right; it is held against the truth once more."""
        names = self.required(inputs, timed["direction"])
        work.write(self.drawn.values)  # samples of other turns may have changed some
        put_back = replace(self.drawn, when="once operands were put back")

        def again(results: Callable[[], Results]) -> None:
            for truth in (self.unforeseen(), put_back):  # one alone may be what was kept
                self.hold(name, work, inputs.dy, truth, names, results)

        def look() -> Callable[[Callable[[], Results]], Figures]:
            return self.holds(name, work, inputs.dy, self.unforeseen(), names)

        return workload_turn(
            work, inputs.dy, timed,
            lambda results: self.error_figures(name, self.called(results), names),
            again=again, vary=partial(self.vary, work, count(2)), look=look,
        )  # fmt: skip

    def hold(
        self, name: str, work: Workload, dy: Outputs, truth: Truth, required: list[str],
        results: Callable[[], Results],
    ) -> Figures:  # fmt: skip
        """Errors of what a function gives where its operands have a truth's values, as figures. The
        operands are as they were drawn afterwards.

        Raises:
            Wrong: the rule of `check` rejects one, or an operand was written over.
        """
        return self.holds(name, work, dy, truth, required)(results)

    def holds(
        self, name: str, work: Workload, dy: Outputs, truth: Truth, required: list[str]
    ) -> Callable[[Callable[[], Results]], Figures]:  # fmt: skip
        """Give the operands a truth's values; what this gives is `hold` of results since then."""
        gradients = dy if isinstance(dy, tuple) else (dy,)
        upstream = {
            f"the gradient of {name}": dy for name, dy in zip(self.outputs, gradients, strict=True)
        }
        given = {**work.leaves, **upstream}
        work.write(truth.values)
        unchanged = ExitStack()
        unchanged.enter_context(alarms.unchanged(given))
        # Last: the copies of operands would take the blocks.
        alarms.poison([self.kinds[name] for name in required], gradients[0].device)

        def held(results: Callable[[], Results]) -> Figures:
            try:
                with unchanged:
                    actual = self.called(results())
                try:
                    return self.error_figures(name, actual, required, truth)
                except Wrong as wrong:
                    reason = self._reason(str(wrong), actual, truth, required)
                    raise Wrong(reason, wrong.figures) from None
            finally:
                work.write(self.drawn.values)

        return held

    def _reason(self, misses: str, actual: Results, truth: Truth, required: list[str]) -> str:
        if not truth.when:
            return misses
        own = check.errors(actual, self.drawn.true)
        outputs = set(self.outputs) & set(required)
        kept = not check.misses(own, self.drawn.baseline, self.dtype, outputs, self.times)
        how = ", the results stay those of before, kept and not computed" if kept else ""
        return f"{truth.when}{how}: {misses}"

    def error_figures(
        self, name: str, results: Mapping[str, Tensor], required: list[str],
        truth: Truth | None = None,
    ) -> Figures:  # fmt: skip
        """Errors in norm, as figures, by default where the operands are as they were drawn.

        Raises:
            Wrong: the rule of `check` rejects one.
        """
        truth = truth or self.drawn
        errors = check.errors(results, truth.true)
        return check.require(errors, truth.baseline, self.dtype, required, times=truth.times)
