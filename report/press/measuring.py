"""What the full profile measures: the cases of a study, without measuring one.

A notebook's measuring cells make the cases; here they run with the parameters of the profile `full`
on a GPU, and a recorder that lists cases instead of measuring them.
"""

import contextlib
import io
import json
import os
import site
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat

from measure.recording import results
from measure.recording.progress import FILE as PROGRESS
from press.running import parameters
from press.running.config import Study, load

MEASURE = "measure"


@cache
def studies() -> list[str]:
    """Names of the studies, in the report's order."""
    return [study.name for study in load().studies]


@cache
def full_cases(study: str) -> dict[str, dict[str, Any]]:
    """Every case of a study under the profile `full`, by its id, in the order of measuring."""
    [selected] = load().select([study])
    with tempfile.TemporaryDirectory(prefix="fusedlib-plan-") as name:
        listed = Path(name) / "cases"
        listing = {
            results.PLAN: str(listed), results.RECORDING: "-", "FRESH": "1",
            results.CASES: None, results.UNTIL: None,
        }  # fmt: skip
        quiet = contextlib.redirect_stdout(io.StringIO())
        with environment(listing | {PROGRESS: os.devnull}), quiet:
            run_measuring(selected)
        lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    split = (line.split(" ", 2) for line in lines)
    return {case: json.loads(fields) for case, owner, fields in split if owner == study}


def run_measuring(study: Study) -> None:
    """Run the cells of a notebook that measure, and those that these cannot do without.

    The variables that a recorder heeds say whether anything is measured, and which cases.
    """
    cells = nbformat.read(study.notebook, as_version=4).cells
    tags = [{*cell.metadata.get("tags", [])} for cell in cells]
    last = max(at for at, own in enumerate(tags) if MEASURE in own)
    given = {"device": "cuda"} | dict(study.profiles["full"]) | {"profile": "full"}
    declared = parameters.read(study.notebook)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    site.addsitedir(str(study.notebook.parent))  # its helpers, as a kernel started there finds them
    for at, cell in enumerate(cells[: last + 1]):
        needed = tags[at] & {MEASURE, parameters.TAG} or "Recorder(" in cell.source
        if cell.cell_type == "code" and needed:
            exec(compile(cell.source, f"{study.notebook.name}[{at}]", "exec"), namespace)
        if parameters.TAG in tags[at]:
            namespace |= {name: value for name, value in given.items() if name in declared}


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """These variables are set while the block runs; those that are None are not."""
    given = {name: value for name, value in values.items() if value is not None}
    with mock.patch.dict(os.environ, given):
        for name in {*values} - {*given}:
            os.environ.pop(name, None)
        yield
