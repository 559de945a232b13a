"""What columns of rows mean to a reader, from `notebooks/study/columns.toml`.

Labels, units, names and order of values, and how the series of a picture look.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

import study
from fusedlib.bench import machine as machines
from press import style
from press.formats import formatted, is_missing
from study.rows import folders

FILE = Path(study.__file__).parent / "columns.toml"
OWN = "this machine"


@dataclass(frozen=True)
class Column:
    """What a column means to a reader; the head of `columns.toml` explains each entry."""

    label: str
    format: str = ""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    order: Sequence[Any] = ()
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    log: bool = False
    field: bool = False
    repeats: bool = False
    rings: Sequence[str] = ()


@cache
def columns() -> dict[str, Column]:
    """The columns of `columns.toml`, by name."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: _column(name, **table) for name, table in entries.items()}


def _column(name: str, looks: Mapping[str, tuple[str, int]] | None = None, **table: Any) -> Column:
    """A column as it is written; its label is by default its name."""
    if looks:
        table["names"] = {value: text for value, (text, _) in looks.items()} | table["names"]
        table["slots"] = {value: slot for value, (_, slot) in looks.items()}
    return Column(**{"label": name.replace("_", " "), **table})


def column(name: str) -> Column:
    """What a column means; one that has no entry is called by its own name."""
    return columns().get(name) or _column(name)


def recorded_machines() -> set[str]:
    """The machines whose rows are part of the repository."""
    return {machines.label(folder.name) for folder in folders(here=False)}


def _recorded(value: Any) -> str:
    """A value as `columns.toml` names it: 64.0 as 64."""
    whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if whole else str(value)


def read(name: str, value: Any) -> str:
    """How a value of a column reads; a missing one is "none"."""
    if is_missing(value):
        return "none"
    if name == "machine" and value not in recorded_machines():
        return OWN if value == machines.label(machines.key()) else str(value)
    says = column(name)
    if _recorded(value) in says.names:
        return says.names[_recorded(value)]
    if isinstance(value, bool | np.bool_):
        return says.label if value else f"no {says.label}"
    if isinstance(value, int | float | np.number):
        return formatted(value, says.format or (",d" if float(value).is_integer() else ""))
    return str(value)


def looks(by: str, values: Iterable[Any]) -> dict[Any, int]:
    """Slots of `press.style` for the series of one picture, in their order; no two look alike.

    Each has its usual colour; of several with the same one the first has it, and the others free
    ones. From the eighth series on colours come again, with another marker and dash.
    """
    usual, taken, ordered = _usual(by), dict[Any, int](), ordered_values(by, values)

    def is_taken(slot: int) -> bool:
        return slot % len(style.PALETTE) in {other % len(style.PALETTE) for other in taken.values()}

    for value in ordered:
        if value in usual and not is_taken(usual[value]):
            taken[value] = usual[value]
    for value in ordered:
        if value not in taken:
            free = (slot for slot in range(style.SLOTS) if slot not in taken.values())
            taken[value] = min(free, key=lambda slot: (is_taken(slot), slot))
    return {value: taken[value] for value in ordered}


def _usual(name: str) -> dict[Any, int]:
    """The usual slot of each known value, in the order in which they are shown: its own, else its
    place."""
    if name == "provider":
        return dict(sorted(column(name).slots.items(), key=lambda item: item[1]))
    known = [*(column(name).order or column(name).names)]
    known += sorted(recorded_machines().difference(known)) if name == "machine" else []
    return {value: column(name).slots.get(value, at) for at, value in enumerate(known)}


def ordered_values(name: str, values: Iterable[Any]) -> list[Any]:
    """Different values in the order in which they are shown, a missing one last, as None.

    Known ones come first; others by number, those like 64·128 by their numbers, or as they come.
    """
    there = list(dict.fromkeys(None if is_missing(value) else value for value in values))
    listed = [value for value in there if value is not None]
    known = {str(value): at for at, value in enumerate(_usual(name))}
    key: Callable[[Any], Any] = listed.index
    if all(isinstance(value, Number) for value in listed):
        key = float
    elif all(re.fullmatch(r"\d+(·\d+)*", str(value)) for value in listed):
        key = lambda shape: [int(size) for size in shape.split("·")]  # noqa: E731
    ordered = sorted(listed, key=lambda v: (known.get(_recorded(v), len(known)), key(v)))
    return ordered + [None] * (None in there)


def value_labels(name: str, ordered: Sequence[Any]) -> list[str]:
    """How values read; two that read alike also as they are recorded."""
    texts = [read(name, value) for value in ordered]
    return [t if texts.count(t) == 1 else f"{t} ({v})" for t, v in zip(texts, ordered, strict=True)]
