"""Parameters of a notebook: read from its cell tagged `parameters`, checked before it runs.

A line there reads `name: type = default  # help`. Types are built from bool, int, float, str,
list and None (papermill turns any other value into a text). Where the help ends in brackets they
bound the values: `[1..100]`, `[0.5..]` or `[eager|math]`; in a list they bound each entry.
"""

import ast
import contextlib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedlib.study.running.config import ConfigError, known

TAG = "parameters"
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "list": list}
_BOUNDS = re.compile(r"\[([^\[\]]*)\]\s*$")


class ParameterError(ConfigError):
    """A parameter that a notebook does not have, or a value that does not fit it."""


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell."""

    name: str
    type: Any
    written_type: str
    default: Any
    help: str

    def check(self, value: Any, where: str) -> Any:
        """The value as the notebook gets it; whole numbers become floats where floats are meant.

        Raises:
            ParameterError: the value is of another type or out of bounds.
        """
        fits, value = _fit(value, self.type)
        if not fits:
            raise ParameterError(f"{where}: {self.name} must be {self.written_type}, not {value!r}")
        self._check_bounds(value, where)
        return value

    def parse(self, text: str, where: str) -> Any:
        """The value that a text from the command line stands for.

        Raises:
            ParameterError: the text does not read as the parameter's type, or is out of bounds.
        """
        for candidate in _readings(text, self.type):
            fits, value = _fit(candidate, self.type)
            if fits:
                self._check_bounds(value, where)
                return value
        raise ParameterError(f"{where}: {self.name} must be {self.written_type}, not {text!r}")

    def _check_bounds(self, value: Any, where: str) -> None:
        found = _BOUNDS.search(self.help)
        if not found or value is None:
            return
        for entry in value if isinstance(value, list) else [value]:
            if not _within(entry, found[1]):
                raise ParameterError(
                    f"{where}: {self.name} must be in [{found[1]}], but {entry!r} is not"
                )


def read(notebook: Path) -> dict[str, Parameter] | None:
    """Parameters of a notebook by name; None when no cell carries the tag.

    Raises:
        ParameterError: not a notebook, more than one tagged cell, or a line of it that does not
            read `name: type = default`.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        raise ParameterError(f"{notebook} is not a Jupyter notebook (no JSON with cells)") from None
    tagged = [c for c in cells if TAG in c.get("metadata", {}).get("tags", [])]
    if not tagged:
        return None
    if len(tagged) > 1:
        raise ParameterError(
            f"{notebook}: {len(tagged)} cells carry the tag '{TAG}'; exactly one must"
        )
    source = tagged[0].get("source", "")
    return _parse_cell("".join(source), notebook)


def read_required(notebook: Path) -> dict[str, Parameter]:
    """Parameters of a study's notebook, which must have the tagged cell and a `profile` in it.

    Raises:
        ParameterError: as `read`, and when the cell or its `profile` is missing.
    """
    found = read(notebook)
    if found is None:
        raise ParameterError(f"{notebook}: no cell carries the tag '{TAG}'; exactly one must")
    if "profile" not in found:
        raise ParameterError(
            f"{notebook}: its parameters cell lacks the line "
            '`profile: str = "quick"  # which profile the rows are filed under`'
        )
    return found


def values(
    name: str, declared: Mapping[str, Parameter], asked: Mapping[str, Any],
    overrides: Mapping[str, str], profile: str,
) -> dict[str, Any]:  # fmt: skip
    """What a notebook is run with: the profile, the study file's values, the command line's.

    Raises:
        ParameterError: a parameter that the notebook does not have, or a value that does not fit.
    """
    out = {"profile": profile} if "profile" in declared else {}
    for key, value in asked.items():
        where = f"study file, {name}, {profile}"
        out[key] = _known(declared, key, where).check(value, where)
    for key, text in overrides.items():
        out[key] = _known(declared, key, name).parse(text, name)
    return out


def assign_overrides(
    settings: Sequence[str], declared: Mapping[str, Mapping[str, Parameter]]
) -> dict[str, dict[str, str]]:
    """Sort `name=value` and `notebook.name=value` settings by notebook.

    A setting without a notebook goes to every selected notebook that has the parameter.

    Raises:
        ParameterError: no `=`, an unselected notebook, a parameter that none of them has, or
            `profile`, which is not set this way.
    """
    out: dict[str, dict[str, str]] = {name: {} for name in declared}
    for setting in settings:
        target, equals, text = setting.partition("=")
        target = target.strip()
        notebook, dot, key = target.rpartition(".")
        if not equals or not key:
            raise ParameterError(f"{setting!r} is no setting; write name=value")
        if key == "profile":
            raise ParameterError("profile is not set by SET; use PROFILE=quick or PROFILE=full")
        if dot and notebook not in declared:
            raise ParameterError(
                f"{setting!r}: notebook {notebook!r} is unknown or not selected; "
                f"known: {known(sorted(declared))}"
            )
        takers = [notebook] if dot else [n for n, found in declared.items() if key in found]
        if not takers:
            every = sorted({k for found in declared.values() for k in found} - {"profile"})
            raise ParameterError(f"parameter {key!r} is unknown; known: {known(every)}")
        for taker in takers:
            out[taker][key] = text
    return out


def _known(declared: Mapping[str, Parameter], key: str, where: str) -> Parameter:
    if key not in declared:
        raise ParameterError(
            f"{where}: parameter {key!r} is unknown; known: {known(sorted(declared))}"
        )
    return declared[key]


def _parse_cell(source: str, notebook: Path) -> dict[str, Parameter]:
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ParameterError(f"{notebook}: its parameters cell is not Python: {error}") from None
    lines = source.splitlines()
    out = {}
    for statement in body:
        line = lines[statement.lineno - 1].strip()
        where = f"{notebook}: parameters cell, line {line!r}"
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            raise ParameterError(f"{where}: must read `name: type = default  # help`")
        name, written = statement.target.id, ast.unparse(statement.annotation)
        try:
            kind = _type(statement.annotation)
            assert statement.value is not None
            default = ast.literal_eval(statement.value)
        except (ValueError, AssertionError) as error:
            reason = str(error) or "it has no default"
            raise ParameterError(f"{where}: only plain types and literals: {reason}") from None
        end = statement.end_lineno or statement.lineno
        comment = lines[end - 1][statement.end_col_offset or 0 :].partition("#")[2].strip()
        parameter = Parameter(name, kind, written, default, comment)
        parameter.check(default, where)
        out[name] = parameter
    return out


def _type(node: ast.expr) -> Any:
    """The type that an annotation of plain names, subscripts and `|` stands for."""
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.Name) and node.id in _TYPES:
        return _TYPES[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _type(node.left) | _type(node.right)
    if isinstance(node, ast.Subscript):
        return _type(node.value)[_type(node.slice)]
    raise ValueError(f"type {ast.unparse(node)} is none of {known(sorted(_TYPES))}")


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether a value is of a type, and the value with ints turned into floats where meant."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is types.UnionType:
        for option in sorted(inner, key=lambda option: option is float):
            fits, fitted = _fit(value, option)
            if fits:
                return True, fitted
        return False, value
    if origin is float and type(value) is int:
        return True, float(value)
    if type(value) is not origin:
        return False, value
    if origin is not list or not inner:
        return True, value
    fitted = [_fit(entry, inner[0]) for entry in value]
    return all(fits for fits, _ in fitted), [entry for _, entry in fitted]


def _readings(text: str, kind: Any) -> list[Any]:
    """What a text of the command line may mean, the likeliest first."""
    text = text.strip()
    out: list[Any] = []
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        out.append(words[text.lower()])
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        out.append(ast.literal_eval(text))
    # `sizes=small,medium` is what people write for a list, and `sizes=small` for one of one.
    if not text.startswith("["):
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        out += [[_literal(entry) for entry in entries], entries]
    # A text parameter takes the text as it is, also one that reads as a number.
    return [text, *out] if kind is str and text[:1] not in ("'", '"') else [*out, text]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _within(value: Any, bounds: str) -> bool:
    if ".." in bounds:
        low, _, high = (part.strip() for part in bounds.partition(".."))
        return (not low or value >= float(low)) and (not high or value <= float(high))
    return str(value) in [choice.strip() for choice in bounds.split("|")]
