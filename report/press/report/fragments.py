"""All Markdown of a document converted at once: starting pandoc costs more than its work."""

from collections.abc import Callable

from press.report import pandoc
from press.report.model import Abstract, Block, Document, Prose, markdown_of, with_markdown


def converted(
    document: Document, target: str, checked: Callable[[str, str], str] | None = None
) -> Document:
    """A document whose Markdown is written as `target`, "html" or "typst".

    Args:
        document: numbered and linked, in Markdown.
        target: see `pandoc.convert`.
        checked: takes a text in Markdown and as `target`, and gives back what shall stand there.
    """
    texts, lines = {document.lead: ""}, {document.title: ""}

    def kind(block: Block) -> dict[str, str]:
        return texts if isinstance(block, Prose | Abstract) else lines

    for block in document.blocks:
        kind(block).update(dict.fromkeys(markdown_of(block).values(), ""))
    for found, convert in ((texts, pandoc.convert), (lines, pandoc.convert_inline)):
        found.update(zip(found, convert(list(found), target), strict=True))
        if checked:
            found.update({text: checked(text, done) for text, done in found.items()})
    blocks = [with_markdown(block, kind(block).__getitem__) for block in document.blocks]
    return Document(lines[document.title], texts[document.lead], tuple(blocks))
