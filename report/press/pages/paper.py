"""The paper as one notebook: its sections' executed notebooks, one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_markdown_cell, new_notebook

from press.pages import outputs
from press.pages.outputs import press
from press.pages.preprocessors import parts


@dataclass(frozen=True)
class Section:
    """An executed notebook on its way into the report.

    `notebook` is the executed copy, complete or partial, None when there is none; `error` is what
    went wrong, None when nothing did. A guide has a page and is no part of the paper.
    """

    name: str
    notebook: Path | None
    error: str | None
    guide: bool = False


def combined(sections: Sequence[Section]) -> Any:
    """All sections as one notebook, which every exporter of ours renders as the paper.

    The first one's title is the paper's, and what follows it up to a heading its lead. A section
    whose first cell is tagged `appendix` begins the appendix.
    """
    paper = new_notebook(cells=[])
    pages = {s.name: f"notebooks/{s.name}.html" if s.notebook else "" for s in sections if s.guide}
    press(paper).update(paper=True, title="Report", lead="", pages=pages)
    for section in (s for s in sections if not s.guide):
        cells = nbformat.read(section.notebook, as_version=4).cells if section.notebook else []
        appendix = bool(cells) and "appendix" in cells[0].metadata.get("tags", [])
        if not paper.cells and cells and cells[0].source.startswith("# "):
            (_, title), *below = parts(cells.pop(0).source)
            press(paper).update(title=title, lead="\n\n".join(text for _, text in below))
        paper.cells += _failures(section)
        for cell in cells:
            page = f"notebooks/{section.name}.html"
            press(cell).update(study=section.name, appendix=appendix, page=page)
            paper.cells.append(cell)
    for number, cell in enumerate(paper.cells):
        cell.id = f"paper-{number}"
    return paper


def _failures(section: Section) -> Iterator[Any]:
    """A cell that says what went wrong with a section, if something did."""
    if section.error or section.notebook is None:
        how = "failed; what it showed before that follows."
        how = "gave nothing to show." if section.notebook is None else how
        title = f"report/sections/{section.name}.ipynb {how}"
        lines = outputs.last_lines(section.error or "not executed yet")
        details = {"study": section.name, "role": "failure", "title": title, "lines": lines}
        yield new_markdown_cell("", metadata={"press": details})
