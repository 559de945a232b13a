"""One call for whoever has a kernel: `fusedlib.bench.compare`. A race, in which anybody may run."""

import html
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import alarms, check, rivals, roofline, sustained
from fusedlib.bench.attempt import Wrong, extra, is_out_of_memory
from fusedlib.bench.cases import Case, Row, grid, require_known, require_least
from fusedlib.bench.operation import Operands, Operation, Truth, exact_results
from fusedlib.bench.race import LAUNCHES, Checked, Race, race
from fusedlib.bench.rivals import Rival, Workload
from fusedlib.bench.statistics import Interval, paired_ratio

TASK = "compare"
LESS_ACCURATE = "less accurate"
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
SUSTAINED = "sustained"
DIRECTIONS = {False: "forward", True: "forward+backward", "alone": "backward"}
Function = Callable[..., Any]
Named = Mapping[str, Tensor]


def compare(
    reference: Function, functions: Mapping[str, Function],
    inputs: Named | Callable[[int], Named], *,
    backward: bool | str = False, launch: str = "python", rounds: int = 30, seconds: float = 1.0,
    flops: float = 0.0, moved_bytes: float | None = None, deterministic: bool = False,
) -> "Comparison":  # fmt: skip
    """Check functions against a reference, then time those that are right, in turns.

        from fusedlib import bench
        print(bench.compare(reference, {"mine": f, "theirs": g}, {"x": x, "w": w}, backward=True))

    All are called with the inputs in their order, `f(x, w)`, and give a tensor or a tuple of them.
    They run on copies of the inputs. Nothing is written to a file, and no time is used again. A
    function is "ok"; "less accurate", timed and marked wherever its time is compared; or "wrong",
    with a reason and no time. The rules:

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
      at a random sample and after it. So a result that was kept, whatever inputs are known by, is
      found wrong as often as it is quick. It must be right too where one element was changed, and,
      forward alone, for values ten times as large and shifted by five, where the reference stays
      finite. Where inputs have a structure that this breaks (symmetric, sorted, probabilities), or
      masks and indices that matter, give a function of a seed: then all values are those of its
      seeds.
    - Outputs are plain tensors with memory of their own, of the reference's shape and dtype, not
      handed out before, done at the return. Nothing is complex. Inputs stay as they are, no thread
      stays at work, no timer is replaced.
    - Samples are taken in turns, A B C A B C, two rounds thrown away; before each, outside the
      clock, inputs are drawn and the card is idle. Short calls are timed in bursts, which leave the
      L2 warm, others with the L2 flushed. A time that the card cannot reach, by FLOPs or by bytes,
      is refused; so is one of which a second clock says something else, or that a call of nothing
      takes too.

    Not seen are: who rewrites this library, which runs in the same process; another process, which
    helps a call along; what is kept in the later calls of a burst or under load, whose inputs are
    those of the first; compilation after the warm-up, whose long samples the median leaves out; a
    part of the L2 that is set aside against the flush, unless a time is below the bytes' least; why
    a card throttles (`rows` have its clocks, power and temperature before and after).

    Args:
        reference: plain PyTorch, correct, also in float64.
        functions: by name; the first is what others are compared with.
        inputs: tensors by name on one device, or a function of a seed that gives them, called with
            0, 1 and others below 2³¹. Gradients are taken of those that require one, of all
            of floating point where none does.
        backward: False times forward; True forward and backward; "alone" backward.
        launch: "python", a loop's calls; "graph", replays of a CUDA graph; "sustained", each alone
            without a pause for `seconds` at the card's power limit, twice. The last two need CUDA.
        rounds: samples of each function.
        flops: of the products that the problem needs, where it is to be held against the roofline.
        moved_bytes: that it must read and write; counted by default: results, and operands of which
            the reference has a gradient that is not zero.
        deterministic: whether the functions promise the same bits for the same inputs.

    Raises:
        ValueError: no function, no input, inputs on several devices, on one without float64 or of
            other shapes with another seed, an unknown launch, or a graph of a backward alone.
    """
    seeded = inputs if callable(inputs) else None
    operands = dict(inputs(0) if callable(inputs) else inputs)
    device = _device_of(operands)
    if seeded:
        _require_alike(operands, seeded(1))
    require_known("launch", launch, [*LAUNCHES, SUSTAINED])
    require_known("backward", str(backward), list(map(str, DIRECTIONS)))
    require_least(2, rounds=rounds)
    if not functions:
        raise ValueError("no function to compare; give some by name: {'mine': f, 'theirs': g}")
    if launch == "graph" and backward == "alone":
        raise ValueError("a graph holds forward, or forward and backward: give backward=True")
    problem: list[_Problem] = []

    def setup(case: Case) -> _Problem:
        new = _Problem(reference, functions, operands, seeded, bool(backward), deterministic)
        problem.append(new)
        return new

    def work(case: Case) -> dict[str, Any]:
        counted = problem[0].compulsory_bytes(case["direction"]) if moved_bytes is None else None
        return {"flops": flops, "compulsory_bytes": counted or moved_bytes or 0}

    shared = {"experiment": TASK, "direction": DIRECTIONS[backward], "device": str(device),
              "launch": launch, "repetitions": rounds}  # fmt: skip
    cases, spec = grid(shared, provider=functions), Race(setup=setup, fields=("device",), work=work)
    if launch == SUSTAINED:
        cases = sustained.loaded_cases([c | {"launch": "python"} for c in cases], seconds=seconds)
        spec = sustained.loaded_race(spec)
    names = list(functions)
    measured = sorted(race(spec, cases), key=lambda row: names.index(row.case["provider"]))
    reasons = problem[0].less_accurate if problem else {}
    measured = [
        replace(row, status=LESS_ACCURATE, reason=reasons[name])
        if row.status == "ok" and (name := row.case["provider"]) in reasons else row
        for row in measured
    ]  # fmt: skip
    return Comparison(tuple(names), tuple(measured), shared)


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


class _Problem(Operation):
    """Anybody's operation: functions by name, called with the operands in their order."""

    def __init__(
        self, reference: Function, functions: Mapping[str, Function], operands: Named,
        seeded: Callable[[int], Named] | None, backward: bool, deterministic: bool = False,
    ) -> None:  # fmt: skip
        self.functions, self.seeded, self.deterministic = functions, seeded, deterministic
        self.less_accurate: dict[str, str] = {}
        leaves = {name: _copy(tensor) for name, tensor in operands.items()}
        floating = [name for name, t in operands.items() if t.is_floating_point()]
        wanted = [name for name in floating if operands[name].requires_grad] or floating
        for name in wanted if backward else ():
            leaves[name].requires_grad_()
        with torch.no_grad():
            outputs = reference(*leaves.values())
        results = rivals.named(outputs)
        complex_ones = [n for n, t in {**operands, **results}.items() if t.is_complex()]
        if complex_ones:
            raise Wrong(f"{complex_ones[0]} is complex, and errors are of real numbers: give "
                        "torch.view_as_real of it")  # fmt: skip
        gradients = tuple(map(_gradient_like, results.values()))
        dy = gradients if isinstance(outputs, tuple | list) else gradients[0]
        super().__init__(TASK, Operands(leaves, dy), lambda **named: reference(*named.values()))
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
            raise Wrong(f"the reference fails {when}: {error}; {STRUCTURE}") from None
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
        self, one: Rival, results: Named, required: list[str], truth: Truth | None = None
    ) -> dict[str, Any]:
        """Also of outputs in the reference's dtype: half of the bytes are half of the time."""
        for name in self.outputs:
            if name in results and results[name].dtype != (wanted := self.kinds[name][1]):
                raise Wrong(f"{name} is {results[name].dtype}, not {wanted} as the reference's")
        try:
            return super().error_figures(one, results, required, truth)
        except Wrong as wrong:
            given = truth or self.drawn
            errors = check.errors(results, given.true)
            if check.misses(errors, given.baseline, self.dtype, required, self.times):
                raise
            self.less_accurate.setdefault(one.name, f"{given.when}: {wrong}".removeprefix(": "))
            return wrong.figures

    def _reason(self, misses: str, actual: Named, truth: Truth, required: list[str]) -> str:
        reason = super()._reason(misses, dict(actual), truth, required)
        as_given = self.seeded or truth.values is self.drawn.values
        return reason if as_given else f"{reason}; {STRUCTURE}"

    def check(self, case: Case) -> Checked:
        """Hold the case's function against the truth."""
        name, leaves = case["provider"], self.inputs.leaves()
        work = Workload(partial(self.functions[name], *leaves.values()), leaves)
        one = Rival(TASK, name, name, 0, lambda inputs: work, "as given")
        checked = self.checked(one, self.inputs)
        if self.deterministic:
            first, second = (check.results_of(work, self.inputs.dy) for _ in range(2))
            for result in first:
                if not alarms.same_bits(first[result], second[result]):
                    raise Wrong(f"{result} has other bits in a second call with the same inputs: "
                                "the functions are said to be deterministic")  # fmt: skip
        return checked

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


def _copy(tensor: Tensor) -> Tensor:
    """A leaf of its own memory; where elements share memory, of the same."""
    return tensor.detach().clone() if all(tensor.stride()) else tensor.detach()


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
    first it is, and the share of the card's roofline, each None where it is not known.
    """

    name: str
    status: str
    reason: str | None = None
    ms: Interval | None = None
    speed: float | None = None
    roofline: float | None = None

    @property
    def label(self) -> str:
        """The name, with the mark of what is less accurate."""
        return f"{self.name} ({LESS_ACCURATE})" if self.status == LESS_ACCURATE else self.name

    def cells(self) -> list[str]:
        """The line as text."""
        ms = self.ms and f"{self.ms.value:.4g} ({self.ms.low:.4g} to {self.ms.high:.4g})"
        speed = self.speed and f"{self.speed:.3g}{self.label.removeprefix(self.name)}"
        share = self.roofline and f"{self.roofline:.0%}"
        return [self.name, self.status, ms or "", speed or "", share or "", self.reason or ""]


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` gives: a table where it is printed, `rows` and `plot()`, which need pandas and
    matplotlib of the extra `bench`.

    Attributes:
        names: of the functions, the first of which is what others are compared with.
        measured: a row of each; under load, of each and round.
        shared: how all were run.
    """

    names: tuple[str, ...]
    measured: tuple[Row, ...]
    shared: Mapping[str, Any]

    @property
    def lines(self) -> list[Line]:
        """A line of the table each function, in their order."""
        by_name = {name: [row for row in self.measured if row.case["provider"] == name]
                   for name in self.names}  # fmt: skip
        return [self._line(name, rows, by_name[self.names[0]]) for name, rows in by_name.items()]

    def _line(self, name: str, rows: Sequence[Row], first: Sequence[Row]) -> Line:
        timed = "ok", LESS_ACCURATE
        if bad := [row for row in rows if row.status not in timed]:
            return Line(name, bad[0].status, bad[0].reason)
        given = [row.figures for row in rows]
        prefix = "burst_" if rows[0].case["experiment"] == SUSTAINED else ""
        middle, low, high = ([figures[f"{prefix}median{end}_ms"] for figures in given]
                             for end in ("", "_low", "_high"))  # fmt: skip
        ms = Interval(statistics.median(middle), min(low), max(high))
        speeds = [paired_ratio(one.figures["samples_ms"], other["samples_ms"]).value
                  for one, other in zip(first, given, strict=True)
                  if one.status in timed]  # fmt: skip
        speed = statistics.median(speeds) if len(speeds) == len(given) else None
        share = self._share(given[0], ms.value)
        return Line(name, rows[0].status, rows[0].reason, ms, speed, share)

    def _share(self, figures: Mapping[str, Any], ms: float) -> float | None:
        """Of the time that tensor cores and memory need at their peaks; more may be in the L2."""
        device = self.shared["device"]
        rates = alarms.most_flops_per_s(device), alarms.most_bytes_per_s(device)
        flops_per_s, bytes_per_s = (rate or math.inf for rate in rates)
        least = roofline.least_ms(
            figures["flops"], figures["compulsory_bytes"], flops_per_s, bytes_per_s
        )
        return least / ms if 0 < least <= ms else None

    @property
    def rows(self) -> Any:
        """A pandas data frame with all figures and samples, a row as in the study."""
        return extra("pandas").DataFrame([row.as_dict() for row in self.measured])

    def _table(self) -> list[list[str]]:
        lines = self.lines
        head = ["", "status", "ms (95 %)", f"times as fast as {lines[0].label}", "of the roofline",
                "reason"]  # fmt: skip
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
