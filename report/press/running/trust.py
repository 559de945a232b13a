"""JupyterLab shows SVG of trusted notebooks only: the executed copies of our runner are."""

from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from press.running.products import read_metadata


def trust(folder: Path) -> list[Path]:
    """Sign the executed copies in a folder for this user's Jupyter, and name those signed.

    Only what the runner noted as its own; a notebook that lies there besides stays as it is.
    """
    notary = NotebookNotary()
    signed = []
    for copy in sorted(folder.glob("*.ipynb")):
        if read_metadata(copy):
            notary.sign(nbformat.read(copy, as_version=4))
            signed.append(copy)
    notary.store.close()
    return signed
