"""The paper as one notebook: the studies' executed notebooks within the report's frame."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_markdown_cell, new_notebook

from press.pages import outputs
from press.pages.outputs import ABSTRACT, APPENDIX, MARKDOWN, PAPER, press, tags
from press.pages.preprocessors import parts
from press.run import FRAME


@dataclass(frozen=True)
class Section:
    """An executed notebook on its way into the report.

    `notebook` is the executed copy, complete or partial, None when there is none; `error` is what
    went wrong, None when nothing did. The section named "report" is the frame; a guide has a page
    and is no part of the paper.
    """

    name: str
    title: str
    notebook: Path | None
    error: str | None
    question: str = ""
    guide: bool = False


def combined(sections: Sequence[Section]) -> Any:
    """All sections as one notebook, which every exporter of ours renders as the paper.

    The frame's cells tagged `studies`, `details` and `floats` give way to the pages' cells tagged
    `paper`, to those tagged `appendix`, and to the list of tables and figures. Without a frame the
    pages stand alone.
    """
    frame = next((s for s in sections if s.name == FRAME and s.notebook), None)
    pages = [s for s in sections if s.name != FRAME and not s.guide]
    if frame:
        title, lead, rest = _split_title(_ran(frame))
        cells = list(_framed(frame, rest, pages))
    else:
        title, lead, cells = "Report", "", [cell for page in pages for cell in _study(page)]
    for number, cell in enumerate(cells):
        cell.id = f"paper-{number}"
    paper = new_notebook(cells=cells)
    press(paper).update(paper=True, title=title, lead=lead)
    return paper


def _split_title(cells: list[Any]) -> tuple[str, str, list[Any]]:
    """Title, the paragraphs under it up to the abstract or a heading, and the other cells."""
    if not cells or not cells[0].source.startswith("# "):
        return "Report", "", cells
    (_, title), *below = parts(cells[0].source)
    lead, rest = [text for _, text in below], cells[1:]
    while rest and rest[0].cell_type == "code" and ABSTRACT not in tags(rest[0]):
        if any(MARKDOWN not in o.get("data", {}) for o in rest[0].outputs):
            break
        lead += _prose(rest.pop(0))
    return title, "\n\n".join(lead), rest


def _prose(cell: Any) -> list[str]:
    """The Markdown that a code cell shows."""
    return [o.data[MARKDOWN] for o in cell.outputs if MARKDOWN in o.get("data", {})]


def _framed(frame: Section, cells: list[Any], pages: Sequence[Section]) -> Iterator[Any]:
    if frame.error:
        yield _failure(frame)
    for cell in cells:
        if "studies" in tags(cell):
            yield from (part for page in pages for part in _study(page))
        elif "details" in tags(cell):
            yield from _appendix(pages)
        elif "floats" in tags(cell):
            yield _cell("", FRAME, role="index")
        else:
            if ABSTRACT in tags(cell) and cell.cell_type == "code":
                cell = new_markdown_cell("\n\n".join(_prose(cell)), metadata=cell.metadata)
            press(cell).update(study=FRAME, appendix=APPENDIX in tags(cell))
            yield cell


def _study(section: Section) -> Iterator[Any]:
    """A topic under its heading: what it asks, what failed, its cells tagged `paper`."""
    yield _cell(section.title, section.name, role="heading", level=2, whole=True)
    page = f"notebooks/{section.name}.html" if section.notebook else ""
    yield _cell(section.question, section.name, role="origin", page=page)
    if section.error or section.notebook is None:
        yield _failure(section)
    for cell in _ran(section):
        if PAPER in tags(cell):
            press(cell).update(study=section.name, least=3)
            yield cell
        elif errors := [o for o in cell.get("outputs", []) if o.output_type == "error"]:
            cell.outputs = errors
            press(cell).study = section.name
            yield cell


def _appendix(sections: Sequence[Section]) -> Iterator[Any]:
    """Cells tagged `appendix`, a topic's under its title."""
    for section in sections:
        cells = [cell for cell in _ran(section) if APPENDIX in tags(cell)]
        if cells:
            yield _cell(section.title, section.name, role="heading", level=3, after="details")
        for cell in cells:
            press(cell).update(study=section.name, least=4)
            yield cell


def _cell(text: str, study: str, **details: Any) -> Any:
    return new_markdown_cell(text, metadata={"press": {"study": study, **details}})


def _failure(section: Section) -> Any:
    folder = "report" if section.name == FRAME else "report/sections"
    path = f"{folder}/{section.name}.ipynb"
    title = f"{path} failed; what it showed before that follows."
    if section.notebook is None:
        title = f"{path} gave nothing to show."
    lines = outputs.last_lines(section.error or "not executed yet")
    return _cell("", section.name, role="failure", title=title, lines=lines)


def _ran(section: Section) -> list[Any]:
    """The cells of an executed notebook; a failed one ends with the last cell that ran."""
    if section.notebook is None:
        return []
    cells = nbformat.read(section.notebook, as_version=4).cells
    outputs = [o for cell in cells for o in cell.get("outputs", [])]
    if not section.error and not any(o.output_type == "error" for o in outputs):
        return cells
    ran = [at for at, c in enumerate(cells) if c.get("execution_count") or c.get("outputs")]
    return cells[: ran[-1] + 1] if ran else []
