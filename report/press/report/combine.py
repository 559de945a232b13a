"""Study notebooks spliced into the report's frame: one document, numbered, with unique anchors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nbformat

from press.report.model import (
    Abstract,
    Block,
    Claim,
    Document,
    Failure,
    Figure,
    Heading,
    Origin,
    Prose,
    ReportError,
    Section,
    Table,
    with_markdown,
)
from press.report.outputs import (
    Numbering,
    last_lines,
    markdown_blocks,
    output_blocks,
    slugify,
    tags,
    was_executed,
)
from press.running.config import FRAME

PAPER, APPENDIX = "paper", "appendix"
PAPERMILL_ERROR = "papermill-error-cell-tag"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?:#([^)\s]+)|([\w/.-]*?)([\w-]+)\.ipynb(?:#[^)\s]*)?)\)")
_KINDS = ("", "Figure", "Table", "Section")

Placed = tuple[str, Block]
"""A block and the notebook that it comes from."""


def load(notebook: Path) -> Any:
    """An executed notebook.

    Raises:
        ReportError: there is none, or it is not a notebook.
    """
    try:
        return nbformat.read(notebook, as_version=4)
    except OSError as error:
        raise ReportError(
            f"cannot read {notebook}: {error.strerror}; run `make study` first"
        ) from error
    except Exception as error:
        raise ReportError(
            f"{notebook} is not a notebook ({type(error).__name__}: {str(error)[:120]}); "
            "delete it and run `make study` again"
        ) from error


def combine(sections: Sequence[Section]) -> Document:
    """All sections as one document.

    Args:
        sections: in the order of the report; the one named "report" is the frame. Its cells tagged
            `studies`, `details` and `floats` give way to the studies' cells tagged `paper`, to
            those tagged `appendix`, and to the list of tables and figures. Without a frame the
            studies stand alone.

    Raises:
        ReportError: an executed notebook cannot be read.
    """
    numbering = Numbering()
    title, lead, placed = _split_title(list(_placed(sections, numbering)))
    return Document(title, lead, tuple(resolved(list(_numbered(placed)), _addresses(sections))))


def _placed(sections: Sequence[Section], numbering: Numbering) -> Iterator[Placed]:
    frame = next((s for s in sections if s.name == FRAME), None)
    studies = [s for s in sections if s.name != FRAME]
    if frame is None or frame.notebook is None:
        yield from (block for study in studies for block in _study(study, numbering))
        return
    if frame.error:
        yield FRAME, _failure(frame)
    so_far: list[Placed] = []
    for cell in _ran(frame):
        found = tags(cell)
        shown: Iterable[Placed]
        if "studies" in found:
            shown = (block for study in studies for block in _study(study, numbering))
        elif "details" in found:
            shown = (block for study in studies for block in _details(study, numbering))
        elif "floats" in found:
            shown = [(FRAME, _index(so_far, studies))]
        else:
            shown = [(FRAME, _framed(block, found)) for block in _blocks(cell, FRAME, numbering)]
        for item in shown:
            so_far.append(item)
            yield item


def _framed(block: Block, found: list[str]) -> Block:
    """A block of the frame as its cell's tags ask: the abstract, a section of the appendix."""
    if "abstract" in found and isinstance(block, Prose):
        return Abstract(block.text)
    if APPENDIX in found and isinstance(block, Heading):
        return replace(block, appendix=True)
    return block


def _split_title(placed: list[Placed]) -> tuple[str, str, list[Placed]]:
    """Title, the paragraphs under it, and the rest."""
    if not placed or not isinstance(placed[0][1], Heading) or placed[0][1].level != 1:
        return "Report", "", placed
    title, rest, lead = placed[0][1].text, placed[1:], []
    while rest and isinstance(rest[0][1], Prose):
        lead.append(rest.pop(0)[1].text)  # type: ignore[union-attr]
    return title, "\n\n".join(lead), rest


def _study(section: Section, numbering: Numbering) -> Iterator[Placed]:
    """A study under its heading: what it asks, what failed, its cells tagged `paper`."""
    name = section.name
    yield name, Heading(2, section.title, numbering.anchor(name))
    page = f"notebooks/{name}.html" if section.notebook else None
    yield name, Origin(name, section.question, page)
    if section.error or section.notebook is None:
        yield name, _failure(section)
    for cell in _ran(section):
        errors_only = PAPER not in tags(cell)
        for block in _blocks(cell, name, numbering, only_errors=errors_only):
            yield name, _below(block, 3)


def _details(section: Section, numbering: Numbering) -> Iterator[Placed]:
    """A study's cells tagged `appendix` under its title."""
    cells = [cell for cell in _ran(section) if APPENDIX in tags(cell)]
    if cells:
        yield section.name, Heading(3, section.title, numbering.anchor(section.name, "details"))
    for cell in cells:
        for block in _blocks(cell, section.name, numbering):
            yield section.name, _below(block, 4)


def _below(block: Block, level: int) -> Block:
    """A heading no higher than a level; other blocks as they are."""
    return replace(block, level=max(block.level, level)) if isinstance(block, Heading) else block


def _ran(section: Section) -> list[Any]:
    """The cells of an executed notebook; a failed one ends with the last cell that ran."""
    if section.notebook is None:
        return []
    cells = [c for c in load(section.notebook).cells if PAPERMILL_ERROR not in tags(c)]
    outputs = [o for cell in cells for o in cell.get("outputs", [])]
    if not section.error and not any(o.output_type == "error" for o in outputs):
        return cells
    ran = [at for at, cell in enumerate(cells) if was_executed(cell)]
    return cells[: ran[-1] + 1] if ran else []


def _blocks(
    cell: Any, name: str, numbering: Numbering, *, only_errors: bool = False
) -> Iterator[Block]:
    """What a cell shows; code is hidden."""
    if cell.cell_type == "code":
        yield from output_blocks(cell, slugify(name), numbering, only_errors=only_errors)
    elif cell.cell_type == "markdown" and not only_errors:
        yield from markdown_blocks(cell.source, slugify(name), numbering)


def _failure(section: Section) -> Failure:
    path = "report/report.ipynb" if section.name == FRAME else f"notebooks/{section.name}.ipynb"
    title = f"{path} failed; what it showed before that follows."
    if section.notebook is None:
        title = f"{path} gave nothing to show."
    return Failure(title, last_lines(section.error or "not executed yet"))


def _numbered(placed: Iterable[Placed]) -> Iterator[Placed]:
    """Headings one level up (the title is no section), numbered 1, 1.1, ... or A, A.1, ..."""
    counts = [0] * 6
    letters = 0
    first = ""
    for name, block in placed:
        if not isinstance(block, Heading):
            yield name, block
            continue
        level = max(block.level - 1, 1)
        counts[level:] = [0] * (len(counts) - level)
        if level == 1 and block.appendix:
            letters += 1
            first = chr(ord("A") + letters - 1)
        else:
            counts[level - 1] += 1
            first = str(counts[0]) if level == 1 and not block.appendix else first
        number = ".".join([first, *(str(count) for count in counts[1:level])])
        yield name, replace(block, level=level, number=number if level <= 2 else "")


def _index(placed: Iterable[Placed], studies: Sequence[Section]) -> Prose:
    """A line a study: its notebook, the command that repeats it, its tables and figures."""
    floats: dict[str, list[str]] = {}
    for name, block in placed:
        if isinstance(block, Table | Figure):
            floats.setdefault(name, []).append(f"[](#{block.anchor})")
    lines = ["| Notebook | Command | Shows |", "|:--|:--|:--|"]
    for study in studies:
        page = f"notebooks/{study.name}.html"
        link = f"[{study.name}]({page})" if study.notebook else study.name
        shown = ", ".join(floats.get(study.name, ["its claims"]))
        lines.append(f"| {link} | `make study ONLY={study.name}` | {shown} |")
    return Prose("\n".join(lines))


def _addresses(sections: Sequence[Section]) -> dict[str, str]:
    """Where a link to a notebook leads in the report: to its section."""
    return {s.name: f"#{slugify(s.name)}" for s in sections if s.name != FRAME}


def resolved(placed: Sequence[Placed], notebooks: Mapping[str, str]) -> Iterator[Block]:
    """Links to `#name` reach their target in the same notebook or by name; others lose the link.

    A text that is empty, or only says "Figure", becomes "Table 3", "Figure 2" or "Section 4".
    Links to notebooks take the address given.
    """
    titles: dict[str, str] = {}
    names: dict[str, str] = {}
    for _, block in placed:
        if isinstance(block, Table | Figure):
            titles[block.anchor] = f"{type(block).__name__} {block.number}"
            names.setdefault(block.name, block.anchor)
        elif isinstance(block, Claim):
            titles[block.anchor] = "the claim"
            names.setdefault(block.name, block.anchor)
        elif isinstance(block, Heading):
            titles[block.anchor] = f"Section {block.number}" if block.number else block.text
            names.setdefault(slugify(block.text), block.anchor)

    def mended(origin: str, text: str) -> str:
        return LINK.sub(lambda found: link(origin, found), text)

    def link(origin: str, found: re.Match[str]) -> str:
        text, anchor, _, notebook = found.groups()
        if notebook:
            address = notebooks.get(notebook)
            return f"[{text}]({address})" if address else text
        target = slugify(anchor)
        local = f"{slugify(origin)}-{target}"
        place = local if local in titles else target if target in titles else names.get(target)
        if place is None:
            return text or anchor
        return f"[{titles[place] if text in _KINDS else text}](#{place})"

    for origin, block in placed:
        yield with_markdown(block, partial(mended, origin))
