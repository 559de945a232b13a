"""A study of tiny notebooks, one for each way that a run can go."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import nbformat

PROFILE = 'profile: str = "quick"  # which profile the rows are filed under'
OK = f"""{PROFILE}
count: int = 2  # how many
scale: float = 1.0  # factor
sizes: list[str] = ["small"]  # which sizes
kind: str = "plain"  # which kind"""
SHOW = """import os
import sys

print("python", sys.executable)
print("fresh", os.environ.get("FRESH"))"""
DIE = "import os\nimport signal\n\nos.kill(os.getpid(), signal.SIGKILL)"
CELLS = {  # title, parameters, and what follows
    "run_fails": (
        "A notebook that fails", PROFILE, 'print("this much was done")',
        'raise ValueError("it broke here")', 'print("never reached")',
    ),
    "run_ok": (
        "A notebook that works", OK, 'print(f"{profile=} {count=} {scale=} {sizes=} {kind=}")', SHOW
    ),
    "run_dies": ("A notebook whose kernel dies", PROFILE, DIE),
    "run_cases": ("A notebook with a sweep", PROFILE, 'print("no case here")'),
    "run_frame": ("A frame", PROFILE, 'print("the frame")'),
}  # fmt: skip
SIZES = {"run_ok": ("{count = 3}", "{count = 5}")}
FILE = "run_study.toml"


def write(path: Path, title: str, *sources: str, tagged: int = 1) -> Path:
    """Write a notebook of these cells, of which so many carry the tag `parameters`."""
    cells = [nbformat.v4.new_markdown_cell(f"# {title}", id="title")]
    for number, source in enumerate(sources):
        tags = {"tags": ["parameters"]} if number < tagged else {}
        cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{number}", metadata=tags))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, path)
    return path


@cache
def folder() -> Path:
    """The study's notebooks and its file, in a folder that this process leaves behind to nobody."""
    made = Path(tempfile.mkdtemp(prefix="tiny-study-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    lines = ['frame = "run_frame.ipynb"']
    for name, cells in CELLS.items():
        write(made / f"{name}.ipynb", *cells)
        if name != "run_frame":
            quick, full = SIZES.get(name, ("{}", "{}"))
            title = {"run_ok": "Works"}.get(name, name.removeprefix("run_").title())
            lines += ["[[study]]", f'name = "{name}"', f'title = "{title}"',
                      'question = "Does it?"', f"quick = {quick}", f"full = {full}"]  # fmt: skip
    (made / FILE).write_text("\n".join(lines))
    return made
