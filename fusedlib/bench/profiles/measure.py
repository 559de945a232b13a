"""Measures study 08's cases: a step without the profiler, with it, and with named ranges.

Which kernels run, and how long each, comes from the profile without ranges, of the second of two
steps back to back: then the host is as far ahead as it ever gets. Which part of the model they
belong to comes from the one with ranges, whose hooks keep the host busier still.
"""

import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from fusedlib.bench import results
from fusedlib.bench.profiles import classes, keep, trace
from fusedlib.bench.profiles.idle import PERCENTILES, idle
from fusedlib.bench.profiles.trace import Event, Piece, Trace
from fusedlib.bench.profiles.work import (
    FEWEST,
    INFERENCE,
    SECTIONS,
    STEP,
    Work,
    affordable,
    record,
)
from fusedlib.bench.statistics import summarize

TOP = 10  # of each section and of the step: these a row names, the others it adds up by class
REST = "rest"
# Steps timed after the profiler, to tell whether its having run makes them longer, take so long.
CONTROL_MS = 300.0
Case = Mapping[str, Any]
Figures = dict[str, Any]
# By key, such as a class or a class and a name: calls and µs.
Totals = list[tuple[Any, tuple[int, float]]]


def measure(case: Case) -> Figures:
    """Times of a step, and what it consists of: the row's figures.

    Lists of lists have these columns, times in ms, a section being "forward", "backward",
    "optimizer" or, of eager models, "inference" (the forward pass alone, without gradients):

    - `sections`: section, calls, time of its kernels, time in which any of them ran, and how long
      the host was in it
    - `classes`: section, class, calls, time
    - `kernels`: section, class, name, calls, time; what is among the most expensive of any
      section or of the step has its line in each, then the rest by class
    - `parts`: section, part of the model, calls, time; eager models only

    `step_` figures are of steps before the profiler ran, as many as `work.affordable` says;
    `control_samples_ms` are steps after it, the profiler off again. A compiled model that was
    compiled again while it was measured gives a row `failed`.

    Raises:
        Unavailable: the profiler sees nothing of this device.
    """
    if torch.device(case["device"]).type == "mps":
        raise results.Unavailable("torch.profiler records no events of an MPS device")
    _free_memory()  # of a case before that ran out of it: its frames are gone only now
    try:
        return _measured(case)
    finally:
        if case["provider"] != "eager":
            _forget_compiled()
        _free_memory()


def _forget_compiled() -> None:
    import torch._dynamo

    torch._dynamo.reset()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measured(case: Case) -> Figures:
    work = Work(case)
    settled = work.warm_up()
    graphs = _graphs(work)
    found: Figures = summarize(work.times_ms(affordable(case["repetitions"], settled)), "step")
    document = record(work.device, lambda: _run(work))
    bare = trace.read(document)
    found |= {"on_device": bare.on_device, **taken_apart(bare), **idleness(bare)}
    found["profiled_ms"] = _step_ms(bare)
    found["control_samples_ms"] = work.times_ms(min(FEWEST, int(CONTROL_MS / settled)))
    if _graphs(work) != graphs:
        return found | {"status": "failed", "reason": "a measured step compiled the model again"}
    if work.eager:
        document = record(work.device, work.named_step)
        ranged = trace.read(document)
        found |= {"ranged_ms": _step_ms(ranged), "parts": parts(ranged)}
    return found | keep.kept(case, document)


def _graphs(work: Work) -> int:
    """Graphs that Dynamo has compiled in this process; 0 for an eager model."""
    if work.eager:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _run(work: Work) -> None:
    if work.eager:  # compiled, it would be another model to compile
        work.inference()
    for _ in range(2):
        work.step()


def _sections(found: Trace) -> dict[str, tuple[Event, list[Piece]]]:
    """The last range and the pieces of each section that the trace has."""
    ranges = {name: found.last(name) for name in (INFERENCE, *SECTIONS)}
    return {n: (r, found.during(r)) for n, r in ranges.items() if r is not None}


def _class_of(found: Trace, section: str) -> Callable[[str], str]:
    """How a section's pieces are classed: all that the optimizer does is the optimizer's."""
    if section == "optimizer":
        return lambda name: classes.OPTIMIZER
    return classes.of_kernel if found.on_device else classes.of_operator


def taken_apart(found: Trace) -> Figures:
    """Sections, classes and kernels of a trace, and what of the step lies in no section."""
    sections: list[list[Any]] = []
    by_class: list[list[Any]] = []
    by_name: dict[str, Totals] = {}
    for section, (during, pieces) in _sections(found).items():
        class_of = _class_of(found, section)
        busy = idle(pieces).busy if found.on_device and pieces else sum(p.us for p in pieces)
        host = _ms([during.end - during.start])
        sections.append([section, len(pieces), _ms(p.us for p in pieces), _ms([busy]), host])
        totals = _totals((class_of(p.name), p.us) for p in pieces)
        by_class += [[section, kind, calls, _ms([us])] for kind, (calls, us) in totals]
        names = ((class_of(p.name), classes.short_name(p.name)) for p in pieces)
        by_name[section] = _totals(zip(names, (p.us for p in pieces), strict=True))
    step = found.last(STEP)
    whole = _ms(p.us for p in found.during(step)) if step else 0.0
    inside = sum(ms for section, _, ms, *_ in sections if section != INFERENCE)
    return {
        "sections": sections, "classes": by_class, "kernels": _kernels(by_name),
        "unlinked": found.unlinked, "kernels_ms": whole,
        "outside_sections_ms": round(whole - inside, 6),
    }  # fmt: skip


def _kernels(by_name: Mapping[str, Totals]) -> list[list[Any]]:
    """Lines of the kernels that are dear somewhere, and of the rest by class, of each section."""
    parts = [totals for section, totals in by_name.items() if section in SECTIONS]
    step = _totals((key, us, calls) for totals in parts for key, (calls, us) in totals)
    named = {key for totals in (*by_name.values(), step) for key, _ in totals[:TOP]}
    lines: list[list[Any]] = []
    for section, totals in by_name.items():
        rest = _totals(
            ((key[0], REST), us, calls) for key, (calls, us) in totals if key not in named
        )
        listed = [*(entry for entry in totals if entry[0] in named), *rest]
        lines += [[section, *key, calls, _ms([us])] for key, (calls, us) in listed]
    return lines


def _totals(entries: Iterable[tuple[Any, ...]]) -> Totals:
    """Calls and µs by key, most µs first; an entry is key, µs and, unless one, calls."""
    sums: dict[Any, list[float]] = defaultdict(lambda: [0, 0.0])
    for key, us, *calls in entries:
        sums[key][0] += calls[0] if calls else 1
        sums[key][1] += us
    ordered = sorted(sums.items(), key=lambda entry: -entry[1][1])
    return [(key, (int(calls), us)) for key, (calls, us) in ordered]


def parts(found: Trace) -> list[list[Any]]:
    """Section, part of the model, calls and ms; the blocks' parts are added up over the blocks."""
    named = [r for r in found.ranges if r.name not in (STEP, INFERENCE, *SECTIONS)]
    rows: list[list[Any]] = []
    for section, (_, pieces) in _sections(found).items():
        where = ((part_name(name), p.us) for p, name in trace.innermost(pieces, named))
        rows += [[section, part, calls, _ms([us])] for part, (calls, us) in _totals(where)]
    return rows


def part_name(range_name: str | None) -> str:
    """`block 3/attention` -> `block/attention`; what ran in no range is "no part"."""
    return re.sub(r"^block \d+", "block", range_name) if range_name else "no part"


def idleness(found: Trace) -> Figures:
    """Idle time and gaps of the last step's device, in ms and µs; empty for a CPU's trace.

    `gap_percentiles_us` are those of `idle.PERCENTILES`, `late_` what waited for the host.
    A step begins where the device ended the one before.
    """
    step = found.last(STEP)
    pieces = found.during(step) if step else []
    if not found.on_device or not pieces or step is None:
        return {}
    seen = idle(pieces, _ended_before(found, step))
    gaps = np.percentile(seen.gaps or [0.0], PERCENTILES)
    return {
        "busy_ms": _ms([seen.busy]), "gaps": len(seen.gaps), "idle_ms": _ms(seen.gaps),
        "late_gaps": len(seen.late), "late_ms": _ms(seen.late), "lead_us": seen.lead,
        "gap_percentiles_us": [round(float(g), 3) for g in gaps], "profiled_kernels": len(pieces),
    }  # fmt: skip


def _ended_before(found: Trace, step: Event) -> float | None:
    """When the device was done with what was issued before a step."""
    return max((p.end for p in found.pieces if p.issued < step.start), default=None)


def _step_ms(found: Trace) -> float | None:
    """The last step under the profiler: until its last kernel, on a CPU until its own end.

    It begins where the device ended the step before, the first one where the host begins it.
    """
    step = found.last(STEP)
    if step is None:
        return None
    if not found.on_device:
        return _ms([step.end - step.start])
    since = _ended_before(found, step)
    end = max((p.end for p in found.during(step)), default=step.end)
    return _ms([end - (step.start if since is None else since)])


def _ms(us: Iterable[float]) -> float:
    return round(sum(us) / 1e3, 6)
