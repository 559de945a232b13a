"""Fingerprints of the code behind a row: what times, what is asked, and whose answer it is.

A row's `code` reads `harness-problem-rival`. A new rival changes nobody else's, and versions of
torch or triton change none: they are facts in the row, not code.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

Source = ModuleType | Callable[..., Any]  # classes too


def fingerprint(*sources: Source) -> str:
    """Digest of modules, classes and functions, a function with those of its module it leads to.

    Comments, docstrings and layout do not count, so that a better explanation costs no new run.
    """
    digest = hashlib.sha256()
    for source in sources:
        if isinstance(source, ModuleType | type):
            text = textwrap.dedent(inspect.getsource(source))
            digest.update(f"{source.__name__}\n{_tree(text)}\n".encode())
            continue
        for function in _reached(source):
            digest.update(f"{function.__qualname__}\n{_text(function)}\n".encode())
    return digest.hexdigest()[:8]


def _text(function: FunctionType) -> str:
    return _tree(textwrap.dedent(inspect.getsource(function)))


def _tree(text: str) -> str:
    tree = ast.parse(text)
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []  # a rival's label and colour measure nothing
    return _dump(tree)


def _dump(node: Any) -> str:
    """A syntax tree as text, the same in every version of Python: `ast.dump` shows new fields."""
    if isinstance(node, ast.AST):
        parts = [f"{n}={_dump(v)}" for n, v in ast.iter_fields(node) if v is not None and v != []]
        return f"{type(node).__name__}({', '.join(parts)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


def _reached(source: Callable[..., Any]) -> Iterator[FunctionType]:
    """A function and, in the order of their names, those of its module that it leads to.

    By the names in its text: what a code object lists differs between versions of Python.
    """
    first = inspect.unwrap(getattr(source, "func", source))
    assert isinstance(first, FunctionType)
    found: dict[str, FunctionType] = {}
    waiting = [first]
    while waiting:
        function = waiting.pop()
        if function.__qualname__ in found:
            continue
        found[function.__qualname__] = function
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
            named = function.__globals__.get(name)
            if isinstance(named, FunctionType) and named.__module__ == first.__module__:
                waiting.append(named)
    yield from (found[name] for name in sorted(found))


@dataclass(frozen=True)
class Code:
    """What measures a study's rows.

    Attributes:
        harness: what checks and times.
        problem: what says what is asked, and measures what is no rival.
        rival: fingerprint of a provider by its name; None where a study has none.
    """

    harness: tuple[Source, ...]
    problem: tuple[Source, ...]
    rival: Callable[[str], str] | None = None

    def of(self, case: Mapping[str, Any]) -> str:
        """The fingerprint of a case's row."""
        name = case.get("provider")
        own = self.rival(name) if self.rival is not None and isinstance(name, str) else "none"
        return f"{_digest(self.harness)}-{_digest(self.problem)}-{own}"


@dataclass(frozen=True)
class ByExperiment(Code):
    """What measures a row depends on its experiment; those that `codes` lacks have these parts.

    Where these are empty, a case of another experiment is a `KeyError`.
    """

    codes: Mapping[str, Code] = field(default_factory=dict)

    def of(self, case: Mapping[str, Any]) -> str:
        """The fingerprint of a case's row."""
        experiment = case.get("experiment", "")
        if self.harness and experiment not in self.codes:
            return super().of(case)
        return self.codes[experiment].of(case)


@cache
def _digest(parts: tuple[Source, ...]) -> str:
    return fingerprint(*parts)
