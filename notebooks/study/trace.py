"""A profile as `torch.profiler` exports it, read into pieces of work that know where they belong.

The file is the Chrome trace format (also Perfetto's): a list of events with times in µs. On a GPU a
piece is a kernel, copy or fill; its launch on the host, found by the correlation id that both bear,
says in which range it was issued. On a CPU a piece is an operator without the operators in it.
"""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from study.files import write_whole
from study.profiler import profiling

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of work.

    Attributes:
        us: its own time.
        start: when it began, on the device or the host, in µs.
        issued: when the host issued it, in µs.
        thread: the host's thread that issued it.
    """

    name: str
    us: float
    start: float
    end: float
    issued: float
    thread: Any


class Event(NamedTuple):
    """What a thread of the host was in from start to end, in µs; or a piece that it issued."""

    name: str
    start: float
    end: float
    thread: Any
    piece: Piece | None = None


@dataclass(frozen=True)
class Trace:
    """What ran: pieces by the time they were issued, and the host's ranges.

    `unlinked` pieces have no launch in the trace; they count as issued when they began.
    """

    pieces: list[Piece]
    ranges: list[Event]
    on_device: bool
    unlinked: int = 0

    def last(self, name: str) -> Event | None:
        """The last range of this name."""
        return max((r for r in self.ranges if r.name == name), key=lambda r: r.start, default=None)

    def during(self, name: str) -> list[Piece]:
        """The pieces issued in the last range of this name, by whatever thread: the backward pass
        has its own."""
        around = self.last(name)
        if around is None:
            return []
        return [p for p in self.pieces if around.start <= p.issued < around.end]


def record(
    device: torch.device | str, work: Callable[[], object], keep: Path | None = None
) -> Trace:
    """The trace of what `work` starts; `keep` is where to leave it for a viewer, compressed.

    Raises:
        OSError: the trace cannot be written.
    """
    with profiling(device) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        document = path.read_bytes()
    if keep is not None:
        write_whole(keep, gzip.compress(document, 5))
    return parse(json.loads(document)["traceEvents"])


def parse(events: Sequence[dict[str, Any]]) -> Trace:
    """The pieces and ranges of a trace's events, in any order."""
    whole = [e for e in events if e.get("ph") == "X"]
    ranges = [
        _event(e) for e in whole if e.get("cat") == "user_annotation" and "#" not in e["name"]
    ]
    device = [e for e in whole if e.get("cat") in DEVICE]
    if not device:
        operators = _own(_event(e) for e in whole if e.get("cat") == "cpu_op")
        return Trace(sorted(operators, key=lambda p: p.issued), ranges, on_device=False)
    launches = {
        e["args"]["correlation"]: e
        for e in whole if e.get("cat") in LAUNCH and "correlation" in e.get("args", {})
    }  # fmt: skip
    pieces = []
    unlinked = 0
    for e in device:
        launch = launches.get(e["args"].get("correlation"))
        unlinked += launch is None
        issued = (float(launch["ts"]), launch["tid"]) if launch else (float(e["ts"]), None)
        pieces.append(Piece(e["name"], e["dur"], e["ts"], e["ts"] + e["dur"], *issued))
    pieces.sort(key=lambda p: p.issued)
    return Trace(pieces, ranges, on_device=True, unlinked=unlinked)


def _event(e: dict[str, Any]) -> Event:
    return Event(e["name"], float(e["ts"]), float(e["ts"] + e.get("dur", 0)), e["tid"])


def _own(operators: Iterable[Event]) -> list[Piece]:
    """Each operator's time less that of the operators it called."""
    inner: dict[int, float] = {}  # by identity: two events may look alike
    listed = []
    for event, around in nested(operators):
        listed.append(event)
        if around is not None:
            within = min(event.end, around.end) - event.start
            inner[id(around)] = inner.get(id(around), 0.0) + within
    own = [max(e.end - e.start - inner.get(id(e), 0.0), 0.0) for e in listed]
    return [
        Piece(e.name, us, e.start, e.end, e.start, e.thread)
        for e, us in zip(listed, own, strict=True)
    ]


def nested(events: Iterable[Event]) -> Iterator[tuple[Event, Event | None]]:
    """Each event with the innermost one around it in its thread, by thread and start."""
    around: list[Event] = []
    for event in sorted(events, key=lambda e: (str(e.thread), e.start, -e.end)):
        while around and (around[-1].end <= event.start or around[-1].thread != event.thread):
            around.pop()
        yield event, around[-1] if around else None
        around.append(event)


def innermost(
    pieces: Iterable[Piece], ranges: Iterable[Event]
) -> Iterator[tuple[Piece, str | None]]:
    """Each piece with the innermost range that its thread had open when it was issued."""
    issued = [Event(p.name, p.issued, p.issued, p.thread, p) for p in pieces]
    for event, around in nested([*ranges, *issued]):
        if event.piece is not None:
            yield event.piece, around.name if around else None
