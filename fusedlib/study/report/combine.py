"""Study notebooks spliced into the report's frame: one document, numbered, with unique anchors."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat

from fusedlib.study.report.model import (
    Abstract,
    Block,
    Document,
    Failure,
    Figure,
    Finding,
    Heading,
    Origin,
    Prose,
    Reproduce,
    Section,
    Table,
    Text,
)  # fmt: skip
from fusedlib.study.report.outputs import (
    Numbering,
    last_lines,
    markdown_blocks,
    output_blocks,
    slugify,
    tags,
    was_executed,
)  # fmt: skip

FRAME = "report"
PAPERMILL_ERROR = "papermill-error-cell-tag"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(#([^)\s]+)\)")


class ReportError(RuntimeError):
    """The report cannot be made; the message says why and what to do."""


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


def combine(sections: Sequence[Section], title: str = "Report") -> Document:
    """All sections as one document.

    Args:
        sections: in the order of the report; the one named "report" is the frame, whose cell tagged
            `studies` gives way to the others. Without a frame they stand alone.
        title: of a report without a frame.

    Raises:
        ReportError: an executed notebook cannot be read.
    """
    numbering = Numbering()
    frame = next((s for s in sections if s.name == FRAME), None)
    studies = [s for s in sections if s.name != FRAME]
    blocks: list[Block] = []
    placed = False
    for cell, shown in _cells(frame, numbering):
        if "studies" in tags(cell):
            placed = True
            blocks += _studies(studies, numbering)
        else:
            blocks += _framed(shown, tags(cell))
    if not placed:
        blocks += _studies(studies, numbering)
    title, lead, blocks = _split_title(_merge_abstracts(blocks), title)
    if frame and frame.error:
        blocks.insert(0, _failure(frame))
    numbered = list(_numbered(blocks))
    index = _index(numbered, studies)
    filled = [index if isinstance(block, Reproduce) else block for block in numbered]
    return Document(title, lead, tuple(resolved(filled)))


def _framed(blocks: list[Block], found: list[str]) -> list[Block]:
    """Blocks of a cell of the frame as its tags ask: abstract, appendix, list of tables."""
    if "reproduce" in found:
        return [Reproduce()]
    if "abstract" in found:
        return [_abstract(blocks)]
    if "appendix" in found:
        return [replace(b, appendix=True) if isinstance(b, Heading) else b for b in blocks]
    return blocks


def _split_title(blocks: list[Block], title: str) -> tuple[str, str, list[Block]]:
    """Title, the paragraph under it, and the rest."""
    lead = ""
    if blocks and isinstance(blocks[0], Heading) and blocks[0].level == 1:
        title, blocks = blocks[0].text, blocks[1:]
        if blocks and isinstance(blocks[0], Prose):
            lead, blocks = blocks[0].text, blocks[1:]
    return title, lead, blocks


def _cells(section: Section | None, numbering: Numbering) -> Iterator[tuple[Any, list[Block]]]:
    """Cells that the report shows, each with its blocks; code is hidden.

    Where a notebook has cells tagged `paper`, those alone; else all but the asides.
    """
    if section is None or section.notebook is None:
        return
    slug = slugify(section.name)
    cells = [c for c in load(section.notebook).cells if PAPERMILL_ERROR not in tags(c)]
    chosen = any("paper" in tags(cell) for cell in cells)
    for cell in cells[: _end(cells, section.error)]:
        if chosen and "paper" not in tags(cell):
            if cell.cell_type == "code":
                yield cell, list(output_blocks(cell, slug, numbering, only_errors=True))
            continue
        if cell.cell_type == "code":
            aside = "aside" in tags(cell)
            yield cell, list(output_blocks(cell, slug, numbering, only_errors=aside))
        elif cell.cell_type == "markdown" and "aside" not in tags(cell):
            yield cell, list(markdown_blocks(cell.source, slug, numbering))
        elif tags(cell):
            yield cell, []


def _end(cells: list[Any], error: str | None) -> int:
    """How many cells to show: a failed notebook ends with the last cell that ran."""
    failed = error or any(o.output_type == "error" for c in cells for o in c.get("outputs", []))
    if not failed:
        return len(cells)
    ran = [at for at, cell in enumerate(cells) if was_executed(cell)]
    if ran:
        return ran[-1] + 1
    return next((at for at, c in enumerate(cells) if c.cell_type == "code"), len(cells))


def _abstract(blocks: Iterable[Block]) -> Abstract | Failure:
    """The text of an abstract's cell, headings dropped; or its failure."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, Failure):
            return block
        if isinstance(block, Prose | Text):
            texts.append(block.text)
        elif isinstance(block, Finding):
            texts.append(" ".join(block.items))
    return Abstract(tuple(texts))


def _merge_abstracts(blocks: Iterable[Block]) -> list[Block]:
    """Neighbouring abstract cells as one abstract; an empty one is left out."""
    merged: list[Block] = []
    for block in blocks:
        before = merged[-1] if merged else None
        if isinstance(block, Abstract) and isinstance(before, Abstract):
            merged[-1] = Abstract(before.texts + block.texts)
        elif not isinstance(block, Abstract) or block.texts:
            merged.append(block)
    return merged


def _studies(sections: Sequence[Section], numbering: Numbering) -> list[Block]:
    return [block for section in sections for block in _study(section, numbering)]


def _study(section: Section, numbering: Numbering) -> Iterator[Block]:
    """A study under its heading: where it comes from, what failed, what it showed."""
    yield Heading(2, section.title, numbering.anchor(section.name))
    yield Origin(
        name=section.name,
        notebook=f"notebooks/{section.name}.ipynb",
        page=f"notebooks/{section.name}.html" if section.notebook else None,
        profile=section.profile,
        rows=f"report/results/<machine>/{section.name}.jsonl",
    )
    if section.error or section.notebook is None:
        yield _failure(section)
    first = True
    for _, blocks in _cells(section, numbering):
        for block in blocks:
            if not isinstance(block, Heading):
                yield block
            elif first and block.level == 1:
                first = False  # the section's heading stands for the notebook's title
            else:
                yield replace(block, level=max(block.level, 2) + 1)


def _failure(section: Section) -> Failure:
    path = "report/report.ipynb" if section.name == FRAME else f"notebooks/{section.name}.ipynb"
    title = f"{path} failed; what it showed before that follows."
    if section.notebook is None:
        title = f"{path} gave nothing to show."
    return Failure(title, last_lines(section.error or "not executed yet"))


def _numbered(blocks: Iterable[Block]) -> Iterator[Block]:
    """Headings one level up (the title is no section), numbered 1, 1.1, ... or A, A.1, ..."""
    counts = [0] * 6
    letters = 0
    first = ""
    for block in blocks:
        if not isinstance(block, Heading):
            yield block
            continue
        level = max(block.level - 1, 1)
        counts[level:] = [0] * (len(counts) - level)
        if level == 1 and block.appendix:
            letters += 1
            first = chr(ord("A") + letters - 1)
        else:
            counts[level - 1] += 1
            first = str(counts[0]) if level == 1 else first
        number = ".".join([first, *(str(count) for count in counts[1:level])])
        yield replace(block, level=level, number=number if level <= 2 else "")


def _index(blocks: Iterable[Block], studies: Sequence[Section]) -> Prose:
    """One row a table or figure: its name, notebook, command and rows."""
    study = None
    pages = {s.name: s.notebook is not None for s in studies}
    lines = ["| | Name | Notebook | Command | Rows |", "|:--|:--|:--|:--|:--|"]
    for block in blocks:
        if isinstance(block, Origin):
            study = block
        elif isinstance(block, Heading) and block.level == 1:
            study = None
        elif isinstance(block, Table | Figure) and study:
            name = study.name
            link = f"[{name}](notebooks/{name}.html)" if pages[name] else name
            lines.append(
                f"| [](#{block.anchor}) | {block.name} | {link} | "
                f"`make study ONLY={name}` | `{name}.jsonl` |"
            )
    if len(lines) == 2:
        return Prose("No table or figure could be made; the failures are shown above.")
    return Prose("\n".join(lines))


def resolved(blocks: Sequence[Block]) -> Iterator[Block]:
    """Links to `#anchor` reach their target in the same notebook or by name; others lose the link.

    An empty link text becomes "Table 3", "Figure 2" or "Section 4".
    """
    titles: dict[str, str] = {}
    names: dict[str, str] = {}
    for block in blocks:
        if isinstance(block, Table | Figure):
            titles[block.anchor] = f"{type(block).__name__} {block.number}"
            names.setdefault(block.name, block.anchor)
        elif isinstance(block, Heading):
            titles[block.anchor] = f"Section {block.number}" if block.number else block.text
            names.setdefault(slugify(block.text), block.anchor)
    slug = FRAME

    def mend(found: re.Match[str]) -> str:
        target = slugify(found[2])
        local = f"{slug}-{target}"
        anchor = local if local in titles else target if target in titles else names.get(target)
        if anchor is None:
            return found[1] or found[2]
        return f"[{found[1] or titles[anchor]}](#{anchor})"

    for block in blocks:
        if isinstance(block, Heading) and block.level == 1:
            slug = FRAME
        if isinstance(block, Origin):
            slug = slugify(block.name)
        yield _with_links(block, lambda text: _LINK.sub(mend, text))


def _with_links(block: Block, mend: Callable[[str], str]) -> Block:
    if isinstance(block, Prose):
        return Prose(mend(block.text))
    if isinstance(block, Finding):
        return Finding(tuple(mend(item) for item in block.items))
    if isinstance(block, Abstract):
        return Abstract(tuple(mend(text) for text in block.texts))
    if isinstance(block, Table):
        note = mend(block.note) if block.note else None
        return replace(block, caption=mend(block.caption), note=note)
    if isinstance(block, Figure):
        return replace(block, caption=mend(block.caption))
    return block
