"""What a report is made of, between notebooks on one side and HTML or PDF on the other."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


class ReportError(RuntimeError):
    """The report cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Section:
    """An executed notebook on its way into the report.

    `notebook` is the executed copy, complete or partial, None when there is none; `error` is what
    went wrong, None when nothing did. The section named "report" is the frame.
    """

    name: str
    title: str
    notebook: Path | None
    error: str | None
    profile: str
    question: str = ""


@dataclass(frozen=True)
class Heading:
    """`level` 1 is a section; `number` is empty for an unnumbered one; `text` is Markdown."""

    level: int
    text: str
    anchor: str
    number: str = ""
    appendix: bool = False


@dataclass(frozen=True)
class Prose:
    """Markdown, with its internal links resolved."""

    text: str


@dataclass(frozen=True)
class Claim:
    """A sentence of an author with computed numbers, in Markdown, and where it holds.

    `verdicts` are parts of one line, each with whether it says that the claim does not hold.
    """

    anchor: str
    name: str
    sentence: str
    verdicts: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Abstract:
    """The frame's abstract: Markdown."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells and headers are plain text, see `display.table_json`; caption and note Markdown."""

    anchor: str
    number: int
    name: str
    caption: str
    note: str | None
    columns: tuple[tuple[str, ...], ...]
    stub: int
    align: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A drawing as SVG text or, when a notebook shows another kind of picture, as PNG bytes."""

    anchor: str
    number: int
    name: str
    caption: str
    alt: str
    svg: str | None = None
    png: bytes | None = None


@dataclass(frozen=True)
class Text:
    """Plain output of a cell."""

    text: str


@dataclass(frozen=True)
class Code:
    """Source of a cell; only in a rendered notebook."""

    source: str
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A notebook or a cell that went wrong: one line, and the last lines of the error."""

    title: str
    lines: str


@dataclass(frozen=True)
class Origin:
    """The lines at a study's head: what it asks, and the page of its notebook, if it has one."""

    name: str
    question: str
    page: str | None


Block = Heading | Prose | Claim | Abstract | Table | Figure | Text | Code | Failure | Origin


MARKDOWN: dict[type, tuple[str, ...]] = {
    Heading: ("text",),
    Prose: ("text",),
    Abstract: ("text",),
    Claim: ("sentence",),
    Table: ("caption", "note"),
    Figure: ("caption",),
    Origin: ("question",),
}
"""Which fields of a block are Markdown."""


def markdown_of(block: Block) -> dict[str, str]:
    """A block's Markdown by field, as far as there is some."""
    texts = {name: getattr(block, name) for name in MARKDOWN.get(type(block), ())}
    return {name: text for name, text in texts.items() if text}


def with_markdown(block: Block, rewritten: Callable[[str], str]) -> Block:
    """A block with each of its Markdown texts rewritten."""
    new: Any = {name: rewritten(text) for name, text in markdown_of(block).items()}
    return replace(block, **new)


@dataclass(frozen=True)
class Document:
    """A report: title in Markdown, the paragraphs under it, and its blocks in order."""

    title: str
    lead: str
    blocks: tuple[Block, ...] = field(default_factory=tuple)
