"""Study 07's cases: one a shape, dtype and way; those of a shape and dtype are timed in turns."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusedlib.bench import (
    allocations,
    check,
    compare,
    machine,
    results,
    roofline,
    sources,
    timing,
)
from fusedlib.bench.attention.problem import AttentionProblem
from fusedlib.bench.attention.ways import WAYS, get
from fusedlib.models import transformer

STUDY = "07_attention"
EXPERIMENT = "attention"
GRIDS = ("course", "published", "long")
"""Of the course behind seed 001, of what its script ran, and beyond what fits a card."""
_FIELDS = ("context_length", "head_dim", "batch_size", "dtype")
Case = dict[str, Any]


def code() -> str:
    """Fingerprint of all that measures this study."""
    shared = (allocations, check, compare, roofline, timing, transformer)
    return results.code_fingerprint(*sources.modules_of(__package__), *shared)


def where(device: str) -> str:
    """The device that `auto` means here."""
    return machine.device_type() if device == "auto" else device


def grid(
    name: str, contexts: Sequence[int], widths: Sequence[int], dtypes: Sequence[str],
    ways: Sequence[str], *, batch_size: int, repetitions: int, device: str,
    compiled: Iterable[str] = (),
) -> list[Case]:  # fmt: skip
    """Every context at every width in every dtype, each way; width by width as they are given.

    `compiled` adds a way at one width and dtype: "inductor float32 64".

    Raises:
        ValueError: an unknown grid, way or dtype, a size or number of repetitions below 1.
    """
    if name not in GRIDS:
        raise ValueError(f"unknown grid {name!r}; known: {', '.join(GRIDS)}")
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    added = [compiled_at(text) for text in compiled]
    shared = {"repetitions": repetitions, "device": where(device)}
    found = []
    for width in widths:
        for dtype in dtypes:
            more = [way for way, at, kind in added if (at, kind) == (width, dtype)]
            for context in contexts:
                problem = AttentionProblem(context, width, batch_size, dtype)
                found += [
                    {"experiment": EXPERIMENT, "grid": name, "provider": get(way).name,
                     **{f: getattr(problem, f) for f in _FIELDS}, **shared}
                    for way in (*ways, *more)
                ]  # fmt: skip
    return found


def published(
    contexts: Sequence[int], widths: Sequence[int], compiled: bool, **shared: Any
) -> list[Case]:
    """The published script's grid: plain attention in fp32, eager and, if so, compiled.

    Raises:
        ValueError: as `grid`.
    """
    ways = ["plain", "inductor"] if compiled else ["plain"]
    return grid("published", contexts, widths, ["float32"], ways, **shared)


def compiled_at(text: str) -> tuple[str, int, str]:
    """Way, width and dtype of a text such as "inductor float32 64".

    Raises:
        ValueError: not three words, a way that is not compiled, or a width that is no number.
    """
    words = text.split()
    if len(words) != 3 or words[0] not in WAYS or not words[2].isdecimal():
        raise ValueError(f"give a way, a dtype and a width, 'inductor float32 64', got {text!r}")
    return words[0], int(words[2]), words[1]


def problem_of(case: Mapping[str, Any]) -> AttentionProblem:
    """The problem that a case or a row speaks of."""
    context, width, batch = (int(case[name]) for name in _FIELDS[:3])
    return AttentionProblem(context, width, batch, str(case["dtype"]))


def label(case: Mapping[str, Any]) -> str:
    """A shape in a few words."""
    return f"context {case['context_length']}, width {case['head_dim']}, {case['dtype']}"
