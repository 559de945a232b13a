"""What templates and other readers ask of a notebook, its cells and outputs."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from press import published
from press.display import TABLE_MIME

MARKDOWN = "text/markdown"
DRAWING = "image/svg+xml"
PICTURES = {DRAWING: "svg", "image/png": "png", "image/jpeg": "jpg", "image/gif": "gif",
            "image/webp": "webp"}  # fmt: skip
"""Formats of pictures that pages and PDF can show, the best first, with their files' endings."""

PAPER, APPENDIX, ABSTRACT = "paper", "appendix", "abstract"  # tags of cells
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
ERROR_LINES = 14


def press(node: Any) -> Any:
    """What the press knows of a notebook, a cell or an output."""
    metadata = node.get("metadata", {})  # an error and printed text have none
    return metadata.setdefault("press", NotebookNode())


def meaning(output: Any) -> Any:
    """What `press.display` says of an output: its kind, name, caption and so on."""
    return output.get("metadata", {}).get("fusedlib", {})


def slugify(text: str) -> str:
    """Lower-case ASCII letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def is_figure(output: Any) -> bool:
    """True if an output shows a picture."""
    data = output.get("data", {})
    return TABLE_MIME not in data and bool(PICTURES.keys() & data.keys())


def tags(cell: Any) -> list[str]:
    """Tags of a cell."""
    return list(cell.metadata.get("tags", []))


def plain_text(markdown: str) -> str:
    """Text of a line of Markdown for places without markup: window title, PDF's metadata."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"(?<!\\)[`*$]", "", text).replace("\\", "")


def plain(text: str) -> str:
    """Terminal output without colours, control characters and overwritten lines."""
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return _CONTROL.sub("", "\n".join(lines)).strip("\n")


def last_lines(text: str) -> str:
    """The end of an error, where its cause stands."""
    lines = plain(text).split("\n")
    return "\n".join(["…", *lines[-ERROR_LINES:]] if len(lines) > ERROR_LINES else lines)


def error_title(output: Any) -> str:
    """An error's first line."""
    return "Execution stopped here: " + plain(f"{output.ename}: {output.evalue}").split("\n")[0]


def error_lines(output: Any) -> str:
    """The end of an error's traceback."""
    return last_lines("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")


def alternative(output: Any) -> str:
    """What a reader who cannot see a picture should know."""
    shown = meaning(output)
    text = shown.get("alt") or plain(output.data.get("text/plain", "")) or shown.get("caption")
    return text or "Picture without a caption."


def shown(notebook: Path, tag: str = "") -> Iterator[tuple[Any, dict[str, Any]]]:
    """Outputs of an executed notebook, each with what `display` says of it; none without one.

    With a tag, those of cells that carry it.
    """
    cells = nbformat.read(notebook, as_version=4).cells if notebook.exists() else []
    for cell in cells:
        tagged = not tag or tag in tags(cell)
        for output in cell.get("outputs", []) if tagged else []:
            yield output, meaning(output)


def answered(standing: Mapping[str, Any]) -> bool:
    """Whether a machine's recordings say something of a claim, all of its cases or some."""
    return bool(standing["measured"] or standing["parts"])


def where_it_holds(claim: dict[str, Any]) -> list[tuple[str, bool]]:
    """Where a claim holds, a text a machine, each with whether it says that it does not.

    What nobody measured is said once; else a machine that measured nothing goes without saying.
    What the claim first said, before a recording contradicted it, comes last.
    """
    every = claim["standings"]
    answering = [s for s in every if answered(s) or s["errors"]]
    first = claim.get("first")
    stated = [(f"first stated as “{first}”", False)] if first else []
    if not answering:
        return [("not measured", False), *stated] if every else []
    texts = []
    for standing in sorted(answering, key=lambda standing: standing["own"]):
        where = " here" if standing["own"] else f" on the {standing['label']}"
        where = "" if standing["machine"] == published.MACHINE else where
        fails = bool(standing["errors"] or standing["contrary"])
        fails |= standing["held"] < standing["measured"]
        numbers = f": {further}" if (further := standing.get("further")) else ""
        text = standing["text"]  # an error as it is
        text = text if standing["errors"] else plain_text(text)
        texts.append((text + where + numbers, fails))
    return [*texts, *stated]
