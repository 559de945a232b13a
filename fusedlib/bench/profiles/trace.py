"""A profile as `torch.profiler` exports it, read into pieces of work that know where they belong.

The file is the Chrome trace format (also Perfetto's): a list of events with times in µs. On a GPU a
piece is a kernel, copy or fill; its launch on the host, found by the correlation id that both bear,
says in which range it was issued. On a CPU a piece is an operator without the operators in it.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


class Event(NamedTuple):
    """An event of one thread; times in µs."""

    name: str
    start: float
    end: float
    thread: Any


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of work.

    Attributes:
        name: of the kernel or operator.
        us: its own time.
        start: when it began, on the device or the host, in µs.
        end: when it ended, in µs.
        issued: when the host issued it, in µs.
        thread: the host's thread that issued it.
    """

    name: str
    us: float
    start: float
    end: float
    issued: float
    thread: Any


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

    def during(self, range_: Event) -> list[Piece]:
        """The pieces issued in a range, by whatever thread: backward has one of its own."""
        return [p for p in self.pieces if range_.start <= p.issued < range_.end]


def events_of(document: bytes) -> list[dict[str, Any]]:
    """The events of a trace, a JSON document.

    Raises:
        ValueError: it is no trace.
    """
    content = json.loads(document)
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError("this is no Chrome trace: it has no list `traceEvents`")
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def read(document: bytes) -> Trace:
    """Read a trace, a JSON document.

    Raises:
        ValueError: it is no trace.
    """
    return parse(events_of(document))


def parse(events: Sequence[dict[str, Any]]) -> Trace:
    """The pieces and ranges of a trace's events, in any order."""
    whole = [e for e in events if e.get("ph") == "X"]
    ranges = [
        _event(e) for e in whole if e.get("cat") == "user_annotation" and "#" not in e["name"]
    ]
    device = [e for e in whole if e.get("cat") in DEVICE]
    if not device:
        operators = [_event(e) for e in whole if e.get("cat") == "cpu_op"]
        return Trace(sorted(_own(operators), key=lambda p: p.issued), ranges, on_device=False)
    launches = {e["args"]["correlation"]: e for e in whole if e.get("cat") in LAUNCH
                and "correlation" in e.get("args", {})}  # fmt: skip
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
    inner: dict[int, float] = {}
    found = []
    open_: list[tuple[int, Event]] = []
    for at, event in enumerate(sorted(operators, key=lambda e: (str(e.thread), e.start, -e.end))):
        while open_ and (open_[-1][1].end <= event.start or open_[-1][1].thread != event.thread):
            open_.pop()
        if open_:
            parent, around = open_[-1]
            inner[parent] = inner.get(parent, 0.0) + min(event.end, around.end) - event.start
        open_.append((at, event))
        found.append((at, event))
    return [
        Piece(e.name, max(e.end - e.start - inner.get(at, 0.0), 0.0), e.start, e.end, e.start,
              e.thread)
        for at, e in found
    ]  # fmt: skip


def innermost(pieces: Iterable[Piece], ranges: Iterable[Event]) -> list[tuple[Piece, str | None]]:
    """Each piece with the innermost range that its thread had open when it was issued."""
    by_thread: dict[Any, list[Event]] = {}
    for event in sorted(ranges, key=lambda e: (e.start, -e.end)):
        by_thread.setdefault(event.thread, []).append(event)
    steps = {thread: _changes(events) for thread, events in by_thread.items()}
    found = []
    for piece in pieces:
        times, names = steps.get(piece.thread, ([], []))
        at = bisect_right(times, piece.issued) - 1
        found.append((piece, names[at] if at >= 0 else None))
    return found


def _changes(events: Sequence[Event]) -> tuple[list[float], list[str | None]]:
    """When the innermost range of a thread changes, and to which; `events` outer before inner."""
    times: list[float] = []
    names: list[str | None] = []

    def change(time: float) -> None:
        times.append(time)
        names.append(open_[-1].name if open_ else None)

    open_: list[Event] = []
    for event in events:
        while open_ and open_[-1].end <= event.start:
            ended = open_.pop().end
            change(ended)
        open_.append(event)
        change(event.start)
    while open_:
        ended = open_.pop().end
        change(ended)
    return times, names
