"""Study 07's cases: one a shape, dtype and way; those of a shape and dtype are timed in turns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """Every context at every width in every dtype, each way; dtype by dtype as they are given.

    `compiled` adds a way at one dtype and width, "inductor float32 64", or at one context of these,
    "flex float32 64 1024".

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
    for dtype in dtypes:
        for width in widths:
            for context in contexts:
                problem = AttentionProblem(context, width, batch_size, dtype)
                more = [a.way for a in added if a.takes(problem)]
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


@dataclass(frozen=True)
class Compiled:
    """Where a way that is compiled is measured besides; `context_length` None: at every one."""

    way: str
    dtype: str
    head_dim: int
    context_length: int | None

    def takes(self, problem: AttentionProblem) -> bool:
        """Whether it is measured on this problem."""
        here = (self.dtype, self.head_dim) == (problem.dtype, problem.head_dim)
        return here and self.context_length in (None, problem.context_length)


def compiled_at(text: str) -> Compiled:
    """What a text such as "inductor float32 64" or "flex float32 64 1024" says.

    Raises:
        ValueError: not three or four words, an unknown way, a width or context that is no number.
    """
    words = text.split()
    numbers = words[2:]
    if len(words) not in (3, 4) or words[0] not in WAYS or not all(map(str.isdecimal, numbers)):
        raise ValueError(
            "give a way, a dtype, a width and at will a context, 'inductor float32 64' or "
            f"'flex float32 64 1024', got {text!r}; known ways: {', '.join(WAYS)}"
        )
    width, context = (*map(int, numbers), None)[:2]
    assert width is not None
    return Compiled(words[0], words[1], width, context)


def problem_of(case: Mapping[str, Any]) -> AttentionProblem:
    """The problem that a case or a row speaks of."""
    context, width, batch = (int(case[name]) for name in _FIELDS[:3])
    return AttentionProblem(context, width, batch, str(case["dtype"]))


def label(case: Mapping[str, Any]) -> str:
    """A shape in a few words."""
    return f"context {case['context_length']}, width {case['head_dim']}, {case['dtype']}"
