"""The rules of a committed notebook, each reported as a sentence.

Those of its parameters are `press.running.parameters`' own.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import nbformat

from press.words import NUMBER
from prose import measured_numbers

Notebook = dict[str, Any]
MOST_LINES = 30
MOST_CELLS, MOST_CELL_LINES, MOST_CODE, MOST_NAMES, MOST_KNOBS = 16, 12, 150, 10, 6
LONG = ("Compilers", "Whole models")
"""Titles that begin so may have more lines of code."""
MOST_LONG = 230
MOST_GUIDE = 250
OURS = ("fusedlib", "measure", "models", "press", "flawed_")
STUDY_TAGS = {"parameters", "measure", "paper", "appendix", "live"}
FRAME_TAGS = {"parameters", "abstract", "paper", "studies", "details", "appendix", "floats"}
NO_TAG = "no cell is tagged"
NEIGHBOUR = re.compile(r"\]\(\d\d_\w+\.ipynb\)")
EMPTY_LINK = re.compile(r"(?<!!)\[\s*\]\([^)]*\)")


def source(cell: dict[str, Any]) -> str:
    """A cell's text, whether stored as one string or as lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def tags(cell: dict[str, Any]) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def problems(
    notebook: Notebook, *, frame: bool = False, guide: bool = False
) -> list[str]:  # fmt: skip
    """Everything that is wrong with a notebook of a study, the report's frame or a guide."""
    faults = list(_format(notebook))
    if faults:
        return faults
    cells = notebook["cells"]
    code = [(i, cell) for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    if not cells or cells[0]["cell_type"] != "markdown" or not source(cells[0]).startswith("# "):
        faults.append("the first cell is not a markdown title")
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            text = NUMBER.sub("", source(cell))  # links that `make figures` fills
            faults += [f"cell {i} states {number!r}" for number in measured_numbers(text)]
            faults += [
                f"cell {i} has a link without words, {link}: JupyterLab shows nothing"
                for link in EMPTY_LINK.findall(source(cell))
            ]
        if strange := set(tags(cell)) - (FRAME_TAGS if frame else STUDY_TAGS):
            faults.append(f"cell {i} has unknown tags: {', '.join(sorted(strange))}")
    for i, cell in code:
        faults += [f"cell {i} {problem}" for problem in _code_cell(cell)]
    if not any("is no plain Python" in problem for problem in faults):
        # A cell may build a name up; another cell that changes it makes the order of runs matter.
        plain = [cell for _, cell in code if source(cell)[:1] not in ("%", "!")]
        names = Counter(name for cell in plain for name in set(_assigned(source(cell))))
        faults += [f"{name} is assigned in {n} cells" for name, n in names.items() if n > 1]
    if frame:
        return faults
    shows_rows = not guide or any("press.rows" in source(cell) for _, cell in code)
    owed = (_for_readers if shows_rows else _without_rows)(cells)
    return faults + [fault for fault in owed if not (guide and fault.startswith(NO_TAG))]


def _for_readers(cells: list[dict[str, Any]]) -> Iterator[str]:
    """What a study's notebook owes to someone who reads it: DESIGN.md, "A notebook"."""
    prose = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    for wanted, words in (
        ("**Predict:**", "asks for no prediction"), ("<details>", "folds no answer"),
        ("Break it", "breaks nothing"), ("](../figures/", "does not open with a picture"),
    ):  # fmt: skip
        if wanted not in prose:
            yield words
    if not NEIGHBOUR.search(prose):
        yield "links to no other notebook"
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    every = "\n".join(map(source, code))
    for wanted, words in (
        (".explore(", "has nothing to explore"), ("= run_here(", "measures nothing"),
        ('shown="this machine"', "does not show this machine"),
    ):  # fmt: skip
        if wanted not in every:
            yield words
    if not any("paper" in tags(cell) for cell in cells):
        yield f"{NO_TAG} paper"
    if any("run_here(" in source(cell) and {"paper", "appendix"} & {*tags(cell)} for cell in code):
        yield "measures in a cell of the paper, which would show how many rows it wrote"
    if len(code) > MOST_CELLS:
        yield f"has {len(code)} cells of code, more than {MOST_CELLS}"
    most = MOST_LONG if source(cells[0]).removeprefix("# ").startswith(LONG) else MOST_CODE
    yield from _sizes(code, most)
    [given] = [cell for cell in code if "parameters" in tags(cell)] or [None]
    knobs = [line for line in _lines(given) if not line.startswith("sizes:")] if given else []
    if not 4 <= len(knobs) <= MOST_KNOBS:
        yield f"has {len(knobs)} knobs, not 4 to {MOST_KNOBS}"


def _sizes(code: list[dict[str, Any]], most: int) -> Iterator[str]:
    """Cells and names of ours are few enough to be read."""
    counts = [len(_lines(cell)) for cell in code]
    yield from (f"a cell has {n} lines, more than {MOST_CELL_LINES}"
                for n in counts if n > MOST_CELL_LINES)  # fmt: skip
    if sum(counts) > most:
        yield f"has {sum(counts)} lines of code, more than {most}"
    yield from _ours("\n".join(map(source, code)))


def _lines(cell: dict[str, Any]) -> list[str]:
    """Lines of code but imports, magics and comments."""
    left_out = ("#", "%", "import ", "from ")
    lines = (line.strip() for line in source(cell).splitlines())
    return [line for line in lines if line and not line.startswith(left_out)]


def _ours(code: str) -> Iterator[str]:
    """Names of ours that a notebook imports: few, and no module through which all are there."""
    tree = ast.parse("\n".join(line for line in code.splitlines() if line[:1] not in ("%", "!")))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith(OURS)]
            yield from (f"imports the whole module {name}" for name in modules)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(OURS):
            names += [alias.name for alias in node.names]
    if len(names) > MOST_NAMES:
        yield f"imports {len(names)} names of ours, more than {MOST_NAMES}"


def _without_rows(cells: list[dict[str, Any]]) -> Iterator[str]:
    """What a guide that shows no recorded rows owes to someone who reads it."""
    prose = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    yield from _sizes([cell for cell in cells if cell["cell_type"] == "code"], MOST_GUIDE)
    if "Predict" not in prose:
        yield "asks for no prediction"
    if not NEIGHBOUR.search(prose):
        yield "links to no other notebook"


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
    magic = text.startswith("%%") and "live" in tags(cell)
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
    if magic or (text.startswith("!") and "live" in tags(cell)):
        return
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
