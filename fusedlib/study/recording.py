"""The analysis of a notebook run in this process, without its measuring: what it shows and claims.

`make record` measures exactly the cases that its claims rest on, as one more recording; `make
figures`, the README and the tests take what it shows from the recorded rows alone.
"""

import contextlib
import io
import os
import re
import site
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from fusedlib import paths
from fusedlib.study import claims, display
from fusedlib.study.claims import Claim
from fusedlib.study.running.config import FRAME, STATIC, Config
from fusedlib.study.running.products import METADATA, copy_path

MEASURE = "measure"
NOBODY = "nobody"
"""Name of a machine that has no rows."""


@dataclass(frozen=True)
class Analysis:
    """A notebook with the outputs of its cells, and the claims it states."""

    notebook: Any
    claims: list[Claim]

    def save(self, path: Path) -> None:
        """Write the notebook where an executed copy would lie."""
        self.notebook.metadata[METADATA] = {"status": "ok", "profile": "full"}
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(self.notebook, path)


def analysis_of(notebook: Path) -> Analysis:
    """Run the cells of a notebook over the rows there are; its measuring cells are left out.

    Raises:
        Exception: whatever a cell raises.
    """
    read = nbformat.read(notebook, as_version=4)
    before = len(claims.CLAIMS)
    namespace: dict[str, object] = {"__name__": "__main__"}
    site.addsitedir(str(notebook.parent))  # its helpers, as a kernel started there finds them
    try:
        with _environment({STATIC: "1"}):
            for at, cell in enumerate(read.cells):
                if cell.cell_type == "code" and MEASURE not in cell.metadata.get("tags", []):
                    code = compile(cell.source, f"{notebook.name}[{at}]", "exec")
                    with display.captured() as shown, contextlib.redirect_stdout(io.StringIO()):
                        exec(code, namespace)
                    cell.outputs = [nbformat.from_dict(output) for output in shown]
        return Analysis(read, claims.CLAIMS[before:])
    finally:
        del claims.CLAIMS[before:]


def executed(config: Config, folder: Path, only: Sequence[str] = ()) -> dict[str, list[Claim]]:
    """Notebooks as they execute on the rows of the repository alone, into a folder of products.

    Args:
        config: the studies, and the frame, which is executed where all of them are.
        folder: gets `notebooks/<name>.ipynb`, as the runner leaves executed copies.
        only: names of studies; all for none.

    Returns:
        The claims that each study states.
    """
    stated = {}
    with recorded_rows(), _environment({"FUSEDLIB_BUILD": str(folder)}):
        for study in config.select(only):
            analysis = analysis_of(study.notebook)
            analysis.save(copy_path(study.name))
            stated[study.name] = analysis.claims
        if not only:
            analysis_of(config.frame.notebook).save(copy_path(FRAME))
    return stated


def cases_of(stated: list[Claim]) -> set[str]:
    """Ids of the cases that claims rest on."""
    return {str(case) for claim in stated for case in claim.selection["case"].unique()}


def recorded_machines() -> list[str]:
    """The machines whose rows are part of the repository: those that git is told not to ignore."""
    lines = (paths.ROOT / ".gitignore").read_text(encoding="utf-8")
    return re.findall(r"^!/report/results/([\w.-]+)/$", lines, re.MULTILINE)


@contextlib.contextmanager
def recorded_rows() -> Iterator[None]:
    """The rows of the repository alone, seen from a machine that has none: the same everywhere."""
    before = paths.RECORDED
    with tempfile.TemporaryDirectory(prefix="fusedlib-rows-") as name:
        for entry in [*recorded_machines(), "carried.toml"]:
            (Path(name) / entry).symlink_to(before / entry)
        paths.RECORDED = Path(name)
        try:
            with _environment({"FUSEDLIB_RESULTS": name, "FUSEDLIB_MACHINE": NOBODY}):
                yield
        finally:
            paths.RECORDED = before


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
