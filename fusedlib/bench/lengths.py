"""Lengths that change: what a number of tokens costs that a rival has not met before.

Training on real text and serving see a new number of tokens at nearly every call. Each rival has a
process of its own with no compiled kernel on disk; a length is called twice in a row.
"""

import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedlib.bench import code, fresh, rivals, swiglu, timing
from fusedlib.bench.problems import SwiGLUProblem, draw

TIMEOUT_S = 300.0


def drawn(count: int, most: int, seed: int = 0) -> list[int]:
    """So many different lengths from 1 to `most`, in random order.

    Raises:
        ValueError: there are not so many.
    """
    return random.Random(seed).sample(range(1, most + 1), count)


def cases(
    names: Sequence[str], *, lengths: int, most: int, hidden_size: int, intermediate_size: int,
    dtype: str, device: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a rival; those that compile anew for every length, as dynamic=False does, left out."""
    shared = {
        "experiment": "lengths", "direction": "forward+backward", "lengths": lengths, "most": most,
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "dtype": dtype,
        "device": device,
    }  # fmt: skip
    return [shared | {"provider": name} for name in names]


def study_code() -> code.Code:
    """Fingerprints of such rows."""
    return code.Code((fresh, timing.synchronize), (drawn, in_one_process))


def measure(case: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a case: see `in_one_process`."""
    names = "provider", "hidden_size", "intermediate_size", "dtype", "device"
    arguments = {name: case[name] for name in names}
    arguments["tokens"] = drawn(case["lengths"], case["most"])
    target = f"{__name__}:in_one_process"
    return dict(fresh.run(target, arguments, timeout_s=TIMEOUT_S))


def in_one_process(
    provider: str, hidden_size: int, intermediate_size: int, dtype: str, device: str,
    tokens: Sequence[int], start: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds of the first and the second call of each length, by the host's clock.

    Returns:
        `tokens`, `first_ms` and `second_ms` in the order of the calls. A call waits for an idle
        device, runs forward and backward, and waits again. The weights stay where they are.

    Raises:
        Unavailable: the rival does not run here.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        sizes = hidden_size, intermediate_size
        inputs = draw(SwiGLUProblem(max(tokens), *sizes, dtype=dtype), device)
        rows, upstream = inputs.x.detach().clone(), inputs.dy
        rival = rivals.get(swiglu.TASK, provider)
        rival.check_available(device, dtype)
        workload = rival.build(inputs)
        torch.mm(rows, rows.t())  # the library and its workspace

        def milliseconds(count: int) -> float:
            workload.reset()
            dy = upstream[:count].clone()
            timing.synchronize(device)
            began = time.perf_counter()
            workload.forward().backward(dy)
            timing.synchronize(device)
            return (time.perf_counter() - began) * 1e3

        first, second = [], []
        for count in tokens:
            inputs.x.grad = None
            inputs.x.data = rows[:count].clone()
            first.append(milliseconds(count))
            second.append(milliseconds(count))
    return {"tokens": list(tokens), "first_ms": first, "second_ms": second}


def over_known(figures: Mapping[str, Sequence[float]]) -> list[float]:
    """Milliseconds that each new length cost more than its second call."""
    return [a - b for a, b in zip(figures["first_ms"], figures["second_ms"], strict=True)]
