"""Rivals on the same problem: checked first, then timed in turns, one row each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusedlib.bench import check, machine, providers, timing
from fusedlib.bench.problems import Inputs, SwiGLUProblem, draw
from fusedlib.bench.progress import progress
from fusedlib.bench.providers import Workload
from fusedlib.bench.results import Recorder
from fusedlib.bench.sweep import outcome

BASELINE = "eager"
_Ready = tuple[dict[str, Any], dict[str, Any], Workload]


def compare(
    recorder: Recorder, problems: Iterable[SwiGLUProblem], names: Sequence[str], *,
    device: str, warmup: int, repetitions: int, flush_l2: bool = True, baseline: str = BASELINE,
) -> None:  # fmt: skip
    """Measure providers on each problem, interleaved in this process on shared inputs.

    A provider that misses the reference gets a row with status `wrong`, its errors and no time; one
    that cannot run here, or fails, gets a row that says why. Each timed row carries the provider's
    version and its speed-up over `baseline` with an interval from the pairs.

    Raises:
        ValueError: an unknown provider.
    """
    rivals = {name: providers.get(name) for name in names}
    settings = {"device": device, "flush_l2": flush_l2, "repetitions": repetitions}
    cases = {
        problem: [{"provider": n, **problem.fields(), **settings} for n in rivals]
        for problem in problems
    }
    todo = {problem: recorder.missing(group) for problem, group in cases.items()}
    with progress(recorder.study, sum(map(bool, todo.values()))) as shown:
        for problem, group in todo.items():
            if not group:
                continue
            shown.case(f"{problem.tokens}·{problem.hidden_size}·{problem.intermediate_size}")
            # All of them run again when one is missing: a time means something beside the others.
            _compare_one(recorder, problem, cases[problem], device, warmup, baseline)
            shown.done()
    print(recorder.summary())


@dataclass(frozen=True)
class _Scene:
    """One problem, drawn, with the truth and the errors that plain PyTorch makes on it."""

    problem: SwiGLUProblem
    inputs: Inputs
    true: dict[str, torch.Tensor]
    usual: dict[str, check.Errors]

    @classmethod
    def of(cls, problem: SwiGLUProblem, device: str) -> "_Scene":
        inputs = draw(problem, device)
        true = check.truth(inputs)
        eager = providers.get(BASELINE).set_up(inputs)
        return cls(problem, inputs, true, check.errors(check.results_of(eager, inputs.dy), true))


def _compare_one(
    recorder: Recorder, problem: SwiGLUProblem, cases: list[dict[str, Any]], device: str,
    warmup: int, baseline: str,
) -> None:  # fmt: skip
    scenes: list[_Scene] = []

    def drawn(_: object) -> dict[str, Any]:
        scenes.append(_Scene.of(problem, device))
        return {}

    _, status, reason = outcome(drawn, {})
    if not scenes:
        for case in cases:
            recorder.append(case, status=status, reason=reason)
        return
    ready: dict[str, _Ready] = {}
    for case in cases:
        works: list[Workload] = []
        figures, status, reason = outcome(partial(_checked, scenes[0], works), case)
        if status == "ok":
            ready[case["provider"]] = (case, figures, works[0])
        else:
            recorder.append(case, figures, status=status, reason=reason)
    timed: list[dict[str, timing.Timing]] = []

    def clocked(_: object) -> dict[str, Any]:
        timed.append(_time(problem, ready, scenes[0].inputs, device, warmup))
        return {}

    before = machine.conditions()
    _, status, reason = outcome(clocked, {})
    state = machine.before_and_after(before, machine.conditions())
    for name, (case, figures, _) in ready.items():
        if not timed:
            recorder.append(case, {**figures, **state}, status=status, reason=reason)
            continue
        # Settings are the case's own fields already.
        own = {k: v for k, v in timed[0][name].figures().items() if k not in case}
        figures = {**figures, **own, **_speedup(timed[0], name, baseline), **state}
        recorder.append(case, figures)


def _checked(scene: _Scene, works: list[Workload], case: Any) -> dict[str, Any]:
    """Set a provider up and hold it against the truth; it lands in `works` when it is right."""
    rival = providers.get(case["provider"])
    work = rival.set_up(scene.inputs)
    found = check.errors(check.results_of(work, scene.inputs.dy), scene.true)
    figures: dict[str, Any] = {"version": rival.version()}
    figures |= {f"{name}_error": e.norm for name, e in found.items()}
    if wrong := check.misses(found, scene.usual, scene.problem.torch_dtype):
        return figures | {"status": "wrong", "reason": "; ".join(wrong)}
    works.append(work)
    return figures


def _time(
    problem: SwiGLUProblem, ready: dict[str, _Ready], inputs: Inputs, device: str, warmup: int
) -> dict[str, timing.Timing]:
    """Time all that are right, in turns."""
    if not ready:
        return {}
    settings = next(iter(ready.values()))[0]
    outputs: dict[str, torch.Tensor] = {}

    def prepare(name: str) -> None:
        work = ready[name][2]
        work.reset()
        if problem.direction == "backward":
            outputs[name] = work.forward()

    def timed(name: str) -> Callable[[], object]:
        work = ready[name][2]
        if problem.direction == "forward":
            return work.forward
        if problem.direction == "backward":
            return lambda: outputs.pop(name).backward(inputs.dy)
        return lambda: work.forward().backward(inputs.dy)

    return timing.interleaved(
        {name: timed(name) for name in ready}, device=device, warmup=warmup, prepare=prepare,
        repetitions=settings["repetitions"], flush_l2=settings["flush_l2"],
    )  # fmt: skip


def _speedup(times: dict[str, timing.Timing], name: str, baseline: str) -> dict[str, Any]:
    if baseline not in times:
        return {}
    ratio = times[baseline].ratio_to(times[name])
    return {
        "baseline": baseline, "speedup": ratio.value,
        "speedup_low": ratio.low, "speedup_high": ratio.high,
    }  # fmt: skip
