"""All Markdown of a document converted at once: starting pandoc costs more than its work."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusedlib.study.report import pandoc
from fusedlib.study.report.model import (
    Abstract,
    Block,
    Claim,
    Document,
    Figure,
    Heading,
    Origin,
    Prose,
    Table,
)


@dataclass(frozen=True)
class Fragments:
    """Converted Markdown by its source; every text of the document's blocks is there."""

    blocks: dict[str, str]
    lines: dict[str, str]

    @classmethod
    def of(cls, document: Document, target: str) -> "Fragments":
        """All Markdown of a document as `target`, "html" or "typst"."""
        texts = [b.text for b in document.blocks if isinstance(b, Prose | Abstract)]
        blocks = dict.fromkeys([document.lead, *texts])
        lines = dict.fromkeys([document.title, *_lines(document.blocks)])
        return cls(
            dict(zip(blocks, pandoc.convert(list(blocks), target), strict=True)),
            dict(zip(lines, pandoc.convert_inline(list(lines), target), strict=True)),
        )


def _lines(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Heading):
            yield block.text
        elif isinstance(block, Origin):
            yield block.question
        elif isinstance(block, Claim):
            yield block.sentence
        elif isinstance(block, Table | Figure):
            yield block.caption
            if isinstance(block, Table) and block.note:
                yield block.note
