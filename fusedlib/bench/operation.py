"""The setup of most races: an operation whose rivals give y, and gradients by autograd.

def setup(case):
    return Operation("swiglu", draw(case), reference.swiglu_mlp)

RACE = Race(setup=setup, fields=("tokens", "hidden_size", "dtype", "device"))
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from fusedlib.bench import alarms, check, rivals
from fusedlib.bench.cases import Case
from fusedlib.bench.race import Checked, Figures, Turn, workload_turn
from fusedlib.bench.rivals import Rival, Workload


class Inputs(Protocol):
    """Operands by name, of which some require gradients, and the gradient of y."""

    @property
    def dy(self) -> Tensor:
        """Of y's shape."""

    def leaves(self) -> Mapping[str, Tensor]:
        """As the reference names them."""


def exact_results(inputs: Inputs, reference: Callable[..., Tensor]) -> dict[str, Tensor]:
    """y and all gradients by name, in float64 on the inputs' own device."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in inputs.leaves().items()}
    work = Workload(lambda: reference(**leaves), leaves)
    return check.results_of(work, inputs.dy.double())


def plain_results(inputs: Inputs, reference: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The same in the inputs' own dtype."""
    leaves = inputs.leaves()
    return check.results_of(Workload(lambda: reference(**leaves), leaves), inputs.dy)


def required_results(inputs: Inputs) -> list[str]:
    """Names of what a rival must give: y, and the gradient of every operand that is not frozen."""
    return ["y", *(f"d_{n}" for n, leaf in inputs.leaves().items() if leaf.requires_grad)]


class Operation:
    """One problem with what is true, by the reference in float64; and how far the reference is off
    in the inputs' own dtype, the measure of everybody's errors.

    Args:
        task: whose rivals take the inputs and give a `Workload`.
        reference: y of the operands by name, in plain PyTorch.
    """

    def __init__(self, task: str, inputs: Any, reference: Callable[..., Tensor]) -> None:
        self.task, self.inputs = task, inputs
        self.true = exact_results(inputs, reference)
        self.baseline = check.errors(plain_results(inputs, reference), self.true)

    def check(self, case: Case) -> Checked:
        """Set a case's rival up and hold all that it gives against the truth."""
        return self.checked(rivals.get(self.task, case["provider"]), self.inputs)

    def checked(self, one: Rival, inputs: Inputs) -> Checked:
        """A rival on these inputs, after y and every gradient that they ask for was found right."""
        work, required = one.build(inputs), required_results(inputs)
        figures = {"path": work.path, **one.facts()}
        figures |= self.error_figures(one, check.results_of(work, inputs.dy), required)
        alarms.require_computed(work, inputs.leaves())

        def turn(timed: Case) -> Turn:
            names = ["y"] if timed["direction"] == "forward" else required
            check_replay = partial(self.error_figures, one, required=names)
            return workload_turn(work, inputs.dy, timed, check_replay)

        return Checked(figures, turn)

    def error_figures(
        self, one: Rival, results: Mapping[str, Tensor], required: list[str]
    ) -> Figures:
        """Errors in norm, as figures.

        Raises:
            Wrong: the rule of `check` rejects one.
        """
        errors = check.errors(results, self.true)
        return check.require(errors, self.baseline, self.inputs.dy.dtype, required)
