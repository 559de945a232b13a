"""Traces that are kept for a viewer such as Perfetto: the small ones, compressed."""

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedlib import paths
from fusedlib.bench.machine import slug

MOST_BYTES = 2**20
SHRINKS = 20  # traces shrink to a thirteenth: a longer one need not be tried


def path_of(case: Mapping[str, Any]) -> Path:
    """Where the trace of a case lies."""
    fields = ("model", "context_length", "precision", "attention", "provider", "device")
    return paths.traces_dir() / f"{slug('-'.join(str(case[f]) for f in fields))}.json.gz"


def kept(
    case: Mapping[str, Any], document: bytes, most_bytes: int | None = MOST_BYTES
) -> dict[str, Any]:
    """Compress and keep a trace, unless it would be larger than `most_bytes`.

    Returns `trace_mib` before compression, and `trace_file` and `trace_kept_mib` of what was kept.

    Raises:
        OSError: the folder of traces cannot be written.
    """
    size = {"trace_mib": len(document) / 2**20}
    if most_bytes is not None and len(document) > SHRINKS * most_bytes:
        return size
    small = gzip.compress(document, 6)
    if most_bytes is not None and len(small) > most_bytes:
        return size
    path = path_of(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small)
    return size | {"trace_file": path.name, "trace_kept_mib": len(small) / 2**20}
