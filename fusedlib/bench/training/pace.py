"""Where a step's time goes: arms of one precision in turns, by marks inside the very steps.

Every arm is set up and checked first; then each takes its turn of some steps, round by round, so
that drift hits all alike. With the DataLoader a turn begins with a worker of its own, whose first
batches are not counted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from fusedlib.bench import machine, timing
from fusedlib.bench.progress import progress
from fusedlib.bench.results import Recorder
from fusedlib.bench.statistics import paired_ratio, summarize
from fusedlib.bench.sweep import outcome
from fusedlib.bench.training import arms, batches
from fusedlib.bench.training.cases import BATCH_SIZE, Case
from fusedlib.bench.training.measure import PROTOCOL, WARM_BATCHES, Measure
from fusedlib.bench.training.trainer import GraphStep, Trainer

BASELINE = "eager"
_Samples = dict[str, list[float]]


@dataclass
class _Ready:
    """An arm that takes its turns: its figures so far, and how it makes a step."""

    figures: dict[str, Any]
    wrong: bool
    trainer: Trainer
    graph: GraphStep | None


def sweep(recorder: Recorder, cases: Iterable[Case], measure: Measure) -> None:
    """Time the cases; all of a precision again when one is missing.

    Rows with one `session` were timed in turns: their samples are pairs.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        key = (case["precision"], case["source"], case["launch"])
        groups.setdefault(key, []).append(case)
    todo = {key: group for key, group in groups.items() if _asked(recorder, group, measure)}
    with progress(recorder.study, len(todo)) as shown:
        for (precision, source, launch), group in todo.items():
            shown.case(f"steps in {precision}, data from {source}, launched by {launch}")
            with arms.settings(precision):
                _session(recorder, group, measure)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            shown.done()
    print(recorder.summary())


def _asked(recorder: Recorder, group: list[Case], measure: Measure) -> bool:
    """Whether an arm that can run has no row yet; those that cannot get theirs."""
    able = []
    for case in group:
        _, status, reason = outcome(partial(_available, measure), case)
        if status == "ok":
            able.append(case)
        else:
            recorder.append(case, status=status, reason=reason)
    group[:] = able
    return bool(recorder.missing(able))


def _available(measure: Measure, case: Case) -> dict[str, Any]:
    measure.available(case)
    return {}


def _session(recorder: Recorder, group: list[Case], measure: Measure) -> None:
    ready: dict[str, _Ready] = {}
    for case in group:
        landed: list[_Ready] = []
        figures, status, reason = outcome(partial(_set_up, measure, landed), case)
        if landed:
            ready[case["arm"]] = landed[0]
        else:
            recorder.append(case, figures, status=status, reason=reason)
    chosen = [case for case in group if case["arm"] in ready]
    if not chosen:
        return
    before = machine.conditions()
    samples: dict[str, _Samples] = {}
    call = partial(_rounds, chosen, measure, ready, samples)
    _, status, reason = outcome(lambda _: call() or {}, {})
    state = machine.before_and_after(before, machine.conditions())
    session = {"session": datetime.now(UTC).isoformat()}
    for case in chosen:
        name = case["arm"]
        if status != "ok":
            recorder.append(case, status=status, reason=reason)
            continue
        figures = {**ready[name].figures, **_figures(samples, name, ready[name].wrong)}
        told, why = figures.pop("status", "ok"), figures.pop("reason", None)
        recorder.append(case, {**figures, **session, **state}, status=told, reason=why)


def _set_up(measure: Measure, landed: list[_Ready], case: Case) -> dict[str, Any]:
    """Check the arm and make its trainer; it lands in `landed` when it may take turns."""
    arm = measure.available(case)
    figures = measure.checked(arm, case)
    if figures.get("status") == "wrong" and not arm.wrong:
        return figures
    trainer = measure.trainer(arm, case)
    graph = None
    first = next(batches.on_device(measure.prepared(case).train, torch.arange(BATCH_SIZE), 64))
    if case["launch"] == "graph":
        graph = GraphStep(trainer, *first)
    landed.append(_Ready(figures, arm.wrong, trainer, graph))
    return {}


def _rounds(
    group: list[Case], measure: Measure, ready: dict[str, _Ready], samples: dict[str, _Samples]
) -> None:
    """One round more than asked for; the first warms up and is thrown away."""
    for number in range(group[0]["rounds"] + 1):
        for case in group:
            turn = _turn(ready[case["arm"]], case, measure, number)
            if number:
                kept = samples.setdefault(case["arm"], {})
                for part, ms in turn.items():
                    kept.setdefault(part, []).append(ms)


def _turn(one: _Ready, case: Case, measure: Measure, number: int) -> dict[str, float]:
    """ms a step of each part and of the whole (`step`), means over one turn's steps."""
    device, steps = case["device"], case["steps"]
    source = _batches(case, measure, number)
    one.trainer.model.train()
    for _ in range(WARM_BATCHES if case["source"] == "loader" else 0):
        one.trainer.step(*next(source))
    timing.synchronize(device)
    whole, parts = timing.Sections(device), []
    with whole.section("step"):
        for _ in range(steps):
            sections = timing.Sections(device)
            with sections.section("data"):
                batch = next(source)
            if one.graph is not None:
                with sections.section("replay"):
                    one.graph(*batch)
            else:
                one.trainer.step(*batch, sections)
            parts.append(sections)
    timing.synchronize(device)
    times = [sections.elapsed_ms() for sections in parts]
    found = {name: sum(t[name] for t in times) / steps for name in times[0] if name != "total"}
    return found | {"step": whole.elapsed_ms()["step"] / steps}


def _batches(case: Case, measure: Measure, number: int) -> Iterator[batches.Batch]:
    """Full batches of shuffled images, as many as a turn takes."""
    data = measure.prepared(case)
    extra = WARM_BATCHES if case["source"] == "loader" else 0
    count = (case["steps"] + extra) * BATCH_SIZE
    epochs = -(-count // len(data.train))
    drawn = [batches.order(len(data.train), number, epoch) for epoch in range(epochs)]
    chosen = torch.cat(drawn)[:count]
    if case["source"] == "loader":
        return batches.loader(data, chosen, BATCH_SIZE, case["device"])
    return batches.on_device(data.train, chosen, BATCH_SIZE)


def _figures(samples: dict[str, _Samples], name: str, wrong: bool) -> dict[str, Any]:
    """Times of the step, samples of each part, and the baseline's time over this arm's."""
    own = samples[name]
    figures = summarize(own["step"])
    for part, values in own.items():
        if part != "step":
            figures[f"{part}_samples_ms"] = [round(v, 6) for v in values]
    if BASELINE in samples:
        ratio = paired_ratio(samples[BASELINE]["step"], own["step"])
        figures |= {
            "baseline": BASELINE, "speedup": ratio.value,
            "speedup_low": ratio.low, "speedup_high": ratio.high,
        }  # fmt: skip
    return {PROTOCOL + k: v for k, v in figures.items()} if wrong else figures
