"""How long a device had nothing to do, and whether that was for want of a launch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fusedlib.bench.profiles.trace import Piece

PERCENTILES = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
"""Of the gaps' lengths, which a row keeps."""


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals merged where they touch or overlap, in their order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


@dataclass(frozen=True)
class Idle:
    """What a device did over a stretch of time; times in µs.

    Attributes:
        span: from `since`, or from the first piece's start, to the last one's end.
        busy: of that, with at least one piece running.
        gaps: each time without any, in order.
        late: of the gaps, those whose next piece the host launched only after they had begun.
        lead: median time from a piece's launch to its start: how far ahead the host is.
    """

    span: float
    busy: float
    gaps: list[float]
    late: list[float]
    lead: float


def idle(pieces: Sequence[Piece], since: float | None = None) -> Idle:
    """Idle time between the pieces, and before the first one if there is a `since`.

    Raises:
        ValueError: no piece.
    """
    if not pieces:
        raise ValueError("idle time needs at least one kernel, got none")
    ordered = sorted(pieces, key=lambda p: p.start)
    end = begin = ordered[0].start if since is None else min(since, ordered[0].start)
    gaps, late = [], []
    for piece in ordered:
        if piece.start > end:
            gaps.append(piece.start - end)
            if piece.issued > end:
                late.append(piece.start - end)
        end = max(end, piece.end)
    busy = sum(b - a for a, b in union((p.start, p.end) for p in ordered))
    lead = float(np.median([p.start - p.issued for p in ordered]))
    return Idle(end - begin, busy, gaps, late, lead)
