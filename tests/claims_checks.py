"""Ways to change recorded rows, one of which must make a claim false."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Turn:
    """A change of recorded rows.

    Attributes:
        columns: the figures that change.
        factor: what they are multiplied by; None: they are missing, for memory ran out.
        more: what is then added, for a claim that something is zero.
        key: the column that tells where, and
        value: its value there; without a key they change in all rows.
    """

    columns: tuple[str, ...]
    factor: float | None
    key: str = ""
    value: Any = None
    more: float = 0.0

    @property
    def subject(self) -> Any:
        """What a rule that asks for it names: the value there, else the first of the figures."""
        return self.value if self.key else self.columns[0]

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows as they are after it."""
        at = rows[self.key] == self.value if self.key else pd.Series(True, index=rows.index)
        changed = {c: self._changed(rows[c], at) for c in self.columns if c in rows}
        if self.factor is None:
            changed["status"] = rows["status"].mask(at, "oom")
        return rows.assign(**changed)

    def _changed(self, values: pd.Series, at: pd.Series) -> Any:
        if self.factor is None:
            return [None if hit else v for v, hit in zip(values, at, strict=True)]
        if values.dtype.kind == "f":
            return np.where(at, values * self.factor + self.more, values)
        return [self._times(v) if hit else v for v, hit in zip(values, at, strict=True)]

    def _times(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._times(v) for v in value]
        return value * self.factor + self.more if isinstance(value, float | int) else value


def turns(rows: pd.DataFrame) -> Iterator[Turn]:
    """For each value of each varying key: times, memory, energy, utilisation and the largest size
    that fits tenfold up or down, or out of memory. Then each column of numbers everywhere, up
    by one too.
    """
    ends = ("_ms", "_mib", "_error", "_gib", "_s", "_bytes", "largest", "joules", "mfu")
    rows = rows.loc[:, rows.notna().any()]
    figures = tuple(c for c in rows if c.endswith(ends))
    others = [
        c for c in rows
        if c not in figures and pd.api.types.is_numeric_dtype(rows[c])
    ]  # fmt: skip
    for name in keys_of(rows):
        for value in rows[name].dropna().unique():
            for factor in (10.0, 0.1, None):
                yield Turn(figures, factor, name, value)
    for column in (*figures, *others):
        yield Turn((column,), 10.0)
        yield Turn((column,), 0.1)
        yield Turn((column,), 1.0, more=1.0)


def names_in(code: CodeType) -> set[str]:
    """The words of a function's names and texts."""
    texts = {*code.co_names}
    texts |= {word for c in code.co_consts if isinstance(c, str) for word in re.findall(r"\w+", c)}
    return texts.union(*(names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def keys_of(rows: pd.DataFrame) -> list[str]:
    """Columns that tell the cases of a selection apart."""
    return [
        c for c in rows
        if c not in ("case", "measured_at", "session", "reason", "settings", "version")
        and all(isinstance(v, str | int | bool | np.integer) for v in rows[c])
        and 2 <= rows[c].nunique() <= 40
    ]  # fmt: skip
