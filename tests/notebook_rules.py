"""The rules of a committed notebook, each reported as a sentence.

Those of its parameters are `press.running.parameters`' own.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import nbformat

from prose import measured_numbers

Notebook = dict[str, Any]
MOST_LINES = 30
STUDY_TAGS = {"parameters", "measure", "paper", "appendix"}
FRAME_TAGS = {"parameters", "abstract", "paper", "studies", "details", "appendix", "floats"}
NEIGHBOUR = re.compile(r"\]\(\d\d_\w+\.ipynb\)")


def source(cell: dict[str, Any]) -> str:
    """A cell's text, whether stored as one string or as lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def tags(cell: dict[str, Any]) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def problems(notebook: Notebook, *, frame: bool = False) -> list[str]:
    """Everything that is wrong with a notebook of a study, or the report's frame; empty if good."""
    faults = list(_format(notebook))
    if faults:
        return faults
    cells = notebook["cells"]
    code = [(i, cell) for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    if not cells or cells[0]["cell_type"] != "markdown" or not source(cells[0]).startswith("# "):
        faults.append("the first cell is not a markdown title")
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            faults += [f"cell {i} states {text!r}" for text in measured_numbers(source(cell))]
        if strange := set(tags(cell)) - (FRAME_TAGS if frame else STUDY_TAGS):
            faults.append(f"cell {i} has unknown tags: {', '.join(sorted(strange))}")
    for i, cell in code:
        faults += [f"cell {i} {problem}" for problem in _code_cell(cell)]
    if not any("is no plain Python" in problem for problem in faults):
        # A cell may build a name up; another cell that changes it makes the order of runs matter.
        names = Counter(name for _, cell in code for name in set(_assigned(source(cell))))
        faults += [f"{name} is assigned in {n} cells" for name, n in names.items() if n > 1]
    return faults if frame else faults + list(_for_readers(cells))


def _for_readers(cells: list[dict[str, Any]]) -> Iterator[str]:
    """What a study's notebook owes to someone who learns from it."""
    prose = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    code = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "code")
    if "Predict" not in prose:
        yield "asks for no prediction"
    if "Try this" not in prose and "display.explore(" not in code:
        yield "has nothing to try or to explore"
    if not NEIGHBOUR.search(prose):
        yield "links to no other notebook"
    if not any("measure" in tags(cell) for cell in cells):
        yield "no cell is tagged measure"
    if not any("paper" in tags(cell) for cell in cells):
        yield "no cell is tagged paper"


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
    lines = sum(bool(line.strip()) for line in text.splitlines())
    if lines > MOST_LINES:
        yield f"has {lines} lines, more than {MOST_LINES}"
    try:
        ast.parse(text)
    except SyntaxError as error:
        yield f"is no plain Python: {error.msg}"


def _assigned(text: str) -> Iterator[str]:
    """Names that a cell binds in the notebook's namespace; those inside of functions are their own.

    Claims are functions named `_`, as often as there are claims.
    """
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name != "_":
                yield node.name
            waiting += node.decorator_list
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.comprehension):
            waiting += [node.iter, *node.ifs]
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id != "_":
            yield node.id
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        waiting += ast.iter_child_nodes(node)
