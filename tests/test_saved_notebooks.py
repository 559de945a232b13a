"""What git sees of a notebook that was run and saved, where `make setup` ran."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from study import paths


def test_a_notebook_that_was_run_and_saved_adds_nothing_to_a_diff(tmp_path):
    """As JupyterLab saves it; a cell that was changed is one, in a second working tree too."""
    copied = [".gitattributes", "tools/hook.sh", "tools/strip_notebook.py"]
    copied += [f"notebooks/{path.name}" for path in paths.NOTEBOOKS.glob("*.ipynb")]
    for name in copied:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(paths.ROOT / name, tmp_path / name)
    setup = (paths.ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    [line] = [line for line in setup.splitlines() if "git config" in line]
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = "git -c user.name=a -c user.email=a@b"

    def said(command: str, folder: Path = tmp_path) -> str:
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, capture_output=True, text=True, check=True,
            env={**os.environ, "PATH": search},
        )  # fmt: skip
        return done.stdout

    def saved(folder: Path, line: str = "") -> None:
        path = folder / "notebooks" / "01_kernel.ipynb"
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata.kernelspec.display_name = "Python 3 (ipykernel)"
        notebook.metadata.language_info.version = "3.12.1"
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for cell in cells:
            printed = nbformat.v4.new_output("stream", text="a line\n" * 100)
            cell.update(outputs=[printed], execution_count=7)
            cell.metadata.execution = {"iopub.status.busy": "2026-11-28"}
        cells[-1].source += line
        nbformat.write(notebook, path)

    said(f"git init -b main && git add . && {own} commit -m All")
    said(line.partition(" ||")[0])
    said("touch notebooks/*")
    assert said("git status --porcelain") == "", "what is committed passes as it is"
    saved(tmp_path)
    assert said("git diff") == said("git add . && git status --porcelain") == ""
    said("git worktree add ../second")
    saved(tmp_path.parent / "second", "\nmore = 1")
    changed = said("git diff --numstat", tmp_path.parent / "second")
    assert changed == "2\t1\tnotebooks/01_kernel.ipynb\n"
