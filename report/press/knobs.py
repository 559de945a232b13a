"""Knobs: what a notebook's cell tagged `parameters` declares, and the check of their values.

A knob's line reads `name: type = default  # help`. Its help may say what is allowed: `[16..4096]`,
where either end may be open, or `[fp32 | bf16]`; of a list this holds for each entry.
"""

import ast
import contextlib
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from measure import study as studies
from measure.study import SizesError

PROFILE = "profile"
SIZES = "sizes"
"""The knob that holds all other sizes of a study, and the profile."""
TYPES: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str,
    "list[bool]": list[bool], "list[int]": list[int], "list[float]": list[float],
    "list[str]": list[str],
}  # fmt: skip
"""Types of knobs, but of the table of sizes."""
_RANGE = re.compile(r"\[(-?\d*)\.\.(-?\d*)\]")
_CHOICES = re.compile(r"\[([^][]+ \| [^][]+)\]")
_INJECTED = "# Parameters\n"
"""Begins the cell that papermill puts below the declared ones."""


class Knob(NamedTuple):
    """What may be set: its type with what is allowed, its default as Python, and its meaning."""

    kind: Any
    default: str
    help: str


def declared(source: str) -> dict[str, Knob]:
    """The knobs of a cell by name; a line that is none has None as its type."""
    knobs = {}
    for line in source.splitlines():
        code, _, text = line.partition(" # ")
        name, _, default = code.partition("=")
        name, _, kind = name.partition(":")
        if name.strip().isidentifier() and default and not line.startswith(" "):
            knobs[name.strip()] = Knob(_kind(kind.strip(), text), default.strip(), text.strip())
    return knobs


def _kind(name: str, text: str) -> Any:
    """The type of a line that names it, of those values that its help allows."""
    if name == "dict":
        return dict
    if (kind := TYPES.get(name)) is None:
        return None
    entry: Any = getattr(kind, "__args__", [kind])[0]
    if bounds := _RANGE.search(text):
        least, most = (int(end) if end else None for end in bounds.groups())
        entry = Annotated[entry, Field(ge=least, le=most)]
    elif choices := _CHOICES.search(text):
        listed = choices[1].split(" | ")
        entry = Literal[tuple(listed if entry is str else map(ast.literal_eval, listed))]
    return list[entry] if name.startswith("list") else entry


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
    for name in [name for text in injected for name in declared(text) if name not in knobs]:
        table = name == PROFILE and SIZES in knobs
        advice = f'; write -y "{SIZES}: {{{PROFILE}: full}}"' if table else ""
        raise SizesError(f"{name!r} is no knob of this notebook; known: {', '.join(knobs)}{advice}")
    for name, knob in knobs.items():
        check(name, knob, shell.user_ns[name])


def check(name: str, knob: Knob, value: Any) -> None:
    """Refuse a value that a knob does not take."""
    try:
        config = ConfigDict(strict=True, allow_inf_nan=False)
        TypeAdapter(knob.kind, config=config).validate_python(value)
    except ValidationError:
        how = ""
        if knob.default[0] in "[{" and not isinstance(value, list | dict):
            how = f"; papermill takes it by -y '{name}: {knob.default}'"
        raise SizesError(studies.refusal(name, knob.kind, value) + how) from None


def _all_knobs(source: str) -> dict[str, Knob]:
    """The knobs of a cell that declares knobs and does nothing else."""
    with contextlib.suppress(SyntaxError):
        body = ast.parse(source).body
        if body and all(isinstance(one, ast.AnnAssign) for one in body):
            return declared(source)
    return {}
