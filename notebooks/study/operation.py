"""The setup of most races: an operation whose rivals give y, and gradients by autograd."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusedlib.bench import check
from fusedlib.bench.cuda_graphs import Captured
from fusedlib.bench.problem import Inputs, Problem
from fusedlib.bench.turns import Checked, Figures, Turn
from study import liger, rivals
from study.cases import Case
from study.rivals import Bound, Rival, Task, Workload


class Operation(Problem):
    """A problem of registered rivals: those of a `task` take the inputs and give a `Workload`, or a
    `Bound`. The `reference` gives y, or a tuple, of the operands by name; `outputs` are their names
    in rows and reasons, by default y, of several y1, y2 and so on.
    """

    def __init__(
        self, task: str, inputs: Any, reference: Callable[..., Any],
        outputs: str | tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.task = Task[[Any], Workload | Bound](task)
        super().__init__(inputs, reference, outputs)

    def check(self, case: Case) -> Checked:
        """Set a case's rival up and hold all that it gives against the truth."""
        return self.checked(rivals.get(self.task, case["provider"]), self.inputs)

    def checked(self, one: Rival[[Any], Workload | Bound], inputs: Inputs) -> Checked:
        """A rival on these inputs, after y and every gradient that they ask for was right. A bound
        is judged by nobody.
        """
        work = one.build(inputs)
        if isinstance(work, Bound):
            return Checked(one.facts(), partial(bound_turn, work))
        facts = {"path": work.path, **work.figures, **one.facts()}
        if liger.is_liger(one.name):
            seen = liger.path(partial(check.results_of, work, inputs.dy))
            facts["path"] = seen or work.path
        return self.admit(one.name, work, inputs, facts)

    def figures_of(
        self, one: Rival[..., Any], work: Workload, required: list[str] | None = None
    ) -> Figures:  # fmt: skip
        """Errors of one call on the drawn operands; all that they ask for is required."""
        results = self.called(check.results_of(work, self.inputs.dy))
        return self.error_figures(one.name, results, required or self.required(self.inputs))


def bound_turn(bound: Bound, timed: Case) -> Turn:
    """The turn of what bounds a task, from Python or as a CUDA graph."""
    once = partial(bound.run, timed["direction"])
    return Turn(capture_call(once).replay if timed["launch"] == "graph" else once)


def capture_call(call: Callable[[], object]) -> Captured:
    """Capture a callable that writes into tensors of its own, as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return Captured(graph.replay, {})
