"""Measures study 07: all ways of a shape are checked, their memory counted, then timed in turns."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import check, compare, machine, timing
from fusedlib.bench.attention import footprint, held, truth, ways
from fusedlib.bench.attention.cases import Case, label, problem_of
from fusedlib.bench.attention.problem import AttentionProblem, Operands, draw
from fusedlib.bench.progress import progress
from fusedlib.bench.providers import Workload
from fusedlib.bench.results import Recorder, Unavailable
from fusedlib.bench.roofline import precision_of
from fusedlib.bench.sweep import outcome

BASELINE = "plain"
WARMUP = 1  # round: the check and the count of memory have run everything before
# A round that takes longer is not short of samples: fewer rounds, the same for all in it.
SLOW_MS, SLOW_ROUNDS = 100.0, 5
PROBE = 128
DIRECTIONS = ("forward", "backward", "both")
PRECISION = "highest"
# Counted at more than this share of the memory there is, a case is not tried. A card refuses and
# goes on, so that an attempt costs little; a host's system ends the process instead.
HOPELESS = {"cuda": 4.0, "mps": 0.7, "cpu": 0.5}


def sweep(recorder: Recorder, cases: Iterable[Case]) -> None:
    """Measure the cases, each shape's together, and record each; no case ends the sweep.

    All of a shape run again when one is missing: a time means something beside the others. Rows
    with one `session` were timed in turns.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        group = groups.setdefault((case["grid"], problem_of(case), case["device"]), [])
        if case not in group:
            group.append(case)
    able = [[case for case in group if _able(recorder, case)] for group in groups.values()]
    todo = [group for group in able if recorder.missing(group)]
    with progress(recorder.study, len(todo)) as shown, precision_of(PRECISION):
        for group in todo:
            shown.case(label(group[0]))
            _Session(recorder, group, problem_of(group[0]), group[0]["device"]).run()
            shown.done()
    print(recorder.summary())


def _able(recorder: Recorder, case: Case) -> bool:
    """Whether this way can run here; one that cannot gets its row now."""
    probe = partial(_refusal, case["provider"], case["head_dim"], case["dtype"], case["device"])
    if reason := probe():
        recorder.append(case, status="unavailable", reason=reason)
    return not reason


@cache
def _refusal(name: str, head_dim: int, dtype: str, device: str) -> str | None:
    """Why a way does not take this width and dtype on this device, asked at a small context."""
    if device not in ("cpu", machine.device_type()):
        return f"this machine has no {device.upper()} device"
    try:
        ways.get(name).build(draw(AttentionProblem(PROBE, head_dim, 1, dtype), device))
    except Unavailable as error:
        return str(error)
    except Exception:
        return None  # its own case tells what is wrong
    return None


def hopeless(way: str, problem: AttentionProblem, device: str) -> str | None:
    """Why a way that holds T × T tensors is not tried here; None where it is.

    Only what is counted far above the memory is given up: see `HOPELESS`.
    """
    facts = machine.describe()
    total = facts.device_memory_gib if device == "cuda" else facts.memory_gib
    if ways.get(way).fused or total is None:
        return None
    need = (held.plain_peak(problem, device) + held.operands(problem)) / 2**30
    if need <= HOPELESS[device] * total:
        return None
    return (
        f"not tried: {need:,.0f} GiB counted, more than {HOPELESS[device]:g} times the "
        f"{total:,.0f} GiB there are"
    )


@dataclass
class _Session:
    """One shape: its operands and truth, made once, and everybody who is right."""

    recorder: Recorder
    group: list[Case]
    problem: AttentionProblem
    device: str
    ready: dict[str, Workload] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Every case gets its row."""
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # its cache is bounded: eight shapes of one function at most
        scene: list[tuple[Operands, truth.Truth, dict[str, check.Errors]]] = []
        _, status, reason = outcome(partial(self._draw, scene), {})
        if not scene:
            for case in self.group:
                self.recorder.append(case, status=status, reason=f"the check: {reason}")
            return
        for case in self.group:
            self._check(case, *scene[0])
        operands = scene.pop()[0]  # the truth is not needed any more, its memory is
        for case, figures, status, reason in self._all_timed(operands.dout):
            self.recorder.append(case, figures, status=status, reason=reason)
        self.ready.clear()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def _all_timed(self, dout: Tensor) -> Iterator[tuple[Case, dict[str, Any], str, str | None]]:
        """Rows of everybody who is right. When the memory does not suffice, whoever holds most
        goes, after another failure whose turn it was; the others are timed again.
        """
        waiting = {case["provider"]: case for case in self.group if case["provider"] in self.ready}
        while waiting:
            times, status, reason, last = self._timed(dout)
            gone = list(waiting)
            if status == "oom":
                gone = [max(waiting, key=lambda name: self.figures[name]["peak_mib"] or 0.0)]
            elif status != "ok" and last in waiting:
                gone = [last]
            for name in gone:
                del self.ready[name]
                yield waiting.pop(name), self.figures[name] | times.get(name, {}), status, reason

    def _draw(self, landed: list[Any], _: object) -> dict[str, Any]:
        operands = draw(self.problem, self.device)
        true = truth.truth(operands)
        whole = hopeless(BASELINE, self.problem, self.device) is None
        landed.append((operands, true, truth.usual_errors(operands, true, whole=whole)))
        return {}

    def _check(
        self, case: Case, operands: Operands, true: truth.Truth,
        usual: dict[str, check.Errors],
    ) -> None:  # fmt: skip
        """Hold a way against the truth and count its memory; a row now where it goes no further."""
        name = case["provider"]
        made = partial(self._set_up, name, operands, true, usual)
        figures, status, reason = outcome(lambda _: made(), case)
        if status == "ok":
            self.figures[name] = figures
        else:
            self.ready.pop(name, None)
            self.recorder.append(case, figures, status=status, reason=reason)

    def _set_up(
        self, name: str, operands: Operands, true: truth.Truth,
        usual: dict[str, check.Errors],
    ) -> dict[str, Any]:  # fmt: skip
        if reason := hopeless(name, self.problem, self.device):
            return {"status": "oom (predicted)", "reason": reason}
        one = ways.get(name)
        figures: dict[str, Any] = {
            "version": f"torch {machine.version_of('torch')}", "settings": one.settings
        }  # fmt: skip
        begin = time.perf_counter()
        work = one.build(operands)
        found = check.results_of(work, operands.dout)
        timing.synchronize(self.device)
        figures["first_call_s"] = time.perf_counter() - begin
        errors = truth.errors(found, true)
        figures |= truth.verdict(errors, usual, self.problem.torch_dtype)
        if figures.get("status") != "wrong":
            figures |= footprint.measure(work, operands.dout)
            self.ready[name] = work
        return figures

    def _timed(
        self, dout: Tensor
    ) -> tuple[dict[str, dict[str, Any]], str, str | None, str | None]:  # fmt: skip
        """Figures of the times by way, or status and reason why there are none; who came last."""
        found: dict[str, dict[str, Any]] = {}
        clock = _Clock(self.ready, dout, self.group[0]["repetitions"])
        before = machine.conditions()
        _, status, reason = outcome(lambda _: found.update(clock.run()) or {}, {})
        state = machine.before_and_after(before, machine.conditions())
        session = datetime.now(UTC).isoformat()
        times = {n: {**f, **state, "session": session} for n, f in found.items()}
        return times, status, reason, clock.last


@dataclass
class _Clock:
    """Times every way of one shape in turns, direction by direction.

    As `fusedlib.bench.compare` does from Python: short calls in bursts, back to back, a call of
    more than a millisecond by itself with the L2 flushed before it.
    """

    ready: dict[str, Workload]
    dout: Tensor
    repetitions: int
    outputs: list[Tensor] = field(default_factory=list)
    last: str | None = None

    def run(self) -> dict[str, dict[str, Any]]:
        """By way: figures of each direction, with `calls`, and the speed-up over plain."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self.ready}
        for direction in DIRECTIONS:
            calls, round_ms = self._calls(direction)
            rounds = self.repetitions if round_ms <= SLOW_MS else min(self.repetitions, SLOW_ROUNDS)
            times = timing.interleaved(
                {name: partial(self._burst, direction, name, calls) for name in self.ready},
                device=self.dout.device, warmup=WARMUP, repetitions=rounds,
                flush_l2=calls == 1, prepare=partial(self._prepare, direction, calls),
            )  # fmt: skip
            prefix = "" if direction == "both" else f"{direction}_"
            for name, taken in times.items():
                each = timing.Timing(
                    tuple(ms / calls for ms in taken.samples_ms), taken.warmup, taken.flush_l2
                )
                figures = {**each.figures(), "calls": calls, **self._speedup(times, name)}
                found[name] |= {prefix + key: value for key, value in figures.items()}
        return found

    def _speedup(self, times: dict[str, timing.Timing], name: str) -> dict[str, float]:
        if BASELINE not in times:
            return {}
        ratio = times[BASELINE].ratio_to(times[name])
        return {"speedup": ratio.value, "speedup_low": ratio.low, "speedup_high": ratio.high}

    def _calls(self, direction: str) -> tuple[int, float]:
        """As many calls a sample as make a burst of `compare.BURST_MS` for the fastest, and the ms
        of a round of them. One on the host, whose clock waits for each call anyway.
        """
        if not self.dout.is_cuda:
            return 1, 0.0
        fastest, whole = compare.BURST_MS, 0.0
        for name in self.ready:
            for _ in range(2):
                self._prepare(direction, 1, name)
                timing.synchronize(self.dout.device)
                begin = time.perf_counter()
                self._once(direction, name)
                timing.synchronize(self.dout.device)
                taken = (time.perf_counter() - begin) * 1e3
                if taken > 10 * compare.BURST_MS:
                    break
            fastest, whole = min(fastest, taken), whole + taken
        calls = min(compare.MOST_CALLS, max(1, round(compare.BURST_MS / fastest)))
        return calls, calls * whole

    def _prepare(self, direction: str, calls: int, name: str) -> None:
        """Drop everybody's gradients; for a backward alone, run its forwards."""
        self.last = name
        for work in self.ready.values():
            work.reset()
        self.outputs.clear()
        if direction == "backward":
            self.outputs = [self.ready[name].forward() for _ in range(calls)]

    def _burst(self, direction: str, name: str, calls: int) -> None:
        for _ in range(calls):
            self._once(direction, name)

    def _once(self, direction: str, name: str) -> None:
        """One call, with its gradients to itself."""
        work = self.ready[name]
        work.reset()
        y = self.outputs.pop() if direction == "backward" else work.forward()
        if direction != "forward":
            y.backward(self.dout)
