"""Rivals on the same problem: checked first, then timed in turns, one row each.

A problem's inputs, its truth in float64 and the check of every rival are made once; all directions
and launches are timed from them. Two ways to launch:

- "python": calls one after another, as a training loop makes them. Short ones are timed in bursts
  of `calls`, back to back; a call of more than a millisecond by itself, with the L2 flushed before
  it, which gives the host the head start that it has in a loop.
- "graph": a replay of a CUDA graph of the same call, the L2 flushed before each: what the device
  needs. Forward and forward+backward only (see `fusedlib.bench.graphs`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import torch

from fusedlib.bench import check, graphs, machine, providers, timing
from fusedlib.bench.plain_products import PlainProducts
from fusedlib.bench.problems import Inputs, SwiGLUProblem, draw
from fusedlib.bench.progress import progress
from fusedlib.bench.providers import Workload
from fusedlib.bench.results import Recorder, Unavailable
from fusedlib.bench.roofline import precision_of
from fusedlib.bench.sweep import outcome

BASELINE = "eager"
PRODUCTS = "products"
LAUNCHES = ("python", "graph")
BURST_MS = 2.0
MOST_CALLS = 20
_Case = dict[str, Any]
_Call = Callable[[], object]
_T = TypeVar("_T")


def compare(
    recorder: Recorder, problems: Iterable[SwiGLUProblem], names: Sequence[str], *,
    device: str, warmup: int, repetitions: int, launches: Sequence[str] = ("python",),
    plain_products: bool = False, baseline: str = BASELINE,
) -> None:  # fmt: skip
    """Measure providers on each problem, interleaved in this process on shared inputs.

    A provider that misses the reference gets a row with status `wrong`, its errors and no time; one
    that cannot run here, or fails, gets a row that says why. Each timed row carries the provider's
    version and settings, and its speed-up over `baseline` with an interval from the pairs. Rows
    with one `session` were timed in turns: their samples are pairs. `plain_products` times the
    problem's matrix products among them, as experiment `products`.

    Raises:
        ValueError: an unknown provider or launch.
    """
    if unknown := [launch for launch in launches if launch not in LAUNCHES]:
        raise ValueError(f"unknown launch {unknown[0]!r}; known: {', '.join(LAUNCHES)}")
    for name in names:
        providers.get(name)
    everyone = [*names, PRODUCTS] if plain_products else list(names)
    shared = {"device": device, "repetitions": repetitions}
    scenes: dict[tuple[Any, ...], list[_Group]] = {}
    for problem in problems:
        for launch in launches:
            if launch == "graph" and problem.direction == "backward":
                continue
            group = _Group.of(problem, launch, everyone, shared)
            scenes.setdefault(_scene_key(problem), []).append(group)
    for groups in scenes.values():
        _tell_unavailable(recorder, groups, device)
    # All of a group run again when one is missing: a time means something beside the others.
    todo = [[g for g in groups if g.asked(recorder)] for groups in scenes.values()]
    with progress(recorder.study, sum(map(bool, todo))) as shown:
        for groups in filter(None, todo):
            problem = groups[0].problem
            shown.case(f"{problem.shape} {problem.dtype}")
            with precision_of(problem.precision):
                _Session(recorder, device, warmup, repetitions, baseline).run(groups)
            if torch.device(device).type == "cuda":
                torch.cuda.empty_cache()
            shown.done()
    print(recorder.summary())


@dataclass(frozen=True)
class _Group:
    """What is timed in turns: one problem, one way to launch, a case a provider."""

    problem: SwiGLUProblem
    launch: str
    cases: dict[str, _Case]
    unavailable: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, problem: SwiGLUProblem, launch: str, names: list[str], shared: _Case) -> "_Group":
        cases = {
            name: {
                "experiment": PRODUCTS if name == PRODUCTS else "swiglu",
                "provider": "torch.mm" if name == PRODUCTS else name,
                **problem.fields(), "launch": launch, **shared,
            }
            for name in names
        }  # fmt: skip
        return cls(problem, launch, cases)

    def asked(self, recorder: Recorder) -> bool:
        """Whether a provider that can run has no row yet."""
        return bool(recorder.missing(c for n, c in self.cases.items() if n not in self.unavailable))


def _scene_key(problem: SwiGLUProblem) -> tuple[Any, ...]:
    return problem.shape, problem.dtype, problem.precision


def _tell_unavailable(recorder: Recorder, groups: list[_Group], device: str) -> None:
    """Rows of what cannot run here, before anything is drawn."""
    for group in groups:
        for name, case in group.cases.items():
            try:
                if group.launch == "graph" and torch.device(device).type != "cuda":
                    raise Unavailable("CUDA graphs need a CUDA GPU")
                if name != PRODUCTS:
                    providers.get(name).check_available(device, group.problem.dtype)
            except Unavailable as error:
                group.unavailable.add(name)
                recorder.append(case, status="unavailable", reason=str(error))


@dataclass(frozen=True)
class _Scene:
    """One problem, drawn, with the truth and the errors that plain PyTorch makes on it."""

    inputs: Inputs
    true: dict[str, torch.Tensor]
    usual: dict[str, check.Errors]
    dtype: torch.dtype

    @classmethod
    def of(cls, problem: SwiGLUProblem, device: str) -> "_Scene":
        inputs = draw(problem, device)
        true = check.truth(inputs)
        eager = providers.get(BASELINE).set_up(inputs)
        usual = check.errors(check.results_of(eager, inputs.dy), true)
        return cls(inputs, true, usual, problem.torch_dtype)

    def verdict(self, found: dict[str, torch.Tensor]) -> _Case:
        """Errors as figures; status and reason where they are too large."""
        errors = check.errors(found, self.true)
        figures: _Case = {f"{name}_error": e.norm for name, e in errors.items()}
        if wrong := check.misses(errors, self.usual, self.dtype):
            figures |= {"status": "wrong", "reason": "; ".join(wrong)}
        return figures


@dataclass
class _Ready:
    """A provider that is right: its figures so far, and its workload (none for plain products)."""

    figures: _Case
    work: Workload | None


@dataclass
class _Session:
    """Measures all groups of one scene."""

    recorder: Recorder
    device: str
    warmup: int
    repetitions: int
    baseline: str

    def run(self, groups: list[_Group]) -> None:
        """Draw, check once, then time group by group; every case gets its row."""
        torch.compiler.reset()  # its cache is bounded: eight shapes of one function at most
        problem = groups[0].problem
        scene, status, reason = _attempt(partial(_Scene.of, problem, self.device))
        if scene is None:
            for group in groups:
                self._tell(group, list(group.cases), status, reason)
            return
        for trained in (True, False):
            chosen = [g for g in groups if g.problem.weight_gradients is trained]
            if chosen:
                self._variant(scene, chosen, trained)

    def _tell(self, group: _Group, names: list[str], status: str, reason: str | None) -> None:
        for name in names:
            if name not in group.unavailable:
                self.recorder.append(group.cases[name], status=status, reason=reason)

    def _variant(self, scene: _Scene, groups: list[_Group], trained: bool) -> None:
        """All groups whose weights are trained, or all whose weights are frozen."""
        inputs = scene.inputs if trained else scene.inputs.frozen()
        names = {n: c for g in groups for n, c in g.cases.items() if n not in g.unavailable}
        ready: dict[str, _Ready] = {}
        for name, case in names.items():
            made: list[_Ready] = []
            figures, status, reason = outcome(partial(self._checked, scene, inputs, made), case)
            if status == "ok":
                ready[name] = made[0]
                continue
            for group in groups:
                if name in group.cases and name not in group.unavailable:
                    self.recorder.append(group.cases[name], figures, status=status, reason=reason)
        products = PlainProducts.of(inputs) if PRODUCTS in ready else None
        for group in groups:
            self._group(scene, group, _Timed(inputs, ready, products, group.problem, self.device))

    def _checked(self, scene: _Scene, inputs: Inputs, made: list[_Ready], case: _Case) -> _Case:
        """Set a provider up and hold it against the truth; it lands in `made` when it is right."""
        if case["experiment"] == PRODUCTS:
            made.append(_Ready({"version": f"torch {machine.version_of('torch')}"}, None))
            return {}
        rival = providers.get(case["provider"])
        begin = time.perf_counter()
        work = rival.set_up(inputs)
        found = check.results_of(work, inputs.dy)
        timing.synchronize(self.device)
        figures: _Case = {"version": rival.version(), "settings": rival.settings or None}
        figures["first_call_s"] = time.perf_counter() - begin
        figures |= scene.verdict(found)
        made.append(_Ready(figures, work))
        return figures

    def _group(self, scene: _Scene, group: _Group, timed: "_Timed") -> None:
        names = [n for n in group.cases if n in timed.ready and n not in group.unavailable]
        calls: dict[str, _Call] = {}
        for name in names:
            make = timed.captured if group.launch == "graph" else timed.called
            landed: list[_Call] = []
            case = group.cases[name]
            figures, status, reason = outcome(partial(make, name, scene, landed), case)
            if status == "ok":
                calls[name] = landed[0]
            else:
                self.recorder.append(case, figures, status=status, reason=reason)
        if not calls:
            return
        before = machine.conditions()
        times, status, reason = _attempt(partial(self._clock, group, timed, calls))
        state = machine.before_and_after(before, machine.conditions())
        if times is None:
            self._tell(group, list(calls), status, reason)
            return
        session = {"session": datetime.now(UTC).isoformat(), "calls": timed.calls}
        work = {"flops": group.problem.flops, "compulsory_bytes": group.problem.compulsory_bytes}
        for name in calls:
            figures = {**timed.ready[name].figures, **times[name].figures(), **work, **session}
            figures |= {**_speedup(times, name, self.baseline), **state}
            self.recorder.append(group.cases[name], figures)

    def _clock(
        self, group: _Group, timed: "_Timed", calls: dict[str, _Call]
    ) -> dict[str, timing.Timing]:
        if group.launch == "python":
            timed.choose_calls(calls)
        found = timing.interleaved(
            {name: partial(timed.burst, name, call) for name, call in calls.items()},
            device=self.device, warmup=self.warmup, repetitions=self.repetitions,
            flush_l2=timed.calls == 1, prepare=partial(timed.prepare, group.launch),
        )  # fmt: skip
        return {
            name: timing.Timing(tuple(s / timed.calls for s in t.samples_ms), t.warmup, t.flush_l2)
            for name, t in found.items()
        }


@dataclass
class _Timed:
    """The callables of one group, and what has to happen outside the clock."""

    inputs: Inputs
    ready: dict[str, _Ready]
    products: PlainProducts | None
    problem: SwiGLUProblem
    device: str
    calls: int = 1
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def called(self, name: str, scene: _Scene, landed: list[_Call], case: _Case) -> _Case:
        """The call as Python makes it."""
        landed.append(self._call(name))
        return {}

    def _call(self, name: str) -> _Call:
        work = self.ready[name].work
        if work is None:
            assert self.products is not None
            problem = self.problem
            return partial(self.products.run, problem.direction, problem.weight_gradients)
        dy = self.inputs.dy
        if self.problem.direction == "forward":
            return work.forward
        if self.problem.direction == "backward":
            return lambda: self.outputs[name].pop().backward(dy)
        return lambda: work.forward().backward(dy)

    def captured(self, name: str, scene: _Scene, landed: list[_Call], case: _Case) -> _Case:
        """The call as a graph, whose replay is held against the truth again."""
        work = self.ready[name].work
        if work is None:
            landed.append(graphs.capture_call(self._call(name)).replay)
            return {}
        graph = graphs.capture(work, self.inputs.dy, self.problem.direction)
        landed.append(graph.replay)
        return scene.verdict(graph.results)

    def choose_calls(self, calls: dict[str, _Call]) -> None:
        """As many calls a sample as make a burst of `BURST_MS` for the fastest."""
        fastest = BURST_MS
        rivals = {n: c for n, c in calls.items() if n != PRODUCTS} or calls
        for name, call in rivals.items():
            for _ in range(2):
                self.prepare("python", name)
                timing.synchronize(self.device)
                begin = time.perf_counter()
                call()
                timing.synchronize(self.device)
            fastest = min(fastest, (time.perf_counter() - begin) * 1e3)
        self.outputs.clear()
        self.calls = min(MOST_CALLS, max(1, round(BURST_MS / fastest)))

    def prepare(self, launch: str, name: str) -> None:
        """Drop everybody's gradients; for a backward alone, run its forwards."""
        for rival in self.ready.values():
            if rival.work is not None:
                rival.work.reset()
        work = self.ready[name].work
        if self.problem.direction == "backward" and launch == "python" and work is not None:
            self.outputs[name] = [work.forward() for _ in range(self.calls)]

    def burst(self, name: str, call: _Call) -> None:
        """`calls` calls back to back, each with its gradients to itself."""
        call()
        work = self.ready[name].work
        for _ in range(self.calls - 1):
            if work is not None:
                work.reset()
            call()


def _attempt(make: Callable[[], _T]) -> tuple[_T | None, str, str | None]:
    """What `make` gives, or None with the status and reason of its failure."""
    made: list[_T] = []

    def call(_: object) -> _Case:
        made.append(make())
        return {}

    _, status, reason = outcome(call, {})
    return (made[0] if made else None), status, reason


def _speedup(times: dict[str, timing.Timing], name: str, baseline: str) -> _Case:
    if baseline not in times:
        return {}
    ratio = times[baseline].ratio_to(times[name])
    return {
        "baseline": baseline, "speedup": ratio.value,
        "speedup_low": ratio.low, "speedup_high": ratio.high,
    }  # fmt: skip
