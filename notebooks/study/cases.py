"""Cases: what is measured, a flat dictionary each; and rows: what became of them.

Cases are made by `grid` and checked before. What lists a study's cases refuses unknown names, and
sizes and counts below one, by `ValueError`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusedlib.bench import machine

STATUSES = ("ok", "wrong", "unavailable", "oom", "oom (predicted)", "failed")
"""What can become of a case. All but "ok" have a reason and no time."""
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """What became of a case: one of `STATUSES`, a reason where it is not "ok", and figures by name,
    such as `median_ms`. Rows of one `session` were timed in turns, sample by sample.
    """

    case: Case
    status: str = "ok"
    reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it, flat: a line of a table."""
        return {**self.case, "status": self.status, "reason": self.reason, **self.figures}


def grid(shared: Case | None = None, /, **axes: Iterable[Any]) -> list[dict[str, Any]]:
    """A case for each combination of the axes' values, the last axis varying fastest.

    Args:
        shared: fields that all cases have.
        axes: values by field. A value that is a mapping gives all its fields instead, so that
            fields that belong together, such as the sizes of one shape, make one axis.

    >>> grid({"device": "cpu"}, size=[{"rows": 1, "columns": 2}], provider=["eager", "fused"])
    [{'device': 'cpu', 'rows': 1, 'columns': 2, 'provider': 'eager'}, \
{'device': 'cpu', 'rows': 1, 'columns': 2, 'provider': 'fused'}]
    """
    cases = [dict(shared or {})]
    for name, values in axes.items():
        fields = [value if isinstance(value, Mapping) else {name: value} for value in values]
        cases = [{**case, **more} for case in cases for more in fields]
    return cases


def differing(cases: Iterable[Case]) -> list[str]:
    """Names of the fields in which cases differ, in the order of the first case that has each; of
    a case alone all that it has.
    """
    listed = list(cases)
    names = dict.fromkeys(name for case in listed for name in case)
    alone = len(listed) == 1
    return [name for name in names if alone or len({case.get(name) for case in listed}) > 1]


def label(case: Case, names: Iterable[str]) -> str:
    """The case or row in a few words: these of its fields, numbers with their names."""
    given = {name: case.get(name) for name in names}
    shown = {name: value for name, value in given.items() if value not in (None, "")}
    return " · ".join(
        value if isinstance(value, str) else f"{name} {value:g}"
        for name, value in shown.items() if value == value
    )  # fmt: skip


def device_of(device: str) -> str:
    """The device's type; of "auto" the best that this machine has."""
    return machine.device_type() if device == "auto" else device
