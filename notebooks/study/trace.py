"""A profile of a GPU as `torch.profiler` exports it: what ran, and when the host issued it.

The file is the Chrome trace format: a list of events with times in µs. The launch of a kernel, copy
or fill on the host, found by the correlation id that both bear, says in which range it was issued.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from study.profiler import profiling

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


class Piece(NamedTuple):
    """A kernel, copy or fill: when it ran on the device and when the host issued it, in µs."""

    name: str
    start: float
    end: float
    issued: float

    @property
    def us(self) -> float:
        """How long it ran."""
        return self.end - self.start


class Range(NamedTuple):
    """A named stretch of the host's time, in µs."""

    name: str
    start: float
    end: float


class Trace(NamedTuple):
    """What ran, by the time it was issued, and the host's ranges."""

    pieces: list[Piece]
    ranges: list[Range]

    def during(self, name: str, *, every: bool = False) -> list[Piece]:
        """The pieces issued in the last range of this name, or in every one, by whatever thread:
        the backward pass has its own."""
        named = sorted((r for r in self.ranges if r.name == name), key=lambda r: r.start)
        chosen = named if every else named[-1:]
        return [p for p in self.pieces if any(r.start <= p.issued < r.end for r in chosen)]


def record(device: torch.device | str, work: Callable[[], object]) -> Trace:
    """The trace of what `work` starts on a CUDA device."""
    with profiling(device) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return parse(json.loads(path.read_bytes())["traceEvents"])


def parse(events: Sequence[dict[str, Any]]) -> Trace:
    """The pieces and ranges of a trace's events, in any order.

    A piece that has no launch in the trace counts as issued when it began.
    """
    whole = [e for e in events if e.get("ph") == "X"]
    launched = {
        e["args"]["correlation"]: float(e["ts"])
        for e in whole if e.get("cat") in LAUNCH and "correlation" in e.get("args", {})
    }  # fmt: skip
    pieces, ranges = [], []
    for e in whole:
        span = e["name"], float(e["ts"]), float(e["ts"] + e.get("dur", 0))
        if e.get("cat") in DEVICE:
            pieces.append(Piece(*span, launched.get(e["args"].get("correlation"), span[1])))
        elif e.get("cat") == "user_annotation":
            ranges.append(Range(*span))
    return Trace(sorted(pieces, key=lambda p: p.issued), ranges)
