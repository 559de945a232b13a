"""The rules of a committed notebook, each reported as a sentence."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import nbformat
from prose import measured_numbers

Notebook = dict[str, Any]
MAX_LINES = 15
PARAMETER = re.compile(r"[a-z]\w*: [^=]+ = .+  # \S.*")


def source(cell: dict[str, Any]) -> str:
    """A cell's text, whether stored as one string or as lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def tags(cell: dict[str, Any]) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def problems(notebook: Notebook) -> list[str]:
    """Everything that is wrong with a notebook; an empty list for a good one."""
    found = list(_format(notebook))
    if found:
        return found
    cells = notebook["cells"]
    code = [(i, cell) for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    if not cells or cells[0]["cell_type"] != "markdown" or not source(cells[0]).startswith("# "):
        found.append("the first cell is not a markdown title")
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            found += [f"cell {i} states {text!r}" for text in measured_numbers(source(cell))]
    for i, cell in code:
        found += [f"cell {i} {problem}" for problem in _code_cell(cell)]
    marked = [i for i, cell in enumerate(cells) if "parameters" in tags(cell)]
    if len(marked) != 1:
        found.append(f"{len(marked)} cells are tagged parameters, not exactly one")
    found += [f"cell {i} {problem}" for i in marked for problem in _parameters(source(cells[i]))]
    if not any("is no plain Python" in problem for problem in found):
        names = Counter(name for _, cell in code for name in _assigned(source(cell)))
        found += [f"{name} is assigned {n} times" for name, n in names.items() if n > 1]
    return found


def _format(notebook: Notebook) -> Iterator[str]:
    if (notebook.get("nbformat"), notebook.get("nbformat_minor", 0) >= 5) != (4, True):
        yield "the format is not nbformat 4.5"
    ids = [cell.get("id") for cell in notebook.get("cells", [])]
    if None in ids or len(set(ids)) != len(ids):
        yield "a cell has no id of its own"
        return
    try:
        nbformat.validate(nbformat.from_dict(notebook))
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {str(error).splitlines()[0]}"


def _code_cell(cell: dict[str, Any]) -> Iterator[str]:
    text = source(cell)
    if cell["outputs"]:
        yield "has outputs"
    if cell["execution_count"] is not None:
        yield "has an execution count"
    leftover = set(cell["metadata"]) & {"papermill", "execution", "ExecuteTime"}
    if leftover:
        yield f"has metadata of a run: {', '.join(sorted(leftover))}"
    if len(text.splitlines()) > MAX_LINES:
        yield f"has {len(text.splitlines())} lines, more than {MAX_LINES}"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield f"is no plain Python: {error.msg}"
        return
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            yield f"defines {node.name}"


def _parameters(text: str) -> Iterator[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        yield "holds no parameter"
    for line in lines:
        if not PARAMETER.fullmatch(line):
            yield f"has a line that is not `name: type = default  # help`: {line!r}"
            continue
        try:
            statement = ast.parse(line).body[0]
            assert isinstance(statement, ast.AnnAssign) and statement.value is not None
            ast.literal_eval(statement.value)
        except (SyntaxError, ValueError, AssertionError):
            yield f"has a default that is not a literal: {line!r}"


def _assigned(text: str) -> Iterator[str]:
    """Names that a cell binds in the notebook's namespace; a comprehension's are its own."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.comprehension):
            waiting += [node.iter, *node.ifs]
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        waiting += ast.iter_child_nodes(node)
