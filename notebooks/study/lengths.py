"""Lengths that change: what a number of tokens costs that a rival has not met before.

Training on real text and serving see a new number of tokens at nearly every call. Each rival has a
process of its own with no compiled kernel on disk; a length is called twice in a row.
"""

import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fusedlib
from fusedlib.bench import timing
from fusedlib.reference import swiglu_mlp
from study import fresh, mlp, rivals
from study.cases import Case, grid
from study.mlp import SwiGLUProblem, draw
from study.operation import Operation
from study.rivals import Workload

EXPERIMENT = "lengths"
TIMEOUT_S = 300.0
RESERVED = 32  # times gate, which is what a rival's memory of a call fits in


def drawn(count: int, most: int) -> list[int]:
    """So many different lengths from 1 to `most`, in random order."""
    return random.Random(0).sample(range(1, most + 1), count)


def listed(
    rival_names: Sequence[str], *, lengths: int, most: int, hidden_size: int,
    intermediate_size: int, dtype: str, device: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a rival, and one more of ours, where `fusedlib.warm_up` goes before: so many different
    lengths, of at most so many tokens.
    """
    shared = {
        "experiment": EXPERIMENT, "direction": "forward+backward", "lengths": lengths, "most": most,
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "dtype": dtype,
        "device": device,
    }  # fmt: skip
    names = rivals.chosen(mlp.TASK, rival_names)
    runs = [{"provider": name, "warmed": False} for name in names]
    runs += [{"provider": "fused", "warmed": True}] * ("fused" in names)
    return grid(shared, run=runs)


def calls(case: Case) -> dict[str, Any]:
    """The figures of a case: see `in_one_process`."""
    rivals.get(mlp.TASK, case["provider"]).check_available(case["device"], case["dtype"])
    names = "hidden_size", "intermediate_size", "dtype", "device", "warmed"
    arguments = {name: case[name] for name in names}
    arguments |= {
        "rival_name": case["provider"], "tokens": drawn(case["lengths"], case["most"])
    }  # fmt: skip
    return dict(fresh.run(f"{__name__}:in_one_process", arguments, timeout_s=TIMEOUT_S))


def in_one_process(
    rival_name: str, hidden_size: int, intermediate_size: int, dtype: str, device: str,
    warmed: bool, tokens: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds of the first and the second call of each length, by the host's clock, and how
    many kernels the first one compiled (`made`). A call waits for an idle device, runs forward and
    backward, and waits again. torch holds enough memory beforehand for no rival to ask the driver
    for more. Afterwards y and all gradients are held against the truth at two lengths.

    `first_use_ms` is the very first call; `compile_s` what calls that compiled took over their
    second ones; `warm_s` what `fusedlib.warm_up` took, None without it.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rival = rivals.get(mlp.TASK, rival_name)
        problem = SwiGLUProblem(max(tokens), hidden_size, intermediate_size, dtype=dtype)
        inputs = draw(problem, device)
        rows, upstream = inputs.x.detach().clone(), inputs.dy
        workload = rivals.workload(rival, inputs)
        torch.mm(rows, rows.t())  # the library and its workspace
        rows.new_empty(RESERVED * max(tokens) * intermediate_size)  # kept by torch's allocator
        warm_s = _warm_up(hidden_size, intermediate_size, dtype, device) if warmed else None
        first, second, compiled = [], [], []
        for count in tokens:
            inputs.x.grad = None
            inputs.x.data = rows[:count].clone()
            cached = _compiled(folder)
            first.append(_call_ms(workload, upstream[:count].clone(), device))
            compiled.append(_compiled(folder) - cached)
            second.append(_call_ms(workload, upstream[:count].clone(), device))
        binaries = _compiled(folder)
        for count in (tokens[0], max(tokens)):
            inputs.x.data = rows[:count].clone()
            right = Operation(mlp.TASK, replace(inputs, dy=upstream[:count]), swiglu_mlp)
            right.figures_of(rival, workload)
    over = [a - b for a, b, new in zip(first, second, compiled, strict=True) if new]
    return {
        "first_ms": first, "second_ms": second, "made": compiled,
        "first_use_ms": first[0], "compile_s": sum(over) / 1e3, "binaries": binaries,
        "warm_s": warm_s, "path": workload.path, **rival.facts(),
    }  # fmt: skip


def _call_ms(workload: Workload, dy: torch.Tensor, device: str) -> float:
    workload.reset()
    timing.synchronize(device)
    began = time.perf_counter()
    workload.forward().backward(dy)
    timing.synchronize(device)
    return (time.perf_counter() - began) * 1e3


def _compiled(folder: str) -> int:
    """Kernels for an NVIDIA GPU in a cache of Triton's, torch.compile's among them."""
    return sum(1 for _ in Path(folder).rglob("*.cubin"))


def _warm_up(hidden_size: int, intermediate_size: int, dtype: str, device: str) -> float:
    """Seconds that it takes for a layer of these sizes."""
    layer = fusedlib.SwiGLUMLP(
        hidden_size, intermediate_size, device=device, dtype=getattr(torch, dtype)
    )
    return fusedlib.warm_up(layer, progress=False).seconds
