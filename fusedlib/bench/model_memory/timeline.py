"""What is held at each moment, by what it is: pure functions of a history and of known addresses.

A block is what its address says at a moment when that is known: a weight when the model has been
built, a gradient after a backward, AdamW's state at the end, a cast of a weight or another
activation at the end of a forward. What outlives everything is `other` (tokens, RoPE's tables,
cuBLAS's workspace), all the rest is temporary.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from fusedlib.bench.model_memory.history import History

CATEGORIES = (
    "weights", "gradients", "optimizer", "activations", "casts", "other", "temporaries",
)  # fmt: skip
MIB = 2**20


@dataclass
class Block:
    """A block: its bytes and between which changes it lived; `end` None outlives the history."""

    address: int
    nbytes: int
    start: int
    end: int | None
    where: str
    category: str = "temporaries"

    def lives(self, at: int) -> bool:
        """Whether it is there when `at` changes have happened."""
        return self.start < at and (self.end is None or self.end >= at)


@dataclass
class Known:
    """Addresses whose meaning was known, by moment; a moment is a name that the history marked.

    `forwards` are pairs of moments, a forward's beginning and its end.
    """

    weights: Mapping[str, set[int]] = field(default_factory=dict)
    gradients: Mapping[str, set[int]] = field(default_factory=dict)
    optimizer: Mapping[str, set[int]] = field(default_factory=dict)
    casts: Mapping[str, set[int]] = field(default_factory=dict)
    where: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    forwards: Sequence[tuple[str, str]] = ()


def blocks(history: History) -> list[Block]:
    """Every block of the history, uncategorised, in the order of birth."""
    found: list[Block] = []
    live: dict[int, Block] = {}
    for at, change in enumerate(history.changes):
        gone = live.pop(change.address, None)
        if gone is not None:  # taken back, or handed out again without its release being told
            gone.end = at
        if change.nbytes:
            live[change.address] = Block(change.address, change.nbytes, at, None, change.where)
            found.append(live[change.address])
    return found


def classify(history: History, known: Known) -> list[Block]:
    """All blocks with their category; the first that holds in the order of the module's text."""
    found = blocks(history)
    for name in ("optimizer", "gradients", "weights"):
        for moment, addresses in getattr(known, name).items():
            at = history.moments[moment]
            for block in found:
                if block.address in addresses and block.lives(at):
                    block.category = name
    for begin, end in known.forwards:
        _activations(found, history.moments[begin], history.moments[end], known, end)
    for block in found:
        if block.category == "temporaries" and block.end is None:
            block.category = "other"
    return found


def _activations(found: list[Block], begin: int, end: int, known: Known, moment: str) -> None:
    casts, where = known.casts.get(moment, set()), known.where.get(moment, {})
    for block in found:
        if block.category != "temporaries" or block.start < begin or not block.lives(end):
            continue
        if block.end is None:
            continue
        block.category = "casts" if block.address in casts else "activations"
        block.where = block.where or where.get(block.address, "")


def live(found: Sequence[Block], changes: int) -> dict[str, np.ndarray]:
    """Bytes held after each change, by category."""
    steps = {name: [0] * (changes + 1) for name in CATEGORIES}
    for block in found:
        steps[block.category][block.start] += block.nbytes
        steps[block.category][changes if block.end is None else block.end] -= block.nbytes
    return {name: np.array(list(accumulate(s))[:-1], np.int64) for name, s in steps.items()}


def thinned(total: np.ndarray, keep: Sequence[int], most: int) -> np.ndarray:
    """At most `most` positions of a series: the peak, those of `keep`, and of each of equal parts
    its least and its greatest.

    Raises:
        ValueError: `most` leaves no room for the positions to keep.
    """
    fixed = {int(np.argmax(total)), 0, len(total) - 1, *(min(k, len(total) - 1) for k in keep)}
    parts = (most - len(fixed)) // 2
    if parts < 1:
        raise ValueError(f"{most} points are too few to keep {len(fixed)} of them and a curve")
    if len(total) <= most:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), parts + 1).astype(int)
    for low, high in pairwise(edges):
        fixed |= {low + int(np.argmin(total[low:high])), low + int(np.argmax(total[low:high]))}
    return np.array(sorted(fixed))


@dataclass(frozen=True)
class Group:
    """Blocks of one size, category and origin that are there at once."""

    count: int
    nbytes: int
    category: str
    where: str


def largest(found: Sequence[Block], at: int, most: int, leave_out: Sequence[str]) -> list[Group]:
    """The groups of largest blocks after `at` changes, without some categories."""
    there = Counter(
        (b.nbytes, b.category, b.where)
        for b in found
        if b.lives(at) and b.category not in leave_out
    )
    ranked = sorted(there.items(), key=lambda item: (-item[0][0], -item[1], item[0][2]))
    return [Group(n, size, name, where) for (size, name, where), n in ranked[:most]]
