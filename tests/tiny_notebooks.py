"""Tiny notebooks, one for each way that a run can go."""

from pathlib import Path

import nbformat

OK = """count: int = 2  # how many [1..9]
scale: float = 1.0  # factor
sizes: list[str] = ["small"]  # which sizes
kind: str = "plain"  # which kind [plain | fancy]"""
SHOW = """import os
import sys

print("python", sys.executable)
print("fresh", os.environ.get("FRESH"))"""
CELLS = {
    "works": (OK, 'print(f"{count=} {scale=} {sizes=} {kind=}")', SHOW),
    "fails": ("", 'print("this much was done")', 'raise ValueError("it broke here")', "print(1)"),
    "dies": ("", "import os\nimport signal\n\nos.kill(os.getpid(), signal.SIGKILL)"),
}


def write(path: Path, *sources: str) -> Path:
    """A notebook of these cells, the first of which carries the tag `parameters`."""
    cells = [nbformat.v4.new_markdown_cell(f"# The {path.stem}: a notebook", id="title")]
    for number, source in enumerate(sources):
        tags = {"tags": [] if number else ["parameters"]}
        cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{number}", metadata=tags))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def made(folder: Path, *names: str) -> list[Path]:
    """Some of `CELLS` in a folder."""
    folder.mkdir(exist_ok=True)
    return [write(folder / f"{name}.ipynb", *CELLS[name]) for name in names]
