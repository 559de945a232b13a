"""One call for whoever has a kernel: `fusedlib.bench.compare`."""

import html
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import alarms, check
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import (
    Attempt,
    Unavailable,
    Wrong,
    extra,
    forget_compiled,
    free_memory,
    is_out_of_memory,
)
from fusedlib.bench.problem import Operands, Problem, Truth, exact_results
from fusedlib.bench.statistics import Interval, paired_ratio
from fusedlib.bench.sustained import Load
from fusedlib.bench.turns import LAUNCHES, Checked, Figures, Sampling, Turn, timed_together
from fusedlib.bench.workload import Workload, named

LESS_ACCURATE = "less accurate"
TIMED = "ok", LESS_ACCURATE
TIMES_LESS_ACCURATE, TIMES_IN_HALF = 64.0, 1.25
"""How many times what the rule allows a result may err and be timed, in float32, in half precision.

In float32, 79 honest pairs were at 2.1 at most, in 3 seeds, but for sums that round at every row,
at 11 for 8,192 rows, and logsumexp's gradient in torch._refs, at 35 for 4,096 columns, in 12 seeds
(once at 67 in some hundred runs).
Products with operands as TF32 were above 300, with fp16 operands, results or sums above 500,
without the last of 32,768 terms above 8,000; with 13 bits of mantissa, at 40 to 110, they may pass.
In half precision the honest that sum in float32 were at 1.15 at most, in 12 seeds; a product
without the last of 4,096 terms at 1.3, its sum in bf16 at 1.7.
"""
ROUGHLY = check.Errors(0.1, math.inf)
"""Plain PyTorch's error for large values in half precision, where attention by hand, whose scores
are rounded, errs by 0.07 in norm, an identity for a norm by 1 and more.
"""
STRUCTURE = (
    "where such values are no inputs (symmetric, sorted, probabilities), give a function of a seed"
)
SUSTAINED, LOADED_ROUNDS = "sustained", 2
DIRECTIONS = {False: "forward", True: "forward+backward", "alone": "backward"}
Function = Callable[..., Any]
Named = Mapping[str, Tensor]
Inputs = Mapping[str, Tensor | Sequence[Tensor]]
Row = Mapping[str, Any]


def compare(
    reference: Function, functions: Mapping[str, Function],
    inputs: Inputs | Callable[[int], Inputs], *,
    backward: bool | str = False, launch: str = "python", rounds: int = 30, seconds: float = 1.0,
    flops: float = 0.0, moved_bytes: float | None = None, deterministic: bool = False,
    batch_invariant: Sequence[str] = (),
) -> "Comparison":  # fmt: skip
    """Check functions against a reference, then time those that are right, in turns.

        from fusedlib import bench
        print(bench.compare(reference, {"mine": f, "theirs": g}, {"x": x, "w": w}, backward=True))

    All are called with the inputs in their order, `f(x, w)`, and give a tensor or a tuple of them.
    An input that is a tuple or list is one argument, and its elements are named `w[0]`, `w[1]`.
    They run on copies of the inputs, of their strides and alignment. Nothing is written to a file,
    and no time is used again. A function is "ok"; "less accurate", timed and marked wherever its
    time is compared; or "wrong", with a reason and no time. The rules:

    - The truth is the reference in float64. An output or gradient may err twice as much as the
      reference does in the inputs' own dtype, and four roundoffs, in norm and, of the largest, in
      its worst element. NaN is right only where the truth has it. Up to 64 times that, in half
      precision 1.25 times, is less accurate: a sum in another order errs so, in float32 nothing of
      less precision does. Results that are whole numbers are right where they are equal.
    - Each sample has inputs drawn anew, in the same memory, so that neither address nor version
      tells: a floating-point element is the given one times a random number up to one; where
      results depend on signs alone, rows are first drawn from all rows. Whole numbers and masks,
      which may be addresses, stay as given, but for inputs that are nothing else.
    - It must be right for the inputs and for values drawn so, others each time: before the clock,
      in a timed call of a random sample, and after the clock. So a result that was kept, whatever
      inputs are known by, is found wrong as often as it is quick, and so is who computes in checks
      alone. It must be right too where one element was changed, and,
      forward alone, for values ten times as large and shifted by five, where the reference stays
      finite. Where inputs have a structure that this breaks (symmetric, sorted, probabilities), or
      masks and indices that matter, give a function of a seed: then all values are those of its
      seeds.
    - Outputs are plain tensors with memory of their own, of the reference's shape and dtype, not
      handed out before, done at the return. Nothing is complex. Inputs stay as they are, no thread
      stays at work, no timer is replaced. `fusedlib.bench.alarms.RULES` has what each rule catches.
    - Samples are taken in turns, each round in another order so that each follows each other as
      often, two rounds thrown away; before each, outside the clock, inputs are drawn and the card
      is idle. Short calls are timed in bursts, which leave the L2 warm, others with the L2 flushed.
      A time that the card cannot reach, by FLOPs or by bytes, is refused; so is one of which a
      second clock says something else, or that a call of nothing takes too.

    Not seen are: who rewrites this library, which runs in the same process, or reads its variables;
    another process, which helps a call along; what is kept in the later
    calls of a burst or under load, whose inputs are those of the first; compilation after the
    warm-up, whose long samples the median leaves out; a part of the L2 that is set aside against
    the flush, unless a time is below the bytes' least; why a card throttles (`rows` have its
    clocks, power and temperature before and after).

    Args:
        reference: plain PyTorch, correct, also in float64.
        functions: by name; the first is what others are compared with.
        inputs: tensors, or tuples of them, by name on one device, or a function of a seed that
            gives them, called with 0, 1 and others below 2³¹. Gradients are taken of those that
            require one, of all of floating point where none does.
        backward: False times forward; True forward and backward; "alone" backward.
        launch: "python", a loop's calls; "graph", replays of a CUDA graph; "sustained", each alone
            without a pause for `seconds` at the card's power limit, twice. The last two need CUDA.
        rounds: samples of each function, 2 at least; 0 checks results and gradients and times
            nothing.
        flops: of the products that the problem needs, where it is to be held against the roofline.
        moved_bytes: that it must read and write; counted by default: results, and operands of which
            the reference has a gradient that is not zero.
        deterministic: whether the functions promise the same bits for the same inputs.
        batch_invariant: names of inputs of which a row, along their first dimension, is promised
            the same bits whatever rows are beside it: outputs and gradients with as many rows are
            computed again for the first 1, 2, 4, 8 … rows alone.

    Raises:
        ValueError: no function, no input, inputs on several devices, on one without float64 or of
            other shapes with another seed, an unknown launch, a graph of a backward alone, one
            round, another launch than "python" in none, or names in `batch_invariant` that are no
            inputs or have other numbers of rows.
    """
    given = inputs(0) if callable(inputs) else inputs
    operands = _flat(given)
    seeded = (lambda seed: _flat(inputs(seed))) if callable(inputs) else None
    device = _device_of(operands)
    if seeded:
        _require_alike(operands, seeded(1))
    require_known("launch", launch, [*LAUNCHES, SUSTAINED])
    require_known("backward", str(backward), list(map(str, DIRECTIONS)))
    if rounds:
        require_least(2, rounds=rounds)
    elif launch != "python":
        raise ValueError(f"rounds=0 times nothing, so nothing is launched by {launch!r}")
    if not functions:
        raise ValueError("no function to compare; give some by name: {'mine': f, 'theirs': g}")
    if launch == "graph" and backward == "alone":
        raise ValueError("a graph holds forward, or forward and backward: give backward=True")
    require_known("input", batch_invariant, operands)
    counts = {operands[name].shape[:1] for name in batch_invariant}
    if batch_invariant and (len(counts) > 1 or counts == {()}):
        raise ValueError(f"inputs of one batch have as many rows each, got {sorted(counts)}")
    shared: Figures = {"direction": DIRECTIONS[backward], "device": str(device), "launch": launch,
              "repetitions": rounds}  # fmt: skip
    forget_compiled()
    arguments = partial(_as_given, given)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        problem = Attempt.at(
            _Problem, reference, functions, operands, arguments, seeded, bool(backward),
            deterministic, tuple(batch_invariant),
        )  # fmt: skip
        tried = {name: _checked(problem, name) for name in functions}
        rows = [
            _row(shared, name, one) for name, one in tried.items() if one.value is None
        ]  # fmt: skip
        ready = {name: one.value for name, one in tried.items() if one.value is not None}
        if problem.value is not None and ready:
            if moved_bytes is None:
                moved_bytes = problem.value.compulsory_bytes(shared["direction"])
            work = {"flops": flops, "compulsory_bytes": moved_bytes}
            rows += _timed(ready, shared, work, seconds)
    lesser, largest = (
        (problem.value.less_accurate, problem.value.largest) if problem.value else ({}, {})
    )
    for row in rows:
        name = row["provider"]
        row["error_of_allowed"] = largest.get(name)
        if row["status"] == "ok" and name in lesser:
            row |= {"status": LESS_ACCURATE, "reason": lesser[name]}
    free_memory()
    order = list(functions)
    rows.sort(key=lambda row: order.index(row["provider"]))
    return Comparison(tuple(functions), tuple(rows), shared)


def _checked(problem: "Attempt[_Problem]", name: str) -> Attempt[Checked]:
    """A function after it was held against the truth of a problem, where there is one."""
    if problem.value is None:
        return Attempt(problem.status, f"the check: {problem.reason}")
    return Attempt.at(problem.value.check, name)


def _timed(
    ready: Mapping[str, Checked], shared: Row, work: Figures, seconds: float
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of those that were found right; under load, of each and round."""
    device, launch, rounds = shared["device"], shared["launch"], shared["repetitions"]
    if not rounds:
        return [_row(shared, name, Attempt(value=one.figures)) for name, one in ready.items()]
    sampling = Sampling(
        device, rounds, flops=work["flops"], moved_bytes=work["compulsory_bytes"]
    )  # fmt: skip
    if launch != SUSTAINED:
        sampling = replace(sampling, most_calls=sampling.most_calls if launch == "python" else 1)
        given = {name: (shared, checked) for name, checked in ready.items()}
        return [_row(shared, name, one, work) for name, one in timed_together(given, sampling)]
    load, rows = Load(device), []
    sampling = replace(sampling, warmup=0, rounds=1, most_calls=1, flush_l2=False)

    def under_load(checked: Checked, case: Row) -> Turn:
        if torch.device(device).type != "cuda":
            raise Unavailable("sustained runs need a CUDA GPU")
        return load.turn(checked.turn({**case, "launch": "python"}), seconds)

    loaded = {name: Checked(checked.figures, partial(under_load, checked))
              for name, checked in ready.items()}  # fmt: skip
    for number in range(1, LOADED_ROUNDS + 1):
        case = {**shared, "round": number, "seconds": seconds}
        order = list(loaded) if number % 2 else list(loaded)[::-1]  # so that drift hits all alike
        given = {name: (case, loaded[name]) for name in order}
        rows += [_row(case, name, one, work) for name, one in timed_together(given, sampling)]
    return rows


def _row(
    case: Row, name: str, tried: Attempt[Any], work: Figures | None = None
) -> dict[str, Any]:  # fmt: skip
    """What became of a function, flat: a line of a data frame."""
    figures = tried.figures if tried.value is None else {**tried.value, **(work or {})}
    return {
        **case, "provider": name, "status": tried.status, "reason": tried.reason, **figures
    }  # fmt: skip


def _flat(inputs: Inputs) -> dict[str, Any]:
    """The inputs by name, elements of a tuple or list by names of their own."""
    flat: dict[str, Any] = {}
    for name, given in inputs.items():
        several = isinstance(given, tuple | list)
        flat |= {f"{name}[{at}]": t for at, t in enumerate(given)} if several else {name: given}
    return flat


def _as_given(inputs: Inputs, leaves: Iterable[Tensor]) -> list[Any]:
    """Flat operands as arguments, in the form of the inputs."""
    rest = iter(leaves)
    return [[next(rest) for _ in given] if isinstance(given, list) else
            tuple(next(rest) for _ in given) if isinstance(given, tuple) else next(rest)
            for given in inputs.values()]  # fmt: skip


def _device_of(operands: Named) -> torch.device:
    """The one device of all; raise ValueError where there is not one, or it has no float64."""
    if odd := [name for name, t in operands.items() if not isinstance(t, Tensor)]:
        raise ValueError(
            f"the input {odd[0]!r} is a {type(operands[odd[0]]).__name__}, not a tensor; what is "
            "none goes into the functions: lambda x: f(x, eps)"
        )
    devices = {tensor.device for tensor in operands.values()}
    if len(devices) != 1:
        shown = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"inputs lie on one device, got {shown}")
    [device] = devices
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"inputs lie on cpu or cuda, where there is float64; got {device}")
    return device


def _require_alike(operands: Named, others: Named) -> None:
    """Raise ValueError where another seed's inputs do not fit into the first one's memory."""
    first, second = ({n: f"{tuple(t.shape)} {t.dtype} {t.device}" for n, t in given.items()}
                     for given in (operands, others))  # fmt: skip
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            raise ValueError(
                f"the input {name!r} is {first.get(name)} for seed 0 and {second.get(name)} for "
                "seed 1: a function of a seed changes values alone"
            )


class _Problem(Problem):
    """Anybody's problem: functions by name, called with the operands in their order."""

    def __init__(
        self, reference: Function, functions: Mapping[str, Function], operands: Named,
        arguments: Callable[[Iterable[Tensor]], list[Any]],
        seeded: Callable[[int], Named] | None, backward: bool, deterministic: bool = False,
        batch: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.functions, self.seeded, self.deterministic = functions, seeded, deterministic
        self.batch = batch
        self.arguments = arguments
        self.less_accurate: dict[str, str] = {}
        self.largest: dict[str, float] = {}
        leaves = {name: _copy(tensor) for name, tensor in operands.items()}
        floating = [name for name, t in operands.items() if t.is_floating_point()]
        wanted = [name for name in floating if operands[name].requires_grad] or floating
        for name in wanted if backward else ():
            leaves[name].requires_grad_()
        if backward:
            alarms.require_inputs_alone(named(reference(*arguments(leaves.values()))), leaves)
        with torch.no_grad():
            outputs = reference(*arguments(leaves.values()))
        results = named(outputs)
        complex_ones = [n for n, t in {**operands, **results}.items() if t.is_complex()]
        if complex_ones:
            raise Wrong(f"{complex_ones[0]} is complex, and errors are of real numbers: give "
                        "torch.view_as_real of it")  # fmt: skip
        gradients = tuple(map(_gradient_like, results.values()))
        dy = gradients if isinstance(outputs, tuple | list) else gradients[0]
        super().__init__(
            Operands(leaves, dy), lambda **named: reference(*arguments(named.values()))
        )
        self.backward = backward
        if backward and not any(name.startswith("d_") for name in self.drawn.true):
            raise Wrong("the reference gives no gradient: compare forward alone, or outside of "
                        "torch.no_grad()")  # fmt: skip
        self.in_half = check.roundoff(self.dtype) > 2**-24
        self.times = TIMES_IN_HALF if self.in_half else TIMES_LESS_ACCURATE
        differ = [self.distinguishes(self.rewritten, name) for name in self.drawn.true]
        if any(map(alarms.has_own_elements, leaves.values())) and not any(differ):
            raise Wrong(
                "the reference gives the same whatever its operands are, within what the rule "
                "allows: there is nothing to compute, and no function can be told from a constant; "
                + ("give other values for seed 1 than for 0" if seeded else "give larger inputs or "
                   "a wider dtype, or a function of a seed, or compare the gradients too, "
                   "backward=True")
            )  # fmt: skip

    def truth(self, when: str, values: Named) -> Truth:
        """Also where the reference happened to round its largest element well."""
        try:
            found = super().truth(when, values)
        except RuntimeError as error:
            if self.seeded or not when or is_out_of_memory(error):
                raise
            raise Wrong(f"the reference fails {when} ({STRUCTURE}): {error}") from None
        for name, own in found.baseline.items():
            true, roundoff = found.true[name], check.roundoff(self.kinds[name][1])
            sizes = true[true.isfinite()].double().abs()
            if roundoff and bool(sizes.any()):
                least = 2 * roundoff * float(sizes.max() / sizes.square().mean().sqrt())
                found.baseline[name] = check.Errors(own.norm, max(own.worst, least))
        return found

    def _true_of(self, seed: int) -> Truth:
        return self.truth(f"for the inputs of seed {seed}", self._of_seed(seed))

    def _of_seed(self, seed: int) -> Named:
        """A seed's operands; of one whose elements share memory what was drawn."""
        given, leaves = self.seeded(seed), self.inputs.leaves()  # type: ignore[misc]
        return {name: given[name] if alarms.has_own_elements(leaf) else self.drawn.values[name]
                for name, leaf in leaves.items()}  # fmt: skip

    def vary(self, work: Workload, seeds: Iterator[int]) -> None:
        """Where inputs are a function, to those of the next seed."""
        if self.seeded:
            work.write(self._of_seed(next(seeds)))
        else:
            super().vary(work, seeds)

    @cached_property
    def rewritten(self) -> Truth:
        """Where inputs are a function, to those of another seed, whole: a part may be no input."""
        return self._true_of(1) if self.seeded else super().rewritten

    def unforeseen(self) -> Truth:
        """For what no check has had: another seed, or values drawn as a sample's are."""
        return self._true_of(alarms.some_of(2**31 - 1)) if self.seeded else self.anew()

    @cached_property
    def others(self) -> list[Truth]:
        """Of tensors also for a change of one element, where results show it, and large values."""
        if self.seeded:
            return [self.rewritten]
        near = self.anew(alarms.one_changed)
        shown = all(self.distinguishes(near, name) for name in self.outputs)
        truths = [near, self.rewritten] if shown else [self.rewritten]
        with suppress(RuntimeError, Wrong, ValueError):  # of a reference that takes no such values
            values = self.changed(lambda t: 10 * t + 5 if t.is_floating_point() else t)
            large = self.truth("for values times 10 plus 5", values)
            if all(large.true[name].isfinite().all() and math.isfinite(large.baseline[name].worst)
                   for name in self.outputs):  # fmt: skip
                if self.in_half:
                    large = replace(large, baseline=dict.fromkeys(large.baseline, ROUGHLY))
                truths.append(replace(large, forward_only=True))
        return truths

    def error_figures(
        self, name: str, results: Named, required: list[str], truth: Truth | None = None
    ) -> Figures:
        """Of outputs in the reference's dtype: half of the bytes are half of the time. The largest
        error is kept, over what the rule allows, and the reason of what is less accurate.
        """
        for output in self.outputs:
            if output in results and results[output].dtype != (wanted := self.kinds[output][1]):
                raise Wrong(f"{output} is {results[output].dtype}, not {wanted} as the reference's")
        given = truth or self.drawn
        errors = check.errors(results, given.true)
        rule = errors, given.baseline, self.dtype, required
        share = check.share(*rule, times=given.times)
        self.largest[name] = max(share, self.largest.get(name, 0.0))
        try:
            return check.require(*rule, times=given.times)
        except Wrong as wrong:
            if check.misses(errors, given.baseline, self.dtype, required, self.times):
                raise
            self.less_accurate.setdefault(name, f"{given.when}: {wrong}".removeprefix(": "))
            return wrong.figures

    def _reason(self, misses: str, actual: Named, truth: Truth, required: list[str]) -> str:
        reason = super()._reason(misses, dict(actual), truth, required)
        as_given = self.seeded or truth.values is self.drawn.values
        return reason if as_given else f"{reason}; {STRUCTURE}"

    def check(self, name: str) -> Checked:
        """Hold a function against the truth; it may not replace a timer in the meantime."""
        leaves = self.inputs.leaves()
        call = partial(self.functions[name], *self.arguments(leaves.values()))
        work = Workload(call, leaves)
        with alarms.own_timers():
            if self.backward:
                alarms.require_inputs_alone(named(call()), leaves)
            checked = self.admit(name, work)
            if self.deterministic:
                self._require_same_bits(work)
            if self.batch:
                self._require_batch_invariance(name, work)
        return checked

    def _require_same_bits(self, work: Workload) -> None:
        first, second = (check.results_of(work, self.inputs.dy) for _ in range(2))
        for result in first:
            if not alarms.same_bits(first[result], second[result]):
                raise Wrong(f"{result} has other bits in a second call with the same inputs: the "
                            "functions are said to be deterministic")  # fmt: skip

    def _require_batch_invariance(self, name: str, work: Workload) -> None:
        """Raise `Wrong` where a row has other bits in a smaller batch."""
        leaves, dy = self.inputs.leaves(), self.inputs.dy
        rows = len(leaves[self.batch[0]])
        whole = check.results_of(work, dy)
        by_row = [n for n, t in whole.items() if not n.startswith("d_") and t.shape[:1] == (rows,)]
        by_row += [f"d_{n}" for n in self.batch if f"d_{n}" in whole]
        for count in (2**power for power in range((rows - 1).bit_length())):

            def first(tensor: Tensor, count: int = count) -> Tensor:
                return tensor[:count] if tensor.shape[:1] == (rows,) else tensor

            fewer = {n: _copy(t[:count]).requires_grad_(t.requires_grad) if n in self.batch else t
                     for n, t in leaves.items()}  # fmt: skip
            alone = check.results_of(
                Workload(partial(self.functions[name], *self.arguments(fewer.values())), fewer),
                tuple(map(first, dy)) if isinstance(dy, tuple) else first(dy),
            )
            for result in by_row:
                if not alarms.same_bits(alone[result], whole[result][:count]):
                    raise Wrong(f"the first {count} of {rows} rows of {result} have other bits "
                                "alone: the functions are said to be batch-invariant")  # fmt: skip

    @cached_property
    def _read(self) -> int:
        """Bytes of operands' elements of which the outputs' gradient is not zero."""
        leaves = {n: t.detach().clone().requires_grad_(t.is_floating_point())
                  for n, t in self.inputs.leaves().items()}  # fmt: skip
        try:
            true = exact_results(Operands(leaves, self.inputs.dy), self.reference)
        except RuntimeError:  # it has no gradients: nothing is known
            return 0
        return sum(int(true[f"d_{name}"].count_nonzero()) * leaf.element_size()
                   for name, leaf in leaves.items() if f"d_{name}" in true)  # fmt: skip

    def compulsory_bytes(self, direction: str) -> int:
        """Fewest bytes that a direction reads and writes; 0 where no peak is known for them."""
        if alarms.most_bytes_per_s(next(iter(self.inputs.leaves().values())).device) is None:
            return 0
        sizes = {name: shape.numel() * dtype.itemsize
                 for name, (shape, dtype) in self.kinds.items()}  # fmt: skip
        forward = self._read + sum(sizes[name] for name in self.outputs)
        backward = sum(sizes.values())  # of the outputs' gradients and of all that are asked for
        return {"forward": forward, "backward": backward}.get(direction, forward + backward)


ALIGNMENT = 256  # of memory that CUDA's allocator gives, in bytes


def _copy(tensor: Tensor) -> Tensor:
    """A leaf of its own memory, of the same strides and alignment, by which functions may choose
    their way; where elements share memory, of the same memory or packed.
    """
    if not tensor.numel() or not all(tensor.stride()):
        return tensor.detach()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    lead = tensor.data_ptr() % ALIGNMENT // tensor.itemsize
    memory = tensor.new_empty(lead + last + 1)
    try:
        return memory.as_strided(tensor.shape, tensor.stride(), lead).copy_(tensor.detach())
    except RuntimeError:  # elements overlap
        return tensor.detach().clone()


def _gradient_like(output: Any) -> Tensor:
    """Random numbers, the same each time."""
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise TypeError(f"the reference gives a {kind}, not a tensor or a tuple of tensors")
    generator = torch.Generator(device=output.device).manual_seed(1)
    values = torch.randn(output.shape, generator=generator, device=output.device)
    return values.to(output.dtype)


# --- what came of it ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A function in the table: its time in ms with its 95 % interval, how many times as fast as the
    first it is, the share of the card's roofline, and its largest error over what the rule allows,
    each None where it is not known.
    """

    name: str
    status: str
    reason: str | None = None
    ms: Interval | None = None
    speed: float | None = None
    roofline: float | None = None
    error: float | None = None

    @property
    def label(self) -> str:
        """The name, with the mark of what is less accurate."""
        return f"{self.name} ({LESS_ACCURATE})" if self.status == LESS_ACCURATE else self.name

    def cells(self) -> list[str]:
        """The line as text, of the reason the first failure; nothing is timed in no rounds."""
        ms = self.ms and f"{self.ms.value:.4g} ({self.ms.low:.4g} to {self.ms.high:.4g})"
        speed = self.speed and f"{self.speed:.3g}{self.label.removeprefix(self.name)}"
        share = self.roofline and f"{self.roofline:.0%}"
        error = "" if self.error is None else f"{self.error:.2g}"
        if self.status in TIMED:
            ms = ms or "not timed"
        reason = (self.reason or "").partition("; ")[0]
        return [self.name, self.status, ms or "", error, speed or "", share or "", reason]


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` gives: a table where it is printed, which has the first failure of a reason;
    `rows`, with all of it, and `plot()`, which need pandas and matplotlib of the extra `bench`.

    Attributes:
        names: of the functions, the first of which is what others are compared with.
        measured: a row of each, flat; under load, of each and round.
        shared: how all were run.
    """

    names: tuple[str, ...]
    measured: tuple[Row, ...]
    shared: Mapping[str, Any]

    @property
    def lines(self) -> list[Line]:
        """A line of the table each function, in their order."""
        by_name = {name: [row for row in self.measured if row["provider"] == name]
                   for name in self.names}  # fmt: skip
        return [self._line(name, rows, by_name[self.names[0]]) for name, rows in by_name.items()]

    def _line(self, name: str, rows: Sequence[Row], first: Sequence[Row]) -> Line:
        error = rows[0].get("error_of_allowed")
        bad = [row for row in rows if row["status"] not in TIMED]
        if bad or not self.shared["repetitions"]:
            row = (bad or rows)[0]
            return Line(name, row["status"], row["reason"], error=error)
        prefix = "burst_" if self.shared["launch"] == SUSTAINED else ""
        middle, low, high = ([row[f"{prefix}median{end}_ms"] for row in rows]
                             for end in ("", "_low", "_high"))  # fmt: skip
        ms = Interval(statistics.median(middle), min(low), max(high))
        speed = None
        if all(row["status"] in TIMED for row in first):
            pairs = zip(first, rows, strict=True)
            speed = statistics.median(
                paired_ratio(one["samples_ms"], other["samples_ms"]).value for one, other in pairs
            )
        share = self._share(rows[0], ms.value)
        return Line(name, rows[0]["status"], rows[0]["reason"], ms, speed, share, error)

    def _share(self, figures: Mapping[str, Any], ms: float) -> float | None:
        """Of the time that tensor cores and memory need at their peaks; more may be in the L2."""
        device = self.shared["device"]
        rates = alarms.most_flops_per_s(device), alarms.most_bytes_per_s(device)
        flops_per_s, bytes_per_s = (rate or math.inf for rate in rates)
        least = 1e3 * max(figures["flops"] / flops_per_s, figures["compulsory_bytes"] / bytes_per_s)
        return least / ms if 0 < least <= ms else None

    @property
    def rows(self) -> Any:
        """A pandas data frame with all figures and samples, times in ms."""
        return extra("pandas").DataFrame(self.measured)

    def _table(self) -> list[list[str]]:
        lines = self.lines
        head = ["", "status", "ms (95 %)", "error / allowed", f"times as fast as {lines[0].label}",
                "of the roofline", "reason"]  # fmt: skip
        columns = zip(head, *(line.cells() for line in lines), strict=True)
        kept = [column for column in columns if column[0] == "" or any(column[1:])]
        return [list(row) for row in zip(*kept, strict=True)]

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                for row in table]  # fmt: skip
        return "\n".join(row.rstrip() for row in rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = ([html.escape(cell) for cell in row] for row in self._table())
        rows = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>"]
        rows += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in body]
        return f"<table>{''.join(rows)}</table>"

    def plot(self) -> Any:
        """Axes of matplotlib: a bar a function that was timed, with its interval."""
        pyplot = extra("matplotlib.pyplot")
        timed = [(line.label, line.ms) for line in self.lines if line.ms]
        _, axes = pyplot.subplots()
        values = [ms.value for _, ms in timed]
        spread = [[ms.value - ms.low for _, ms in timed], [ms.high - ms.value for _, ms in timed]]
        axes.barh([name for name, _ in timed], values, xerr=spread)
        axes.invert_yaxis()
        axes.set_xlabel("{direction}, ms".format(**self.shared))
        return axes
