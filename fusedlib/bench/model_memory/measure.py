"""Measures study 09's cases: a watched pass, and a plan of checkpointing beside no plan at all."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusedlib import paths
from fusedlib.bench import timing
from fusedlib.bench.model_memory import saved, timeline
from fusedlib.bench.model_memory.births import Births
from fusedlib.bench.model_memory.cases import Case, hopeless, label, plan_of
from fusedlib.bench.model_memory.history import History, Watch, watching
from fusedlib.bench.model_memory.program import MODES, WHOLE, Program, nbytes
from fusedlib.bench.model_memory.timeline import CATEGORIES, MIB, Known
from fusedlib.bench.results import Unavailable
from fusedlib.bench.sweep import is_out_of_memory
from fusedlib.models.checkpointed import Plan

POINTS = 400
LARGEST = 8
STEPS = 2
# What a forward leaves is listed without what was there before it.
_BEFORE = ("weights", "gradients", "optimizer")


class Measure:
    """Measures a case; one model at a time stays for the next case of checkpointing."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Program] = {}
        self._too_large: set[tuple[Any, ...]] = set()
        self._saved: set[tuple[str, str]] = set()

    def __call__(self, case: Case) -> dict[str, Any]:
        """The row's figures, in MiB and ms.

        Raises:
            Unavailable: this device's allocator tells nothing.
        """
        if case["device"] not in ("cuda", "cpu"):
            raise Unavailable(
                f"the allocator of {case['device']} keeps neither a history nor a peak"
            )
        if reason := hopeless(case):
            return {"status": "oom (predicted)", "reason": reason}
        with _one_thread():
            if case["experiment"] == "checkpoint":
                return self._checkpoint(case)
            self._kept.clear()
            _clear(case["device"])
            return self._watched(case)

    def _watched(self, case: Case) -> dict[str, Any]:
        """A pass. A snapshot takes up to 80 MB: the first of each mode and precision is kept."""
        kind = (case["mode"], case["precision"])
        figures = _watched(case, None if kind in self._saved else snapshot_path(case))
        self._saved.add(kind)
        return figures

    # --- checkpointing ---------------------------------------------------------------------------

    def _checkpoint(self, case: Case) -> dict[str, Any]:
        program, key = self._program(case)
        plan = plan_of(case)
        both = {"plan": plan, "none": WHOLE}
        if plan == WHOLE or not self._fits(program, key):
            del both["none"]
        figures = _held(program, plan)
        times = timing.interleaved(  # all in it have just run once: no round to warm them up
            {name: lambda one=one: _pass(program, one) for name, one in both.items()},  # type: ignore[misc]
            device=program.device, warmup=0, repetitions=case["repetitions"], flush_l2=False,
        )  # fmt: skip
        figures |= times["plan"].figures()
        if "none" in times:
            ratio = times["plan"].ratio_to(times["none"])
            figures |= {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
        return figures | {"num_layers": program.shape.num_layers}

    def _program(self, case: Case) -> tuple[Program, tuple[Any, ...]]:
        names = ("model", "context_length", "batch_size", "attention", "precision", "device")
        key = tuple(case[name] for name in names)
        if key not in self._kept:
            self._kept.clear()
            _clear(case["device"])
            program = Program(**{name: case[name] for name in names})
            for weight in program.weights():  # held, as in gradient accumulation: no part of this
                weight.grad = torch.zeros_like(weight)
            _pass(program, Plan("segments", 1))  # libraries and workspaces are there from now on
            self._kept[key] = program
        _clear(case["device"], workspaces=False)
        return self._kept[key], key

    def _fits(self, program: Program, key: tuple[Any, ...]) -> bool:
        """Whether a pass without any checkpoint fits, which warms it up; not tried again if not."""
        if key in self._too_large:
            return False
        try:
            _pass(program, WHOLE)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._too_large.add(key)
        if key in self._too_large:
            _clear(program.device.type, workspaces=False)
        return key not in self._too_large


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a CPU the small models wait longer for a second thread than it helps; a GPU needs none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pass(program: Program, plan: Plan) -> None:
    program.forward(plan).backward()


def _held(program: Program, plan: Plan) -> dict[str, Any]:
    """MiB over base, weights and gradients, at the end of the forward and at the peak, and the
    largest blocks there. On CUDA the peak is the allocator's own count.
    """
    device = program.device.type
    base = _statistics(device)
    with watching(program.device) as watch:
        loss = program.forward(plan)
        watch.mark("forward")
        loss.backward()
        peaks = _statistics(device)
    history = watch.history
    found = timeline.blocks(history)
    total = _total(timeline.live(found, len(history.changes)))
    at, forward = int(np.argmax(total)), history.moments["forward"]
    figures = {
        "kept_mib": int(total[forward - 1]) / MIB, "events_peak_mib": int(total[at]) / MIB,
        "peak_mib": int(total[at]) / MIB, "peak_in": "forward" if at < forward else "backward",
    }  # fmt: skip
    largest = _listed(timeline.largest(found, at + 1, LARGEST, ()))
    del largest["largest_category"]  # nothing was named here
    counters = _witness(base, peaks)
    counters.pop("reserved_peak_mib", None)  # of the pass without checkpoints just before
    return figures | counters | largest


def _listed(groups: list[timeline.Group]) -> dict[str, list[Any]]:
    """Groups of blocks as a row's lists."""
    return {
        "largest_count": [g.count for g in groups], "largest_bytes": [g.nbytes for g in groups],
        "largest_category": [g.category for g in groups],
        "largest_where": [g.where for g in groups],
    }  # fmt: skip


# --- watched passes ----------------------------------------------------------------------------


def _watched(case: Case, kept_at: Path | None) -> dict[str, Any]:
    base = _statistics(case["device"])
    known = Known(weights={}, gradients={}, optimizer={}, casts={}, where={}, forwards=[])
    with watching(torch.device(case["device"])) as watch:
        program = _run(case, watch, known)
        peaks = _statistics(case["device"])
    figures = _figures(watch.history, known) | _witness(base, peaks)
    if kept_at and case["device"] == "cuda":
        figures |= {"snapshot": kept_at.name, "snapshot_mib": watch.save(kept_at) / MIB}
    for name in ("weights", "gradients", "state"):
        figures[f"{name}_bytes"] = nbytes(getattr(program, name)())
    if case["mode"] == "forward":
        found = saved.saved_bytes(program)
        figures |= {f"saved_{part.replace(' ', '_')}_bytes": n for part, n in found.items()}
    return figures


def snapshot_path(case: Mapping[str, Any]) -> Path:
    """Where CUDA's snapshot of a case lies, under the products."""
    name = label(case).replace(" ", "-").replace(",", "").replace("=", "")
    return paths.build_dir() / "snapshots" / f"{name}.pickle"


def _run(case: Case, watch: Watch, known: Known) -> Program:
    names = ("model", "context_length", "batch_size", "attention", "precision", "device")
    program = Program(**{n: case[n] for n in names}, optimizer=case["mode"] == "step")
    watch.mark("built")
    known.weights = {"built": _addresses(program.weights())}
    for number in range(1, STEPS + 1 if case["mode"] == "step" else 2):
        _one(case["mode"], program, watch, known, number)
    return program


def _one(mode: str, program: Program, watch: Watch, known: Known, number: int) -> None:
    """One pass; the casts of autocast's cache are there until its context ends."""
    begin, forward, backward, step = (
        f"{name} {number}" for name in ("begin", "forward", "backward", "step")
    )
    program.model.zero_grad(set_to_none=True)
    watch.mark(begin)
    births = Births(program.weights())
    gradients = torch.no_grad() if mode == MODES[0] else nullcontext()
    with gradients, program.precise():
        with births:
            loss = program.forward()
        watch.mark(forward)
    known.casts[forward], known.where[forward] = births.casts, births.where  # type: ignore[index]
    known.forwards = [*known.forwards, (begin, forward)]
    if program.optimizer is None:
        return
    loss.backward()
    watch.mark(backward)
    known.gradients[backward] = _addresses(program.gradients())  # type: ignore[index]
    program.optimizer.step()
    watch.mark(step)
    known.optimizer[step] = _addresses(program.state())  # type: ignore[index]


def _addresses(tensors: list[Any]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def _figures(history: History, known: Known) -> dict[str, Any]:
    """The timeline, its peak, the moments, and what the last forward left."""
    found = timeline.classify(history, known)
    held = timeline.live(found, len(history.changes))
    total = _total(held)
    moments = history.moments
    at = int(np.argmax(total))
    points = timeline.thinned(total, [m - 1 for m in moments.values()], POINTS)
    forward = known.forwards[-1][1]
    groups = timeline.largest(found, moments[forward], LARGEST, _BEFORE)
    figures: dict[str, Any] = {
        "events": len(total), "events_peak_mib": int(total[at]) / MIB, "peak_at": at,
        "moment_names": list(moments), "moment_at": list(moments.values()),
        "live_at": points.tolist(), **_listed(groups),
    }  # fmt: skip
    for name in CATEGORIES:
        figures[f"live_{name}_mib"] = [round(float(v), 4) for v in held[name][points] / MIB]
        figures[f"peak_{name}_mib"] = int(held[name][at]) / MIB
        figures[f"forward_{name}_mib"] = int(held[name][moments[forward] - 1]) / MIB
    return figures | _sections(total, moments) | _one_size(found, moments[forward])


def _total(held: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.sum(list(held.values()), axis=0)


def _sections(total: np.ndarray, moments: Mapping[str, int]) -> dict[str, float]:
    """Peak of each section of the last pass, MiB."""
    number = STEPS if f"begin {STEPS}" in moments else 1
    names = [n for n in ("begin", "forward", "backward", "step") if f"{n} {number}" in moments]
    edges = [moments[f"{name} {number}"] for name in names]
    return {
        f"peak_in_{name}_mib": int(total[low - 1 : high].max()) / MIB
        for name, low, high in zip(names[1:], edges[:-1], edges[1:], strict=True)
    }


def _one_size(found: list[timeline.Block], at: int) -> dict[str, Any]:
    """Sizes of the blocks that the forward kept, and how many there are of each, the most first."""
    sizes = [b.nbytes for b in found if b.category == "activations" and b.lives(at)]
    values, counts = np.unique(np.array(sizes, np.int64), return_counts=True)
    order = np.argsort(-counts * values, kind="stable")[:LARGEST]
    return {"kept_sizes_bytes": values[order].tolist(), "kept_sizes_count": counts[order].tolist()}


# --- the allocator's own counts ------------------------------------------------------------------


def _statistics(device: str) -> dict[str, int]:
    """CUDA's counters; peaks begin anew when read. Nothing elsewhere."""
    if device != "cuda":
        return {}
    torch.cuda.synchronize()
    counters = torch.cuda.memory_stats()
    names = ("allocated_bytes", "requested_bytes", "reserved_bytes")
    found = {
        f"{n} {when}": counters[f"{n}.all.{when}"] for n in names for when in ("current", "peak")
    }
    torch.cuda.reset_peak_memory_stats()
    return found


def _witness(base: dict[str, int], peaks: dict[str, int]) -> dict[str, float]:
    """Peaks that CUDA's allocator counted itself: handed out, asked for, and held in reserve."""
    if not peaks:
        return {}

    def over(name: str) -> float:
        return (peaks[f"{name} peak"] - base[f"{name} current"]) / MIB

    return {
        "peak_mib": over("allocated_bytes"),
        "requested_peak_mib": over("requested_bytes"),
        "reserved_peak_mib": peaks["reserved_bytes peak"] / MIB,
        "idle_mib": base["allocated_bytes current"] / MIB,
    }


def _clear(device: str, *, workspaces: bool = True) -> None:
    """Leave nothing of the case before on a GPU, also when that one ended in an exception.

    But for cuBLAS's workspaces, when the same model runs on.
    """
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
