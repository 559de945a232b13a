"""The analysis of a notebook run in this process, without its measuring: what it shows and claims.

`make figures`, the README, the slides and the tests take what it shows from the repository's
recordings alone.
"""

import contextlib
import io
import site
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from fusedlib.bench.machine import NAME
from measure.recording import results
from measure.recording.files import write_whole
from press import claims, display, say
from press.claims import Claim
from press.running.config import DETAILS, FRAME, Config, Study
from press.running.products import METADATA, copy_path
from press.variables import environment

LIVE = "live"
"""Tag of cells that are for whoever runs the notebook: no other cell needs them."""
NOBODY = "nobody"
"""Name of a machine that has no rows."""


@dataclass(frozen=True)
class Analysis:
    """A notebook with the outputs of its cells, and the claims it states."""

    notebook: Any
    claims: list[Claim]


def analysis_of(notebook: Path) -> Analysis:
    """Run the cells of a notebook over the rows there are; nothing is measured."""
    read = nbformat.read(notebook, as_version=4)
    return Analysis(read, fill(read, notebook))


def fill(
    notebook: Any, path: Path, started: Callable[[Any, int], None] = lambda cell, at: None
) -> list[Claim]:  # fmt: skip
    """Give the cells of a notebook, read from `path`, their outputs; the claims that it states.

    Nothing is measured. Where a cell raises, the cells before it have their outputs.

    Args:
        started: gets each cell that begins and its place.
    """
    before = len(claims.CLAIMS)
    namespace: dict[str, object] = {"__name__": "__main__"}
    site.addsitedir(str(path.parent))  # its helpers, as a kernel started there finds them
    try:
        with results.replaying():
            for at, cell in enumerate(notebook.cells):
                if cell.cell_type == "code" and LIVE not in cell.metadata.get("tags", []):
                    started(cell, at)
                    code = compile(cell.source, f"{path.name}[{at}]", "exec")
                    with display.captured() as shown, contextlib.redirect_stdout(io.StringIO()):
                        exec(code, namespace)
                    cell.outputs = [nbformat.from_dict(output) for output in shown]
        return claims.CLAIMS[before:]
    finally:
        del claims.CLAIMS[before:]


def executed(
    config: Config, folder: Path, only: Sequence[str] = ()
) -> dict[str, list[Claim] | list[say.Claim]]:  # fmt: skip
    """Notebooks as they execute on the rows of the repository alone, into a folder of products.

    Without `only` all studies and then the frame, which reads their products; with the frame's name
    it alone. Returned are the claims of each notebook by its name.
    """
    stated: dict[str, list[Claim] | list[say.Claim]] = {}
    if FRAME in only:
        parts: tuple[Study, ...] = (config.frame,)
    else:
        parts = config.with_details(config.select(only)) if only else config.parts
    with recorded_rows(), environment({"FUSEDLIB_BUILD": str(folder)}):
        for part in parts:
            analysis = analysis_of(part.notebook)
            analysis.notebook.metadata[METADATA] = {"status": "ok", "profile": "full"}
            write_whole(copy_path(part.name), nbformat.writes(analysis.notebook))
            is_page = part.only_shows and not part.name.endswith(DETAILS)
            stated[part.name] = say.every(part.name) if is_page else analysis.claims
    return stated


@contextlib.contextmanager
def recorded_rows() -> Iterator[None]:
    """The rows of the repository alone, seen from a machine that has none: the same everywhere."""
    with results.replaying("committed"), environment({NAME: NOBODY}):
        yield
