"""Committed notebooks have no outputs, and no number that a row holds is typed."""

import re

import nbformat
import pytest

from press import run
from study import paths

FOLDERS = (paths.NOTEBOOKS, run.SECTIONS)
NOTEBOOKS = sorted(path for folder in FOLDERS for path in folder.glob("*.ipynb"))
# A time, a size, a rate, a share or a factor; links, comments and products such as 64×64 aside.
MEASURED = re.compile(
    r"(?<![\w.])\d[\d,.]*(?:[\s‑-]?(?:ns|[µμu]s|ms|s|[kMGT]i?B(?:/s)?|[kMGTP]?FLOP/?[sS]|W|[kMG]Hz)\b"
    r"|\s?%|x\b|×(?!\s*\d|[A-Za-z(]))"
)
NOT_PROSE = re.compile(
    r"<!--.*?-->|\]\([^)]*\)|https?://\S+|^.*<!-- requirement -->$|95 % (?:interval|band)", re.M
)
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)


def typed_numbers(markdown: str) -> list[str]:
    text = NOT_PROSE.sub("", GENERATED.sub("", markdown))
    return [found.group() for found in MEASURED.finditer(re.sub(r"[$*`{}]|\\[,;: ]", "", text))]


def test_every_notebook_belongs_to_the_study():
    assert set(NOTEBOOKS) == {part.notebook for part in run.select()}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_without_outputs_and_types_no_measured_number(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            assert not set(cell.metadata) & {"papermill", "execution", "ExecuteTime"}
        else:
            assert typed_numbers(cell.source) == []


def test_the_readme_types_no_measured_number():
    assert typed_numbers((paths.ROOT / "README.md").read_text(encoding="utf-8")) == []
    assert typed_numbers("**3.2** ms or 5 %, 2.5× less of 64×64") == ["3.2 ms", "5 %", "2.5×"]
