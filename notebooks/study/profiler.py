"""torch's profiler over a block of code, without the greetings that its library prints."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusedlib.bench import timing


@contextmanager
def profiling(device: torch.device | str, **options: Any) -> Iterator[torch.profiler.profile]:
    """Profile the host, and a CUDA device, while inside; wait for the device before the end."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(activities=activities, acc_events=True, **options)
    with _no_standard_error():
        profile.start()
    try:
        yield profile
        timing.synchronize(device)
    finally:
        with _no_standard_error():
            profile.stop()


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """The profiler's library writes there when it begins and when it ends, each time."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
