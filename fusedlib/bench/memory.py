"""Study 04's cases and how each is measured: what an MLP keeps, what a step holds, deep stacks."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fusedlib import functional
from fusedlib.bench import (
    allocations,
    check,
    ledger,
    machine,
    providers,
    results,
    sources,
    stacks,
)
from fusedlib.bench.allocations import Trace
from fusedlib.bench.ledger import CATEGORIES, MIB
from fusedlib.bench.problems import SwiGLUProblem, draw
from fusedlib.bench.providers import Workload

STUDY = "04_memory"
# Up to this many tokens · hidden · intermediate a rival is checked at the very shape, else at GATE.
SMALL = 2**26
GATE = (192, 256, 704)
# An attempt costs a second; only what is counted at more than twice the memory is not tried.
HOPELESS = 2.0
# Share of the peak that the events may be off before they are not taken for its parts.
TOLD = 0.005
_FIELDS = ("tokens", "hidden_size", "intermediate_size", "dtype")


def code() -> str:
    """Fingerprint of all that measures this study and of the kernels, whose buffers it measures."""
    from fusedlib.bench import memory

    measuring = (memory, allocations, stacks, providers, functional)
    return results.code_fingerprint(*measuring, *sources.kernel_modules())


def shape(text: str, dtype: str) -> SwiGLUProblem:
    """A problem of "tokens·hidden·intermediate".

    Raises:
        ValueError: not three whole numbers from 1.
    """
    parts = text.split("·")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"a shape is tokens·hidden·intermediate such as 64·128·128, got {text!r}")
    tokens, hidden, inner = map(int, parts)
    return SwiGLUProblem(tokens, hidden, inner, dtype)


def square(tokens: int, width: int) -> SwiGLUProblem:
    """A problem as published: hidden and intermediate size alike, fp32."""
    return SwiGLUProblem(tokens, width, width, "float32")


def mlp_cases(
    problems: Iterable[SwiGLUProblem], rivals: Sequence[str], device: str
) -> list[dict[str, Any]]:
    """For each problem and rival what autograd keeps ("saved") and what one step holds ("step").

    Raises:
        ValueError: a rival whose memory nobody has counted.
    """
    for rival in rivals:
        ledger.of(rival)
    where = machine.device_type() if device == "auto" else device
    unique = dict.fromkeys(tuple(getattr(p, f) for f in _FIELDS) for p in problems)
    return [
        {
            "experiment": experiment, "provider": rival,
            **dict(zip(_FIELDS, fields, strict=True)), "device": where,
        }
        for fields in unique for rival in rivals for experiment in ("saved", "step")
    ]  # fmt: skip


def stack_cases(
    problem: SwiGLUProblem, layers: Sequence[int], rivals: Sequence[str], device: str
) -> list[dict[str, Any]]:
    """Stacks of that many layers, without gradients from an earlier pass and with them held.

    Raises:
        ValueError: a number of layers below 1, or a rival that has no module.
    """
    if least := [n for n in layers if n < 1]:
        raise ValueError(f"a stack has at least one layer, got {least[0]}")
    stacks.check_names(rivals)
    where = machine.device_type() if device == "auto" else device
    shared = {name: getattr(problem, name) for name in _FIELDS} | {"device": where}
    return [
        {"experiment": "stack", "provider": rival, "layers": n, "held": held, **shared}
        for n in layers for rival in rivals for held in (False, True)
    ]  # fmt: skip


def problem_of(case: Mapping[str, Any]) -> SwiGLUProblem:
    """The problem that a case or a row speaks of."""
    tokens, hidden, inner = (int(case[name]) for name in _FIELDS[:3])
    return SwiGLUProblem(tokens, hidden, inner, str(case["dtype"]))


def label(case: Mapping[str, Any]) -> str:
    """A case in a few words."""
    sizes = "·".join(str(case[name]) for name in _FIELDS if name != "dtype")
    layers = f" × {case['layers']}" if case["experiment"] == "stack" else ""
    return f"{case['experiment']} {case['provider']} {sizes}{layers}"


def measure(case: Mapping[str, Any]) -> dict[str, Any]:
    """The row's figures, in MiB.

    Raises:
        Unavailable: the rival or the figure does not exist on this device.
    """
    name, problem, device = case["provider"], problem_of(case), case["device"]
    rival = providers.get(name)
    rival.check_available(device, problem.dtype)
    if reason := _hopeless(case):
        return {"status": "oom", "reason": reason}
    _clear(device)
    if case["experiment"] == "stack":
        return _stack(case)
    small = problem.tokens * problem.hidden_size * problem.intermediate_size <= SMALL
    gate = problem if small else SwiGLUProblem(*GATE, problem.dtype)
    figures: dict[str, Any] = {"version": rival.version(), "path": _path(name, problem, device)}
    if wrong := _misses(name, gate, device):
        return figures | {"status": "wrong", "reason": wrong}
    idle = _allocated(device)
    inputs = draw(problem, device)
    work, dy = rival.set_up(inputs), inputs.dy
    if case["experiment"] == "saved":
        return figures | _saved(work)
    return figures | {"idle_mib": idle / MIB} | _step(work, dy, device)


def _path(name: str, problem: SwiGLUProblem, device: str) -> str:
    """Whether fused runs its kernels here; everybody else is what the name says."""
    probe = torch.empty(0, dtype=problem.torch_dtype, device=device)
    return "plain" if name.startswith("fused") and not functional.fused(probe) else "kernels"


def _hopeless(case: Mapping[str, Any]) -> str | None:
    total_gib = machine.describe().device_memory_gib if case["device"] == "cuda" else None
    total_gib = total_gib or machine.describe().memory_gib
    if total_gib is None or not (need := counted_mib(case)):
        return None
    if need / 1024 <= HOPELESS * total_gib:
        return None
    return (
        f"not tried: {need / 1024:.0f} GiB counted, more than {HOPELESS:g} times the "
        f"{total_gib:.0f} GiB there are"
    )


def counted_mib(case: Mapping[str, Any]) -> float:
    """All that a case needs at its peak by the ledger, weights, x and dy included, in MiB."""
    problem = problem_of(case)
    book = ledger.of(case["provider"], case.get("path"))
    weights, ends = (ledger.W * 3).mib(problem), (ledger.D * 2).mib(problem)
    if case["experiment"] != "stack":
        return weights + ends + ledger.total(book.peak(problem)[1]).mib(problem)
    held = bool(case["held"])
    layers = int(case["layers"])
    over = ledger.stack_peak_mib(book, layers, problem, held=held)
    return ends + (2 if held else 1) * layers * weights + sum(over.values())


@cache
def _misses(name: str, problem: SwiGLUProblem, device: str) -> str:
    """What the float64 gate rejects: only what is right, with every gradient, is measured."""
    inputs = draw(problem, device)
    true = check.truth(inputs)
    usual = check.errors(check.results_of(providers.get("eager").set_up(inputs), inputs.dy), true)
    work = providers.get(name).set_up(inputs)
    try:
        found = check.errors(check.results_of(work, inputs.dy), true)
    except ValueError as error:  # a gradient did not arrive
        return str(error)
    return "; ".join(check.misses(found, usual, problem.torch_dtype))


def _saved(work: Workload) -> dict[str, Any]:
    """What autograd keeps, storage by storage; the operands themselves left out.

    `kept` names each storage by its MiB, and the shape and dtype of the first tensor that uses it.
    """
    operands = {leaf.untyped_storage().data_ptr() for leaf in work.leaves.values()}
    kept: dict[int, tuple[int, str]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in operands and storage.nbytes():
            text = f"{'·'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
            kept.setdefault(storage.data_ptr(), (storage.nbytes(), text))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = work.forward()
    del y
    return {
        "saved_mib": sum(nbytes for nbytes, _ in kept.values()) / MIB,
        "kept": sorted(text for _, text in kept.values()),
    }


def _step(work: Workload, dy: Tensor, device: str) -> dict[str, Any]:
    """Forward and backward once, every allocation seen, after a pass that is not measured."""
    operands = sum(leaf.untyped_storage().nbytes() for leaf in work.leaves.values())
    _pass(work.forward, dy)
    work.reset()
    base = _allocated(device)
    trace = _traced(work.forward, dy, device)
    figures = _moments(trace, device, base)
    work.reset()
    if figures["complete"]:
        figures |= {f"live_{name}_mib": live for name, live in trace.live_mib().items()}
    return figures | {
        "operands_mib": operands / MIB,
        "dy_mib": dy.untyped_storage().nbytes() / MIB,
        "forward_events": trace.forward_events,
    }


def _pass(forward: Callable[[], Tensor], dy: Tensor) -> None:
    forward().backward(dy)


def _traced(forward: Callable[[], Tensor], dy: Tensor, device: str) -> Trace:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return allocations.trace(forward, dy)


def _moments(trace: Trace, device: str, base: int) -> dict[str, Any]:
    """MiB over base after the forward, at the peak with its parts, and in gradients at the end.

    On CUDA the allocator's own counts are the figures, and the events give the parts. Where their
    peak is not the allocator's (`complete` False: releases inside torch's checkpoint are not told
    to the profiler), there are no parts.
    """
    live = trace.live_mib()
    held = [sum(parts) for parts in zip(*(live[name] for name in CATEGORIES), strict=True)]
    forward = trace.forward_events - 1
    at = max(range(len(held)), key=lambda event: held[event])
    peak, after = held[at], held[forward]
    if device == "cuda" and trace.forward_bytes is not None:
        peak = (torch.cuda.max_memory_allocated() - base) / MIB
        after = (trace.forward_bytes - base) / MIB
    output = sum(b.nbytes for b, name in trace.blocks if name == "output") / MIB
    complete = abs(held[at] - peak) <= TOLD * peak
    figures = {
        "after_forward_mib": after, "output_mib": output, "saved_mib": after - output,
        "peak_mib": peak, "events_peak_mib": held[at], "complete": complete,
    }  # fmt: skip
    if complete:
        figures["gradients_mib"] = live["gradients"][-1]
        figures |= {f"peak_{name}_mib": live[name][at] for name in CATEGORIES}
    return figures


def _stack(case: Mapping[str, Any]) -> dict[str, Any]:
    problem, device = problem_of(case), case["device"]
    name, layers, held = case["provider"], int(case["layers"]), bool(case["held"])
    with torch.device(device):
        modules = stacks.build(name, problem, layers)
    x = torch.randn(problem.tokens, problem.hidden_size, device=device).to(problem.torch_dtype)
    x, dy = x.requires_grad_(), torch.ones_like(x)
    _pass(partial(modules[0], x), dy)  # libraries, kernels and workspaces are there from now on
    if held:
        _pass(partial(modules, x), dy)
    else:
        modules.zero_grad(set_to_none=True)
    x.grad = None
    base = _allocated(device)
    figures = _moments(_traced(partial(modules, x), dy, device), device, base)
    weights = sum(w.untyped_storage().nbytes() for w in modules.parameters()) / MIB
    ends = 2 * dy.untyped_storage().nbytes() / MIB
    figures["total_peak_mib"] = (2 if held else 1) * weights + ends + figures["peak_mib"]
    return figures | {"path": _path(name, problem, device)}


def _clear(device: str) -> None:
    """Leave nothing of the case before, also when that one ended in an exception."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0
