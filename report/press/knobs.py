"""Knobs: what a notebook's cell tagged `parameters` declares, and the check of their values.

A knob's line reads `name: type = default  # help`. Its help may say what is allowed: `[16..4096]`,
where either end may be open, or `[fp32 | bf16]`; of a list, which may not be empty, this holds for
each entry.
"""

import ast
import contextlib
import re
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from study.errors import SizesError

TAG = "parameters"
TYPES: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str,
    "list[bool]": list[bool], "list[int]": list[int], "list[float]": list[float],
    "list[str]": list[str],
}  # fmt: skip
_RANGE = re.compile(r"\[(-?\d+(?:\.\d+)?)?\.\.(-?\d+(?:\.\d+)?)?\]")
_CHOICES = re.compile(r"\[([^][]+ \| [^][]+)\]")
_INJECTED = "# Parameters\n"
"""Begins the cell that papermill puts below the declared ones."""


class Knob(NamedTuple):
    """What may be set: its type with what is allowed, its default as Python, and its meaning."""

    kind: Any
    default: str
    help: str


def declared(source: str) -> dict[str, Knob]:
    """The knobs of a cell by name.

    Raises:
        SizesError: a line has no type that papermill can give.
    """
    knobs = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, last = node.target.id, node.end_lineno or node.lineno
        lines = source.split("\n")[node.lineno - 1 : last]
        text = " ".join(line.partition(" # ")[2].strip() for line in lines).strip()
        default = (node.value and ast.get_source_segment(source, node.value)) or ""
        knobs[name] = Knob(_kind(name, ast.unparse(node.annotation), text), default, text)
    return knobs


def _kind(name: str, stated: str, text: str) -> Any:
    """The type of a line that names it, of those values that its help allows."""
    if (kind := TYPES.get(stated)) is None:
        raise SizesError(
            f"the knob {name} must read `name: type = default  # help`, the type one of "
            f"{', '.join(TYPES)}; not {stated!r}"
        )
    entry: Any = getattr(kind, "__args__", [kind])[0]
    if bounds := _RANGE.search(text):
        least, most = (ast.literal_eval(end) if end else None for end in bounds.groups())
        entry = Annotated[entry, Field(ge=least, le=most)]
    elif choices := _CHOICES.search(text):
        listed = choices[1].split(" | ")
        entry = Literal[tuple(listed if entry is str else map(ast.literal_eval, listed))]
    return Annotated[list[entry], Field(min_length=1)] if stated.startswith("list") else entry


def check_knobs() -> None:
    """Refuse a knob of this notebook that is set to what its line does not allow.

    Lines are read in the newest cell that ran and declares some. Outside a notebook nothing is set.

    Raises:
        SizesError: with the value and what is allowed.
    """
    from IPython.core.getipython import get_ipython

    if (shell := get_ipython()) is None:
        return
    ran = shell.user_ns["In"]
    at = next((at for at in reversed(range(len(ran))) if _all_knobs(ran[at])), None)
    if at is None:
        return
    knobs = _all_knobs(ran[at])
    injected = [text for text in ran[at + 1 : at + 2] if text.startswith(_INJECTED)]
    for text in injected:
        require_known([node.targets[0].id for node in ast.parse(text).body], knobs)
    for name, knob in knobs.items():
        check(name, knob, shell.user_ns[name])


def require_known(names: "list[str]", knobs: "dict[str, Knob]") -> None:
    """Refuse a name that no knob has."""
    for name in names:
        if name not in knobs:
            raise SizesError(f"{name!r} is no knob of this notebook; known: {', '.join(knobs)}")


def check(name: str, knob: Knob, value: Any) -> None:
    """Refuse a value that a knob does not take."""
    try:
        config = ConfigDict(strict=True, allow_inf_nan=False)
        TypeAdapter(knob.kind, config=config).validate_python(value)
    except ValidationError:
        how = ""
        if knob.default[0] in "[{" and not isinstance(value, list | dict):
            how = f"; papermill takes it by -y '{name}: {knob.default}'"
        raise SizesError(_refusal(name, knob.kind, value) + how) from None


def parsed(name: str, text: str, knob: Knob) -> Any:
    """The value that a text of the command line stands for.

    Entries of a list are separated by commas, or written as Python's.

    Raises:
        SizesError: it stands for none; the sentence begins with the name.
    """
    if knob.default.startswith("["):
        inside = text.strip().removeprefix("[").removesuffix("]")
        value: Any = [_literal(entry.strip()) for entry in inside.split(",") if entry.strip()]
    else:
        value = _literal(text.strip())
    for meant in (value, [*map(str, value)] if isinstance(value, list) else text.strip()):
        with contextlib.suppress(SizesError):
            check(name, knob, meant)
            return meant
    raise SizesError(_refusal(name, knob.kind, value))


def _literal(text: str) -> Any:
    """What a text reads as in Python, else the text."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def _refusal(name: str, kind: Any, value: Any) -> str:
    """The sentence that refuses a value, with what is allowed."""
    return f"{name} must be {in_words(kind)}, not {value!r}"


def in_words(kind: Any) -> str:
    """A type as an error names it, such as "list of int in [1..100]" or "auto, cuda or cpu"."""
    bounds: dict[str, Any] = {}
    while get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        for note in (part for one in notes for part in getattr(one, "metadata", [one])):
            bounds |= {name: getattr(note, name) for name in ("ge", "le") if hasattr(note, name)}
    if get_origin(kind) is list:
        return f"list of {in_words(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        *most, last = map(str, get_args(kind))
        return f"{', '.join(most)} or {last}" if most else last
    within = f" in [{bounds.get('ge', '')}..{bounds.get('le', '')}]" if bounds else ""
    return f"{kind.__name__}{within}"


def _all_knobs(source: str) -> dict[str, Knob]:
    """The knobs of a cell that declares knobs and does nothing else."""
    with contextlib.suppress(SyntaxError):
        body = ast.parse(source).body
        if body and all(isinstance(one, ast.AnnAssign) for one in body):
            return declared(source)
    return {}
