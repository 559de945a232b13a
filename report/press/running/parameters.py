"""Parameters of a notebook: read from its cell tagged `parameters`, checked before it runs.

A line there reads `name: type = default  # help`. A type is bool, int, float or str, or a list of
one of them, such as `list[int]`. Where the help ends in brackets they bound the values: `[1..100]`,
`[0.5..]` or `[eager|math]`; in a list they bound each entry.
"""

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.recording import paths
from press.running.config import ConfigError, listed

TAG = "parameters"
_SCALARS = {"bool": bool, "int": int, "float": float, "str": str}
_TYPES = {*_SCALARS, *(f"list[{name}]" for name in _SCALARS)}
_BOUNDS = re.compile(r"\[([^\[\]]*)\]\s*$")


class ParameterError(ConfigError):
    """A parameter that a notebook does not have, or a value that does not fit it."""


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell."""

    name: str
    type: str
    default: Any
    help: str

    def check(self, value: Any, where: str) -> Any:
        """The value as the notebook gets it; whole numbers become floats where floats are meant."""
        try:
            value = _fitted(value, self.type)
        except TypeError:
            message = f"{where}: {self.name} must be {self.type}, not {value!r}"
            raise ParameterError(message) from None
        bounds = _BOUNDS.search(self.help)
        for entry in value if isinstance(value, list) else [value]:
            if bounds and not _within(entry, bounds[1]):
                raise ParameterError(
                    f"{where}: {self.name} must be in [{bounds[1]}], but {entry!r} is not"
                )
        return value

    def parse(self, text: str, where: str) -> Any:
        """The value that a text from the command line stands for, checked."""
        value: Any = text
        with contextlib.suppress(ValueError, SyntaxError):  # it is a text
            value = _reading(text.strip(), self.type)
        return self.check(value, where)


def read(notebook: Path) -> dict[str, Parameter]:
    """Parameters of a notebook by name."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        raise ParameterError(f"{notebook} is not a Jupyter notebook (no JSON with cells)") from None
    tagged = [c for c in cells if TAG in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        count = len(tagged) or "no"
        raise ParameterError(f"{notebook}: {count} cells carry the tag '{TAG}'; exactly one must")
    return _parse_cell("".join(tagged[0]["source"]), notebook)


def require_valid(study: str, values: Mapping[str, Any]) -> None:
    """Refuse what papermill would refuse, where a reader changed the parameters cell by hand.

    Args:
        study: whose notebook declares them.
        values: the notebook's names.

    Raises:
        ParameterError: a value of another type or out of bounds.
    """
    for name, parameter in read(paths.NOTEBOOKS / f"{study}.ipynb").items():
        parameter.check(values[name], study)


def choose(
    declared: Mapping[str, Mapping[str, Parameter]], presets: Mapping[str, Mapping[str, Any]],
    settings: Sequence[str], profile: str,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """What each notebook is run with: the profile, the study file's values, the command line's.

    The last are `name=value`, for every notebook that has the parameter, or `notebook.name=value`.
    """
    chosen: dict[str, dict[str, Any]] = {name: {"profile": profile} for name in declared}
    for name, values in presets.items():
        where = f"study file, {name}, {profile}"
        for key, value in values.items():
            value = _parameter(declared[name], key, where).check(value, where)
            chosen[name].setdefault(key, value)  # the profile stays the one that was chosen
    for setting in settings:
        target, equals, text = setting.partition("=")
        notebook, dot, key = target.strip().rpartition(".")
        if not equals or key in ("", "profile"):
            advice = "write name=value, and for the profile use PROFILE=quick or PROFILE=full"
            raise ParameterError(f"{setting!r} is no setting; {advice}")
        if dot and notebook not in declared:
            raise ParameterError(
                f"{setting!r}: notebook {notebook!r} is unknown or not selected; "
                f"known: {listed(sorted(declared))}"
            )
        takers = [notebook] if dot else [name for name in declared if key in declared[name]]
        if not takers:
            names = {name for parameters in declared.values() for name in parameters} - {"profile"}
            raise ParameterError(f"parameter {key!r} is unknown; known: {listed(sorted(names))}")
        for name in takers:
            chosen[name][key] = _parameter(declared[name], key, name).parse(text, name)
    return chosen


def _parameter(declared: Mapping[str, Parameter], key: str, where: str) -> Parameter:
    if key not in declared:
        raise ParameterError(
            f"{where}: parameter {key!r} is unknown; known: {listed(sorted(declared))}"
        )
    return declared[key]


def _parse_cell(source: str, notebook: Path) -> dict[str, Parameter]:
    lines, parameters = source.splitlines(), {}
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ParameterError(f"{notebook}: parameters cell: {error}") from None
    for statement in body:
        line = lines[statement.lineno - 1].strip()
        where = f"{notebook}: parameters cell, line {line!r}"
        try:
            if not isinstance(statement, ast.AnnAssign) or statement.value is None:
                raise ValueError
            name, kind = ast.unparse(statement.target), ast.unparse(statement.annotation)
            if not name.isidentifier() or kind not in _TYPES:
                raise ValueError
            default = ast.literal_eval(statement.value)
        except ValueError:
            raise ParameterError(
                f"{where}: must read `name: type = default  # help`, the default a literal, "
                f"the type one of {listed(sorted(_TYPES))}"
            ) from None
        last = lines[(statement.end_lineno or 1) - 1]
        comment = last[statement.end_col_offset or 0 :].partition("#")[2]
        parameters[name] = Parameter(name, kind, default, comment.strip())
        parameters[name].check(default, where)
    return parameters


def _fitted(value: Any, kind: str) -> Any:
    """A value of a type, ints turned into floats where meant; of another type a TypeError."""
    if kind not in _SCALARS:
        if type(value) is not list:
            raise TypeError
        return [_fitted(entry, kind[len("list[") : -1]) for entry in value]
    if kind == "float" and type(value) is int:
        return float(value)
    if type(value) is not _SCALARS[kind]:
        raise TypeError
    return value


def _reading(text: str, kind: str) -> Any:
    """What a text of the command line means where a type is wanted.

    `sizes=small,medium` is what people write for a list, and `sizes=small` for one of one; a text
    is taken as it is, also one that reads as a number, but for quotes around it.
    """
    if kind not in _SCALARS and not text.startswith("["):
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        return [_reading(entry, kind[len("list[") : -1]) for entry in entries]
    if kind == "str" and not re.fullmatch(r"(['\"]).*\1", text):
        return text
    return ast.literal_eval(text.capitalize() if kind == "bool" else text)


def _within(value: Any, bounds: str) -> bool:
    if ".." in bounds:
        low, _, high = (part.strip() for part in bounds.partition(".."))
        return (not low or value >= float(low)) and (not high or value <= float(high))
    return str(value) in [choice.strip() for choice in bounds.split("|")]
