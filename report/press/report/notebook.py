"""An executed notebook as a document with its code: what the report's links lead to."""

from collections.abc import Iterator
from pathlib import Path

from press.report.combine import PAPERMILL_ERROR, load, resolved
from press.report.model import Block, Code, Document, Failure, Heading, Prose, Section
from press.report.outputs import Numbering, last_lines, markdown_blocks, output_blocks, tags


def document(section: Section, notebook: Path) -> Document:
    """All cells in order, with code and errors; headings keep their level."""
    others = {path.stem: f"{path.stem}.html" for path in notebook.parent.glob("*.ipynb")}
    placed = [("", block) for block in _blocks(notebook)]
    blocks = list(resolved(placed, others))
    title = section.title
    if blocks and isinstance(blocks[0], Heading) and blocks[0].level == 1:
        title = blocks[0].text
        blocks = blocks[1:]
    if section.error:
        failed = f"This notebook, {section.name}.ipynb, failed."
        blocks.insert(0, Failure(failed, last_lines(section.error)))
    profile = f" with the profile `{section.profile}`" if section.profile else ""
    return Document(title, f"`{section.name}.ipynb`, as executed{profile}.", tuple(blocks))


def _blocks(notebook: Path) -> Iterator[Block]:
    numbering = Numbering()
    for cell in load(notebook).cells:
        if PAPERMILL_ERROR in tags(cell):
            continue
        if cell.cell_type == "code":
            if cell.source.strip():
                yield Code(cell.source, tuple(tags(cell)))
            yield from output_blocks(cell, "cell", numbering, whole=True)
        elif cell.cell_type == "markdown":
            for block in markdown_blocks(cell.source, "", numbering):
                yield _raised(block)


def _raised(block: Heading | Prose) -> Block:
    """A notebook's `##` is a section of its page."""
    if isinstance(block, Heading) and block.level > 1:
        return Heading(block.level - 1, block.text, block.anchor)
    return block
