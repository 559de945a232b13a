"""Knobs: what a notebook's cell tagged `parameters` declares, and the check of their values.

A knob's line reads `name: type = default  # help`, as papermill reads it. Its help may say what is
allowed: `[16..4096]`, where either end may be open, or `[fp32 | bf16]`; of a list, which may not be
empty, this holds for each entry.
"""

import ast
import contextlib
import math
import re
from typing import Any

from nbformat import NotebookNode
from papermill.translators import PythonTranslator

from study.errors import SizesError

TAG = "parameters"
TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_INJECTED = "# Parameters\n"
"""Begins the cell that papermill puts below the declared ones."""


class Knob:
    """What may be set: `words` say what it takes, such as "list of int in [1..100]"."""

    def __init__(self, name: str, stated: str, default: str, help: str) -> None:
        self.name, self.default, self.help = name, default, help
        self.listed, entry = stated.startswith("list["), re.sub(r"list\[(.*)\]", r"\1", stated)
        if entry not in TYPES:
            raise SizesError(
                f"the knob {name} must read `name: type = default  # help`, the type one of "
                f"{', '.join(TYPES)}, or a list of one such as list[int]; not {stated!r}"
            )
        self.type, self.words = TYPES[entry], entry
        self.choices: list[Any] = []
        self.least, self.most = -math.inf, math.inf
        if among := re.search(r"\[(-?[\d.]+?)?\.\.(-?[\d.]+)?\]", help):
            self.least, self.most = float(among[1] or -math.inf), float(among[2] or math.inf)
            self.words += f" in {among[0]}"
        elif listed := re.search(r"\[([^][]+ \| [^][]+)\]", help):
            texts = listed[1].split(" | ")
            self.choices = texts if self.type is str else [*map(ast.literal_eval, texts)]
            self.words = f"{', '.join(texts[:-1])} or {texts[-1]}"
        if self.listed:
            self.words = f"list of {self.words}"

    def takes(self, value: Any) -> bool:
        """Whether it may be set to a value."""
        if not self.listed:
            value = [value]
        return isinstance(value, list) and bool(value) and all(map(self._takes_one, value))

    def _takes_one(self, value: Any) -> bool:
        if type(value) is not self.type and (self.type, type(value)) != (float, int):
            return False
        if self.choices or self.type is str:
            return not self.choices or value in self.choices
        return bool(self.least <= value <= self.most)

    def refusal(self, value: Any, name: str = "") -> SizesError:
        """What is raised of a value that it does not take; it begins with the name."""
        how = ""
        if self.listed and not isinstance(value, list):
            how = f"; papermill takes it by -y '{self.name}: {self.default}'"
        return SizesError(f"{name or self.name} must be {self.words}, not {value!r}{how}")

    def parsed(self, text: str, name: str) -> Any:
        """The value that a text of the command line stands for.

        Entries of a list are separated by commas, or written as Python's.

        Raises:
            SizesError: it stands for none; the sentence begins with `name`.
        """
        parts = text.strip().removeprefix("[").removesuffix("]").split(",")
        texts = [part.strip() for part in parts if part.strip()] if self.listed else [text.strip()]
        values = [*map(_literal, texts)]
        for meant in (values, [*map(str, values)], texts):
            if self.takes(value := meant if self.listed else meant[0]):
                return value
        raise self.refusal(values if self.listed else values[0], name)


def _literal(text: str) -> Any:
    """What a text reads as in Python, else the text."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def declared(source: str) -> dict[str, Knob]:
    """The knobs of a cell by name.

    Raises:
        SizesError: a line has no type that papermill can give.
    """
    return {one.name: Knob(*one) for one in PythonTranslator.inspect(NotebookNode(source=source))}


def check_knobs() -> None:
    """Refuse a knob of this notebook that is set to what its line does not allow.

    Lines are read in the newest cell that ran and declares some. Outside a notebook nothing is set.

    Raises:
        SizesError: with the value and what is allowed.
    """
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    ran = shell.user_ns["In"] if shell else []
    at = max((at for at, source in enumerate(ran) if _only_declares(source)), default=None)
    if at is None:
        return
    knobs, below = declared(ran[at]), "".join(ran[at + 1 : at + 2])
    for node in ast.parse(below).body if below.startswith(_INJECTED) else ():
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) not in knobs:
            raise SizesError(f"{name!r} is no knob of this notebook; known: {', '.join(knobs)}")
    for name, knob in knobs.items():
        if not knob.takes(value := shell.user_ns[name]):
            raise knob.refusal(value)


def _only_declares(source: str) -> bool:
    """Whether a cell declares knobs and does nothing else."""
    with contextlib.suppress(SyntaxError):
        body = ast.parse(source).body
        return bool(body) and all(isinstance(one, ast.AnnAssign) for one in body)
    return False
