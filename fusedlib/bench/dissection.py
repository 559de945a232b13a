"""Measures study 05's cases: errors first, then times beside Liger's, in turns.

The published kernel is wrong and may not be imported from here: whoever measures hands over the
function that builds it. Its rows have the status `wrong`, and their times go by names of their own,
`published_protocol_...`: they say what its authors' protocol shows, and compare nothing.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import check, graphs, providers, results, roofline, timing
from fusedlib.bench.anatomy import IMPLEMENTATIONS, Variant
from fusedlib.bench.problems import Inputs, SwiGLUProblem, draw
from fusedlib.bench.providers import Workload

BASELINE = "liger"
BURST_MS = 10.0  # calls run back to back, as published, in bursts of about this length
MOST_CALLS = 20
WARMUP = 2
MIB = 2**20
_Case = Mapping[str, Any]
_Figures = dict[str, Any]
Build = Callable[[Inputs, Variant], Workload]


@dataclass(frozen=True)
class _Scene:
    """One problem drawn, with the truth and plain PyTorch's errors; IEEE and TF32 where fp32."""

    inputs: Inputs
    true: dict[str, Tensor]
    usual: dict[str, check.Errors]
    usual_tf32: dict[str, check.Errors]

    def errors(self, work: Workload, forward_only: bool) -> tuple[dict[str, check.Errors], list]:
        """Errors by name, and the operands that no gradient reached."""
        work.reset()
        if forward_only:
            with torch.no_grad():
                return check.errors({"y": work.forward()}, self.true), []
        y = work.forward()
        y.backward(self.inputs.dy)
        found = {"y": y.detach()}
        missing = []
        for name, leaf in work.leaves.items():
            if leaf.grad is None:
                missing.append(name)
            else:
                found[f"d_{name}"] = leaf.grad.detach()
        errors = check.errors(found, self.true)
        work.reset()
        return errors, missing

    def verdict(self, work: Workload, *, forward_only: bool, products: str) -> _Figures:
        """Errors as figures, the gradients that did not arrive; status and reason where wrong.

        "tf32" is held to what torch's own TF32 does, with the floor of its 11 bits: fp16's. "cut"
        may err by twice that: Triton's products cut the bits of an fp32 off where cuBLAS rounds.
        """
        errors, missing = self.errors(work, forward_only)
        usual = self.usual if products == "ieee" else self.usual_tf32
        if products == "cut":
            usual = {n: check.Errors(2 * e.norm, 2 * e.worst) for n, e in usual.items()}
        dtype = self.inputs.x.dtype if products == "ieee" else torch.float16
        wrong = [f"no gradient arrived at {name}" for name in missing]
        wrong += check.misses(errors, usual, dtype)
        figures: _Figures = {f"{name}_error": e.norm for name, e in errors.items()}
        figures |= {"missing_gradients": missing}
        return figures | ({"status": "wrong", "reason": "; ".join(wrong)} if wrong else {})


class Measure:
    """Measures a case. `build` makes the published kernel and its repairs."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._scene: tuple[Any, _Scene | None] = (None, None)

    def __call__(self, case: _Case) -> _Figures:
        """The row's figures."""
        measures = {"step": self._step, "correctness": self._correctness, "memory": self._memory}
        with roofline.precision_of(case["precision"]):
            return measures[case["experiment"]](case)

    def _scene_of(self, problem: SwiGLUProblem, device: str, kind: str = "random") -> _Scene:
        """Drawn once for neighbouring cases of one problem."""
        key = (problem.shape, problem.dtype, device, kind)
        if self._scene[0] != key:
            self._scene = (None, None)  # gives its memory back before the next one takes it
            self._scene = (key, _draw_scene(problem, device, kind))
        scene = self._scene[1]
        assert scene is not None
        return scene

    def _work(self, who: Variant | str, inputs: Inputs) -> Workload:
        if isinstance(who, str):
            return providers.get(who).set_up(inputs)
        return self._build(inputs, who)

    def _correctness(self, case: _Case) -> _Figures:
        who = IMPLEMENTATIONS[case["implementation"]]
        if isinstance(who, Variant):
            who = replace(who, block=case["block"])
            if case["device"] != "cuda" and not who.emulated:
                raise results.Unavailable("Triton kernels need a CUDA GPU; see the emulated row")
        scene = self._scene_of(_problem(case), case["device"], case["inputs"])
        # The published kernel's products are TF32 on a GPU, and exact where they are emulated.
        cut = isinstance(who, Variant) and not who.emulated and who.dot_precision == "tf32"
        work = self._work(who, scene.inputs)
        return scene.verdict(work, forward_only=False, products="cut" if cut else "ieee")

    def _memory(self, case: _Case) -> _Figures:
        if case["device"] != "cuda":
            raise results.Unavailable("peaks are read from CUDA's allocator: no CUDA GPU here")
        who = IMPLEMENTATIONS[case["implementation"]]
        self._scene = (None, None)
        inputs = draw(_problem(case), case["device"])
        figures = _peak(self._work(who, inputs), inputs)
        wrong = isinstance(who, Variant) and not who.whole_sum
        return figures | ({"status": "wrong", "reason": _ONE_BLOCK} if wrong else {})

    def _step(self, case: _Case) -> _Figures:
        if case["device"] != "cuda":
            raise results.Unavailable(
                "times of Triton kernels and of Liger need a CUDA GPU; Triton's interpreter shows "
                "errors only"
            )
        problem, forward_only = _problem(case), case["direction"] == "forward"
        scene = self._scene_of(problem, case["device"])
        ours = self._work(_rival(case), scene.inputs)
        theirs = self._work(BASELINE, scene.inputs)
        torchs = "tf32" if case["precision"] == "high" else "ieee"
        own = "cut" if case["dot_precision"] == "tf32" else torchs
        figures = scene.verdict(ours, forward_only=forward_only, products=own)
        against = scene.verdict(theirs, forward_only=forward_only, products=torchs)
        if "status" in against:
            raise RuntimeError(f"Liger itself misses the reference: {against['reason']}")
        figures |= {
            "compulsory_bytes": problem.compulsory_bytes, "flops": problem.flops,
            "liger_y_error": against["y_error"],
            "liger_version": providers.get(BASELINE).version(),
        }  # fmt: skip
        with torch.no_grad() if forward_only else nullcontext():
            times, calls = _timed({"rival": ours, BASELINE: theirs}, scene.inputs.dy, case)
        return figures | {"calls": calls} | _times(times, wrong="status" in figures)


_ONE_BLOCK = "one block of K where the sum runs over all; no gradient arrived at w_gate_up"


def _problem(case: _Case) -> SwiGLUProblem:
    return SwiGLUProblem(
        case["tokens"], case["hidden_size"], case["intermediate_size"], case["dtype"],
        case["direction"], precision=case["precision"] or "highest",
    )  # fmt: skip


def _rival(case: _Case) -> Variant | str:
    if case["rival"] == "fused":
        return "fused"
    return Variant(**{name: case[name] for name in asdict(Variant())})


def _draw_scene(problem: SwiGLUProblem, device: str, kind: str) -> _Scene:
    inputs = draw(problem, device)
    if kind == "ones":  # the published test's: x, up and dz all ones, gate all twos
        fill = {"x": 1.0, "w_gate": 2.0, "w_up": 1.0, "w_down": 1.0}
        leaves = {
            n: torch.full_like(t, fill[n]).requires_grad_() for n, t in inputs.leaves().items()
        }
        inputs = Inputs(**leaves, dy=torch.ones_like(inputs.dy))
    true = check.truth(inputs)
    usual = {}
    for setting in ("highest", "high"):
        with roofline.precision_of(setting):
            eager = providers.get("eager").set_up(inputs)
            usual[setting] = check.errors(check.results_of(eager, inputs.dy), true)
    return _Scene(inputs, true, usual["highest"], usual["high"])


def _call(work: Workload, dy: Tensor, case: _Case) -> Callable[[], object]:
    """One call as the case launches it; gradients are dropped in it, as published."""
    if case["launch"] == "graph":
        return graphs.capture(work, dy, case["direction"]).replay
    if case["direction"] == "forward":
        return work.forward

    def step() -> None:
        work.reset()
        work.forward().backward(dy)

    return step


def _timed(
    works: Mapping[str, Workload], dy: Tensor, case: _Case
) -> tuple[dict[str, timing.Timing], int]:
    """ms a call for each, in turns, in bursts of so many calls back to back."""
    calls = {name: _call(work, dy, case) for name, work in works.items()}
    count = min(max(int(BURST_MS / max(_roughly(c) for c in calls.values())), 1), MOST_CALLS)

    def burst(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                call()

        return run

    times = timing.interleaved(
        {name: burst(call) for name, call in calls.items()}, device=case["device"],
        warmup=WARMUP, repetitions=case["repetitions"], flush_l2=False,
        # A host that ran ahead during the other side's burst would launch this one for nothing.
        prepare=lambda _: timing.synchronize(case["device"]),
    )  # fmt: skip
    for work in works.values():
        work.reset()
    shares = {n: tuple(s / count for s in t.samples_ms) for n, t in times.items()}
    return {n: timing.Timing(s, WARMUP, False) for n, s in shares.items()}, count


def _roughly(call: Callable[[], object]) -> float:
    """ms of a call, to choose how many make a burst."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return max((time.perf_counter() - begin) * 1e3, 1e-3)


def _times(times: Mapping[str, timing.Timing], *, wrong: bool) -> _Figures:
    """Times and Liger's over ours; those of a wrong result by names that say whose protocol."""
    rival, liger = times["rival"], times[BASELINE]
    ratio = liger.ratio_to(rival)
    figures = {
        "ms": rival.figures()["median_ms"], "liger_ms": liger.figures()["median_ms"],
        "ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high,
        "samples_ms": list(rival.samples_ms), "liger_samples_ms": list(liger.samples_ms),
    }  # fmt: skip
    return {f"published_protocol_{n}": v for n, v in figures.items()} if wrong else figures


def _peak(work: Workload, inputs: Inputs) -> _Figures:
    """Peak of a pass with what it must hold told apart, in MiB; weights and x count, other
    operands of the scene do not.
    """
    for _ in range(2):  # libraries take their workspace in the first
        work.reset()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work.forward().backward(inputs.dy)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
    weights = [leaf for name, leaf in work.leaves.items() if name != "x"]
    held = sum(t.nbytes for t in weights)
    gradients = sum(t.grad.nbytes for t in weights if t.grad is not None)
    work.reset()
    total = held + inputs.x.nbytes + peak
    return {
        "peak_mib": total / MIB, "weights_mib": held / MIB, "gradients_mib": gradients / MIB,
        "rest_mib": (total - held - gradients) / MIB,
    }  # fmt: skip
