"""Traces that are kept for a viewer such as Perfetto, compressed, a small file a case."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedlib import paths
from fusedlib.bench.machine import slug
from fusedlib.bench.profiles import trace

MOST_BYTES = 2**20
SHRINKS = 20  # traces shrink to a thirteenth: a longer one need not be tried whole
# Of an H200's trace these are two thirds: the host's operators, and arrows between them.
OPERATORS = ("cpu_op", "fwdbwd")


def path_of(case: Mapping[str, Any]) -> Path:
    """Where the trace of a case lies."""
    fields = ("model", "context_length", "precision", "attention", "provider", "device")
    return paths.traces_dir() / f"{slug('-'.join(str(case[f]) for f in fields))}.json.gz"


def kept(
    case: Mapping[str, Any], document: bytes, most_bytes: int | None = MOST_BYTES
) -> dict[str, Any]:
    """Compress and keep a trace: whole, or without operators, unless either is too large.

    Args:
        case: whose trace it is.
        document: the trace, JSON.
        most_bytes: a compressed file may have so many; None: any.

    Returns `trace_mib` before compression, and `trace_file`, `trace_kept_mib` and `trace_whole`
    (whether operators are in it) of what was kept.

    Raises:
        OSError: the folder of traces cannot be written.
    """
    size = {"trace_mib": len(document) / 2**20}
    small, whole = _compressed(document, most_bytes), True
    if small is None:
        small, whole = _compressed(without_operators(document), most_bytes), False
    if small is None:
        return size
    path = path_of(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small)
    named = {"trace_file": path.name, "trace_kept_mib": len(small) / 2**20, "trace_whole": whole}
    return size | named


def _compressed(document: bytes, most_bytes: int | None) -> bytes | None:
    """The document compressed, None where that is more than `most_bytes`."""
    if most_bytes is not None and len(document) > SHRINKS * most_bytes:
        return None
    small = gzip.compress(document, 6)
    return None if most_bytes is not None and len(small) > most_bytes else small


def without_operators(document: bytes) -> bytes:
    """A trace with ranges, launches, kernels and the arrows between them, and no more.

    Of the events' arguments only the number stays that a launch and its kernel share.
    """
    events = [_bare(e) for e in trace.events_of(document) if e.get("cat") not in OPERATORS]
    return json.dumps({"traceEvents": events}, separators=(",", ":")).encode()


def _bare(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("ph") == "M" or "args" not in event:  # names of threads and streams
        return event
    bare = {name: value for name, value in event.items() if name != "args"}
    number = event["args"].get("correlation")
    return bare if number is None else bare | {"args": {"correlation": number}}
