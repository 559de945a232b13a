"""Executed copies are trusted for JupyterLab, and nothing else that lies beside them."""

import nbformat
import pytest
from nbformat import v4
from nbformat.sign import NotebookNotary

from press import cli
from press.running.products import METADATA


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A build folder with a copy of ours, one of somebody else, and an unreadable one."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    build = tmp_path / "notebooks"
    build.mkdir()
    drawn = v4.new_output("display_data", {"image/svg+xml": "<svg/>", "text/plain": "a figure"})
    for name, metadata in {"ours": {METADATA: {"profile": "quick"}}, "theirs": {}}.items():
        notebook = v4.new_notebook(cells=[v4.new_code_cell("1", outputs=[drawn])])
        notebook.metadata.update(metadata)
        nbformat.write(notebook, build / f"{name}.ipynb")
    (build / "broken.ipynb").write_text("{")
    return build


def test_copies_of_the_runner_are_trusted_and_no_others(folder):
    cli._trust(folder)
    notary = NotebookNotary()
    ours, theirs = (nbformat.read(folder / f"{n}.ipynb", 4) for n in ("ours", "theirs"))
    assert notary.check_signature(ours) and not notary.check_signature(theirs)
    ours.cells[0].outputs[0].data["image/svg+xml"] = "<svg onload='x'/>"
    assert not notary.check_signature(ours), "what was changed since is not trusted"
